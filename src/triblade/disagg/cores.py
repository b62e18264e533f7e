"""Which cores of a machine without accelerators prefill and which decode.

NUMA nodes are not shared between roles where there are several: each role's rows and weights then stay in its own memory. Hardware
threads of one core stay together. Reads sysfs below a root that tests replace; sets no affinity itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from triblade import host
from triblade.errors import ConfigError

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """Hardware threads of both roles, those of one core and of one NUMA node side by side, why, and what is bad about it."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """Without the warnings."""
        return f"prefill on cores {as_list(self.prefill)}, decode on cores {as_list(self.decode)}: {self.reason}"

    def __str__(self) -> str:
        return "\n".join((self.summary, *(f"warning: {text}" for text in self.warnings)))


def split_cores(
    prefill_share: float = 0.5,
    allowed: Collection[int] | None = None,
    root: Path = ROOT,
    *,
    prefill_threads: int | None = None,
) -> CoreSplit:
    """Cores for both roles.

    Args:
        prefill_share: of the cores.
        allowed: hardware threads that this process may use; None: its affinity.
        root: of the file system.
        prefill_threads: as many threads instead, wherever that cuts.

    Raises:
        ConfigError: the share is not between 0 and 1, or the threads are all there are.
    """
    if not 0 < prefill_share < 1:
        raise ConfigError(f"prefill_share must be between 0 and 1, got: {prefill_share}", param="prefill_share")
    usable = host.allowed_cores() if allowed is None else sorted(allowed)
    nodes = [cores for cores in (_grouped(node, root) for node in _nodes(usable, root)) if cores]
    if len(usable) == 1:
        warning = f"there is one core, {usable[0]}: both roles take turns on it, and streams stutter"
        return CoreSplit(_flat(nodes), _flat(nodes), "no other", (warning,))
    if prefill_threads is not None:
        return _cut(nodes, prefill_threads)
    if len(nodes) > 1:
        count = min(max(1, round(len(nodes) * prefill_share)), len(nodes) - 1)
        return CoreSplit(
            _flat(nodes[:count]), _flat(nodes[count:]), f"whole NUMA nodes, {count} of {len(nodes)} prefill"
        )
    cores = nodes[0]
    if len(cores) == 1:
        return _cut(nodes, max(1, len(usable) // 2))
    count = min(max(1, round(len(cores) * prefill_share)), len(cores) - 1)
    reason = f"one NUMA node, {count} of {len(cores)} cores prefill"
    return CoreSplit(_flat([cores[:count]]), _flat([cores[count:]]), reason)


def _cut(nodes: Sequence[Sequence[tuple[int, ...]]], prefill_threads: int) -> CoreSplit:
    """So many threads, whatever they have in common with the others."""
    threads = _flat(nodes)
    if prefill_threads >= len(threads):
        raise ConfigError(
            f"prefill_threads must leave a core to the decode workers, got {prefill_threads} of {len(threads)}",
            hint=f"use at most --prefill-threads {len(threads) - 1}",
        )
    prefill, decode = threads[:prefill_threads], threads[prefill_threads:]
    shared = [core for node in nodes for core in node if {*core} & {*prefill} and {*core} & {*decode}]
    warnings = tuple(f"hardware threads {as_list(core)} are one core, and both roles use it" for core in shared)
    return CoreSplit(prefill, decode, f"{prefill_threads} of {len(threads)} threads prefill", warnings)


def in_order(allowed: Collection[int], root: Path = ROOT) -> tuple[int, ...]:
    """Threads, those of one core and of one NUMA node side by side."""
    usable = sorted(allowed)
    return _flat([_grouped(node, root) for node in _nodes(usable, root)])


def as_list(threads: Sequence[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8, as the kernel writes it."""
    runs: list[tuple[int, int]] = []
    for thread in sorted(threads):
        if runs and thread == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], thread)
        else:
            runs.append((thread, thread))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_list(text: str) -> list[int]:
    """The inverse of `as_list`."""
    threads: list[int] = []
    for run in filter(None, text.strip().split(",")):
        first, _, last = run.partition("-")
        threads += range(int(first), int(last or first) + 1)
    return threads


def _nodes(usable: Sequence[int], root: Path) -> list[list[int]]:
    """Usable threads by NUMA node; all in one where the kernel shows none."""
    folder = root / "sys/devices/system/node"
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    nodes = [[thread for thread in parse_list(path.read_text()) if thread in usable] for path in lists]
    known = {thread for node in nodes for thread in node}
    return nodes if known == set(usable) else [list(usable)]


def _grouped(threads: Sequence[int], root: Path) -> list[tuple[int, ...]]:
    """Threads by core."""
    cores: dict[tuple[int, ...], None] = {}
    for thread in threads:
        path = root / f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
        siblings = parse_list(path.read_text()) if path.is_file() else [thread]
        cores[tuple(sibling for sibling in siblings if sibling in threads)] = None
    return list(cores)


def _flat(nodes: Sequence[Sequence[tuple[int, ...]]]) -> tuple[int, ...]:
    return tuple(thread for node in nodes for core in node for thread in core)

"""What this process may use of the machine: cores, memory, and the most it has taken so far.

Containers get less than the machine has, so every figure is the smallest of what the host, the CPU affinity and the
control groups (v1 and v2, every level above the process) allow. Reads only files below `root`, which tests replace with
a made-up tree. Knows no model and no torch; uses no user name, since a container's user need not exist.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
KIB = 1024


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory in bytes: `limit_bytes` is what may be used at most, `available_bytes` what is free of it now."""

    limit_bytes: int
    available_bytes: int


def usable_cores(root: Path = ROOT) -> int:
    """Cores to run threads on: affinity and CPU quota, rounded down.

    A thread beyond the quota would be throttled, and the others would wait for it at every barrier.
    """
    quotas = [_cpu_quota(group) for group in _groups("cpu", root)]
    return max(1, int(min([float(len(allowed_cores())), *(quota for quota in quotas if quota is not None)])))


def memory(root: Path = ROOT) -> Memory:
    """The smallest limit and the smallest free amount of host and control groups."""
    total, available = _host_memory(root)
    for group in _groups("memory", root):
        limit = _memory_limit(group)
        if limit is not None and limit < total:
            total = limit
        if limit is not None:
            available = min(available, max(0, limit - _memory_in_use(group)))
    return Memory(total, min(available, total))


def peak_rss_bytes(process: int | None = None, root: Path = ROOT) -> int:
    """Largest resident memory a process has had; `process` is its id, this one when None.

    Linux's VmHWM belongs to this program alone; getrusage also counts what the process was before it became this one.
    """
    peak = _table(root / "proc" / str(process or "self") / "status").get("VmHWM")
    if peak is not None or process is not None:
        return peak or 0
    unit = 1 if sys.platform == "darwin" else KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_objects() -> None:
    """What was made until now stays: the collector would look through all of it now and then, for 100 ms in the middle of a step.

    `gc.unfreeze` gives it back to the collector.
    """
    gc.collect()
    gc.freeze()


def return_free_memory() -> None:
    """Hand back to the system what the C library's allocator keeps of memory that was freed; where it cannot, do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)


def return_code_pages(root: Path = ROOT) -> None:
    """Let go of the machine code that ran so far, most of it only once, to register operators and to load; where a system has no
    such call, do nothing. What is still needed comes back from the file, which the system's page cache has, when it next runs.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    for begin, end in clean_code(root):
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def clean_code(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """Addresses of the code that this process has mapped from files and never changed."""
    span, is_code = (0, 0), False
    for line in _lines(root / "proc/self/smaps"):
        name, *rest = line.split()
        if not name.endswith(":"):  # "7f00-7f80 r-xp 00000000 fe:00 1234  /usr/lib/libc.so.6"
            begin, _, end = name.partition("-")
            span, is_code = (int(begin, 16), int(end, 16)), rest[0] == "r-xp" and rest[3] != "0"
        elif name == "Private_Dirty:" and is_code and rest[0] == "0":
            yield span


def allowed_cores() -> list[int]:
    """Numbers of the cores that the calling thread may use; all of them where the system cannot say."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def compute_on(cores: Collection[int]) -> None:
    """Keep the calling thread, and threads that it starts from now on, to these cores, where the system has a way to."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _host_memory(root: Path) -> tuple[int, int]:
    """Total and available bytes of the machine."""
    table = _table(root / "proc/meminfo")
    if "MemTotal" in table:
        return table["MemTotal"], table.get("MemAvailable", table["MemTotal"])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the control groups this process is in for `controller`, innermost first.

    The path in /proc/self/cgroup is the host's and may not exist inside a container, whose own group is then mounted at
    the top; missing folders are skipped.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in dict.fromkeys((controllers, controller))]
        else:
            continue
        inner = Path(path.strip().lstrip("/"))
        for mount in mounts:
            yield from (mount / level for level in (inner, *inner.parents) if (mount / level).is_dir())


def _cpu_quota(group: Path) -> float | None:
    """Cores' worth of time per period; None when unlimited."""
    quota, period = [*_words(group / "cpu.max"), "", ""][:2]  # v2: "200000 100000" or "max 100000"
    if not quota:
        quota, period = _first(group / "cpu.cfs_quota_us"), _first(group / "cpu.cfs_period_us")  # v1: -1 is no quota
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _memory_limit(group: Path) -> int | None:
    """Bytes; None when unlimited. Version 1 says so with a number near 2**63, which the caller's minimum drops."""
    value = _first(group / "memory.max") or _first(group / "memory.limit_in_bytes")
    return int(value) if value.isdigit() else None


def _memory_in_use(group: Path) -> int:
    """Bytes charged to the group less file pages that the kernel drops first when memory is short."""
    used = _first(group / "memory.current") or _first(group / "memory.usage_in_bytes")
    stat = {name: int(value) for name, _, value in (line.partition(" ") for line in _lines(group / "memory.stat"))}
    reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return max(0, int(used) - reclaimable) if used.isdigit() else 0


def _table(path: Path) -> dict[str, int]:
    """Lines of the form "Name:   123 kB" in bytes; other lines are left out."""
    rows = (line.replace(":", " ").split() for line in _lines(path))
    return {row[0]: int(row[1]) * KIB for row in rows if len(row) == 3 and row[2] == "kB"}


def _lines(path: Path) -> list[str]:
    """Lines of a file, or none when it is missing or may not be read."""
    return _read(path, str.splitlines)


def _words(path: Path) -> list[str]:
    return _read(path, str.split)


def _first(path: Path) -> str:
    return next(iter(_words(path)), "")


def _read(path: Path, parse: Callable[[str], list[str]]) -> list[str]:
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []

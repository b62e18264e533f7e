"""Which cores and which device each worker of a deployment gets, why, and what is bad about it.

Puts the choices of `disagg.cores` and `disagg.topology` in the order of the workers. Starts nothing, knows no option of a worker.
Invariant: two workers share a core or a device only where there are not enough, and then a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from triblade.config import TopologyConfig
from triblade.config.worker import WorkerRole
from triblade.disagg.cores import in_order, split_cores
from triblade.disagg.nvml import Nvml
from triblade.disagg.topology import ROOT, Device, Driver, Topology, read_topology
from triblade.errors import UnsupportedError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Something of the machine for each worker, by role.

    Attributes:
        shares: of the prefill and of the decode workers, in the order of their numbers; empty where nothing was chosen.
        reason: why, in a line.
        warnings: what makes it slow.
    """

    shares: Mapping[WorkerRole, list[tuple[int, ...]]]
    reason: str
    warnings: tuple[str, ...] = ()

    def report(self) -> None:
        """Into the log."""
        log.info("%s", self.reason)
        for text in self.warnings:
            log.warning("%s", text)


def place_cores(topology: TopologyConfig, allowed: Sequence[int], root: Path = ROOT) -> Placement:
    """Hardware threads of each worker. Who computes prompts never shares one with who streams, where there are enough.

    Args:
        topology: how many workers.
        allowed: threads that may be used.
        root: of the file system.

    Raises:
        ConfigError: the prefill workers are to have all cores.
    """
    num_prefill, num_decode = topology.prefill_workers, topology.decode_workers
    if not num_prefill:
        shares = _dealt(in_order(allowed, root), num_decode)
        return Placement({"prefill": [], "decode": shares}, f"{len(allowed)} cores in equal parts", _crowds(shares))
    split = split_cores(allowed=allowed, root=root, prefill_threads=topology.prefill_threads)
    prefill, decode = _dealt(split.prefill, num_prefill), _dealt(split.decode, num_decode)
    warnings = (*split.warnings, *_crowds(prefill), *_crowds(decode))
    return Placement({"prefill": prefill, "decode": decode}, split.summary, warnings)


def place_devices(
    topology: TopologyConfig,
    visible: Sequence[int] | None = None,
    open_driver: Callable[[], AbstractContextManager[Driver]] = Nvml,
    root: Path = ROOT,
) -> Placement:
    """Devices that each worker sees, its own first, then those that its rows come from or go to.

    Args:
        topology: how many workers.
        visible: indices of devices that may be used; None: all.
        open_driver: tells what there is.
        root: of the file system.
    """
    try:
        with open_driver() as driver:
            machine = read_topology(driver, root)
    except UnsupportedError as error:
        return Placement({}, "all workers use the first device", (error.message,))
    usable = [device for device in machine.devices if visible is None or device.index in visible]
    wanted = topology.prefill_workers + topology.decode_workers
    if wanted > len(usable):
        return Placement({}, f"{wanted} workers share one device", _idle(usable[1:]))
    return _chosen(topology, Topology(usable, machine.are_linked))


def _chosen(topology: TopologyConfig, machine: Topology) -> Placement:
    if not topology.prefill_workers:
        own: list[tuple[int, ...]] = [(device.index,) for device in machine.devices[: topology.decode_workers]]
        return Placement({"prefill": [], "decode": own}, "a device for each worker")
    choice = machine.choose(topology.prefill_workers, topology.decode_workers)
    prefill, decode = ([device.index for device in devices] for devices in (choice.prefill, choice.decode))
    shares: Mapping[WorkerRole, list[tuple[int, ...]]] = {
        "prefill": [(index, *decode) for index in prefill],
        "decode": [(index, *prefill) for index in decode],
    }
    return Placement(shares, choice.summary, choice.warnings)


def _idle(devices: Sequence[Device]) -> tuple[str, ...]:
    """Devices that nobody uses because there are not enough for all."""
    names = ", ".join(str(device.index) for device in devices)
    return (f"devices {names} stay idle: there are more workers than devices",) if devices else ()


def _dealt(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Cores in equal parts side by side; with fewer cores than workers some share one."""
    size = len(cores) // workers
    if size == 0:
        return [(cores[number % len(cores)],) for number in range(workers)]
    return [tuple(cores[number * size : (number + 1) * size]) for number in range(workers)]


def _crowds(shares: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """Workers of one role on one core."""
    num_cores = len({core for share in shares for core in share})
    return (f"{len(shares)} workers of one role share {num_cores} cores",) if num_cores < len(shares) else ()

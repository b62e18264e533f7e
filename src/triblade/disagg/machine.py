"""The machine as prefill and decode workers see it, in words: devices, links, cores, and what to run where (`triblade doctor`).

Only reads; every answer of the driver and of sysfs is one that tests can replace.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from triblade.config.checks import require_at_least
from triblade.disagg.cores import split_cores
from triblade.disagg.nvml import Nvml
from triblade.disagg.topology import ROOT, Driver, read_topology
from triblade.errors import UnsupportedError


def describe_machine(
    num_prefill: int = 1,
    num_decode: int = 1,
    open_driver: Callable[[], AbstractContextManager[Driver]] = Nvml,
    root: Path = ROOT,
) -> str:
    """Devices and their links with the best choice for so many workers; on a machine without devices the split of its cores.

    Raises:
        ConfigError: less than one worker of a kind.
    """
    require_at_least("prefill_workers", num_prefill, 1)
    require_at_least("decode_workers", num_decode, 1)
    try:
        with open_driver() as driver:
            topology = read_topology(driver, root)
    except UnsupportedError as error:
        return f"{error.message}\n{split_cores(root=root)}"
    if not topology.devices:
        return f"the driver sees no device\n{split_cores(root=root)}"
    wanted, there = num_prefill + num_decode, len(topology.devices)
    if wanted > there:
        return f"{topology.table()}\n{wanted} workers for {there} devices: roles share a device, or fewer workers run"
    return f"{topology.table()}\n{topology.choose(num_prefill, num_decode)}"

"""Made-up machines: PCI trees as sysfs shows them, NUMA nodes with cores, and a driver that sees devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path


class FakeDriver:
    """Devices at addresses, of which some pairs have NVLink."""

    def __init__(self, addresses: Sequence[str], linked: Collection[tuple[int, int]] = ()) -> None:
        self._addresses = addresses
        self._linked = {tuple(sorted(pair)) for pair in linked}

    def devices(self) -> Sequence[tuple[str, str]]:
        return [("GPU", address) for address in self._addresses]

    def are_linked(self, first: int, second: int) -> bool:
        return tuple(sorted((first, second))) in self._linked


def pci_tree(root: Path, places: Mapping[str, str], numa: Mapping[str, int] | None = None) -> None:
    """`places`: address -> folders from the root complex to the device, such as `pci0000:3a/0000:3a:00.0`."""
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    for address, place in places.items():
        folder = root / "sys/devices" / place / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{(numa or {}).get(address, -1)}\n")
        (links / address).symlink_to(f"../../../devices/{place}/{address}")


def cores(root: Path, nodes: Sequence[str], siblings: Sequence[str] = ()) -> None:
    """NUMA nodes by their lists of hardware threads, and which threads share a core."""
    for number, threads in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{threads}\n")
    for group in siblings:
        for thread in group.split(","):
            folder = root / f"sys/devices/system/cpu/cpu{thread}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{group}\n")

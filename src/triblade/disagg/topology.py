"""How near devices are to each other, and which of them should prefill and which decode.

Rows go from every prefill device to every decode device, so a choice is as good as its worst pair. NVLink comes from the driver,
the PCI tree and NUMA nodes from sysfs below a root that tests replace. Knows no engine and starts nothing; every answer comes with
its reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from typing import Protocol

from triblade.errors import ConfigError

ROOT = Path("/")


class Link(IntEnum):
    """The best way between two devices; smaller is nearer."""

    NVLINK = 0
    SAME_SWITCH = 1
    SAME_ROOT = 2
    SAME_NUMA = 3
    OTHER = 4

    @property
    def words(self) -> str:
        """What it is, and what it means for rows."""
        return _WORDS[self]

    @property
    def is_bad(self) -> bool:
        """Whether rows leave a PCI root complex on their way."""
        return self >= Link.SAME_NUMA


_WORDS = {
    Link.NVLINK: "NVLink",
    Link.SAME_SWITCH: "same PCIe switch",
    Link.SAME_ROOT: "same PCIe root complex",
    Link.SAME_NUMA: "different root complexes of one NUMA node",
    Link.OTHER: "different NUMA nodes",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator; `path` leads from its root complex to it: ("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0")."""

    index: int
    name: str
    address: str
    path: tuple[str, ...] = ()
    numa_node: int | None = None


class Driver(Protocol):
    """What the driver knows."""

    def devices(self) -> Sequence[tuple[str, str]]:
        """Name and PCI address of every device, in order of their indices."""
        ...

    def are_linked(self, first: int, second: int) -> bool:
        """Whether NVLink connects two of them, directly or through a switch."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """Which devices prefill and which decode, how near each pair is, and what to mind."""

    prefill: tuple[Device, ...]
    decode: tuple[Device, ...]
    pairs: tuple[tuple[Device, Device, Link], ...]  # prefill, decode

    @property
    def worst(self) -> Link:
        return max((link for _, _, link in self.pairs), default=Link.NVLINK)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One for every pair that no good choice would have."""
        return tuple(
            f"devices {p.index} and {d.index} are on {link.words}: rows cross the processor's own interconnect, which is slower"
            for p, d, link in self.pairs
            if link.is_bad
        )

    @property
    def summary(self) -> str:
        """Without the warnings."""
        return f"prefill on {_indices(self.prefill)}, decode on {_indices(self.decode)}: {self.worst.words} or better"

    def __str__(self) -> str:
        return "\n".join((self.summary, *(f"warning: {text}" for text in self.warnings)))


class Topology:
    """All devices of a machine and the links between them.

    Args:
        devices: of the machine.
        are_linked: by NVLink, two indices.
    """

    def __init__(self, devices: Sequence[Device], are_linked: Callable[[int, int], bool]) -> None:
        self.devices = tuple(devices)
        self.are_linked = are_linked
        self._links = {
            (a.index, b.index): Link.NVLINK if are_linked(a.index, b.index) else by_tree(a, b)
            for a, b in combinations(self.devices, 2)
        }

    def link(self, first: Device, second: Device) -> Link:
        """The best way between two devices."""
        return self._links[min(first.index, second.index), max(first.index, second.index)]

    def rate(self, prefill: Sequence[Device], decode: Sequence[Device]) -> Choice:
        """The pairs of a given choice."""
        pairs = tuple((p, d, self.link(p, d)) for p in prefill for d in decode)
        return Choice(tuple(prefill), tuple(decode), pairs)

    def choose(self, num_prefill: int, num_decode: int) -> Choice:
        """The devices with the nearest worst pair, then with the nearest pairs in all, then with the smallest indices.

        Raises:
            ConfigError: there are not as many devices.
        """
        if num_prefill + num_decode > len(self.devices):
            raise ConfigError(
                f"{num_prefill} + {num_decode} devices wanted, there are {len(self.devices)}",
                hint="use fewer workers, or two roles on one device (--pd-memory)",
            )
        choices = (
            self.rate(chosen, self._nearest(chosen, num_decode)) for chosen in combinations(self.devices, num_prefill)
        )
        return min(choices, key=lambda choice: (choice.worst, sum(link for _, _, link in choice.pairs)))

    def table(self) -> str:
        """Links between all devices, and where each one hangs."""
        header = "       " + "".join(f"{device.index:>8}" for device in self.devices)
        lines = [header]
        for device in self.devices:
            cells = ("-" if other is device else self.link(device, other).name.lower() for other in self.devices)
            lines.append(f"{device.index:>7}" + "".join(f"{cell:>8}"[-12:] for cell in cells))
        about = (f"{d.index}: {d.name}, {d.address}, NUMA node {_node(d.numa_node)}" for d in self.devices)
        return "\n".join((*lines, *about))

    def _nearest(self, prefill: Sequence[Device], count: int) -> tuple[Device, ...]:
        """The devices nearest to all of `prefill`; as no distance depends on other decode devices, one by one finds the best."""
        others = [device for device in self.devices if device not in prefill]

        def distance(device: Device) -> tuple[int, int, int]:
            links = [self.link(device, p) for p in prefill]
            return max(links, default=0), sum(links), device.index

        return tuple(sorted(sorted(others, key=distance)[:count], key=lambda device: device.index))


def by_tree(first: Device, second: Device) -> Link:
    """The way through the PCI tree. A root port has one device below it, so two that share a port share a switch."""
    shared = 0
    for mine, theirs in zip(first.path, second.path, strict=False):
        if mine != theirs:
            break
        shared += 1
    if shared >= 2:
        return Link.SAME_SWITCH
    if shared == 1:
        return Link.SAME_ROOT
    if first.numa_node is not None and first.numa_node == second.numa_node:
        return Link.SAME_NUMA
    return Link.OTHER


def read_topology(driver: Driver, root: Path = ROOT) -> Topology:
    """The devices that a driver sees, with their places in the PCI tree."""
    devices = []
    for index, (name, address) in enumerate(driver.devices()):
        own = root / "sys/bus/pci/devices" / pci_address(address)
        devices.append(Device(index, name, pci_address(address), _tree_path(own), _numa_node(own)))
    return Topology(devices, driver.are_linked)


def pci_address(address: str) -> str:
    """`00000000:3B:00.0`, as the driver writes it, as sysfs does: `0000:3b:00.0`."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def _tree_path(device: Path) -> tuple[str, ...]:
    """Root complex, bridges and device; empty where sysfs does not show it."""
    if not device.exists():
        return ()
    parts = device.resolve().parts
    start = next((i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part), len(parts))
    return parts[start:]


def _numa_node(device: Path) -> int | None:
    """None where there is one node only (the kernel says -1) or nothing is known."""
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _indices(devices: Sequence[Device]) -> str:
    return ", ".join(str(device.index) for device in devices)


def _node(node: int | None) -> str:
    return "unknown" if node is None else str(node)

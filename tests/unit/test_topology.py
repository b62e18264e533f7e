"""Devices and cores for the two roles, on made-up machines (row P4)."""

from __future__ import annotations

import itertools
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
from device_trees import FakeDriver, cores, pci_tree

from triblade import cli
from triblade.disagg.cores import as_list, parse_list, split_cores
from triblade.disagg.machine import describe_machine
from triblade.disagg.nvml import Nvml
from triblade.disagg.topology import Link, Topology, pci_address, read_topology
from triblade.errors import ConfigError, UnsupportedError

# Two sockets; on the first, 0 and 1 share a switch below one port, 2 has a port of its own on the same root complex, and 3 another
# root complex; 4 is on the second socket.
PLACES = {
    "0000:03:00.0": "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0",
    "0000:04:00.0": "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0",
    "0000:05:00.0": "pci0000:00/0000:00:02.0",
    "0000:41:00.0": "pci0000:40/0000:40:01.0",
    "0000:81:00.0": "pci0000:80/0000:80:01.0",
}
NUMA = dict(zip(PLACES, (0, 0, 0, 0, 1), strict=True))


@pytest.fixture
def machine(tmp_path: Path) -> Topology:
    pci_tree(tmp_path, PLACES, NUMA)
    return read_topology(FakeDriver([address.upper() for address in PLACES]), tmp_path)


def test_links_are_rated_by_the_tree(machine: Topology) -> None:
    devices = machine.devices
    expected = [Link.SAME_SWITCH, Link.SAME_ROOT, Link.SAME_NUMA, Link.OTHER]
    assert [machine.link(devices[0], other) for other in devices[1:]] == expected
    assert [machine.link(other, devices[0]) for other in devices[1:]] == expected
    assert [device.numa_node for device in devices] == [0, 0, 0, 0, 1]


def test_the_drivers_addresses_are_those_of_sysfs() -> None:
    assert pci_address("00000000:3B:00.0") == "0000:3b:00.0"
    assert pci_address("00010000:0A:1F.1") == "0000:0a:1f.1"
    assert pci_address("0000:3b:00.0") == "0000:3b:00.0"


def test_the_nearest_pair_is_chosen_and_explained(machine: Topology) -> None:
    choice = machine.choose(1, 1)
    assert (choice.prefill[0].index, choice.decode[0].index) == (0, 1)
    assert choice.worst is Link.SAME_SWITCH
    assert choice.warnings == ()
    assert str(choice) == "prefill on 0, decode on 1: same PCIe switch or better"


def test_the_worst_pair_counts_first(machine: Topology) -> None:
    choice = machine.choose(1, 2)  # 0 or 1 with the other and 2; never one that leaves the root complex
    assert {device.index for device in (*choice.prefill, *choice.decode)} == {0, 1, 2}
    assert choice.worst is Link.SAME_ROOT


def test_bad_pairs_are_warned_of(machine: Topology) -> None:
    choice = machine.rate(machine.devices[:1], machine.devices[3:])
    assert [text.partition(":")[0] for text in choice.warnings] == [
        "devices 0 and 3 are on different root complexes of one NUMA node",
        "devices 0 and 4 are on different NUMA nodes",
    ]
    assert "warning: devices 0 and 4" in str(choice)


def test_nvlink_goes_before_the_tree(tmp_path: Path) -> None:
    pci_tree(tmp_path, PLACES, NUMA)
    topology = read_topology(FakeDriver(list(PLACES), linked=[(0, 4)]), tmp_path)
    choice = topology.choose(1, 1)
    assert (choice.prefill[0].index, choice.decode[0].index, choice.worst) == (0, 4, Link.NVLINK)
    assert choice.warnings == ()


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)])
def test_no_other_choice_is_better(machine: Topology, num_prefill: int, num_decode: int) -> None:
    """The obvious twin: all choices of both roles."""

    def cost(choice: object) -> tuple[int, int]:
        pairs = choice.pairs  # type: ignore[attr-defined]
        return max(link for _, _, link in pairs), sum(link for _, _, link in pairs)

    best = min(
        cost(machine.rate(p, d))
        for p in itertools.combinations(machine.devices, num_prefill)
        for d in itertools.combinations(machine.devices, num_decode)
        if not set(p) & set(d)
    )
    assert cost(machine.choose(num_prefill, num_decode)) == best


def test_more_workers_than_devices_are_refused(machine: Topology) -> None:
    with pytest.raises(ConfigError, match="4 \\+ 2 devices wanted, there are 5"):
        machine.choose(4, 2)


def test_the_table_names_every_link(machine: Topology) -> None:
    text = machine.table()
    for words in ("same_switch", "same_root", "same_numa", "other", "0000:81:00.0, NUMA node 1"):
        assert words in text


def test_devices_that_sysfs_does_not_show_are_far(tmp_path: Path) -> None:
    topology = read_topology(FakeDriver(["0000:03:00.0", "0000:04:00.0"]), tmp_path)
    assert topology.link(*topology.devices) is Link.OTHER
    assert "NUMA node unknown" in topology.table()


def test_one_numa_node_is_no_distance(tmp_path: Path) -> None:
    pci_tree(tmp_path, {"0000:01:00.0": "pci0000:00/0000:00:01.0", "0000:41:00.0": "pci0000:40/0000:40:01.0"})
    topology = read_topology(FakeDriver(["0000:01:00.0", "0000:41:00.0"]), tmp_path)
    assert topology.devices[0].numa_node is None  # the kernel says -1
    assert topology.link(*topology.devices) is Link.OTHER


def test_whole_numa_nodes_for_each_role(tmp_path: Path) -> None:
    cores(tmp_path, ["0-3", "4-7", "8-11"])
    split = split_cores(0.3, range(12), tmp_path)
    assert (as_list(split.prefill), as_list(split.decode)) == ("0-3", "4-11")
    assert str(split) == "prefill on cores 0-3, decode on cores 4-11: whole NUMA nodes, 1 of 3 prefill"


def test_threads_of_one_core_stay_together(tmp_path: Path) -> None:
    cores(tmp_path, ["0-7"], siblings=["0,4", "1,5", "2,6", "3,7"])
    split = split_cores(0.5, range(8), tmp_path)
    assert (as_list(split.prefill), as_list(split.decode)) == ("0-1,4-5", "2-3,6-7")


def test_only_allowed_cores_are_split(tmp_path: Path) -> None:
    cores(tmp_path, ["0-3", "4-7"])
    split = split_cores(0.5, [1, 2], tmp_path)  # the second node has none of them
    assert (split.prefill, split.decode) == ((1,), (2,))
    assert "one NUMA node" in split.reason


def test_each_role_has_a_core_whatever_the_share(tmp_path: Path) -> None:
    for share in (0.01, 0.99):
        split = split_cores(share, range(4), tmp_path)
        assert split.prefill
        assert split.decode
    alone = split_cores(0.5, [3], tmp_path)
    assert alone.prefill == alone.decode == (3,)
    assert "take turns" in alone.warnings[0]
    with pytest.raises(ConfigError, match="between 0 and 1"):
        split_cores(1.0, [3], tmp_path)


def test_lists_of_threads() -> None:
    assert parse_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert as_list([11, 0, 1, 2, 3, 8, 10]) == "0-3,8,10-11"
    assert parse_list("") == []


class FakeNvmlError(Exception):
    """What the package raises."""


def fake_nvml(*, has_driver: bool = True) -> types.ModuleType:
    module = types.ModuleType("pynvml")

    def start() -> None:
        if not has_driver:
            raise FakeNvmlError("Driver Not Loaded")

    def status(first: int, second: int, capability: int) -> int:
        if second == 2:
            raise FakeNvmlError("Not Supported")
        return 0 if (first, second) == (0, 1) else 4

    content = {
        "NVMLError": FakeNvmlError,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2,
        "NVML_P2P_STATUS_OK": 0,
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"H200" if handle else "H200",
        "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(busId=f"00000000:0{handle}:00.0"),
        "nvmlDeviceGetP2PStatus": status,
    }
    module.__dict__.update(content)
    return module


def test_the_driver_through_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    with Nvml() as driver:
        assert list(driver.devices()) == [("H200", f"00000000:0{i}:00.0") for i in range(4)]
        assert driver.are_linked(0, 1)
        assert not driver.are_linked(0, 3)
        assert not driver.are_linked(0, 2)


def test_without_package_or_driver_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(has_driver=False))
    with pytest.raises(UnsupportedError, match="Driver Not Loaded"):
        Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnsupportedError, match="nvidia-ml-py is not installed"):
        Nvml()


def test_the_machine_in_words(tmp_path: Path) -> None:
    pci_tree(tmp_path, PLACES, NUMA)
    cores(tmp_path, ["0"])

    def describe(num_prefill: int, num_decode: int, addresses: list[str]) -> str:
        return describe_machine(num_prefill, num_decode, lambda: nullcontext(FakeDriver(addresses)), tmp_path)

    assert describe(1, 1, list(PLACES)).endswith("prefill on 0, decode on 1: same PCIe switch or better")
    assert describe(4, 4, list(PLACES)).endswith("8 workers for 5 devices: roles share a device, or fewer workers run")
    assert describe(1, 1, []).startswith("the driver sees no device\nprefill on cores")


def test_the_doctor_looks_at_the_machine_when_no_model_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert cli.main(["doctor", "--prefill-workers", "1", "--decode-workers", "1"]) == 0
    assert "prefill on 0, decode on 1: NVLink or better" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cli.main(["doctor"]) == 0
    assert "prefill on cores" in capsys.readouterr().out
    assert cli.main(["doctor", "--target", "m"]) == cli.BAD_OPTIONS
    assert "compares two models" in capsys.readouterr().err
    assert cli.main(["doctor", "--prefill-workers", "0"]) == cli.BAD_OPTIONS

"""Which cores and devices workers are started with, on made-up machines (row P4)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from device_trees import FakeDriver, cores, pci_tree

from triblade.config import TopologyConfig
from triblade.config.environment import visible_devices, worker_environment
from triblade.disagg.placement import Placement, place_cores, place_devices
from triblade.disagg.topology import Driver
from triblade.errors import ConfigError, UnsupportedError

ONE_EACH = TopologyConfig(prefill_workers=1, decode_workers=1)
# 0 alone on the first socket; 1 and 2 share a root complex of the second.
PLACES = {
    "0000:05:00.0": "pci0000:00/0000:00:02.0",
    "0000:81:00.0": "pci0000:80/0000:80:01.0",
    "0000:82:00.0": "pci0000:80/0000:80:02.0",
}
NUMA = dict(zip(PLACES, (0, 1, 1), strict=True))


def on_devices(
    root: Path,
    topology: TopologyConfig,
    visible: tuple[int, ...] | None = None,
    linked: tuple[tuple[int, int], ...] = (),
) -> Placement:
    pci_tree(root, PLACES, NUMA)
    return place_devices(topology, visible, lambda: nullcontext(FakeDriver(list(PLACES), linked)), root)


def test_cores_of_both_roles(tmp_path: Path) -> None:
    cores(tmp_path, ["0-7"])
    found = place_cores(ONE_EACH, [4, 5], tmp_path)
    assert found.shares == {"prefill": [(4,)], "decode": [(5,)]}
    assert found.reason == "prefill on cores 4, decode on cores 5: one NUMA node, 1 of 2 cores prefill"
    assert found.warnings == ()
    many = TopologyConfig(prefill_workers=2, decode_workers=2, prefill_threads=2)
    assert place_cores(many, range(8), tmp_path).shares == {"prefill": [(0,), (1,)], "decode": [(2, 3, 4), (5, 6, 7)]}
    several = TopologyConfig(decode_workers=2)
    assert place_cores(several, [0, 1], tmp_path).shares == {"prefill": [], "decode": [(0,), (1,)]}
    with pytest.raises(ConfigError, match="leave a core"):
        place_cores(TopologyConfig(prefill_workers=1, decode_workers=1, prefill_threads=2), [0, 1], tmp_path)


def test_each_role_stays_in_its_numa_nodes(tmp_path: Path) -> None:
    cores(tmp_path, ["0,2,4,6", "1,3,5,7"])
    found = place_cores(ONE_EACH, range(8), tmp_path)
    assert found.shares == {"prefill": [(0, 2, 4, 6)], "decode": [(1, 3, 5, 7)]}
    assert "whole NUMA nodes" in found.reason


def test_workers_of_a_role_get_whole_cores(tmp_path: Path) -> None:
    cores(tmp_path, ["0-7"], siblings=["0,4", "1,5", "2,6", "3,7"])
    topology = TopologyConfig(prefill_workers=2, decode_workers=1)
    assert place_cores(topology, range(8), tmp_path).shares == {"prefill": [(0, 4), (1, 5)], "decode": [(2, 6, 3, 7)]}


def test_what_is_shared_is_warned_of(tmp_path: Path) -> None:
    cores(tmp_path, ["0-7"], siblings=["0,4", "1,5", "2,6", "3,7"])
    asked = TopologyConfig(prefill_workers=1, decode_workers=1, prefill_threads=3)
    found = place_cores(asked, range(8), tmp_path)
    assert found.shares == {"prefill": [(0, 4, 1)], "decode": [(5, 2, 6, 3, 7)]}
    assert found.warnings == ("hardware threads 1,5 are one core, and both roles use it",)
    assert "4" in place_cores(ONE_EACH, [4], tmp_path).warnings[0]
    assert place_cores(ONE_EACH, [0, 4], tmp_path).warnings == (
        "hardware threads 0,4 are one core, and both roles use it",
    )
    crowd = TopologyConfig(prefill_workers=1, decode_workers=3, prefill_threads=1)
    assert place_cores(crowd, [0, 1], tmp_path).warnings == ("3 workers of one role share 1 cores",)


def test_the_nearest_devices_are_used_and_see_each_other(tmp_path: Path) -> None:
    found = on_devices(tmp_path, ONE_EACH)
    assert found.shares == {"prefill": [(1, 2)], "decode": [(2, 1)]}
    assert found.reason == "prefill on 1, decode on 2: same PCIe root complex or better"
    assert found.warnings == ()


def test_only_visible_devices_are_used_and_a_bad_pair_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = on_devices(tmp_path, ONE_EACH, visible=(0, 2))
    assert found.shares == {"prefill": [(0, 2)], "decode": [(2, 0)]}
    with caplog.at_level(logging.INFO):
        found.report()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "devices 0 and 2 are on different NUMA nodes" in caplog.text


def test_nvlink_makes_a_pair_good(tmp_path: Path) -> None:
    found = on_devices(tmp_path, ONE_EACH, visible=(0, 2), linked=((0, 2),))
    assert (found.reason, found.warnings) == ("prefill on 0, decode on 2: NVLink or better", ())


def test_engines_without_prefill_workers_have_a_device_each(tmp_path: Path) -> None:
    assert on_devices(tmp_path, TopologyConfig(decode_workers=2)).shares == {"prefill": [], "decode": [(0,), (1,)]}


def test_more_workers_than_devices_share_one(tmp_path: Path) -> None:
    found = on_devices(tmp_path, TopologyConfig(prefill_workers=2, decode_workers=2))
    assert (found.shares, found.reason) == ({}, "4 workers share one device")
    assert found.warnings == ("devices 1, 2 stay idle: there are more workers than devices",)


def test_a_driver_that_says_nothing_changes_nothing() -> None:
    def fail() -> AbstractContextManager[Driver]:
        raise UnsupportedError("devices are unknown: no driver")

    found = place_devices(ONE_EACH, None, fail)
    assert (found.shares, found.warnings) == ({}, ("devices are unknown: no driver",))


def test_the_environment_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert visible_devices() == (3, 1)
    assert worker_environment((1, 3))["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert worker_environment((1, 3))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert worker_environment(())["CUDA_VISIBLE_DEVICES"] == "3, 1"
    for names in ("GPU-5a", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        assert visible_devices() is None

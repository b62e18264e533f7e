"""`triblade serve` with workers, from its command line to the options and devices that each worker is started with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_trees import FakeDriver, pci_tree
from tiny_folders import tiny_folder

from triblade import cli
from triblade.disagg import launch
from triblade.disagg.launch import Deployment, planned
from triblade.disagg.placement import place_devices
from triblade.disagg.processes import WorkerProcess
from triblade.models.loader import open_model
from triblade.serve import run

PLACES = {"0000:81:00.0": "pci0000:80/0000:80:01.0", "0000:82:00.0": "pci0000:80/0000:80:02.0"}
BAD_OPTIONS = 2
OPTIONS = ("--prefill-workers", "1", "--decode-workers", "1", "--connector", "cuda-ipc")


class Reached(Exception):
    """The command came as far as starting workers."""


@dataclass
class Machine:
    """A command line on a machine with some GPUs, or none; nothing is started."""

    model: Path
    root: Path
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        """The server itself is left out."""
        self.monkeypatch.setattr(run, "serve", lambda engine, server, *, start, plan: start(engine))

    def serve(self, *options: str) -> int:
        return cli.main(["serve", str(self.model), "--num-kv-blocks", "32", *options])

    def workers(self, *options: str, devices: int) -> list[WorkerProcess]:
        """What would be started."""
        found: list[Deployment] = []

        def reached(deployment: Deployment) -> None:
            found.append(deployment)
            raise Reached

        self.monkeypatch.setattr("triblade.disagg.launch.start_workers", reached)
        with pytest.raises(Reached):
            self.serve(*options)
        self._gpus(devices)
        (deployment,) = found
        return planned(deployment, open_model(deployment.engine))

    def _gpus(self, count: int) -> None:
        places = list(PLACES)[:count]
        pci_tree(self.root, {place: PLACES[place] for place in places}, dict.fromkeys(places, 0))
        driver = FakeDriver(places, ((0, 1),) if count > 1 else ())
        place = partial(place_devices, open_driver=lambda: nullcontext(driver), root=self.root)
        prepare = launch.prepare
        self.monkeypatch.setattr(launch, "place_devices", place)
        self.monkeypatch.setattr(launch, "visible_devices", lambda: None)
        self.monkeypatch.setattr(launch, "select_device", lambda _: (torch.device("cuda"), "a test"))
        # Its arithmetic is the same without a device.
        self.monkeypatch.setattr(
            launch, "prepare", lambda config, model, _, copies: prepare(config, model, torch.device("cpu"), copies)
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tiny_folder(tmp_path / "model"), tmp_path / "root", monkeypatch)


def option(process: WorkerProcess, name: str) -> str:
    (found,) = (text.partition("=")[2] for text in process.options if text.startswith(f"--{name}="))
    return found


def closed(processes: Sequence[WorkerProcess]) -> Iterator[WorkerProcess]:
    for process in processes:
        process.wait(0.0)
        yield process


def test_two_gpus_are_a_pair(machine: Machine) -> None:
    prefill, decode = closed(machine.workers(*OPTIONS, "--wire-codec", "int8", devices=2))
    assert (prefill.devices, decode.devices) == ((0, 1), (1, 0))  # each sees the other one's
    for process in (prefill, decode):
        assert (option(process, "connector"), option(process, "wire-codec")) == ("cuda-ipc", "int8")
        assert option(process, "num-kv-blocks") == "32"  # a device each: nothing to split
    assert option(decode, "prefill-address") == prefill.address
    assert "/" in prefill.address  # links are Unix sockets


def test_one_gpu_is_shared_with_its_memory_split(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Both processes map the same device, so rows are placed there as well."""
    prefill, decode = closed(machine.workers(*OPTIONS, "--pd-memory", "25:75", devices=1))
    assert (prefill.devices, decode.devices) == ((), ())  # the first one, for both
    assert (option(prefill, "num-kv-blocks"), option(decode, "num-kv-blocks")) == ("8", "24")
    assert option(decode, "connector") == "cuda-ipc"
    assert "2 workers share one device" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_the_command_says_so(
    device: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "init", absent)
    assert machine.serve(*OPTIONS, "--device", device) == BAD_OPTIONS
    told = " ".join(capsys.readouterr().err.split())
    assert "connector cuda-ipc writes rows from GPU to GPU, the workers would run on: cpu" in told
    assert "hint: use --connector shm" in told


def test_nor_does_a_worker_of_its_own_start(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = str(tmp_path / "p")
    options = ["--role", "prefill", "--address", address, "--connector", "cuda-ipc", "--device", "cpu"]
    assert cli.main(["worker", str(machine.model), *options]) == BAD_OPTIONS
    assert "connector cuda-ipc writes rows from GPU to GPU" in " ".join(capsys.readouterr().err.split())
    assert not Path(address).exists()


def test_addresses_of_other_hosts_are_refused_first(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = ("--decode-workers", "1", "--prefill-address", "10.0.0.5:7000", "--connector", "cuda-ipc")
    assert machine.serve(*options) == BAD_OPTIONS
    assert "connector cuda-ipc needs paths of sockets on this host" in " ".join(capsys.readouterr().err.split())

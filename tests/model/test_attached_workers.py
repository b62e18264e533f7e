"""A server over workers that run already: the same answers, and what it says where one is absent or is something else."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny import prompt
from tiny_folders import tiny_folder

from triblade.config import EngineConfig, TopologyConfig, TransferConfig
from triblade.disagg.client_port import ClientPort
from triblade.disagg.launch import Deployment, planned, start_workers
from triblade.disagg.links import Link
from triblade.disagg.router import Router
from triblade.disagg.rpc import CLIENT_PROTOCOL
from triblade.disagg.sockets import listening
from triblade.disagg.worker import welcome
from triblade.engine.build import build_engine
from triblade.engine.local import LocalClient
from triblade.errors import ConfigError, EngineDeadError
from triblade.models.loader import open_model
from triblade.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ENGINE: dict[str, Any] = {
    "deterministic": True,
    "dtype": "float32",
    "block_size": 4,
    "num_kv_blocks": 64,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def deployment(model: Path, connector: Any = "tcp", **topology: Any) -> Deployment:
    options = {"attach_timeout_s": 0.4, **topology}
    config = EngineConfig(model=str(model), **ENGINE)
    return Deployment(config, TopologyConfig(**options), TransferConfig(connector=connector), 1.0, "info")


@contextmanager
def decode_worker(model: Path) -> Iterator[str]:
    """One in a thread; its address."""
    client = LocalClient(build_engine(EngineConfig(model=str(model), **ENGINE)))
    found: dict[str, Any] = {}
    is_up = threading.Event()

    async def serve() -> None:
        port = ClientPort(client, welcome(client._engine), client.load)
        listener = listening("127.0.0.1:0", port.accept, CLIENT_PROTOCOL)
        found.update(address=listener.address, stop=asyncio.Event(), loop=asyncio.get_running_loop())
        is_up.set()
        await found["stop"].wait()
        listener.close()
        await port.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    is_up.wait()
    try:
        yield found["address"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join()
        client.close()


def answer(router: Router, ids: list[int]) -> list[int]:
    async def collect() -> list[int]:
        return [token async for output in router.generate(ids, GREEDY) for token in output.token_ids]

    return asyncio.run(collect())


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_workers_that_run_already_answer(folder: Path) -> None:
    engine = build_engine(EngineConfig(model=str(folder), **ENGINE))
    requests = engine.prepare(prompt(9), GREEDY)
    engine.add(requests)
    while engine.has_work:
        engine.step()
    with decode_worker(folder) as first, decode_worker(folder) as second:
        router = start_workers(deployment(folder, decode_address=(first, second), attach_timeout_s=10.0))
        try:
            assert len(router.ready) == 2
            assert answer(router, prompt(9)) == requests[0].output_token_ids
        finally:
            router.close()


def test_an_absent_worker_is_named(folder: Path) -> None:
    address = free_address()
    with pytest.raises(EngineDeadError, match=f"decode worker at {address}: Connection refused") as caught:
        start_workers(deployment(folder, decode_address=(address,)))
    assert f"--role decode --address {address}" in str(caught.value.hint)


def test_a_worker_with_another_model_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path / "other", seed=1)
    with (
        decode_worker(other) as address,
        pytest.raises(ConfigError, match=f"{address}: it serves another checkpoint: .*other"),
    ):
        start_workers(deployment(folder, decode_address=(address,), attach_timeout_s=60.0))


def test_somebody_who_says_nothing_is_no_decode_worker(folder: Path) -> None:
    links: list[Link] = []
    listener = listening("127.0.0.1:0", links.append)
    with pytest.raises(EngineDeadError, match="it says nothing: it loads its model, or is no decode worker"):
        start_workers(deployment(folder, decode_address=(listener.address,)))
    listener.close()
    for link in links:
        link.close()


def test_decode_workers_that_are_started_here_know_prefill_workers_elsewhere(folder: Path) -> None:
    plan = deployment(folder, prefill_workers=1, decode_workers=1, prefill_address=("10.0.0.5:7000",))
    processes = planned(plan, open_model(plan.engine))
    prefill, decode = (process.options for process in processes)
    assert "--prefill-address=10.0.0.5:7000" in decode
    assert sum(option.startswith("--prefill-address=") for option in decode) == 2
    assert not any(option.startswith("--prefill-address=") for option in prefill)
    for process in processes:
        process.wait(0)


def test_options_that_contradict_each_other(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"connector shm needs paths of sockets on this host, got: 10\.0\.0\.5:7000"):
        start_workers(deployment(folder, "shm", decode_workers=1, prefill_address=("10.0.0.5:7000",)))
    with pytest.raises(ConfigError, match="prefill_address is for decode workers that are started here"):
        TopologyConfig(decode_address=("10.0.0.5:7001",), prefill_address=("10.0.0.5:7000",))
    for wrong in ("somewhere", "host:", ":80", "host:port"):
        with pytest.raises(ConfigError, match=f"decode_address must be HOST:PORT or a path, got: '{wrong}'"):
            TopologyConfig(decode_address=(wrong,))
    assert TopologyConfig(decode_address=("/run/decode",)).is_distributed

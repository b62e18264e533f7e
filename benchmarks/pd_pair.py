"""A prefill and a decode worker in processes of their own, started, watched and routed to as `triblade serve` does, and a relay
between them (for `pd_faults.py`).

The model is tiny and deterministic, so an answer is right when tokens and logprobs are those of one engine in this process. Knows
no fault. Invariant: when `baseline` returns, neither worker holds a block or has work.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from relays import Relay, Throttle
from tiny import prompt
from tiny_folders import tiny_folder

from triblade.config import EngineConfig, TopologyConfig, TransferConfig
from triblade.disagg.launch import Deployment, planned
from triblade.disagg.processes import Supervisor, WorkerProcess
from triblade.disagg.remote_client import RemoteClient
from triblade.disagg.router import Router
from triblade.disagg.rpc import CLIENT_PROTOCOL
from triblade.disagg.sockets import SocketLink, connected
from triblade.engine.build import build_engine
from triblade.engine.client import EngineClient
from triblade.engine.local import LocalClient
from triblade.engine.transfers import TransferCounts
from triblade.models.loader import OpenModel, open_model
from triblade.registry import CONNECTORS
from triblade.sampling_params import SamplingParams, TokenLogprobs

PROMPT_TOKENS, NEW_TOKENS = 400, 8
TIMEOUT_S, LEASE_S = 2.0, 1.0
READY_S, STUCK_S, SETTLED_S = 90.0, 20.0, 0.6
POLL_S = 0.01
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
SIZES: dict[str, Any] = {"max_position_embeddings": 1024, "num_hidden_layers": 3}

Answer = list[tuple[int, TokenLogprobs]]


class Pair:
    """Two running workers.

    Attributes:
        processes: prefill, decode.
        relay: between them, by message; none where bytes are throttled.
        throttle: between them, by bytes.
    """

    def __init__(
        self, model: OpenModel, processes: list[WorkerProcess], relay: Relay | None, throttle: Throttle | None
    ):
        self.processes, self._relay, self.throttle = processes, relay, throttle
        supervisor = Supervisor(processes, restarts=1_000_000)
        self.router = Router(model, [partial(_dial, processes[1].address)], supervisor.close)
        self.wait(lambda: self.counts.num_prefill_workers == 1, READY_S)
        supervisor.all_started()

    @property
    def relay(self) -> Relay:
        assert self._relay is not None
        return self._relay

    @property
    def counts(self) -> TransferCounts:
        return self.router.load().transfers or TransferCounts()

    def answer(self, ids: list[int]) -> Answer | None:
        """None: it did not come in time."""
        try:
            return asyncio.run(asyncio.wait_for(answer(self.router, ids), STUCK_S))
        except TimeoutError:
            return None

    def kill(self, number: int) -> None:
        """0 prefills, 1 decodes."""
        pid = self.processes[number].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def baseline(self) -> float:
        """Seconds until nothing is held on either side, as long as that lasts: what workers report is a little old."""
        start = time.monotonic()
        idle_since: float | None = None
        while idle_since is None or time.monotonic() - idle_since < SETTLED_S:
            if not self._is_idle():
                idle_since = None
            elif idle_since is None:
                idle_since = time.monotonic()
            if time.monotonic() - start > READY_S:
                raise SystemExit("the pools are not back at their baseline")
            time.sleep(POLL_S)
        return idle_since - start

    def wait_ready(self) -> None:
        """Until both are there and know each other."""
        self.wait(lambda: bool(self.router.ready) and self.counts.num_prefill_workers == 1, READY_S)

    def wait(self, holds: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline:
                raise SystemExit("it did not happen in time")
            time.sleep(POLL_S)

    def close(self) -> None:
        self.router.close()
        if self._relay is not None:
            self._relay.close()
        if self.throttle is not None:
            self.throttle.close()

    def _is_idle(self) -> bool:
        if not self.router.ready:
            return False
        load, counts = self.router.load(), self.counts
        is_free = load.num_kv_blocks == load.num_free_kv_blocks > 0 and load.num_running == load.num_waiting == 0
        return is_free and counts.prefill_backlog_tokens == 0 and counts.prefill_kv_usage == 0


async def answer(client: EngineClient | Router, ids: list[int]) -> Answer:
    """Tokens with their logprobs."""
    found: Answer = []
    async for output in client.generate(ids, PARAMS):
        found += zip(output.token_ids, output.logprobs or [], strict=True)
    return found


class Expected:
    """Right answers: of one engine in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self._client = LocalClient(build_engine(config))

    def __call__(self, ids: list[int]) -> Answer:
        return asyncio.run(answer(self._client, ids))

    def close(self) -> None:
        self._client.close()


def prompt_of(seed: int) -> list[int]:
    """Prompts that have no beginning in common."""
    return prompt(PROMPT_TOKENS, seed=seed)


@contextmanager
def tiny_engine() -> Iterator[EngineConfig]:
    """Options of every engine, with a model on disk."""
    with TemporaryDirectory() as folder:
        path = tiny_folder(Path(folder, "model"), **SIZES)
        yield EngineConfig(
            model=str(path),
            dtype="float32",
            deterministic=True,
            device="cpu",
            threads=1,
            max_model_len=1024,
            num_kv_blocks=300,
            max_num_batched_tokens=16,
        )


@contextmanager
def running(config: EngineConfig, connector: str, bytes_per_s: float | None = None) -> Iterator[Pair]:
    """Both workers; with a limit of speed between them, or a relay."""
    transfer = TransferConfig(
        connector=connector,  # type: ignore[arg-type]
        remote_prefill_tokens=16,
        transfer_timeout_s=TIMEOUT_S,
        lease_s=LEASE_S,
    )
    topology = TopologyConfig(prefill_workers=1, decode_workers=1, pd_memory="50:50")
    model = open_model(config)
    processes = planned(Deployment(config, topology, transfer, 5.0, "error"), model)
    target = processes[0].address
    with TemporaryDirectory() as folder:
        address = str(Path(folder, "relay")) if connector == "shm" else "127.0.0.1:0"
        throttle = None if bytes_per_s is None else Throttle(target, bytes_per_s)
        relay = Relay(CONNECTORS[connector](), address, target) if throttle is None else None
        between = throttle or relay
        assert between is not None
        processes[1].options = [option.replace(target, between.address) for option in processes[1].options]
        pair = Pair(model, processes, relay, throttle)
        try:
            yield pair
        finally:
            pair.close()


def _dial(address: str) -> RemoteClient:
    return RemoteClient(SocketLink(connected(address), address, CLIENT_PROTOCOL))

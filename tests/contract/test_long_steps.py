"""A step may take longer than anybody bears silence: whoever computes is not lost meanwhile, whoever stopped is (issue F)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache
from shutil import which
from typing import Any

import pytest
from disaggregated import PLACED, Pair, pair
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.disagg import client_port, peer, prefill, prefill_transfers, remote_client
from triblade.disagg.client_port import ClientPort
from triblade.disagg.frames import Message
from triblade.disagg.heartbeat import Heartbeat
from triblade.disagg.identity import canary
from triblade.disagg.links import LocalLink
from triblade.disagg.pace import MOST_ABSENCE_S, Silence
from triblade.disagg.remote_client import RemoteClient
from triblade.disagg.rpc import Welcome
from triblade.disagg.wire import State
from triblade.engine.client import EngineLoad
from triblade.engine.local import LocalClient
from triblade.errors import WorkerLostError
from triblade.models.loader import OpenModel
from triblade.registry import CONNECTORS
from triblade.sampling_params import SamplingParams

ALL = [*sorted(CONNECTORS), *([PLACED] if which("g++") else [])]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
IDS, OTHER, THIRD = prompt(57, seed=21), prompt(50, seed=3), prompt(41, seed=4)
OPTIONS: dict[str, Any] = {"prefill": {"max_num_batched_tokens": 16}}
SILENCE_S, STEP_S = 0.8, 2.0
WELCOME = Welcome(model="m", model_hash="h", vocab_size=9, context_length=9, kv_tokens=9, max_logprobs=0)


@cache
def model() -> OpenModel:
    return open_tiny("llama")


@cache
def alone(ids: tuple[int, ...]) -> list[int]:
    return tiny_llm(model()).generate([list(ids)], GREEDY)[0][0].token_ids


def tokens(workers: Pair, ids: list[int]) -> list[int]:
    return workers.generate([ids], GREEDY)[0][0].token_ids


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "STATE_INTERVAL_S", 0.02)
    monkeypatch.setattr(peer, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(remote_client, "SILENCE_S", SILENCE_S)


def delayed(call: Callable[..., Any], number: int, wait: Callable[[], object]) -> Callable[..., Any]:
    """`call`, but its n-th use waits first."""
    uses = iter(range(1, 1 << 30))

    def replacement(*arguments: Any, **options: Any) -> Any:
        if next(uses) == number:
            wait()
        return call(*arguments, **options)

    return replacement


@pytest.mark.parametrize("connector", ALL)
def test_a_prefill_worker_in_a_long_step_is_waited_for(
    connector: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # G05
    """And what was taken from it during the step is no expired lease afterwards."""
    monkeypatch.setattr(prefill_transfers, "GRACE_S", 0.0)
    with pair(model(), connector, transfer={"lease_s": 1.0}, **OPTIONS) as workers:
        runner = workers.prefill_engine.runner
        monkeypatch.setattr(runner, "execute", delayed(runner.execute, 2, lambda: time.sleep(STEP_S)))
        assert tokens(workers, IDS) == alone(tuple(IDS))
        counts = workers.remote.counts
        assert (counts.num_complete, counts.num_failed) == (1, 0)
        workers.eventually(lambda: [state.num_expired for state in workers.fetcher.states] == [0])
    assert "silent" not in caplog.text


def test_a_prefill_worker_is_waited_for_before_it_has_greeted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be in a step for others when a decode worker dials."""
    monkeypatch.setattr(prefill, "canary", delayed(canary, 1, lambda: time.sleep(STEP_S)))
    with pair(model(), "tcp", **OPTIONS) as workers:
        assert tokens(workers, IDS) == alone(tuple(IDS))
        assert workers.remote.counts.num_complete == 1
    assert "silent" not in caplog.text


@pytest.mark.parametrize("connector", ["local", "tcp", "shm"])
def test_a_prefill_worker_whose_thread_ended_is_noticed(
    connector: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # G05
    """At once by the loss of its links; one that is made afterwards stays silent."""

    def fail() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(peer, "REDIAL_S", 0.05)
    with pair(model(), connector, **OPTIONS) as workers:
        monkeypatch.setattr(workers.prefill._transfers, "publish", fail)
        workers.eventually(lambda: not workers.prefill.is_alive)
        workers.eventually(lambda: workers.fetcher.num_ready == 0)
        assert tokens(workers, IDS) == alone(tuple(IDS))
        assert workers.remote.counts.num_fetches == 0
        workers.eventually(lambda: f"silent for {SILENCE_S:g} s" in caplog.text)
    assert "the thread of the engine ends" in caplog.text


def test_a_prefill_worker_that_is_stuck_in_a_step_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One transfer waits in vain; as soon as the step is over, it is asked again."""
    stuck = threading.Event()
    with pair(model(), "tcp", transfer={"transfer_timeout_s": 0.3}, **OPTIONS) as workers:
        runner, counts = workers.prefill_engine.runner, workers.remote.counts
        monkeypatch.setattr(runner, "execute", delayed(runner.execute, 1, lambda: stuck.wait(20)))
        assert tokens(workers, IDS) == alone(tuple(IDS))
        assert tokens(workers, OTHER) == alone(tuple(OTHER))
        assert (counts.num_fetches, counts.num_failed, counts.num_declined) == (1, 1, 1)
        stuck.set()
        workers.eventually(lambda: workers.fetcher.accepts(1))
        assert tokens(workers, THIRD) == alone(tuple(THIRD))
        assert counts.num_complete == 1


class Ear:
    """A receiver that counts, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.num_words, self._fails = 0, fails

    def received(self, link: object, message: Message) -> None:
        self.num_words += 1
        if self._fails:
            raise RuntimeError("injected")

    def writable(self, link: object) -> None: ...

    def lost(self, link: object, reason: str) -> None: ...


def test_a_heartbeat_ends_with_its_thread_and_not_with_a_link() -> None:
    ended = threading.Event()
    worker = threading.Thread(target=ended.wait)
    worker.start()
    ears = [Ear(), Ear(fails=True), Ear()]
    with closing(Heartbeat(worker, lambda _: State(backlog_tokens=0), 0.001)) as heartbeat:
        ways = [LocalLink.pair() for _ in ears]
        for (ours, theirs), ear in zip(ways, ears, strict=True):
            theirs.start(ear)
            heartbeat.join(ours)
        Pair.eventually(lambda: ears[0].num_words > 3 and ears[2].num_words > 3)
        assert ears[1].num_words == 1  # its link is closed
        heartbeat.leave(ways[0][0])
        left = ears[0].num_words
        ended.set()
        worker.join()
        Pair.eventually(lambda: not heartbeat._thread.is_alive())
        assert ears[0].num_words <= left + 1
        last = ears[2].num_words
        time.sleep(0.02)
        assert ears[2].num_words == last


def test_silence_is_counted_by_who_was_there_to_hear() -> None:
    silence = Silence(0.0)
    assert silence.look("a", 1.0) == 0.0
    assert silence.look("a", 1.5) == pytest.approx(0.5)
    assert silence.look("a", 2.0) == pytest.approx(1.0)
    assert silence.look("a", 99.0) == pytest.approx(1.0 + MOST_ABSENCE_S)
    assert silence.look("b", 99.1) == 0.0
    assert silence.look("b", 99.2) == pytest.approx(0.1)


async def answered(port: ClientPort) -> tuple[list[int], str]:
    """Tokens that a router's end of a link got, and how that ended."""
    ours, theirs = LocalLink.pair("w", "r")
    port.accept(theirs)
    client = RemoteClient(ours)
    found: list[int] = []

    async def ask() -> None:
        async for output in client.generate(IDS, GREEDY):
            found.extend(output.token_ids)

    asking = asyncio.create_task(ask())
    while not asking.done():
        client.tend(time.monotonic())
        await asyncio.sleep(0.02)
    await port.close()
    error = asking.exception()
    assert error is None or isinstance(error, WorkerLostError)
    return found, "" if error is None else error.message


def test_a_decode_worker_in_a_long_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(LocalClient(tiny_llm(model()).engine)) as engine:
        runner = engine._engine.runner
        monkeypatch.setattr(runner, "execute", delayed(runner.execute, 2, lambda: time.sleep(STEP_S)))

        async def scenario() -> tuple[list[int], str]:
            return await answered(ClientPort(engine, WELCOME, engine.load))

        assert asyncio.run(scenario()) == (alone(tuple(IDS)), "")


class Endless:
    """An engine that never answers."""

    async def generate(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()
        yield

    def load(self) -> EngineLoad:
        return EngineLoad()


def test_a_decode_worker_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, or its host gone: the call that waits there ends, to be tried elsewhere."""
    monkeypatch.setattr(client_port, "REPORT_INTERVAL_S", 60.0)
    engine: Any = Endless()

    async def scenario() -> tuple[list[int], str]:
        return await answered(ClientPort(engine, WELCOME, engine.load))

    assert asyncio.run(scenario()) == ([], f"the worker at w is gone: silent for {SILENCE_S:g} s")

"""The router over workers without a model: who serves what, retries, drains, and what it says when nobody is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from triblade.config import EngineConfig, TopologyConfig, WorkerConfig, to_flags
from triblade.disagg.router import Router, summed
from triblade.disagg.rpc import Welcome
from triblade.engine.client import EngineLoad
from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.engine.transfers import Spread, TransferCounts
from triblade.errors import ConfigError, ContextLengthError, WorkerLostError
from triblade.sampling_params import SamplingParams
from triblade.spec.record import SpeculationCounts

PARAMS = SamplingParams(max_tokens=2)
MODEL: Any = SimpleNamespace(
    vocab_size=50_000, tokenizer=None, generation_config={}, checkpoint=SimpleNamespace(fingerprint=lambda: "h")
)
LIMITS: dict[str, Any] = {"vocab_size": 9, "kv_tokens": 10_000, "max_logprobs": 5}


class FakeWorker:
    """Two tokens for everybody; `lose_after` tokens it is gone."""

    def __init__(self, lose_after: int | None = None, context_length: int = 512) -> None:
        self.welcome = Welcome(model="m", model_hash="h", context_length=context_length, **LIMITS)
        self.is_alive, self.is_draining = True, False
        self.num_calls = 0
        self.prompts: list[list[int]] = []
        self._lose_after = lose_after

    async def generate(self, prompt: Sequence[int], params: SamplingParams, **_: Any) -> AsyncIterator[RequestOutput]:
        self.prompts.append(list(prompt))
        for number in range(2):
            if number == self._lose_after:
                self.is_alive = False
                raise WorkerLostError("gone")
            yield RequestOutput(request_id="r", token_ids=[7], finish_reason=FinishReason.STOP if number else None)

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=1, transfers=TransferCounts(num_tokens=5, num_prefill_workers=1))

    def tend(self, now_s: float) -> None: ...

    def close(self) -> None:
        self.is_alive = False


@contextmanager
def routed(*workers: FakeWorker) -> Iterator[Router]:
    dials: list[Callable[[], Any]] = [lambda worker=worker: alive(worker) for worker in workers]  # type: ignore[misc]
    router = Router(MODEL, dials)
    deadline = time.monotonic() + 10
    while len(router.ready) < len(workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield router
    router.close()


def alive(worker: FakeWorker) -> FakeWorker:
    if not worker.is_alive:
        raise ConnectionRefusedError
    return worker


def ask(router: Router, prompt: list[int]) -> list[int]:
    async def collect() -> list[int]:
        return [token async for output in router.generate(prompt, PARAMS) for token in output.token_ids]

    return asyncio.run(collect())


def test_equal_beginnings_go_to_one_worker() -> None:
    first, second = FakeWorker(), FakeWorker()
    with routed(first, second) as router:
        shared = list(range(200))
        for number in range(4):
            ask(router, [*shared, number])
        assert sorted((len(first.prompts), len(second.prompts))) == [0, 4]


def test_others_go_where_least_is_running_and_so_does_a_known_one_when_its_worker_is_swamped() -> None:
    first, second = FakeWorker(), FakeWorker()
    with routed(first, second) as router:
        shared = list(range(100))
        ask(router, shared)
        known, other = (first, second) if first.prompts else (second, first)
        known.num_calls = 3
        ask(router, [1, 2, 3])
        assert other.prompts == [[1, 2, 3]]
        known.num_calls = 30
        ask(router, shared)
        assert other.prompts[-1] == shared


def test_a_worker_that_is_lost_before_the_first_token_is_replaced() -> None:
    broken, whole = FakeWorker(lose_after=0), FakeWorker()
    whole.num_calls = 1  # so that the broken one comes first
    with routed(broken, whole) as router:
        assert ask(router, [1, 2]) == [7, 7]
        assert len(broken.prompts) == len(whole.prompts) == 1


def test_a_worker_that_cannot_be_dialled_does_not_keep_others_from_it() -> None:
    def broken() -> Any:
        raise RuntimeError("injected")

    worker = FakeWorker()
    with closing(Router(MODEL, [broken, lambda: worker])) as router:
        deadline = time.monotonic() + 10
        while not router.ready or router.missing.get(0) != "injected":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ask(router, [1]) == [7, 7]


def test_after_the_first_token_nobody_can_go_on() -> None:
    broken, whole = FakeWorker(lose_after=1), FakeWorker()
    whole.num_calls = 1
    with routed(broken, whole) as router:
        with pytest.raises(WorkerLostError):
            ask(router, [1, 2])
        assert whole.prompts == []


def test_attempts_are_limited() -> None:
    workers = [FakeWorker(lose_after=0) for _ in range(5)]
    with routed(*workers) as router:
        with pytest.raises(WorkerLostError):
            ask(router, [1])
        assert sum(len(worker.prompts) for worker in workers) == 3


def test_who_drains_gets_nothing_new() -> None:
    first, second = FakeWorker(), FakeWorker()
    with routed(first, second) as router:
        first.is_draining = True
        for number in range(3):
            ask(router, [number])
        assert first.prompts == []


def test_the_smallest_worker_decides_what_is_possible() -> None:
    with routed(FakeWorker(context_length=512), FakeWorker(context_length=40)) as router:
        assert router.max_model_len == 40
        with pytest.raises(ContextLengthError, match="40 tokens"):
            router.check(list(range(39)), PARAMS)


def test_loads_are_added_and_prefill_workers_are_not() -> None:
    with routed(FakeWorker(), FakeWorker()) as router:
        load = router.load()
        assert load.num_running == 2
        assert load.transfers is not None
        assert (load.transfers.num_tokens, load.transfers.num_prefill_workers) == (10, 1)
    parts = [SpeculationCounts(num_steps=1, drafted_per_position=[1]), SpeculationCounts(drafted_per_position=[2, 5])]
    assert summed(SpeculationCounts, parts) == SpeculationCounts(num_steps=1, drafted_per_position=[3, 5])
    spreads = [TransferCounts(queue_s=Spread([1, 0, 2], 7.0)), TransferCounts(queue_s=Spread([0, 1, 1], 5.0))]
    assert summed(TransferCounts, [*spreads, TransferCounts()]).queue_s == Spread([1, 1, 3], 12.0)


def test_a_split_of_memory() -> None:
    assert TopologyConfig(prefill_workers=1, decode_workers=1, pd_memory="25:75").shares == (0.25, 0.75)
    assert TopologyConfig(decode_workers=2).shares == (0.0, 1.0)
    for wrong in ("30", "0:100", "a:b", "1:2:3", "-1:2"):
        with pytest.raises(ConfigError, match="pd_memory"):
            TopologyConfig(pd_memory=wrong)
    with pytest.raises(ConfigError, match="without a decode worker"):
        TopologyConfig(prefill_workers=1)


def test_options_of_a_worker_are_its_flags() -> None:
    worker = WorkerConfig(role="decode", address="a:1", prefill_address=("b:2", "/c"), cores=(0, 1))
    flags = to_flags(worker)
    assert flags == [
        "--role=decode",
        "--address=a:1",
        "--prefill-address=b:2",
        "--prefill-address=/c",
        "--cores=0",
        "--cores=1",
    ]
    engine = EngineConfig(model="m", enable_prefix_caching=False, max_num_seqs=3)
    assert to_flags(engine) == ["--model=m", "--max-num-seqs=3", "--no-enable-prefix-caching"]
    with pytest.raises(ConfigError, match="HOST:PORT"):
        WorkerConfig(role="prefill", address="nowhere")

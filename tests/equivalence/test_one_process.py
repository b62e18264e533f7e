"""Prefill and decode as two engines of one process = one engine, token for token, and one set of weights (cases of kind g)."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from disaggregated import Pair
from role_conditions import ENGINES, GREEDY, NATIVE, model, prompts, saved_head
from tiny import prompt
from tiny_engine import DictionaryCheckpoint, open_tiny, tiny_llm
from two_engines import ONE_EACH, WAIT_S, Roles, addresses, deployment, lanes, storages, two_engines

from triblade.disagg.one_process import Lane, TwoEngines, joined, start_threads
from triblade.engine.build import assemble
from triblade.engine.engine import Engine
from triblade.engine.weights import SharedWeights
from triblade.errors import ConfigError, EngineDeadError, MemoryBudgetError
from triblade.llm import Completion
from triblade.sampling_params import SamplingParams

PARAMS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "three choices": {"n": 3, "temperature": 0.9, "seed": 5, "logprobs": 2},
    "one token": {"max_tokens": 1},
    "prompt logprobs": {"max_tokens": 0, "prompt_logprobs": 1},
}


@cache
def alone(params: str = "logprobs", weights: str = "as stored") -> list[list[Completion]]:
    return [tiny_llm(model(weights)).generate([ids], replace(GREEDY, **PARAMS[params]))[0] for ids in prompts()]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_head(tmp_path_factory.mktemp("head"))


def options(name: str, head: Path) -> dict[str, Any]:
    found = ENGINES[name]
    return {**found, "draft_model": str(head)} if found.get("drafter") == "eagle" else found


def check_equal(roles: Roles, params: str, weights: str = "as stored") -> None:
    """Everything but how many prompt tokens were cached and how many steps it took."""
    found = roles.generate(prompts(), replace(GREEDY, **PARAMS[params]))
    for choices, references in zip(found, alone(params, weights), strict=True):
        for choice, reference in zip(choices, references, strict=True):
            assert choice.token_ids == reference.token_ids
            assert (choice.logprobs, choice.prompt_logprobs) == (reference.logprobs, reference.prompt_logprobs)
            assert (choice.text, choice.finish_reason) == (reference.text, reference.finish_reason)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", ENGINES)
def test_two_engines_equal_one(name: str, params: str, head: Path) -> None:  # G11, G13-G15, G17: cold, then warm
    with two_engines(model(), **options(name, head)) as roles:
        for _ in range(2):
            check_equal(roles, params)
        assert roles.counts.num_complete == roles.counts.num_fetches
        assert (roles.counts.num_fetches > 0) == (params != "prompt logprobs")  # those need every token's logits


@pytest.mark.parametrize("name", ["plain", "self"])
def test_with_4_bit_weights(name: str, head: Path) -> None:
    with two_engines(model("4 bits"), **options(name, head)) as roles:
        check_equal(roles, "logprobs", "4 bits")
        assert roles.counts.num_complete == roles.counts.num_fetches > 0
    assert [c[0].token_ids for c in alone(weights="4 bits")] != [c[0].token_ids for c in alone()]


def test_prefix_hits_of_the_prefill_engine(head: Path) -> None:  # G16
    ids = prompts()[-1]
    with two_engines(model()) as roles:
        roles.client.prefill.service.engine.add(roles.prefill.prepare(ids[:24], SamplingParams(max_tokens=0)))
        check_equal(roles, "logprobs")


def test_a_stop_at_token_one() -> None:  # G15
    with two_engines(model()) as roles:
        for ids, (reference, *_) in zip(prompts(), alone(), strict=True):
            first = reference.token_ids[0]
            ((stopped,),) = roles.generate([ids], replace(GREEDY, stop_token_ids=(first,)))
            assert (stopped.token_ids, stopped.stop_reason) == ([first], first)


def test_short_prompts_are_computed_where_they_are_answered() -> None:
    with two_engines(model(), transfer={"remote_prefill_tokens": 10}) as roles:
        check_equal(roles, "one token")
        assert roles.counts.num_fetches == 2  # 21 and 48 tokens


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_native_engines_have_one_set_of_packed_weights(codec: str) -> None:
    with two_engines(model(), transfer={"wire_codec": codec}, **NATIVE) as roles:
        assert storages(roles.prefill) == storages(roles.decode)
        roles.generate(prompts(), GREEDY)
        assert roles.counts.num_complete == roles.counts.num_fetches > 0


def test_drafts_of_native_engines_share_theirs(head: Path) -> None:
    for name in ("self", "eagle"):
        drafts = {**options(name, head), **NATIVE, "quantization": None, "draft_quantization": "int4"}
        if name == "eagle":
            del drafts["draft_quantization"]
        with two_engines(model(), **drafts) as roles:
            assert draft_storages(roles.prefill) == draft_storages(roles.decode)
            roles.generate(prompts(), GREEDY)


def draft_storages(engine: Engine) -> set[int]:
    assert engine.speculator is not None
    drafter: Any = engine.speculator.drafter
    executor = getattr(drafter, "_executor", None) or drafter._head
    return set(addresses(executor._weights))


def test_the_checkpoint_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    read = DictionaryCheckpoint.tensor

    def tensor(checkpoint: DictionaryCheckpoint, name: str) -> torch.Tensor:
        names.append(name)
        return read(checkpoint, name)

    monkeypatch.setattr(DictionaryCheckpoint, "tensor", tensor)
    with two_engines(open_tiny("llama")) as roles:
        assert storages(roles.prefill) == storages(roles.decode)
        assert len(names) == len(set(names)) > 0


def test_weights_that_are_there_need_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine is planned with what is free beside them."""
    opened, weights, cpu = (
        open_tiny("llama", hidden_size=256, intermediate_size=512),
        SharedWeights(),
        torch.device("cpu"),
    )
    small = {"num_kv_blocks": 8, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    config = deployment(opened, **small).engine
    first = assemble(config, opened, cpu, None, weights)
    monkeypatch.setattr("triblade.engine.build.available_bytes", lambda _: opened.weight_bytes - 1)
    with pytest.raises(MemoryBudgetError):
        assemble(config, opened, cpu)
    assert storages(assemble(config, opened, cpu, None, weights)) == storages(first)


@contextmanager
def held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Steps of an engine wait for the event, which is set at the end in any case."""
    go, step = threading.Event(), engine.step

    def waiting() -> Any:
        assert go.wait(20)
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", waiting)
        try:
            yield go
        finally:
            go.set()


async def begun(client: TwoEngines) -> asyncio.Task[Any]:
    """A request whose prompt the prefill engine was asked for."""
    task = asyncio.ensure_future(anext(client.generate(prompts()[-1], GREEDY)))  # type: ignore[arg-type]
    while client.prefill.service.num_jobs == 0:
        assert not task.done()
        await asyncio.sleep(0.001)
    return task


def test_a_client_that_leaves_frees_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:  # G01, G02
    with two_engines(model()) as roles:

        async def leave() -> None:
            task = await begun(roles.client)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        with held(roles.prefill, monkeypatch):
            asyncio.run(leave())
            Pair.eventually(lambda: roles.counts.num_dropped == 1)
        roles.check_idle()
        check_equal(roles, "logprobs")


def test_closing_ends_open_streams_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    client = joined(deployment(model()), model(), torch.device("cpu"), lanes())
    client.wait(WAIT_S)

    async def close(go: threading.Event) -> None:
        task = await begun(client)
        closing = asyncio.ensure_future(asyncio.to_thread(client.close))
        with pytest.raises(EngineDeadError, match="closed"):
            await task
        go.set()
        await closing

    with held(client.prefill.service.engine, monkeypatch) as go:
        asyncio.run(close(go))
    assert not client.is_alive
    assert not client.prefill.service.is_alive


def broken(*_: object) -> None:
    raise RuntimeError("injected")


def give_up(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the prefill engine fail until its thread ends."""
    service = roles.client.prefill.service
    with monkeypatch.context() as patched:
        patched.setattr(service.engine, "step", broken)
        for seed in range(3):
            roles.generate([prompt(30, seed=100 + seed)], GREEDY)
            if not service.is_alive:
                break
        Pair.eventually(lambda: not service.is_alive)


def test_a_prefill_engine_that_gives_up_is_made_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # G05, G06
    monkeypatch.setattr("triblade.disagg.peer.REDIAL_S", 0.01)
    with two_engines(model(), replace(ONE_EACH, worker_restarts=1)) as roles:
        first = roles.prefill
        give_up(roles, monkeypatch)
        Pair.eventually(lambda: roles.counts.num_prefill_workers == 1)
        assert roles.prefill is not first
        assert storages(roles.prefill) == storages(roles.decode)
        before = roles.counts.num_complete
        check_equal(roles, "logprobs")
        assert roles.counts.num_complete > before
        give_up(roles, monkeypatch)
        Pair.eventually(lambda: roles.counts.num_prefill_workers == 0)
        check_equal(roles, "logprobs")  # everything is computed where it is answered
        assert roles.client.is_alive
    assert caplog.text.count("the prefill engine gave up; it is started again") == 1


def test_each_engine_keeps_to_its_cores() -> None:
    before, wanted = os.sched_getaffinity(0), lanes()
    with two_engines(model()) as roles:
        roles.generate(prompts()[-1:], GREEDY)
        found = {thread.name: os.sched_getaffinity(thread.native_id or 0) for thread in threading.enumerate()}
        assert found["triblade-prefill"] == set(wanted["prefill"].cores)
        assert found["triblade-engine"] == set(wanted["decode"].cores)
    assert os.sched_getaffinity(0) == before


class FakeStream:
    """A stream of a device that is not there."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


def test_the_decode_engine_is_built_and_runs_in_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = FakeStream()
    entered: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: entered.append(threading.current_thread().name))
    cores = tuple(os.sched_getaffinity(0))
    both = {"prefill": Lane(cores), "decode": Lane(cores, stream)}
    client = joined(deployment(model()), model(), torch.device("cpu"), both)  # type: ignore[arg-type]
    client.wait(WAIT_S)
    assert stream.num_waits == 1  # before the other engine reads the weights
    Pair.eventually(lambda: len(entered) == 2)
    assert "triblade-engine" in entered
    assert "triblade-prefill" not in entered
    client.close()


def test_tcp_is_no_way_within_a_process() -> None:
    with pytest.raises(ConfigError, match="connector tcp is between processes"):
        start_threads(deployment(model(), transfer={"connector": "tcp"}))


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_workers": 2},
        {"decode_workers": 2},
        {"prefill_workers": 0},
        {"decode_address": ("127.0.0.1:1",)},
        {"prefill_address": ("127.0.0.1:1",)},
    ],
)
def test_one_engine_of_each_role(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pd_isolation thread is one prefill and one decode worker"):
        replace(ONE_EACH, **change)

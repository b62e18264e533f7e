"""The engine's thread: streams, aborts, faults and shutdown, as a server sees them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from typing import Any

import pytest
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.config import EngineConfig
from triblade.engine.local import LocalClient
from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.errors import EngineDeadError, RequestError
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)


@cache
def model() -> OpenModel:
    return open_tiny("llama")


@pytest.fixture
def client() -> Iterator[LocalClient]:
    made = LocalClient(tiny_llm(model()).engine)
    yield made
    made.close()
    made._engine.check_idle()


async def collect(
    client: LocalClient, ids: list[int], params: SamplingParams = GREEDY, **options: Any
) -> list[RequestOutput]:
    return [output async for output in client.generate(ids, params, **options)]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def idle(client: LocalClient) -> None:
    """Wait until nothing runs."""
    for _ in range(500):
        load = client.load()
        if load.num_running == load.num_waiting == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests are still there")


def run(client: LocalClient, scenario: Callable[[LocalClient], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(client), 60))  # type: ignore[arg-type]


def test_streams_run_together_and_end_once(client: LocalClient) -> None:
    async def scenario(client: LocalClient) -> None:
        prompts = [prompt(n, seed=n) for n in (3, 9, 20, 5)]
        results = await asyncio.gather(*(collect(client, ids) for ids in prompts))
        expected = tiny_llm(model()).generate(prompts, GREEDY)
        assert [tokens(outputs) for outputs in results] == [choices[0].token_ids for choices in expected]
        assert [[o.finished for o in outputs].count(True) for outputs in results] == [1] * 4

    run(client, scenario)


def test_leaving_early_aborts(client: LocalClient) -> None:  # D08
    async def scenario(client: LocalClient) -> None:
        stream = client.generate(prompt(5), LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await idle(client)
        assert client.load().num_free_kv_blocks == client.num_kv_blocks

    run(client, scenario)


def test_a_cancelled_task_aborts_also_while_it_waits(client: LocalClient) -> None:  # D09
    async def scenario(client: LocalClient) -> None:
        tasks = [asyncio.create_task(collect(client, prompt(20, seed=i), LONG)) for i in range(80)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(client)
        assert client.load().num_generated_tokens < 80 * 50
        assert client.load().num_free_kv_blocks == client.num_kv_blocks

    run(client, scenario)


def test_abort_by_label(client: LocalClient) -> None:
    async def scenario(client: LocalClient) -> None:
        task = asyncio.create_task(collect(client, prompt(5), LONG, request_id="a"))
        other = asyncio.create_task(collect(client, prompt(6), LONG, request_id="b"))
        while client.load().num_generated_tokens < 4:
            await asyncio.sleep(0.001)
        await client.abort("a")
        await client.abort("nobody")
        outputs = await task
        assert outputs[-1].finish_reason is FinishReason.ABORT
        assert len(tokens(await other)) == 50

    run(client, scenario)


def test_two_requests_with_one_label_both_finish(client: LocalClient) -> None:  # D11
    async def scenario(client: LocalClient) -> None:
        first, second = await asyncio.gather(
            collect(client, prompt(5), request_id="same"), collect(client, prompt(9), request_id="same")
        )
        assert len(tokens(first)) == len(tokens(second)) == 6
        assert tokens(first) != tokens(second)
        assert client._by_label == {}

    run(client, scenario)


def test_a_bad_request_fails_at_once(client: LocalClient) -> None:
    async def scenario(client: LocalClient) -> None:
        with pytest.raises(RequestError):
            await collect(client, [])
        assert len(tokens(await collect(client, [5]))) == 6

    run(client, scenario)


def fail_steps(client: LocalClient, count: int) -> None:
    """Make the next `count` steps raise."""
    runner, left = client._engine.runner, [count]
    original = runner.execute

    def execute(scheduled: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("injected fault")
        return original(scheduled)

    runner.execute = execute  # type: ignore[method-assign]


def test_a_fault_ends_its_requests_and_the_next_one_works(client: LocalClient) -> None:  # D06
    async def scenario(client: LocalClient) -> None:
        fail_steps(client, 1)
        outputs = await collect(client, prompt(5))
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert outputs[-1].error == "internal error: RuntimeError"
        assert len(tokens(await collect(client, prompt(5)))) == 6
        assert client.is_alive

    run(client, scenario)


def test_an_engine_that_always_fails_dies_and_says_so(client: LocalClient) -> None:
    async def scenario(client: LocalClient) -> None:
        fail_steps(client, 10)
        for _ in range(3):
            assert (await collect(client, prompt(5)))[-1].finish_reason is FinishReason.ERROR
        for _ in range(100):
            if not client.is_alive:
                break
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="failed too often"):
            await collect(client, prompt(5))

    run(client, scenario)


def test_close_ends_open_streams() -> None:
    client = LocalClient(tiny_llm(model()).engine)

    async def scenario(client: LocalClient) -> None:
        task = asyncio.create_task(collect(client, prompt(5), LONG))
        while client.load().num_generated_tokens == 0:
            await asyncio.sleep(0.001)
        client.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await task
        with pytest.raises(EngineDeadError):
            await collect(client, prompt(5))

    run(client, scenario)
    client._engine.check_idle()


def test_the_collector_leaves_alone_what_loading_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the engine may go."""
    monkeypatch.setattr("triblade.engine.local.build_engine", lambda _: tiny_llm(model()).engine)
    made = LocalClient.start(EngineConfig(model="tiny"))
    assert gc.get_freeze_count() > 10_000
    made.close()
    assert gc.get_freeze_count() == 0


def test_the_thread_sleeps_when_idle_and_serves_several_loops(client: LocalClient) -> None:
    for _ in range(3):
        outputs = asyncio.run(collect(client, prompt(5)))
        assert len(tokens(outputs)) == 6
    steps = client.load().num_steps
    assert client.load().num_steps == steps

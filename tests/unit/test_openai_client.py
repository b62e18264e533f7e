"""A server as an engine client: ours over sockets with a fake engine, and one that answers as vLLM does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_client import EOS, FakeClient, Script
from fake_replica import replica
from live_server import eventually, live_server
from routed import router

from triblade.deploy.openai_client import OpenAIClient, load_of, request_fields
from triblade.deploy.openai_errors import failure, refusal
from triblade.engine.client import EngineClient
from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    ModelNotFoundError,
    QueueFullError,
    RequestError,
    TribladeError,
    UnsupportedError,
    WorkerLostError,
)
from triblade.sampling_params import SamplingParams, StructuredOutputs

HELLO = [*b"hello"]


def outputs(url: str, params: SamplingParams, prompt: list[int] = HELLO) -> list[RequestOutput]:
    """All news of one request."""

    async def collect() -> list[RequestOutput]:
        async with await OpenAIClient.connect(url) as client:
            engine: EngineClient = client
            return [output async for output in engine.generate(prompt, params, request_id="label")]

    return asyncio.run(collect())


def answered(*events: Any, params: SamplingParams | None = None, **response: Any) -> list[RequestOutput]:
    """The outputs made of a server's events, or of another answer."""
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    made = httpx.Response(**{"status_code": 200, "text": text, **response})

    async def collect() -> list[RequestOutput]:
        http = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: made))
        async with OpenAIClient("http://x", "m", http) as client:
            return [output async for output in client.generate(HELLO, params or SamplingParams())]

    return asyncio.run(collect())


def test_our_server_gives_what_its_engine_gave() -> None:
    engine = FakeClient(num_cached=3)
    with live_server(engine) as live:
        found = outputs(live.url, SamplingParams(max_tokens=20, logprobs=1, seed=7, stop=("zzz",)))
    assert "".join(output.text for output in found) == "Hello, world!"
    assert [token for output in found for token in output.token_ids] == [*b"Hello, world!", EOS]
    last = found[-1]
    assert (last.finish_reason, last.num_prompt_tokens, last.num_cached_tokens, last.num_output_tokens) == (
        "stop",
        5,
        3,
        14,
    )
    assert found[0].logprobs is not None
    assert (found[0].logprobs[0].token_id, found[0].logprobs[0].logprob) == (ord("H"), -1.5)
    record = engine.records[0]
    assert (record.prompt_token_ids, record.params.seed, record.params.stop) == (HELLO, 7, ("zzz",))


def test_a_server_like_vllm_with_choices_and_limits() -> None:
    with replica() as server:
        found = outputs(server.url, SamplingParams(max_tokens=4, logprobs=0))
        assert [output.token_ids for output in found] == [[1], [2], [3], [4]]
        assert [output.finish_reason for output in found] == [None, None, None, FinishReason.LENGTH]
        assert found[-1].num_output_tokens == 4
        assert found[0].logprobs is not None
        sent = server.requests[0]
        assert (sent["stream_options"], sent["return_token_ids"], sent["max_tokens"]) == (
            {"include_usage": True},
            True,
            4,
        )
        assert sent["headers"][b"x-request-id"] == b"label"


def test_it_works_through_the_router() -> None:
    with replica() as a, replica() as b, router(a.url, b.url) as routed:
        assert "".join(output.text for output in outputs(routed.url, SamplingParams(max_tokens=3))) == "word " * 3


def test_choices_end_each_for_itself() -> None:
    found = answered(
        {"choices": [{"index": 1, "text": "b", "token_ids": [2]}]},
        {"choices": [{"index": 0, "text": "a", "finish_reason": "stop", "stop_reason": 13}]},
        {"choices": [{"index": 1, "text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": None}},
        params=SamplingParams(n=2),
    )
    assert [(o.index, o.text, o.finish_reason, o.stop_reason, o.num_prompt_tokens) for o in found] == [
        (1, "b", None, None, 5),
        (0, "a", "stop", 13, 9),
        (1, "", "length", None, 9),
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("tool_calls", "stop"),
        ("abort", "abort"),
        ("error", "error"),
        ("new", "stop"),
    ],
)
def test_finish_reasons(given: str, expected: str) -> None:
    (last,) = answered({"choices": [{"text": "a", "finish_reason": given}]})
    assert last.finish_reason == expected
    assert (last.error is not None) == (expected == "error")


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "bad", "type": "BadRequestError", "param": "top_p", "code": 400}}, RequestError),
        (
            400,
            {"object": "error", "message": "This model's maximum context length is 8 tokens.", "code": 400},
            ContextLengthError,
        ),
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, ContextLengthError),
        (401, {"error": "Unauthorized"}, ConfigError),
        (404, {"error": {"message": "The model `x` does not exist."}}, ModelNotFoundError),
        (422, {"detail": [{"msg": "field required"}]}, RequestError),
        (429, {}, QueueFullError),
        (503, {"error": {"message": "queue", "code": "queue_full"}}, QueueFullError),
        (503, {"error": {"message": "loading", "code": "loading"}}, EngineDeadError),
        (500, "<html>", EngineDeadError),
    ],
)
def test_refusals_are_the_errors_of_an_engine(status: int, body: Any, kind: type[TribladeError]) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    with pytest.raises(kind) as caught:
        answered(status_code=status, text=content)
    assert caught.type is kind
    assert caught.value.message
    assert refusal(400, b'{"error": {"message": "m", "param": "top_p"}}').param == "top_p"


def raises(server: Callable[[], Any], kind: type[TribladeError]) -> None:
    with pytest.raises(kind):
        server()


def test_failures_within_an_answer() -> None:
    text = {"choices": [{"text": "a"}]}
    raises(lambda: answered(text), WorkerLostError)  # it ends without a reason
    raises(lambda: answered(text, {"error": {"message": "it broke", "code": 500}}), EngineDeadError)
    raises(lambda: answered(text="data: {half\n\n"), EngineDeadError)
    raises(lambda: answered([1]), EngineDeadError)
    assert isinstance(failure({"message": "no", "code": 400}), RequestError)
    with replica(dies_after=1) as server:
        raises(lambda: outputs(server.url, SamplingParams(max_tokens=3)), WorkerLostError)
    raises(lambda: outputs("http://127.0.0.1:9", SamplingParams()), ConfigError)


def test_a_fault_of_our_engine_comes_as_an_error() -> None:
    script = Script(b"abc", fail_after=1, error=EngineDeadError("it is dead"))
    with live_server(FakeClient(scripts={"hello": script})) as live:
        raises(lambda: outputs(live.url, SamplingParams(max_tokens=3)), EngineDeadError)


@pytest.mark.parametrize("way", ["leave", "abort"])
def test_leaving_and_aborting_end_the_request_at_the_server(way: str) -> None:
    async def run(url: str) -> list[RequestOutput]:
        found = []
        async with await OpenAIClient.connect(url) as client:
            stream = client.generate(HELLO, SamplingParams(max_tokens=4000), request_id="mine")
            async for output in stream:
                found.append(output)
                if way == "leave":
                    await stream.aclose()  # type: ignore[attr-defined]
                    break
                if len(found) == 1:
                    await client.abort("another")
                    await client.abort("mine")
            await asyncio.sleep(0)
        return found

    with replica(step_ms=20) as server:
        found = asyncio.run(run(server.url))
        eventually(lambda: server.requests[0]["left"])
    assert (found[-1].finish_reason == "abort") == (way == "abort")
    assert len(found) < 20


def test_fields_of_a_request() -> None:
    assert request_fields(SamplingParams(temperature=0.0, max_tokens=3)) == {
        "temperature": 0.0,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    found = request_fields(
        SamplingParams(logit_bias={5: 1.0}, structured_outputs=StructuredOutputs("json_schema", '{"a": 1}'))
    )
    assert (found["logit_bias"], found["structured_outputs"], found["max_tokens"]) == (
        {"5": 1.0},
        {"json": {"a": 1}},
        None,
    )
    form = StructuredOutputs("structural_tag", "{}")
    for params in (
        SamplingParams(prompt_logprobs=1),
        SamplingParams(max_tokens=0),
        SamplingParams(structured_outputs=form),
    ):
        raises(lambda params=params: request_fields(params), UnsupportedError)  # type: ignore[misc]


def test_the_load_of_ours_and_of_vllm() -> None:
    async def load(url: str) -> Any:
        async with await OpenAIClient.connect(url) as client:
            assert client.load().num_running == 0
            return await client.refresh()

    with live_server(FakeClient(num_waiting=2)) as live:
        found = asyncio.run(load(live.url))
        assert (found.num_waiting, found.num_kv_blocks, found.num_free_kv_blocks) == (2, 100, 100)
    with replica() as server:
        outputs(server.url, SamplingParams(max_tokens=2))
        assert asyncio.run(load(server.url)).num_cached_prompt_tokens == 0
    samples = {"kv_cache_usage_perc": 0.25, "num_requests_running": 3.0, "prompt_tokens_total": 9.0}
    assert (load_of(samples).num_free_kv_blocks, load_of(samples).num_running) == (75, 3)

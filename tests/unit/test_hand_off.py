"""The front of vLLM engines: what is handed off, what each side gets, what happens when one fails or the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from triblade.deploy.hand_off import HandOff, estimated_tokens, prefill_request

P, D, OTHER = "http://p", "http://d", "http://e"
HANDED = {"remote_block_ids": [[1, 2]], "do_remote_prefill": True}
Respond = Callable[[httpx.Request], httpx.Response]


def streamed(content: Any) -> httpx.Response:
    """An answer as it comes from a socket."""

    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps(content).encode()

    return httpx.Response(200, content=pieces())


class Engines:
    """Both sides, in memory; `requests` has (host, path, body) in order."""

    def __init__(self, prefill: Respond | None = None, decode: Respond | None = None) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self._answers = {
            "p": prefill or (lambda _: httpx.Response(200, json={"kv_transfer_params": HANDED})),
            "d": decode or (lambda _: streamed({"text": "decoded"})),
        }

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.requests.append((request.url.host, request.url.path, body))
        return self._answers.get(request.url.host, self._answers["d"])(request)


async def ask(engines: Engines, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    """One request through the front."""
    decode = options.pop("decode", [D])
    async with httpx.AsyncClient(transport=httpx.MockTransport(engines)) as http:
        front = HandOff(options.pop("prefill", [P]), decode, http, **options)
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))


REQUEST = {"prompt": "hello", "max_tokens": 9, "stream": False, "min_tokens": 3}


def test_a_prompt_is_computed_by_one_engine_and_answered_by_another() -> None:
    engines = Engines()
    answer = asyncio.run(ask(engines, REQUEST))
    assert answer.json() == {"text": "decoded"}
    (first, _, asked), (second, _, decoded) = engines.requests
    assert (first, second) == ("p", "d")
    assert asked["max_tokens"] == 1
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert "min_tokens" not in asked
    assert decoded == {**REQUEST, "kv_transfer_params": HANDED}


def test_what_a_prefill_engine_is_asked() -> None:
    chat = {"messages": [], "max_completion_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
    asked = prefill_request(chat)
    assert asked["max_completion_tokens"] == asked["max_tokens"] == 1
    assert asked["stream"] is False
    assert "stream_options" not in asked


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["one", "two"]},
        {"prompt": [[1], [2]]},
        {"prompt": "hello", "n": 2},
        {"prompt": "hello", "kv_transfer_params": {"do_remote_prefill": True}},
    ],
)
def test_what_is_not_handed_off(body: dict[str, Any]) -> None:
    engines = Engines()
    asyncio.run(ask(engines, body))
    assert engines.requests == [("d", "/v1/completions", body)]


def test_short_prompts_stay_with_the_decode_engine() -> None:
    engines = Engines()
    asyncio.run(ask(engines, {"prompt": "x" * 400}, direct_tokens=101))
    asyncio.run(ask(engines, {"prompt": list(range(101))}, direct_tokens=101))
    assert [host for host, _, _ in engines.requests] == ["d", "p", "d"]
    assert estimated_tokens({"messages": [{"role": "user", "content": "x" * 400}]}) >= 100


def test_other_paths_and_bodies_pass_through() -> None:
    engines = Engines()
    asyncio.run(ask(engines, None, "/v1/models"))
    asyncio.run(ask(engines, [1], "/v1/completions"))
    assert [host for host, _, _ in engines.requests] == ["d", "d"]


def broken(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize("prefill", [broken, lambda _: httpx.Response(500)])
def test_a_failing_prefill_engine(prefill: Respond) -> None:
    engines = Engines(prefill=prefill)
    answer = asyncio.run(ask(engines, REQUEST))
    assert answer.json() == {"text": "decoded"}
    assert engines.requests[-1] == ("d", "/v1/completions", REQUEST)
    answer = asyncio.run(ask(engines, REQUEST, policy="fail"))
    assert answer.status_code == 502
    assert "prefill engine failed" in answer.json()["error"]["message"]


def test_a_request_that_the_prefill_engine_refuses_is_refused() -> None:
    engines = Engines(prefill=lambda _: httpx.Response(400, json={"error": {"message": "too long"}}))
    answer = asyncio.run(ask(engines, REQUEST))
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})
    assert len(engines.requests) == 1


def test_a_decode_engine_that_is_gone() -> None:
    answer = asyncio.run(ask(Engines(decode=broken), REQUEST))
    assert answer.status_code == 503
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_health_is_that_of_all_engines() -> None:
    assert asyncio.run(ask(Engines(), None, "/health")).status_code == 200
    assert asyncio.run(ask(Engines(prefill=broken), None, "/health")).status_code == 503


def test_engines_take_turns_by_load() -> None:
    """While one has a request the other gets the next."""
    seen: list[str] = []

    async def both() -> None:
        waiting = asyncio.Event()

        async def slow(request: httpx.Request) -> httpx.Response:
            seen.append(request.url.host)
            if len(seen) == 2:
                waiting.set()
            await waiting.wait()
            return streamed({})

        async with httpx.AsyncClient(transport=httpx.MockTransport(slow)) as http:
            front = httpx.ASGITransport(HandOff([], [D, OTHER], http))
            async with httpx.AsyncClient(transport=front, base_url="http://front") as client:
                await asyncio.gather(*(client.post("/v1/completions", json=REQUEST) for _ in range(2)))

    asyncio.run(both())
    assert sorted(seen) == ["d", "e"]


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_client_that_leaves_takes_its_request_along(side: str) -> None:  # D08
    cancelled: list[str] = []

    async def leave() -> None:
        arrived = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            if request.url.host != side:
                return httpx.Response(200, json={"kv_transfer_params": HANDED})
            arrived.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(side)
                raise
            raise AssertionError

        messages = [{"type": "http.request", "body": json.dumps(REQUEST).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await arrived.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            raise AssertionError("nobody is there")

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            await asyncio.wait_for(HandOff([P], [D], http)(scope, receive, send), 5)

    asyncio.run(leave())
    assert cancelled == [side]

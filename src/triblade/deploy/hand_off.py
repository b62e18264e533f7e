"""The front of vLLM engines on one host: one address for clients, and prompts handed from prefill to decode engines.

Of a request: 1. a prefill engine gets it, to answer one token, marked as one that another engine decodes; 2. its answer says where
the keys and values lie; 3. a decode engine gets the request as it was, with that, and its answer goes to the client as it comes.
Both get it under one id. Where step 1 fails the decode engine computes the prompt itself, unless the policy is to fail.
A client that leaves takes the request away from whichever engine has it. Knows no tokenizer: lengths of text are estimated.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias
from uuid import uuid4

import httpx
import orjson

from triblade.config.deploy import LoadFailurePolicy

log = logging.getLogger(__name__)

Message: TypeAlias = Any  # of ASGI
GENERATING = ("/v1/completions", "/v1/chat/completions")
CHARACTERS_PER_TOKEN = 4
REQUEST_ID = b"x-request-id"
REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
OF_A_CONNECTION = frozenset({b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding"})


class HandOff:
    """An ASGI application in front of engines.

    Args:
        prefill: addresses of the engines that compute prompts; may be none.
        decode: of those that answer.
        http: the connections to them; closed by who made them.
        direct_tokens: prompts estimated shorter are not handed off.
        policy: when the prefill engine fails.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        http: httpx.AsyncClient,
        *,
        direct_tokens: int = 0,
        policy: LoadFailurePolicy = "recompute",
    ) -> None:
        self._prefill, self._decode, self._http = list(prefill), list(decode), http
        self._direct_tokens, self._policy = direct_tokens, policy
        self._in_flight: Counter[str] = Counter()

    async def __call__(self, scope: Message, receive: Message, send: Message) -> None:
        """One request, until it is answered or its client has left."""
        if scope["type"] != "http":
            raise RuntimeError(f"not served here: {scope['type']}")
        body = await _whole_body(receive)
        work = asyncio.create_task(self._answer(scope, body, send))
        gone = asyncio.create_task(_until_gone(receive))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, work):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Message, body: bytes, send: Message) -> None:
        path = scope["path"]
        if path == "/health":
            await self._health(send)
            return
        request = _parsed(body) if scope["method"] == "POST" and path in GENERATING else None
        if request is not None and self._is_handed_off(request):
            scope = {**scope, "headers": named(scope["headers"])}
            answer = await self._prefilled(scope, request)
            if isinstance(answer, httpx.Response):
                await _send_whole(send, answer.status_code, answer.content)
                return
            if answer is not None:
                body = orjson.dumps({**request, "kv_transfer_params": answer})
        await self._pass_on(scope, body, send)

    def _is_handed_off(self, request: Mapping[str, Any]) -> bool:
        """One prompt, one answer, long enough, and nobody handed it off before."""
        prompt = request.get("prompt")
        is_one = not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)
        is_new = request.get("kv_transfer_params") is None
        is_long = estimated_tokens(request) >= self._direct_tokens
        return bool(self._prefill) and is_one and is_new and is_long and request.get("n") in (None, 1)

    async def _prefilled(self, scope: Message, request: Mapping[str, Any]) -> Mapping[str, Any] | httpx.Response | None:
        """Where the keys and values are; None: the decode engine is to compute them; an answer: it is for the client."""
        try:
            async with self._least_busy(self._prefill) as url:
                answer = await self._http.post(
                    url + scope["path"], content=orjson.dumps(prefill_request(request)), headers=_headers(scope)
                )
        except httpx.HTTPError as error:
            return self._failed(f"{type(error).__name__}: {error}")
        if answer.is_client_error:
            return answer
        if not answer.is_success:
            return self._failed(f"status {answer.status_code}")
        found: Mapping[str, Any] | None = answer.json().get("kv_transfer_params")
        return found

    def _failed(self, why: str) -> httpx.Response | None:
        log.warning("a prefill engine failed: %s", why)
        if self._policy == "recompute":
            return None
        return httpx.Response(httpx.codes.BAD_GATEWAY, content=_error(f"the prefill engine failed: {why}"))

    async def _pass_on(self, scope: Message, body: bytes, send: Message) -> None:
        """The request to a decode engine, and its answer to the client piece by piece."""
        query = scope["query_string"].decode("latin-1")
        started = False
        try:
            async with self._least_busy(self._decode) as url:
                target = url + scope["path"] + (f"?{query}" if query else "")
                async with self._http.stream(scope["method"], target, content=body, headers=_headers(scope)) as answer:
                    kept = [(name.lower(), value) for name, value in answer.headers.raw]
                    headers = [(name, value) for name, value in kept if name not in OF_A_CONNECTION]
                    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                    started = True
                    async for piece in answer.aiter_raw():
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
        except httpx.HTTPError as error:
            log.warning("a decode engine failed: %s: %s", type(error).__name__, error)
            if started:
                raise  # the server cuts the connection, so that no client takes the piece for the whole
            await _send_whole(send, httpx.codes.SERVICE_UNAVAILABLE, _error("the engine does not answer"))

    async def _health(self, send: Message) -> None:
        """Well while every engine is."""
        for url in (*self._prefill, *self._decode):
            try:
                status = (await self._http.get(f"{url}/health")).status_code
            except httpx.HTTPError:
                status = httpx.codes.SERVICE_UNAVAILABLE
            if status != httpx.codes.OK:
                await _send_whole(send, httpx.codes.SERVICE_UNAVAILABLE, _error(f"not well: {url}"))
                return
        await _send_whole(send, httpx.codes.OK, b"")

    @asynccontextmanager
    async def _least_busy(self, urls: Sequence[str]) -> AsyncIterator[str]:
        url = min(urls, key=lambda one: self._in_flight[one])
        self._in_flight[url] += 1
        try:
            yield url
        finally:
            self._in_flight[url] -= 1


def named(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers with one id for both engines, by which some connectors find a prompt's keys and values; clients may repeat theirs."""
    given = next((value + b"-" for name, value in headers if name == REQUEST_ID), b"")
    kept = [(name, value) for name, value in headers if name != REQUEST_ID]
    return [*kept, (REQUEST_ID, given + uuid4().hex.encode())]


def prefill_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request as a prefill engine gets it: one token, whole, for another engine to decode."""
    left_out = ("stream", "stream_options", "max_completion_tokens", "min_tokens")
    kept = {name: value for name, value in request.items() if name not in left_out}
    limits = {"max_tokens": 1} | ({"max_completion_tokens": 1} if "max_completion_tokens" in request else {})
    return {**kept, **limits, "stream": False, "kv_transfer_params": dict(REMOTE_DECODE)}


def estimated_tokens(request: Mapping[str, Any]) -> int:
    """Length of a prompt: exact for token ids, a quarter of the characters for text."""
    prompt = request.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    return len(prompt if isinstance(prompt, str) else str(request.get("messages", ""))) // CHARACTERS_PER_TOKEN


def _parsed(body: bytes) -> dict[str, Any] | None:
    """A JSON object; anything else is for the engine to refuse."""
    with suppress(orjson.JSONDecodeError):
        found = orjson.loads(body)
        return found if isinstance(found, dict) else None
    return None


def _headers(scope: Message) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in scope["headers"] if name not in OF_A_CONNECTION]


async def _whole_body(receive: Message) -> bytes:
    pieces = []
    while (message := await receive())["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    return b"".join(pieces)


async def _until_gone(receive: Message) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(send: Message, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _error(message: str) -> bytes:
    """In the shape of the OpenAI API."""
    error = {"message": message, "type": "service_unavailable_error", "param": None, "code": None}
    return orjson.dumps({"error": error})

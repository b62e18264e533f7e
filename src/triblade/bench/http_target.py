"""Any server that speaks the OpenAI API as a target: triblade, vLLM, llama.cpp and others.

Answers are streamed; the usage is asked for with `stream_options` and, where a server does not send it, pieces are counted as
tokens. Counters come from /metrics, whatever prefix the server gives its names; a server without them just has none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import Any

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from triblade.bench.metrics import Usage
from triblade.bench.target import COUNTERS, GAUGES, Ask, Piece, TargetError
from triblade.config import BenchConfig
from triblade.errors import ConfigError

DATA = b"data:"
DONE = b"[DONE]"
CONNECT_TIMEOUT_S = 10.0
POLL_S = 0.25
PATHS = {True: "chat/completions", False: "completions"}


class HTTPTarget:
    """A server.

    Args:
        url: its address, with or without /v1.
        model: name of the model there.
        chat: chat completions, or plain ones.
        http: the connections; closed with the target.
    """

    def __init__(self, url: str, model: str, *, chat: bool, http: httpx.AsyncClient) -> None:
        self.name = f"{model} at {url}"
        self._api = api_url(url)
        self._model = model
        self._chat = chat
        self._http = http

    @classmethod
    async def connect(cls, url: str, config: BenchConfig, api_key: str | None) -> HTTPTarget:
        """Find the server and the name of its model, waiting while it loads it.

        Raises:
            ConfigError: nobody answers there, or not as an OpenAI server does.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(config.request_timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        http = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False)
        try:
            name = config.served_model or await _first_model(http, url, config.ready_timeout_s)
        except BaseException:
            await http.aclose()
            raise
        return cls(url, name, chat=config.endpoint == "chat", http=http)

    async def answer(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """See `Target`."""
        try:
            async with self._http.stream("POST", f"{self._api}/{PATHS[self._chat]}", json=self._body(ask)) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise TargetError(f"status {response.status_code}: {_message(response)}")
                # Not `aiter_lines`: on a small machine the time per event is the server's, too (a quarter less this way).
                rest = b""
                async for received in response.aiter_bytes():
                    *lines, rest = (rest + received).split(b"\n")
                    for piece in _pieces(lines):
                        yield piece
                for piece in _pieces([rest]):
                    yield piece
        except httpx.TimeoutException as error:
            raise TargetError(f"timed out ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise TargetError(f"the connection failed ({type(error).__name__})") from error

    async def readings(self) -> Mapping[str, float]:
        """See `Target`."""
        try:
            response = await self._http.get(f"{self._api.removesuffix('/v1')}/metrics")
            return parse_readings(response.text) if response.status_code == httpx.codes.OK else {}
        except httpx.HTTPError:
            return {}

    async def close(self) -> None:
        """End the connections."""
        await self._http.aclose()

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.ignore_eos:
            body["ignore_eos"] = True
        if self._chat:
            return body | {"messages": list(ask.messages)}
        return body | {"prompt": ask.text}


def api_url(url: str) -> str:
    """The address that paths of the API follow."""
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def parse_readings(text: str) -> dict[str, float]:
    """Known counters and gauges of a Prometheus page."""
    return {name: value for name, value in parse_samples(text).items() if name in COUNTERS or name in GAUGES}


def parse_samples(text: str) -> dict[str, float]:
    """All samples of a Prometheus page, summed over their labels, under their names without prefix; of another page none."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.rpartition(":")[2]
                found[name] = found.get(name, 0.0) + sample.value
    except ValueError:  # not a page of metrics
        return {}
    return found


async def _first_model(http: httpx.AsyncClient, url: str, ready_timeout_s: float) -> str:
    """The model that a server lists first, as soon as it has loaded it."""
    late = time.monotonic() + ready_timeout_s
    try:
        response = await http.get(f"{api_url(url)}/models")
        while response.status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < late:
            await asyncio.sleep(POLL_S)
            response = await http.get(f"{api_url(url)}/models")
    except httpx.HTTPError as error:
        raise ConfigError(
            f"nobody answers at {url}: {error}", hint="does the server run there?", param="model"
        ) from error
    if response.status_code != httpx.codes.OK:
        raise ConfigError(
            f"{url} lists no models: status {response.status_code}: {_message(response)}",
            hint="is it an OpenAI server? a key is taken from TRIBLADE_API_KEY or OPENAI_API_KEY",
            param="model",
        )
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{url} lists no model", hint="name one with --served-model", param="model") from error


def _pieces(lines: Iterable[bytes]) -> Iterator[Piece]:
    """The events among these lines."""
    for line in lines:
        data = line[len(DATA) :].strip()
        if line.startswith(DATA) and data != DONE:
            yield _piece(data)


def _piece(data: bytes) -> Piece:
    """A server-sent event of a completion or a chat completion."""
    try:
        event = orjson.loads(data)
        if "error" in event:
            raise TargetError(f"an error within the answer: {_error_text(event)}")
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        return Piece(text, bool(text), _usage(event.get("usage")), choice.get("finish_reason"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError("an event that is no completion") from error


def _usage(usage: Mapping[str, Any] | None) -> Usage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], details.get("cached_tokens") or 0, usage.get("completion_tokens") or 0)


def _message(response: httpx.Response) -> str:
    try:
        return _error_text(response.json())[:200]
    except ValueError:
        return response.text[:200]


def _error_text(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)

"""Any OpenAI server as an `EngineClient`: completions over token ids, streamed, with the server's own counts.

Ids of tokens come from the server (`return_token_ids`: ours, vLLM from 0.10.2); where it sends none, outputs have text and counts
and no ids. Knows no tokenizer and no chat. Invariant: every choice ends with a finish reason, or the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import httpx
import orjson

from triblade.bench.http_target import api_url, parse_samples
from triblade.deploy.openai_errors import failure, refusal
from triblade.engine.client import EngineLoad
from triblade.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from triblade.errors import (
    ConfigError,
    EngineDeadError,
    UnsupportedError,
    WorkerLostError,
)
from triblade.sampling_params import SamplingParams, StructuredOutputs
from triblade.spec.record import SpeculationCounts

CONNECT_TIMEOUT_S = 5.0
OF_ENGINES = ("return_token_ids", "priority")  # fields that answers do not depend on
REASONS: Mapping[str, FinishReason] = {  # vLLM's and others' words; calls of tools end as stops do
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
    "tool_calls": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
}
SAME_NAMES = (
    "n",
    "min_tokens",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "logprobs",
    "skip_special_tokens",
)


class OpenAIClient:
    """Implements `EngineClient` over HTTP.

    Args:
        url: of the server, with or without /v1.
        model: its name there; see `connect`.
        http: connections; closed with the client.
    """

    def __init__(self, url: str, model: str, http: httpx.AsyncClient) -> None:
        self._api = api_url(url)
        self._model = model
        self._http = http
        self._running: dict[str, set[asyncio.Event]] = {}  # label -> how its requests are told to end
        self._load = EngineLoad()
        self._unknown: set[str] = set()  # fields that this server refused

    @classmethod
    async def connect(
        cls, url: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0
    ) -> Self:
        """Find the server, and its first model where none is named.

        Raises:
            ConfigError: nobody answers there, or not as an OpenAI server does.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        http = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False)
        client = cls(url, model or "", http)
        try:
            client._model = model or await client._first_model()
        except BaseException:
            await http.aclose()
            raise
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections; requests that run end at the server."""
        await self._http.aclose()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """See `EngineClient.generate`. Logprobs come for the chosen token alone where the server names tokens by text.

        Raises:
            RequestError: the server refuses the request.
            QueueFullError: it has too many.
            EngineDeadError: it failed, before or within the answer.
            WorkerLostError: it cannot be reached, or broke off.
            UnsupportedError: the API has no field for a parameter.
        """
        label = request_id or ""
        body = {"model": self._model, "prompt": list(prompt_token_ids), **request_fields(params), "priority": priority}
        told = asyncio.Event()
        self._running.setdefault(label, set()).add(told)
        answer = Answer(label, len(prompt_token_ids), params)
        try:
            headers = {"X-Request-Id": request_id} if request_id else {}
            async with self._asked(body, headers) as response:
                async for event in _until(told, _events(response)):
                    for output in answer.outputs(event):
                        yield output
            for output in answer.ends(aborted=told.is_set()):
                yield output
        except httpx.HTTPError as error:
            raise WorkerLostError(
                f"the server at {self._api} is gone: {type(error).__name__}", hint="try again"
            ) from error
        finally:
            self._forget(label, told)

    @contextlib.asynccontextmanager
    async def _asked(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """The stream of an answer. A server that refuses a field of engines by its name is asked again, then always, without."""
        sent = {name: value for name, value in body.items() if name not in self._unknown}
        async with self._http.stream("POST", f"{self._api}/completions", json=sent, headers=headers) as response:
            if response.status_code == httpx.codes.OK:
                yield response
                return
            content = await response.aread()
        unknown = {name for name in OF_ENGINES if name in sent and name.encode() in content}
        if not unknown or response.status_code not in (400, 422):
            raise refusal(response.status_code, content)
        self._unknown |= unknown
        async with self._asked(body, headers) as answer:
            yield answer

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        for told in self._running.get(request_id, ()):
            told.set()

    def load(self) -> EngineLoad:
        """What `refresh` saw last."""
        return self._load

    async def refresh(self) -> EngineLoad:
        """Read the server's /metrics; one without them looks idle."""
        with contextlib.suppress(httpx.HTTPError):
            response = await self._http.get(f"{self._api.removesuffix('/v1')}/metrics")
            self._load = (
                load_of(parse_samples(response.text)) if response.status_code == httpx.codes.OK else EngineLoad()
            )
        return self._load

    async def _first_model(self) -> str:
        try:
            response = await self._http.get(f"{self._api}/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"no OpenAI server answers at {self._api}: {error}", hint="does it run there, and is the key right?"
            ) from error

    def _forget(self, label: str, told: asyncio.Event) -> None:
        running = self._running[label]
        running.discard(told)
        if not running:
            del self._running[label]


class Answer:
    """The choices of one request, from events to outputs.

    Args:
        label: of the request.
        num_prompt_tokens: where the server says nothing of it.
        params: what was asked for.
    """

    def __init__(self, label: str, num_prompt_tokens: int, params: SamplingParams) -> None:
        self._label = label
        self._wants_logprobs = params.logprobs is not None
        self._latest = [
            RequestOutput(request_id=label, index=i, num_prompt_tokens=num_prompt_tokens) for i in range(params.n)
        ]
        self._ended: dict[int, RequestOutput] = {}  # held back until the usage is known

    def outputs(self, event: Mapping[str, Any]) -> Iterator[RequestOutput]:
        """What an event says of its choices. The last output of a choice waits for the usage, which comes after it.

        Raises:
            TribladeError: the event is an error.
        """
        if "error" in event:
            raise failure(event["error"])
        if event.get("usage"):
            self._count(event["usage"])
        for choice in event.get("choices") or ():
            output = self._output(choice)
            if output.finished:
                self._ended[output.index] = output
            elif output.text or output.token_ids:
                yield output

    def ends(self, *, aborted: bool) -> Iterator[RequestOutput]:
        """The last outputs.

        Raises:
            WorkerLostError: the stream ended before a choice did.
        """
        for index, latest in enumerate(self._latest):
            if index in self._ended:
                counted = self._ended[index]
                yield replace(
                    counted, num_prompt_tokens=latest.num_prompt_tokens, num_cached_tokens=latest.num_cached_tokens
                )
            elif aborted:
                yield replace(latest, text="", token_ids=[], logprobs=None, finish_reason=FinishReason.ABORT)
            else:
                raise WorkerLostError("the answer ended without a finish reason", hint="try again")

    def _output(self, choice: Mapping[str, Any]) -> RequestOutput:
        index = int(choice.get("index") or 0)
        latest = self._latest[index]
        text, token_ids = choice.get("text") or "", list(choice.get("token_ids") or ())
        counted = len(token_ids) or int(bool(text))
        reason = choice.get("finish_reason")
        output = replace(
            latest,
            text=text,
            token_ids=token_ids,
            logprobs=_logprobs(choice.get("logprobs"), token_ids) if self._wants_logprobs else None,
            finish_reason=None if not reason else REASONS.get(reason, FinishReason.STOP),
            stop_reason=choice.get("stop_reason"),
            num_output_tokens=latest.num_output_tokens + counted,
            error="the server ended it with an error" if reason == "error" else None,
        )
        self._latest[index] = output
        return output

    def _count(self, usage: Mapping[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        for index, latest in enumerate(self._latest):
            self._latest[index] = replace(
                latest,
                num_prompt_tokens=usage.get("prompt_tokens", latest.num_prompt_tokens),
                num_cached_tokens=details.get("cached_tokens") or 0,
            )
        if len(self._latest) == 1 and 0 in self._ended and usage.get("completion_tokens") is not None:
            self._ended[0] = replace(self._ended[0], num_output_tokens=usage["completion_tokens"])


def request_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields of a completion that differ from the API's defaults.

    Raises:
        UnsupportedError: there is no field for it.
    """
    if params.prompt_logprobs is not None or params.max_tokens == 0:
        raise UnsupportedError("prompt_logprobs and prompts alone are not to be had of a streamed completion")
    plain = SamplingParams()
    found = {name: getattr(params, name) for name in SAME_NAMES if getattr(params, name) != getattr(plain, name)}
    if params.stop:
        found["stop"] = list(params.stop)
    if params.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.structured_outputs is not None:
        found["structured_outputs"] = _form(params.structured_outputs)
    asked = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    # Without a limit completions end after 16 tokens; engines take None for all there is room for.
    return {**found, **asked, "temperature": params.temperature, "max_tokens": params.max_tokens}


def load_of(samples: Mapping[str, float]) -> EngineLoad:
    """A page of metrics, ours or vLLM's, as an engine's load."""

    def whole(name: str) -> int:
        return int(samples.get(name, 0.0))

    blocks = whole("num_kv_blocks") or 100  # vLLM tells the share alone
    return EngineLoad(
        num_running=whole("num_requests_running"),
        num_waiting=whole("num_requests_waiting"),
        num_kv_blocks=blocks,
        num_free_kv_blocks=round(blocks * (1 - samples.get("kv_cache_usage_perc", 0.0))),
        num_preemptions=whole("num_preemptions_total"),
        num_prompt_tokens=whole("prompt_tokens_total"),
        num_computed_prompt_tokens=whole("prompt_tokens_total") - whole("prefix_cache_hits_total"),
        num_cached_prompt_tokens=whole("prefix_cache_hits_total"),
        num_generated_tokens=whole("generation_tokens_total"),
        speculation=SpeculationCounts(
            num_drafts=whole("spec_decode_num_drafts_total"),
            num_draft_tokens=whole("spec_decode_num_draft_tokens_total"),
            num_accepted_tokens=whole("spec_decode_num_accepted_tokens_total"),
        ),
    )


def _logprobs(found: Mapping[str, Any] | None, token_ids: Sequence[int]) -> list[TokenLogprobs] | None:
    """Of the chosen tokens; alternatives are named by their text there, so they stay behind. Rank 0: not known."""
    if not found or len(token_ids) != len(found.get("token_logprobs") or ()):
        return None
    return [
        TokenLogprobs(token, float(value or 0.0), 0)
        for token, value in zip(token_ids, found["token_logprobs"], strict=True)
    ]


def _form(wanted: StructuredOutputs) -> dict[str, Any]:
    """vLLM's names of the forms, which ours are, too."""
    names = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    if wanted.kind == "json_object":
        return {"json_object": True}
    if wanted.kind not in names:
        raise UnsupportedError(f"no field of the API for the form: {wanted.kind}")
    value = wanted.text if wanted.kind in ("regex", "grammar") else orjson.loads(wanted.text)
    return {names[wanted.kind]: value}


async def _events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The objects of a stream of events."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise EngineDeadError(f"an event that is no JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise EngineDeadError(f"an event that is no object: {data[:80]!r}")
        yield event


async def _until(told: asyncio.Event, events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[Mapping[str, Any]]:
    """Events, until somebody tells to end."""
    waiting = asyncio.ensure_future(told.wait())
    try:
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            await asyncio.wait({coming, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await coming
                return
            if (event := coming.result()) is None:
                return
            yield event
    finally:
        waiting.cancel()

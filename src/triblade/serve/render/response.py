"""Answers of /v1/responses: the response object, and the events of a stream around those of its items.

Knows one choice of one prompt. Nothing is stored, so a response is what it was when it ended. Invariant: numbers of events count up
from 0, and the last event is one of completed, incomplete and failed, with the whole response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.serve.jobs import Job
from triblade.serve.message import MessageReader
from triblade.serve.problems import Problem
from triblade.serve.protocol import ResponsesRequest
from triblade.serve.render.base import Envelope, Json, Usage
from triblade.serve.render.items import CUT_STATUS, DONE_STATUS, ItemWriter
from triblade.serve.strict_json import dumps

if TYPE_CHECKING:
    from triblade.models.tokenizer import Tokenizer

# What a response says of itself beside its output, where the request does not say it.
DEFAULTS: Json = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}


class ResponseRenderer:
    """Implements `StreamRenderer`."""

    def __init__(self, body: ResponsesRequest, job: Job, envelope: Envelope, tokenizer: Tokenizer) -> None:
        params = job.prompts[0].params
        asked = body.model_dump(include=set(DEFAULTS), exclude_none=True)
        self._said: Json = {**DEFAULTS, "temperature": params.temperature, "top_p": params.top_p, **asked}
        self._envelope = envelope
        self._reader = MessageReader(job.reading)
        self._writer = ItemWriter()
        self._number = 0  # of the next event
        self._status = "in_progress"
        self._num_reasoning_tokens = 0

    def chunk(self, prompt: int, output: RequestOutput) -> bytes:
        """The events of an output, behind those that open the response."""
        opening = [] if self._number else ["response.created", "response.in_progress"]
        events = [{"type": name, "response": self._response(None)} for name in opening]
        return self._written([*events, *self._read(output)])

    def ending(self, usage: Usage) -> bytes:
        """See `StreamRenderer`."""
        return self._written([{"type": f"response.{self._status}", "response": self._response(usage)}])

    def failure(self, problem: Problem) -> bytes:
        """See `StreamRenderer`."""
        events = list(self._writer.close(CUT_STATUS))
        self._status = "failed"
        error = {"code": problem.code or "server_error", "message": problem.message}
        return self._written([*events, {"type": "response.failed", "response": self._response(None, error)}])

    def collect(self, prompt: int, output: RequestOutput) -> None:
        """See `Renderer`."""
        for _ in self._read(output):
            pass  # the items are what stays of them

    def body(self, usage: Usage) -> bytes:
        """See `Renderer`."""
        return dumps(self._response(usage))

    def _read(self, output: RequestOutput) -> Iterator[Json]:
        pieces = self._reader.feed(output.text, is_last=output.finished)
        self._num_reasoning_tokens += len(output.token_ids) if self._reader.is_reasoning else 0
        yield from self._writer.add(pieces)
        if output.finished:
            self._status = CUT_STATUS if output.finish_reason is FinishReason.LENGTH else DONE_STATUS
            yield from self._writer.finish(self._status)

    def _response(self, usage: Usage | None, error: Json | None = None) -> Json:
        is_cut = self._status == CUT_STATUS
        return {
            "id": self._envelope.answer_id,
            "object": "response",
            "created_at": self._envelope.created,
            "model": self._envelope.model,
            "status": self._status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self._writer.items),
            "usage": None if usage is None else self._usage(usage),
            **self._said,
        }

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _written(self, events: Iterable[Json]) -> bytes:
        """Server-sent events, each under its name and with its number."""
        written = b""
        for told in events:
            written += b"event: " + told["type"].encode() + b"\ndata: "
            written += dumps({**told, "sequence_number": self._number}) + b"\n\n"
            self._number += 1
        return written

"""What chat and text answers have in common: the envelope, the usage, and how deltas fold into a whole answer.

A body is the fold of the same deltas that a stream sends, so the two cannot disagree. JSON that repeats in every
chunk is written once per request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from triblade import __version__
from triblade.engine.outputs import RequestOutput
from triblade.serve.problems import Problem
from triblade.serve.strict_json import dumps

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields of every object of one answer."""

    answer_id: str
    created: int
    model: str

    def fields(self, kind: str) -> Json:
        """The envelope of an object of this `kind`."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"triblade-{__version__}",
        }


class Renderer(Protocol):
    """Turns the outputs of one request into its answer, in one body."""

    def collect(self, prompt: int, output: RequestOutput) -> None:
        """Keep an output of prompt number `prompt` for `body`."""
        ...

    def body(self, usage: Usage) -> bytes:
        """The whole answer."""
        ...


@runtime_checkable
class StreamRenderer(Renderer, Protocol):
    """The same, or a stream."""

    def chunk(self, prompt: int, output: RequestOutput) -> bytes:
        """Server-sent events for an output of prompt number `prompt`; empty when there is nothing to tell yet."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """The events behind those of the last output."""
        ...

    def failure(self, problem: Problem) -> bytes:
        """The events that end a stream of which the rest is missing."""
        ...


class ChunkWriter:
    """Writes server-sent events around the choices of one request."""

    def __init__(self, envelope: Envelope, kind: str, *, announces_usage: bool) -> None:
        self._fields = envelope.fields(kind)
        self._announces_usage = announces_usage
        self._head = b"data: " + dumps(self._fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if announces_usage else b"]}\n\n"

    def choice(self, choice: Json) -> bytes:
        """One event with one choice."""
        return self._head + dumps(choice) + self._tail

    def ending(self, usage: Usage) -> bytes:
        """The usage, if it is to be told, in an event without choices; then the mark of the end."""
        told = event({**self._fields, "choices": [], "usage": usage.as_json()}) if self._announces_usage else b""
        return told + DONE

    def failure(self, problem: Problem) -> bytes:
        """What went wrong, and the mark of the end."""
        return event(problem.body()) + DONE


def event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(payload) + b"\n\n"


def speculation_json(output: RequestOutput) -> Json | None:
    """What the last output of a choice says about its drafts; null where none are made."""
    return None if output.speculation is None else output.speculation.as_json()


@dataclass(slots=True)
class Usage:
    """Token counts of one request; prompt tokens count once per prompt, however many choices it has."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def as_json(self) -> Json:
        """The OpenAI usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Fold:
    """The pieces of one choice, joined: texts end to end, lists end to end, the last reason that is not null."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: dict[str, list[Any]] | None = None
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.speculation: Json | None = None

    def add(self, text: str, logprobs: Mapping[str, Sequence[Any]] | None, output: RequestOutput) -> None:
        """Append one delta."""
        self.texts.append(text)
        self.token_ids.extend(output.token_ids)
        if logprobs is not None:
            self.logprobs = {} if self.logprobs is None else self.logprobs
            for name, values in logprobs.items():
                self.logprobs.setdefault(name, []).extend(values)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            self.stop_reason = output.stop_reason
            self.speculation = speculation_json(output)

    @property
    def text(self) -> str:
        """Everything so far."""
        return "".join(self.texts)

"""Answers of /v1/chat/completions. The role stands in the first delta of a choice and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.serve.jobs import Job
from triblade.serve.message import MessageReader
from triblade.serve.pieces import Message, Piece
from triblade.serve.problems import Problem
from triblade.serve.render.base import ChunkWriter, Envelope, Fold, Json, Usage, speculation_json
from triblade.serve.render.logprobs import LogprobWriter, prompt_logprobs
from triblade.serve.strict_json import dumps

if TYPE_CHECKING:
    from triblade.models.tokenizer import Tokenizer

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"


class ChatRenderer:
    """Implements `StreamRenderer`."""

    def __init__(self, job: Job, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._job = job
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._chunks = ChunkWriter(envelope, CHUNK_KIND, announces_usage=job.include_usage)
        self._writer = LogprobWriter(tokenizer, skips_special_tokens=False)  # chat has no text offsets
        self._opened: set[int] = set()
        self._readers: dict[int, MessageReader] = {}  # by choice, as all that follow
        self._messages: dict[int, Message] = {}
        self._folds: dict[int, Fold] = {}
        self._prompt_logprobs: Any = None

    def chunk(self, prompt: int, output: RequestOutput) -> bytes:
        """The opening event of a choice, then one event per output that a client could see."""
        index = output.index
        events = b"" if index in self._opened else self._open(index)
        logprobs = self._logprobs(output)
        shows_tokens = bool(output.token_ids) and (logprobs is not None or self._job.return_token_ids)
        deltas = [piece.delta() for piece in self._read(output)]
        if not (deltas or output.finished or shows_tokens):
            return events
        *before, delta = deltas or [{} if output.finished else {"content": ""}]
        for earlier in before:
            events += self._chunks.choice({"index": index, "delta": earlier, "logprobs": None, "finish_reason": None})
        reason = self._reason(index, output.finish_reason)
        choice: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if output.finished:
            choice["stop_reason"] = output.stop_reason
            if self._job.return_speculation:
                choice["speculation"] = speculation_json(output)
        if self._job.return_token_ids:
            choice["token_ids"] = output.token_ids
        return events + self._chunks.choice(choice)

    def ending(self, usage: Usage) -> bytes:
        """See `StreamRenderer`."""
        return self._chunks.ending(usage)

    def failure(self, problem: Problem) -> bytes:
        """See `StreamRenderer`."""
        return self._chunks.failure(problem)

    def collect(self, prompt: int, output: RequestOutput) -> None:
        """Keep an output for `body`."""
        self._folds.setdefault(output.index, Fold()).add(output.text, self._logprobs(output), output)
        self._messages.setdefault(output.index, Message()).add(self._read(output))
        if output.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, output.prompt_logprobs)

    def body(self, usage: Usage) -> bytes:
        """The whole answer."""
        choices = [self._choice(index, fold) for index, fold in sorted(self._folds.items())]
        body = {**self._envelope.fields(KIND), "choices": choices, "usage": usage.as_json()}
        if self._job.wants_prompt_logprobs:
            body["prompt_logprobs"] = self._prompt_logprobs
        if self._job.return_token_ids:
            body["prompt_token_ids"] = self._job.prompts[0].token_ids
        return dumps(body)

    def _open(self, index: int) -> bytes:
        self._opened.add(index)
        delta = {"role": "assistant", "content": ""}
        opening: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._job.return_token_ids:
            opening["prompt_token_ids"] = self._job.prompts[0].token_ids
        return self._chunks.choice(opening)

    def _choice(self, index: int, fold: Fold) -> Json:
        choice: Json = {
            "index": index,
            "message": self._messages[index].as_json(),
            "logprobs": self._with_refusal(fold.logprobs),
            "finish_reason": self._reason(index, fold.finish_reason),
            "stop_reason": fold.stop_reason,
        }
        if self._job.return_token_ids:
            choice["token_ids"] = fold.token_ids
        if self._job.return_speculation:
            choice["speculation"] = fold.speculation
        return choice

    def _read(self, output: RequestOutput) -> list[Piece]:
        reader = self._readers.setdefault(output.index, MessageReader(self._job.reading))
        return reader.feed(output.text, is_last=output.finished)

    def _reason(self, index: int, reason: str | None) -> str | None:
        """`tool_calls` where calls were told and the message is complete."""
        return "tool_calls" if reason == FinishReason.STOP and self._readers[index].has_calls else reason

    def _logprobs(self, output: RequestOutput) -> Mapping[str, Sequence[Any]] | None:
        if self._job.prompts[0].params.logprobs is None:
            return None
        return self._writer.chat(output.logprobs or [])

    @staticmethod
    def _with_refusal(logprobs: Mapping[str, Sequence[Any]] | None) -> Json | None:
        return None if logprobs is None else {**logprobs, "refusal": None}

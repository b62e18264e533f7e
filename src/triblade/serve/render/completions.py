"""Answers of /v1/completions. Choice `prompt * n + child` belongs to one child of one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triblade.engine.outputs import RequestOutput
from triblade.serve.jobs import Job, PromptJob
from triblade.serve.problems import Problem
from triblade.serve.render.base import ChunkWriter, Envelope, Fold, Json, Usage, speculation_json
from triblade.serve.render.logprobs import Legacy, LogprobWriter, prompt_logprobs
from triblade.serve.strict_json import dumps

if TYPE_CHECKING:
    from triblade.models.tokenizer import Tokenizer

KIND = "text_completion"


class CompletionRenderer:
    """Implements `StreamRenderer`."""

    def __init__(self, job: Job, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._job = job
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._chunks = ChunkWriter(envelope, KIND, announces_usage=job.include_usage)
        self._writers: dict[int, LogprobWriter] = {}  # by choice, made with its first output
        self._folds: dict[int, Fold] = {}
        self._prompt_logprobs: dict[int, Any] = {}  # by choice

    def chunk(self, prompt: int, output: RequestOutput) -> bytes:
        """One event, unless the output has nothing that a client could see."""
        index = prompt * self._job.n + output.index
        first = index not in self._writers
        text, logprobs = self._delta(index, prompt, output)
        shows_tokens = bool(output.token_ids) and (logprobs is not None or self._job.return_token_ids)
        if not (text or output.finished or shows_tokens):
            return b""
        choice: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}
        if output.finished:
            choice["stop_reason"] = output.stop_reason
            if self._job.return_speculation:
                choice["speculation"] = speculation_json(output)
        if self._job.return_token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = self._job.prompts[prompt].token_ids if first else None
        return self._chunks.choice(choice)

    def ending(self, usage: Usage) -> bytes:
        """See `StreamRenderer`."""
        return self._chunks.ending(usage)

    def failure(self, problem: Problem) -> bytes:
        """See `StreamRenderer`."""
        return self._chunks.failure(problem)

    def collect(self, prompt: int, output: RequestOutput) -> None:
        """Keep an output for `body`."""
        index = prompt * self._job.n + output.index
        text, logprobs = self._delta(index, prompt, output)
        self._folds.setdefault(index, Fold()).add(text, logprobs, output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = prompt_logprobs(self._tokenizer, output.prompt_logprobs)

    def body(self, usage: Usage) -> bytes:
        """The whole answer."""
        choices = [self._choice(index, fold) for index, fold in sorted(self._folds.items())]
        return dumps({**self._envelope.fields(KIND), "choices": choices, "usage": usage.as_json()})

    def _choice(self, index: int, fold: Fold) -> Json:
        choice: Json = {
            "index": index,
            "text": fold.text,
            "logprobs": fold.logprobs,
            "finish_reason": fold.finish_reason,
            "stop_reason": fold.stop_reason,
        }
        if self._job.wants_prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs.get(index)
        if self._job.return_token_ids:
            choice["token_ids"] = fold.token_ids
            choice["prompt_token_ids"] = self._job.prompts[index // self._job.n].token_ids
        if self._job.return_speculation:
            choice["speculation"] = fold.speculation
        return choice

    def _delta(self, index: int, prompt: int, output: RequestOutput) -> tuple[str, Legacy | None]:
        """The new text of a choice and its log-probabilities; the first one brings the prompt, if it is echoed."""
        source = self._job.prompts[prompt]
        text = output.text
        wants_logprobs = source.params.logprobs is not None
        logprobs: Legacy = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if index not in self._writers:
            skips = source.params.skip_special_tokens
            writer = self._writers[index] = LogprobWriter(self._tokenizer, skips_special_tokens=skips)
            text = (source.text or "") + text
            if source.text is not None and wants_logprobs:
                logprobs = self._of_prompt(writer, source, output)
        if not wants_logprobs:
            return text, None
        for name, values in self._writers[index].legacy(output.logprobs or []).items():
            logprobs[name] += values
        return text, logprobs

    def _of_prompt(self, writer: LogprobWriter, source: PromptJob, output: RequestOutput) -> Legacy:
        entries = output.prompt_logprobs or [None] * len(source.token_ids)
        return writer.legacy_prompt(source.token_ids, entries, source.text or "")

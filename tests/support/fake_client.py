"""An engine client without a model, for the server's tests: scripted answers over a byte tokenizer.

Bytes are tokens 0..255; 256 begins a text, 257 ends one. What a prompt is answered with is looked up in `scripts` by the
prompt's text; unknown prompts get "Hello, world!". Every request that began and every one that was dropped is on record.
"""

from __future__ import annotations

import asyncio
import codecs
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from triblade.engine.client import EngineLoad
from triblade.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from triblade.errors import ContextLengthError, RequestError
from triblade.sampling_params import SamplingParams, check_token_ids
from triblade.spec.record import Speculation, SpeculationCounts

BOS, EOS, VOCABULARY = 256, 257, 258
SPECIAL = {BOS: "<bos>", EOS: "<eos>"}


class FakeTokenizer:
    """Bytes in, bytes out; the template speaks of calls as Hermes' does."""

    chat_template = "{{ messages }}"
    tool_template = "{{ tools }} <tool_call>"
    special_tokens = MappingProxyType({"bos_token": "<bos>", "eos_token": "<eos>"})

    vocab_size = VOCABULARY
    eos_token_ids = frozenset({EOS})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in SPECIAL)]
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL[token_id].encode() if token_id in SPECIAL else bytes([token_id])

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A template that takes user and assistant in turns, as Gemma's does."""
        turns = []
        for i, message in enumerate(messages):
            if message.get("role") != ("user", "assistant")[i % 2]:
                raise RequestError("the chat template refused the messages: roles must alternate", param="messages")
            content = message.get("content") or ""
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for j, part in enumerate(parts):
                kind = part.get("type") if isinstance(part, dict) else None
                if kind != "text":
                    where = f"messages[{i}].content[{j}]"
                    raise RequestError(f"unknown content part type: {kind!r}", param=where)
            turns.append(f"{message['role']}: {''.join(str(part.get('text')) for part in parts)}\n")
        if not turns:
            raise RequestError("messages must not be empty", param="messages")
        turns.insert(0, "".join(f"tool {tool['function']['name']}\n" for tool in options.get("tools") or ()))
        if options.get("continue_final_message"):
            return "".join(turns)[:-1]
        return "".join(turns) + ("assistant: " if options.get("add_generation_prompt", True) else "")


@dataclass
class Script:
    """How to answer a prompt.

    Attributes:
        answer: the tokens, one per step; bytes of text by default.
        pause_s: seconds before each token.
        hold: wait for this event before the first token, as a request in a queue does.
        fail_after: raise `error` (or end with FinishReason.ERROR, if it is None) after so many tokens.
        silent_end: end the stream without a finish reason.
    """

    answer: bytes = b"Hello, world!"
    pause_s: float = 0.0
    hold: threading.Event | None = None
    fail_after: int | None = None
    error: Exception | None = None
    silent_end: bool = False


@dataclass
class Record:
    """One call of `generate`."""

    prompt_token_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int
    num_tokens: int = 0
    dropped: bool = False  # left before its end


@dataclass
class FakeClient:
    """Implements `ServedEngine`."""

    max_model_len: int = 256
    generation_config: dict[str, Any] = field(default_factory=dict)
    scripts: dict[str, Script] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_waiting: int = 0
    running: int = 0
    dead: Exception | None = None
    closed: bool = False
    speculation: Speculation | None = None  # what every choice's last output says
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        if not prompt_token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        check_token_ids("prompt", list(prompt_token_ids), VOCABULARY)
        params.check_vocabulary(VOCABULARY, 20)
        asked = 1 if params.max_tokens is None else params.max_tokens
        if len(prompt_token_ids) + asked > self.max_model_len:
            raise ContextLengthError(
                f"the context length is {self.max_model_len} tokens, got {len(prompt_token_ids)} and {asked}",
                param="prompt" if len(prompt_token_ids) >= self.max_model_len else "max_tokens",
            )

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        if self.dead is not None:
            raise self.dead
        self.check(prompt_token_ids, params)
        record = Record(list(prompt_token_ids), params, request_id or "", priority)
        self.records.append(record)
        script = self.scripts.get(self.tokenizer.decode(prompt_token_ids), Script())
        self.running += params.n
        ended = False
        try:
            while script.hold is not None and not script.hold.is_set():
                await asyncio.sleep(0.005)
            choices = [_Choice(index, script, record) for index in range(params.n)]
            while not all(choice.done for choice in choices):
                await asyncio.sleep(script.pause_s)
                self.num_steps += 1
                for choice in [choice for choice in choices if not choice.done]:
                    yield self._labelled(choice.step(), record)
                if script.silent_end:
                    break
            ended = True
        finally:
            self.running -= params.n
            record.dropped = not ended

    def _labelled(self, output: RequestOutput, record: Record) -> RequestOutput:
        output.num_prompt_tokens = len(record.prompt_token_ids)
        output.num_cached_tokens = self.num_cached
        output.speculation = self.speculation if output.finished else None
        return output

    async def abort(self, request_id: str) -> None:
        raise AssertionError("the server ends requests by leaving their streams")

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self.running,
            num_waiting=self.num_waiting,
            num_kv_blocks=100,
            num_free_kv_blocks=100 - self.running,
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            speculation=SpeculationCounts() if self.speculation is None else self.speculation.counts,
        )

    def close(self) -> None:
        self.closed = True


class _Choice:
    """One choice on its way through a script; choices differ in their first letter."""

    def __init__(self, index: int, script: Script, record: Record) -> None:
        self._index = index
        self._script = script
        self._record = record
        prefix = b"" if index == 0 else str(index).encode()
        self._tokens = [*prefix, *script.answer, EOS]
        self._limit = 10**6 if record.params.max_tokens is None else record.params.max_tokens
        self._count = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.done = False

    def step(self) -> RequestOutput:
        params = self._record.params
        output = RequestOutput(request_id=self._record.request_id, index=self._index)
        if self._count == 0 and params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *map(entry, self._record.prompt_token_ids[1:])]
        if self._script.fail_after == self._count:
            if self._script.error is not None:
                raise self._script.error
            output.finish_reason, output.error, self.done = FinishReason.ERROR, "logits are not finite", True
            return output
        if params.pooling is not None:
            output.embedding = embedding(self._record.prompt_token_ids)
        if self._limit > 0:
            self._append(output, params)
        if self._count >= self._limit and not self.done:
            output.finish_reason, self.done = FinishReason.LENGTH, True
            output.text += self._decoder.decode(b"", final=True)
        output.num_output_tokens = self._count
        return output

    def _append(self, output: RequestOutput, params: SamplingParams) -> None:
        token = self._tokens[self._count]
        self._count += 1
        self._record.num_tokens += 1
        output.token_ids = [token]
        output.logprobs = None if params.logprobs is None else [entry(token, params.logprobs)]
        if token == EOS:
            output.finish_reason, self.done = FinishReason.STOP, True
        else:
            output.text = self._decoder.decode(bytes([token]))


def embedding(prompt_token_ids: Sequence[int]) -> list[float]:
    """A vector that tells prompts apart."""
    return [len(prompt_token_ids) / 512, prompt_token_ids[-1] / 512, -0.25]


def entry(token: int, count: int = 2) -> TokenLogprobs:
    """A plausible entry: the token is the second best."""
    top = (((token + 1) % 128, -0.5), (token, -1.5), ((token + 2) % 128, -9999.0))[:count]
    return TokenLogprobs(token, -1.5, 2, top)

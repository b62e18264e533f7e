"""The engine for scripts: prompts in, completions out, in the calling thread.

llm = LLM("smollm2-135m")
print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triblade.config import AlignConfig, EngineConfig
from triblade.console import progress
from triblade.engine.build import build_engine
from triblade.engine.engine import Engine
from triblade.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from triblade.engine.request import Request
from triblade.models.tokenizer import Tokenizer
from triblade.ops.select import select_device
from triblade.sampling_params import SamplingParams
from triblade.spec.align.run import AlignReport, align
from triblade.spec.align.writer import Writer
from triblade.spec.record import Speculation

OWN_TEXT_AT_ONCE = 32  # samples in one batch


@dataclass(slots=True)
class Completion:
    """One finished choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    speculation: Speculation | None = field(default=None, compare=False)  # how it was made, with the trace of its steps
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Join the next delta."""
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *output.logprobs]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error
        self.speculation = output.speculation
        self.num_prompt_tokens, self.num_cached_tokens = output.num_prompt_tokens, output.num_cached_tokens


class LLM:
    """A model ready to generate.

    Args:
        model: folder, GGUF file, hub id, `pypi:` package or alias; or a whole `EngineConfig`.
        options: further fields of `EngineConfig`.
    """

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        config = model if isinstance(model, EngineConfig) else EngineConfig(model=model, **options)
        self.engine = build_engine(config)

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Wrap an engine that exists."""
        llm = cls.__new__(cls)
        llm.engine = engine
        return llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[list[Completion]]:
        """Complete prompts (texts or token ids) together: for each prompt its `params.n` completions.

        Raises:
            RequestError: a prompt cannot be served; nothing was computed.
        """
        params = params or SamplingParams()
        prepared = [self.engine.prepare(self._encode(prompt), params) for prompt in prompts]
        completions = {request: Completion(request.index) for requests in prepared for request in requests}
        for request, output in self._run(list(completions)):
            completions[request].add(output)
        return [[completions[request] for request in requests] for requests in prepared]

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation."""
        prompt = self.tokenizer.encode_chat(messages)
        return self.generate([prompt], params)[0][0]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt step by step; leaving the iteration aborts it."""
        requests = self.engine.prepare(self._encode(prompt), params or SamplingParams())
        for _, output in self._run(requests):
            yield output

    def write(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float], seed: int
    ) -> list[list[int]]:
        """Continue prompts, each at its own temperature and with its own seed; end tokens are part of the answer."""
        requests = []
        for index, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + index)
            requests += self.engine.prepare(list(prompt), params)
        written: dict[Request, list[int]] = {request: [] for request in requests}
        for request, output in self._run(requests):
            written[request] += output.token_ids
        return list(written.values())

    def _run(self, requests: list[Request]) -> Iterator[tuple[Request, RequestOutput]]:
        self.engine.add(requests)
        try:
            while self.engine.has_work:
                yield from self.engine.step()
        finally:
            self.engine.abort(requests)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def write_own_text(llm: LLM, samples: int, length: int, path: Path) -> None:
    """Let a model write text to calibrate on: a JSON list of `samples` lists of `length` token ids.

    Each begins with BOS, or a random token where there is none, and goes on as the model would at temperature 1, past every end.
    """
    random_ids = random.Random(0)
    tokenizer = llm.tokenizer
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompts = [[*start, random_ids.randrange(tokenizer.vocab_size)] for _ in range(samples)]
    written = []
    with progress("writing calibration text", samples * length, unit="tokens") as advance:
        for begin in range(0, samples, OWN_TEXT_AT_ONCE):
            batch = prompts[begin : begin + OWN_TEXT_AT_ONCE]
            params = SamplingParams(max_tokens=length - len(batch[0]), temperature=1.0, seed=begin, ignore_eos=True)
            for prompt, (completion,) in zip(batch, llm.generate(batch, params), strict=True):
                written.append([*prompt, *completion.token_ids])
                advance(length)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(written), encoding="utf-8")
    part.replace(path)


def long_texts(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The greedy continuation of each prompt, past every end, as token ids."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    texts: list[list[int]] = []
    with progress("writing long texts", len(prompts) * max_tokens, unit="tokens") as advance:
        for begin in range(0, len(prompts), OWN_TEXT_AT_ONCE):
            batch = prompts[begin : begin + OWN_TEXT_AT_ONCE]
            texts += [completion.token_ids for (completion,) in llm.generate(batch, params)]
            advance(len(batch) * max_tokens)
    return texts


class EngineWriter:
    """Text for an alignment, written as the target is served: with its kernels, quantized weights included.

    Args:
        llm: the target.
    """

    at_once = OWN_TEXT_AT_ONCE

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float], seed: int
    ) -> list[list[int]]:
        """See `spec.align.writer.Writer`."""
        return self._llm.write(prompts, max_tokens, temperatures, seed)


def align_head(config: AlignConfig) -> AlignReport:
    """Train a head; on a CPU the engine writes the text, elsewhere the model in lock step, which is faster there."""
    device, _ = select_device(config.device)

    def make_writer() -> Writer:
        return EngineWriter(LLM(config.engine))

    return align(config, make_writer if device.type == "cpu" else None)

"""The engine for scripts: prompts in, completions out, in the calling thread.

llm = LLM("smollm2-135m")
print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triblade.config import EngineConfig
from triblade.engine.build import build_engine
from triblade.engine.engine import Engine
from triblade.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from triblade.engine.request import Request
from triblade.errors import NumericalError, RequestError
from triblade.models.tokenizer import Tokenizer
from triblade.sampling_params import Pooling, SamplingParams
from triblade.spec.record import Speculation


@dataclass(slots=True)
class Completion:
    """One finished choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: list[float] | None = None
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
        self.embedding = output.embedding
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
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[list[Completion]]:
        """Complete prompts (texts or token ids) together: for each prompt its `params.n` completions.

        Args:
            params: of all prompts, or one for each.

        Raises:
            RequestError: a prompt cannot be served, or there are more or fewer params than prompts; nothing was computed.
        """
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else params
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(prompts)} prompts", hint="pass one, or one for each prompt"
            )
        prepared = [self.engine.prepare(self._encode(prompt), own) for prompt, own in zip(prompts, each, strict=True)]
        completions = {request: Completion(request.index) for requests in prepared for request in requests}
        for request, output in self._run(list(completions)):
            completions[request].add(output)
        return [[completions[request] for request in requests] for requests in prepared]

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation."""
        prompt = self.tokenizer.encode_chat(messages)
        return self.generate([prompt], params)[0][0]

    def embed(self, prompts: Sequence[str | Sequence[int]], pooling: Pooling = "last") -> list[list[float]]:
        """A vector of length one for each prompt: final-norm hidden states, of the last token or the mean of all.

        Raises:
            RequestError: a prompt cannot be served; nothing was computed.
            NumericalError: the model made something of a prompt that is not finite.
        """
        vectors = [
            found.embedding for (found,) in self.generate(prompts, SamplingParams(max_tokens=0, pooling=pooling))
        ]
        if None in vectors:
            raise NumericalError(f"no vector could be made of prompt number {vectors.index(None)}: it is not finite")
        return [vector for vector in vectors if vector is not None]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt step by step; leaving the iteration aborts it."""
        requests = self.engine.prepare(self._encode(prompt), params or SamplingParams())
        for _, output in self._run(requests):
            yield output

    def _run(self, requests: list[Request]) -> Iterator[tuple[Request, RequestOutput]]:
        self.engine.add(requests)
        try:
            while self.engine.has_work:
                yield from self.engine.step()
        finally:
            self.engine.abort(requests)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

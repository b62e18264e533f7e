"""Whether a request can be served at all, known before anything is computed for it, here or in front of other processes.

Plain numbers of an engine; knows neither the engine nor a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triblade.errors import ContextLengthError, RequestError
from triblade.sampling_params import SamplingParams, check_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The limits of an engine."""

    vocab_size: int  # valid ids are below
    context_length: int
    kv_tokens: int  # that the whole KV cache holds
    max_logprobs: int

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Output tokens that a request may have.

        Raises:
            RequestError: an empty prompt, or an id outside the vocabulary.
            ContextLengthError: prompt and `max_tokens` exceed the context length or the whole KV cache.
        """
        if not prompt:
            raise RequestError("the prompt is empty", hint="send at least one token", param="prompt")
        check_token_ids("prompt", prompt, self.vocab_size)
        params.check_vocabulary(self.vocab_size, self.max_logprobs)
        return self._max_tokens(len(prompt), params.max_tokens)

    def _max_tokens(self, num_prompt_tokens: int, asked: int | None) -> int:
        capacity = min(self.context_length, self.kv_tokens)
        room = capacity - num_prompt_tokens
        least = 1 if asked is None else asked
        if room < least:
            wish = "" if asked is None else f" and {asked} output tokens"
            raise ContextLengthError(
                f"the context length is {capacity} tokens, the request has {num_prompt_tokens} prompt tokens{wish}",
                hint="shorten the prompt or lower max_tokens",
                param="prompt" if room < 1 else "max_tokens",
            )
        return room if asked is None else asked

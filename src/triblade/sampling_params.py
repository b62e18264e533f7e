"""What a request asks of the sampler, under the names vLLM users know; checked once, where it is made.

Knows no tokenizer and no model: ranges that depend on the vocabulary are checked by `check_vocabulary`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from triblade.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop. `temperature=0` is greedy."""

    n: int = 1
    max_tokens: int | None = None  # None: up to the context length
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 (or -1) keeps the whole vocabulary
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output; divides positive logits, multiplies negative ones
    presence_penalty: float = 0.0  # over the output only; subtracted once per token seen
    frequency_penalty: float = 0.0  # over the output only; subtracted per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # number of alternatives beside the chosen token; 0: the chosen one only
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Reject what no model could serve, naming the field."""
        _require(1 <= self.n <= MAX_N, "n", self.n, f"between 1 and {MAX_N}")
        _require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _require(_finite(self.temperature) and 0 <= self.temperature <= 100, "temperature", self.temperature, "between 0 and 100")
        _require(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (off), or at least 1")
        _require(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(_finite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_finite(value) and -2 <= value <= 2, name, value, "between -2 and 2")
        for token, bias in self.logit_bias.items():
            _require(_finite(bias) and -100 <= bias <= 100, "logit_bias", {token: bias}, "between -100 and 100")
        _require(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids", self.allowed_token_ids, "non-empty")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            _require(0 < len(text) <= MAX_STOP_LENGTH_CHARS, "stop", text[:80], f"between 1 and {MAX_STOP_LENGTH_CHARS} characters")
        _require(all(self.bad_words), "bad_words", list(self.bad_words), "non-empty strings")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "at least 0")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int, max_logprobs: int) -> None:
        """Check every token id against the tokenizer's length (added tokens included), and the number of logprobs.

        Raises:
            RequestError: naming the field, the id and the vocabulary size.
        """
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", tuple(self.logit_bias)),
        ):
            check_token_ids(name, ids, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value <= max_logprobs, name, value, f"at most {max_logprobs}")


def check_token_ids(name: str, ids: tuple[int, ...] | list[int], vocab_size: int) -> None:
    """Refuse ids outside `0 <= id < vocab_size` wherever ids enter from outside."""
    for token in ids:
        _require(0 <= token < vocab_size, name, token, f"a token id between 0 and {vocab_size - 1}")


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} must be {expected}, got: {value!r}", param=name)

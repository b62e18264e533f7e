"""The training of a head: soft labels of the target, chains unrolled, weights rounded as they will be stored towards the end.

Loss of guess j: weight_j * cross entropy of the head with the target's distribution over the draft vocabulary (EAGLE-3, section
3.1), where the token that was written is in it. Matrices are trained by Muon (Jordan 2024), the draft head and norms by AdamW.
Everything random follows from (seed, step), so that a run that goes on is the run that never stopped. Knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from triblade.models.decoder import Decoder
from triblade.ops.backend import Linear
from triblade.ops.packing import QuantizedMatrix
from triblade.quant.packed_weights import group_for
from triblade.quant.rtn import round_to_nearest
from triblade.spec.align.loss import cross_entropy
from triblade.spec.align.text import shard_seed
from triblade.spec.align.unroll import Sequences, unroll
from triblade.spec.eagle import INNER_NORMS, MATRICES, NORMS, EagleHead, EagleWeights, head_config, matrix_shapes

STEP_WEIGHT = 0.8  # loss weight of a guess relative to the one before it
UNKNOWN_SHARE = 1 / 64  # of positions whose hidden state is hidden from the head
WARMUP = 0.05  # share of the steps
ROUNDED_FROM = 0.7  # share of the steps after which weights are rounded in the forward pass
MAX_GRADIENT = 1.0
_LEAST_SCALE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a training is, beside its text."""

    bits: int
    window: int | None
    inner_layers: tuple[int, ...]  # whose states the head reads beside the final ones
    unrolled: int  # guesses of a chain
    total_steps: int
    learning_rate: float
    seed: int


class Trainer:
    """Parameters, optimizers and one step.

    Args:
        target: the model.
        token_ids: the draft vocabulary, ascending.
        recipe: the training.
        sample: a batch that the scales of the inputs are taken from; always the same one.
        context_length: longest sequence.
    """

    def __init__(
        self, target: Decoder, token_ids: Tensor, recipe: Recipe, sample: Sequences, context_length: int
    ) -> None:
        self.recipe = recipe
        self._target = target
        self._token_ids = token_ids.to(target.device)
        self._rows = target.weights.head.weight[self._token_ids]  # [N, C], the target's head
        self._row_of = _row_of(self._token_ids, target.weights.embedding.weight.shape[0])
        self._input_scale, self._inner_norms = _input_scales(target, sample)  # [(1 + F) C], [F - 1, C]
        config = head_config(target.config, recipe.window)
        generator = torch.Generator().manual_seed(recipe.seed)
        shapes = matrix_shapes(config, len(token_ids), len(recipe.inner_layers))
        self._parameters = {
            name: _initial(name, shape, generator).to(target.device) for name, shape in shapes.items() if name != "head"
        }
        self._parameters["head"] = self._rows.float().clone()
        ones = torch.ones(config.hidden_size, device=target.device)
        norms = {"input_norm": ones, "mlp_norm": ones, "final_norm": target.weights.final_norm}
        self._parameters |= {name: norm.float().clone() for name, norm in norms.items()}
        for parameter in self._parameters.values():
            parameter.requires_grad_()
        self._optimizers = self._make_optimizers()
        self._head = EagleHead(
            config, self._dense(rounded=False), target.weights.embedding, target.backend, context_length
        )

    def step(self, number: int, batch: Sequences) -> Tensor:
        """Train on one batch; the loss [], in nats."""
        self._set_rates(number)
        rounded = number >= ROUNDED_FROM * self.recipe.total_steps
        with self._autocast():
            loss = self._loss(self._head.reweighted(self._dense(rounded=rounded)), batch, number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), MAX_GRADIENT)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def head(self) -> EagleHead:
        """The head as it would be stored now."""
        with torch.no_grad():
            weights = self.quantized().mapped(lambda m: Linear(m.dequantize().to(self._target.dtype)))
        return self._head.reweighted(weights)

    @torch.no_grad()
    def quantized(self) -> EagleWeights[QuantizedMatrix]:
        """The weights, rounded."""
        matrices = {name: _rounded(self._matrix(name), self.recipe.bits) for name in MATRICES}
        norms = {name: self._parameters[name].detach() for name in NORMS} | {INNER_NORMS: self._inner_norms}
        return EagleWeights.from_parts(matrices, norms, self._token_ids)

    def state(self) -> dict[str, Any]:
        """Everything that a step changes."""
        return {
            "parameters": {name: parameter.detach() for name, parameter in self._parameters.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self._parameters[name].copy_(value)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _loss(self, head: EagleHead, batch: Sequences, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(shard_seed(self.recipe.seed, number))
        known = (torch.rand(batch.ids.shape, generator=generator) >= UNKNOWN_SHARE).to(batch.ids.device)
        following = F.pad(self._row_of[batch.ids[:, 1:]], (0, 1), value=-1)  # [B, L]
        places = [(batch.counted(i) & (following >= 0)).flatten().nonzero()[:, 0] for i in range(self.recipe.unrolled)]
        wanted = self._wanted(batch, places[0])
        total = torch.zeros((), device=batch.ids.device)
        for index, state in enumerate(unroll(head, batch, self.recipe.unrolled, known)):
            chosen = places[index]  # some of the first step's, both ascending
            given = self._target.backend.linear(state.flatten(0, 1)[chosen], head.weights.head)  # [R, N]
            same = wanted if index == 0 else wanted[torch.searchsorted(places[0], chosen)]
            total = total + STEP_WEIGHT**index * cross_entropy(given, same) / max(1, len(chosen))
        return total

    @torch.no_grad()
    def _wanted(self, batch: Sequences, places: Tensor) -> Tensor:
        """The target's distribution over the draft vocabulary behind R tokens of the flattened batch: [R, N]."""
        config = self._target.config
        final = batch.hidden[..., : config.hidden_size].flatten(0, 1)[places]
        logits = self._target.backend.logits(final, Linear(self._rows), config.logits_softcap)
        return logits.softmax(-1).to(self._target.dtype)

    def _dense(self, *, rounded: bool) -> EagleWeights[Linear]:
        matrices = {name: self._matrix(name) for name in MATRICES}
        if rounded:
            matrices = {name: _straight_through(matrix, self.recipe.bits) for name, matrix in matrices.items()}
        norms = {name: self._parameters[name] for name in NORMS} | {INNER_NORMS: self._inner_norms}
        return EagleWeights.from_parts({n: Linear(m) for n, m in matrices.items()}, norms, self._token_ids)

    def _matrix(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        return parameter * self._input_scale if name == "fc" else parameter

    def _make_optimizers(self) -> list[Optimizer]:
        rate = self.recipe.learning_rate
        hidden = [self._parameters[name] for name in MATRICES if name != "head"]
        others = [self._parameters[name] for name in ("head", *NORMS)]
        return [
            Muon(hidden, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=self._target.device.type == "cuda"),
        ]

    def _set_rates(self, number: int) -> None:
        """Linear warm-up, then a cosine to zero."""
        total = self.recipe.total_steps
        warm = max(1, round(WARMUP * total))
        share = (
            (number + 1) / warm if number < warm else 0.5 * (1 + math.cos(math.pi * (number - warm) / (total - warm)))
        )
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.learning_rate * share

    def _autocast(self) -> AbstractContextManager[Any]:
        device = self._target.device.type
        return torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext()


def batch_order(seed: int, num_batches: int, total_steps: int) -> Iterator[int]:
    """Which batch each step takes: all of them in a new order, again and again."""
    for begin in range(0, total_steps, num_batches):
        generator = torch.Generator().manual_seed(shard_seed(seed, -1 - begin))
        yield from torch.randperm(num_batches, generator=generator)[: total_steps - begin].tolist()


def _rounded(matrix: Tensor, bits: int) -> QuantizedMatrix:
    return round_to_nearest(matrix.detach(), bits, group_for(matrix.shape[1]))


def _straight_through(matrix: Tensor, bits: int) -> Tensor:
    """The rounded matrix, with the gradient of the exact one."""
    return matrix + (_rounded(matrix, bits).dequantize() - matrix).detach()


def _initial(name: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Products of unit rows are unit rows; what is added to the residual stream begins at half of it."""
    gain = 0.5 if name in ("output", "down") else 1.0
    initial: Tensor = torch.randn(shape, generator=generator) * gain * shape[1] ** -0.5
    return initial


def _row_of(token_ids: Tensor, vocab_size: int) -> Tensor:
    """[V]: the row of each token in the draft vocabulary, -1 if it has none."""
    rows = torch.full((vocab_size,), -1, device=token_ids.device)
    rows[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    return rows


@torch.no_grad()
def _input_scales(target: Decoder, sample: Sequences) -> tuple[Tensor, Tensor]:
    """What makes each input of the head about 1, so that one learning rate fits all of them.

    The first, [(1 + F) C], becomes part of `fc`; the other, [F - 1, C], a norm of each inner state: those have channels hundreds of
    times larger than others, which no group of four-bit weights can even out.
    """
    config, backend = target.config, target.backend
    embedded = backend.embed(target.weights.embedding.weight, sample.ids.flatten(), config.embedding_scale)
    final, *inner = sample.hidden.flatten(0, 1).split(config.hidden_size, -1)
    ones = torch.ones(config.hidden_size, device=target.device)
    levelled = [_inverse(backend.rms_norm(x, ones, config.rms_norm_eps)) for x in inner]
    norms = torch.stack(levelled) if inner else ones.new_empty(0, config.hidden_size)
    return torch.cat((_inverse(embedded), _inverse(final), ones.repeat(len(inner)))), norms


def _inverse(x: Tensor) -> Tensor:
    """[R, C] -> [C]: one over the root of the mean square."""
    return x.float().square().mean(0).sqrt().clamp_min(_LEAST_SCALE).reciprocal()

"""Which products lose most when they are rounded, and how to spend a budget of bits where it helps.

The loss that rounding a product causes is estimated to second order: 1/2 sum over rows r of G_r sum over inputs j of D_j dw_rj^2,
with G the second moment of the gradient at the product's outputs (labels drawn from the model itself, so it is the Fisher
information) and D what feedback leaves of the inputs' second moments. A budget is then spent greedily: the next step up goes
where it saves most per bit. Knows no file format; a choice obeys what loaders need, one scheme for all matrices of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.console import progress
from triblade.errors import ConfigError
from triblade.models.config import ModelConfig
from triblade.models.decoder import Decoder, DenseAttend
from triblade.models.weights import DenseReader
from triblade.ops.backend import Backend, Linear
from triblade.quant.gptq import conditional_variances
from triblade.quant.layer import FIELDS, BatchAttend
from triblade.quant.plan import Losses, Schemes, average_bits, elements, inputs_of
from triblade.quant.quantize import Job, decoder_without_layers
from triblade.quant.ranges import search_grid
from triblade.quant.rescale import balanced_scales
from triblade.quant.scheme import QuantScheme
from triblade.quant.statistics import Accumulator

SEQUENCES = 16  # of the calibration text
GRADIENT_LENGTH = 256  # tokens of a sequence that gradients are taken on


@dataclass(slots=True)
class _Gradients:
    """A backend that listens: second moments of the gradients at the outputs of every product."""

    backend: Backend
    moments: dict[int, Tensor]  # by the identity of a Linear: [out]

    def __getattr__(self, name: str) -> object:
        return getattr(self.backend, name)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """See `Backend.linear`."""
        result = self.backend.linear(x, linear)
        if result.requires_grad:
            result.register_hook(lambda gradient: self._add(id(linear), gradient))
        return result

    def _add(self, key: int, gradient: Tensor) -> None:
        moment = gradient.float().square().sum(0)
        self.moments[key] = self.moments[key].add_(moment) if key in self.moments else moment


def output_gradients(job: Job) -> list[dict[str, Tensor]]:
    """By layer and product, mean squared gradients [out] of the log-likelihood of labels that the model draws itself."""
    assert job.ids is not None
    listening = _Gradients(job.backend, {})
    decoder = job.model.load(GRADIENT_LENGTH, cast(Backend, listening), job.device)
    sequences = job.ids[:SEQUENCES, :GRADIENT_LENGTH].to(job.device)
    generator = torch.Generator(job.device).manual_seed(0)
    with progress("looking for sensitive layers", len(sequences), unit="sequences") as advance, torch.enable_grad():
        for ids in sequences:
            _backward(decoder, ids, generator)
            advance(1)
    count = sequences.numel()
    layers = decoder.weights.layers
    return [{name: listening.moments[id(getattr(layer, name))] / count for name in FIELDS} for layer in layers]


def _backward(decoder: Decoder, ids: Tensor, generator: torch.Generator) -> None:
    positions = torch.arange(len(ids), device=ids.device)
    attend = DenseAttend(decoder.config, decoder.backend, len(ids), ids.device)
    # The embedding is where the graph begins: weights have no gradients, hidden states do.
    embedding = decoder.weights.embedding
    tracked = replace(embedding, weight=embedding.weight.detach().requires_grad_())
    started = Decoder(
        decoder.config, replace(decoder.weights, embedding=tracked), decoder.backend, decoder.context_length
    )
    logits = decoder.logits(started.forward(ids, positions, attend))
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
    F.cross_entropy(logits, labels, reduction="sum").backward()


@torch.no_grad()
def estimate_losses(job: Job, candidates: Sequence[QuantScheme]) -> Losses:
    """What each product of each layer would lose under each candidate."""
    gradients = output_gradients(job)
    assert job.ids is not None
    ids = job.ids[:SEQUENCES].to(job.device)
    decoder = decoder_without_layers(job)
    reader = DenseReader(job.model.checkpoint, job.model.config, job.model.dtype, job.device)
    table = decoder.weights.embedding.weight
    hidden = decoder.backend.embed(table, ids.flatten(), job.model.config.embedding_scale)  # [T, C]
    losses = []
    with progress("estimating losses", len(gradients), unit="layers") as advance:
        for index, gradient in enumerate(gradients):
            probe = _LayerProbe(decoder, index, reader, gradient, candidates, ids.shape[1])
            hidden = probe.run(hidden)
            losses.append(probe.losses)
            advance(1)
    return losses


class _LayerProbe:
    """One layer of the original, with the losses of its products."""

    def __init__(
        self,
        decoder: Decoder,
        index: int,
        reader: DenseReader,
        gradients: Mapping[str, Tensor],
        candidates: Sequence[QuantScheme],
        length: int,
    ) -> None:
        self._decoder, self._index = decoder, index
        self._layer = reader.layer(index)
        self._gradients, self._candidates = gradients, candidates
        self._attend = BatchAttend(decoder, length)
        self._length = length
        self.losses: dict[str, dict[QuantScheme, float]] = {}

    def run(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, C] in front of the layer to those behind it."""
        decoder, layer = self._decoder, self._layer
        ops, eps = decoder.backend, decoder.config.rms_norm_eps
        self._look("qkv", ops.rms_norm(hidden, layer.input_norm, eps))
        positions = torch.arange(self._length, device=hidden.device).repeat(len(hidden) // self._length)
        rope = decoder.rotations(positions)[decoder.config.layers[self._index].rope]
        mixed = decoder.attention_mix(self._index, layer, hidden, rope, self._attend)
        self._look("output", mixed)
        hidden = hidden + decoder.attention_out(layer, mixed)
        self._look("gate_up", ops.rms_norm(hidden, layer.mlp_norm, eps))
        mixed = decoder.mlp_mix(layer, hidden)
        self._look("down", mixed)
        return hidden + decoder.mlp_out(layer, mixed)

    def _look(self, name: str, inputs: Tensor) -> None:
        accumulator = Accumulator(name)
        accumulator.add(inputs)
        statistics = accumulator.result()
        weight = getattr(self._layer, name).weight.float()
        self.losses[name] = {}
        # One search for all schemes: it is most of the work, and other groups would move the scales little.
        scales = balanced_scales(weight, statistics, self._candidates[0])
        scaled, costs = weight * scales, conditional_variances(statistics.divided(scales).hessian)
        for scheme in self._candidates:
            grid = search_grid(scaled, costs, scheme, torch.float32)
            lost = (grid.values(grid.codes(scaled)) - scaled).square() @ costs  # [out]
            self.losses[name][scheme] = (self._gradients[name] @ lost).item() / 2


def spend(config: ModelConfig, losses: Losses, bits: float) -> list[Schemes]:
    """Schemes of every layer within `bits` per weight on average, scales included.

    Raises:
        ConfigError: even the cheapest scheme takes more.
    """
    plan: list[dict[str, QuantScheme | None]] = [
        {name: min(found, key=_cost(config, name)) for name, found in layer.items()} for layer in losses
    ]
    least = average_bits(config, plan)
    if least > bits:
        raise ConfigError(f"average bits must be at least {least:.3f} here, got: {bits}", param="average_bits")
    total = sum(elements(config, i, name) for i, layer in enumerate(losses) for name in layer)
    room = (bits - least) * total
    while True:
        steps = [
            step
            for index, layer in enumerate(losses)
            for name in layer
            for step in _steps(config, losses, plan, (index, name))
            if step[1] <= room
        ]
        if not steps:
            return list(plan)
        _, price, index, name, scheme = max(steps, key=lambda step: step[0])
        plan[index][name] = scheme
        room -= price


def _steps(
    config: ModelConfig, losses: Losses, plan: Sequence[Schemes], place: tuple[int, str]
) -> list[tuple[float, float, int, str, QuantScheme]]:
    """(saving per bit, bits, layer, product, scheme) of every scheme that costs more than the present one and loses less."""
    index, name = place
    now = plan[index][name]
    assert now is not None
    cost, found = _cost(config, name), losses[index][name]
    result = []
    for scheme, loss in found.items():
        price = (cost(scheme) - cost(now)) * elements(config, index, name)
        saving = found[now] - loss
        if price > 0 and saving > 0:
            result.append((saving / price, price, index, name, scheme))
    return result


def _cost(config: ModelConfig, name: str) -> Callable[[QuantScheme], float]:
    """Bits per weight of a scheme in a product."""
    inputs = inputs_of(config, name)
    return lambda scheme: scheme.bits_per_weight(inputs)


def candidates(config: ModelConfig, scheme: QuantScheme, bits: float) -> list[QuantScheme]:
    """What to choose from: 4 bits in the group size given and half of it, 8 bits, and 3 bits where the budget asks for them."""
    widths = [inputs_of(config, name) for name in FIELDS]
    groups: list[int | None] = [scheme.group_size]
    if scheme.group_size is not None and scheme.group_size >= 64:
        groups.append(scheme.group_size // 2)
    allowed = [group for group in groups if group is None or all(width % group == 0 for width in widths)]
    found = [replace(scheme, bits=b, group_size=group) for b in (3, 4) for group in allowed]
    cheapest_of_four = min(s.bits_per_weight(max(widths)) for s in found if s.bits == 4)
    return [*(s for s in found if s.bits != 3 or bits < cheapest_of_four), replace(scheme, bits=8)]

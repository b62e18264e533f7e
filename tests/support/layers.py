"""A fixed linear layer with inputs as language models have them: correlated, some channels much larger than others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triblade.quant.passes import Work, recipe
from triblade.quant.scheme import QuantScheme
from triblade.quant.statistics import Accumulator, InputStatistics


@dataclass(frozen=True)
class FixedLayer:
    """Weights and both models' inputs for the same tokens."""

    weight: Tensor  # [out, in]
    inputs: Tensor  # [T, in]
    original: Tensor  # [T, in]

    @property
    def statistics(self) -> InputStatistics:
        accumulator = Accumulator("layer")
        for x, o in zip(self.inputs.split(100), self.original.split(100), strict=True):
            accumulator.add(x, o)
        return accumulator.result()

    def rounding_error(self, weight: Tensor) -> float:
        """Mean squared distance of the outputs from those of the original's weights on the same inputs."""
        return (self.inputs @ (weight - self.weight).T).square().mean().item()

    def error(self, weight: Tensor) -> float:
        """Mean squared distance of the outputs from the original's, whose inputs are its own."""
        return (self.inputs @ weight.T - self.original @ self.weight.T).square().mean().item()


def fixed_layer(rows: int = 48, inputs: int = 64, tokens: int = 700, seed: int = 0) -> FixedLayer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    mixing = torch.eye(inputs) + 0.4 * normal(inputs, inputs) / inputs**0.5
    spread = (0.8 * normal(inputs)).exp()
    spread[3] *= 12
    original = normal(tokens, inputs) @ mixing * spread
    drifted = original + 0.05 * normal(tokens, inputs) * spread - 0.08 * original.roll(1, 1)
    return FixedLayer(0.3 * normal(rows, inputs) / spread.sqrt(), drifted, original)


def quantized(layer: FixedLayer, method: str, scheme: QuantScheme) -> Tensor:
    """The dequantized weights that a method makes of the layer, with its channel scales undone: [out, in]."""
    steps = recipe(method)
    statistics = layer.statistics
    work = Work(
        name="layer", weight=layer.weight, scheme=scheme, scale_type=torch.float16, statistics=statistics, sharing=None
    )
    work = steps.scaled(work)
    scales = torch.ones(layer.weight.shape[1]) if work.scales is None else work.scales
    scaled = Work(
        name="layer",
        weight=layer.weight * scales,
        scheme=scheme,
        scale_type=torch.float16,
        statistics=statistics.divided(scales),
    )
    done = steps.rounded(scaled)
    assert done.grid is not None
    assert done.codes is not None
    return done.grid.matrix(done.codes, torch.float16).dequantize() / scales

"""Quantize one decoder layer: product after product, each on the inputs that the products before it make once they are quantized.

    input norm -> q, k, v -> attention -> output -> + -> norm -> gate, up -> activation -> down -> +

A product's channel scales are folded into whoever makes its inputs: a norm, the rows of v (one scale for all query heads that read
the same value), or the rows of up. Folding into rows that have codes already divides their scales; what is stored of a norm is
rounded, so the product takes the scales that really came out. Knows no file; what is left of a layer is codes and dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from triblade import host
from triblade.config import BiasMode
from triblade.models.config import ModelConfig
from triblade.models.decoder import Decoder, LayerWeights, window_mask
from triblade.models.weights import layer_modules, layer_prefix, mlp_norm_name
from triblade.ops.backend import Linear
from triblade.quant.bias import bias_importance, corrected_bias, rounded_bias
from triblade.quant.passes import Recipe, Work
from triblade.quant.ranges import Grid, storable
from triblade.quant.refine import row_errors
from triblade.quant.scheme import IntegerMatrix, QuantScheme
from triblade.quant.statistics import Accumulator, InputStatistics
from triblade.quant.streams import Streams

FIELDS = ("qkv", "output", "gate_up", "down")  # of LayerWeights, in the order of the data

Batch = tuple[
    Tensor, Tensor | None, Tensor | None
]  # inputs [T, in], the original's, what the residual stream lacks [T, C]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings:
    """How to quantize a layer; the scheme of a product is None where it stays dense."""

    recipe: Recipe
    schemes: Mapping[str, QuantScheme | None]
    scale_type: torch.dtype
    store_type: torch.dtype  # of dense tensors
    bias: BiasMode = "correct"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """What is stored of a layer: quantized matrices, dense tensors that changed, and error shares for the report."""

    matrices: dict[str, IntegerMatrix] = field(default_factory=dict)  # by module name
    dense: dict[str, Tensor] = field(default_factory=dict)  # by tensor name
    errors: dict[str, float] = field(default_factory=dict)  # by product: squared output error over squared output
    drift: float | None = None  # of the hidden states behind the layer


@dataclass(frozen=True, slots=True)
class _Rounded:
    grid: Grid
    codes: Tensor


class LayerQuantizer:
    """One layer of one model.

    Args:
        decoder: tells how the model computes; its own layers are not used.
        index: of the layer.
        original: its weights; they stay as they are.
        settings: what to do.
        streams: the calibration text in front of this layer, afterwards behind it; None: no calibration.
    """

    def __init__(
        self,
        decoder: Decoder,
        index: int,
        original: LayerWeights[Linear],
        settings: LayerSettings,
        streams: Streams | None,
    ) -> None:
        self._decoder, self._config, self._index = decoder, decoder.config, index
        self._original, self._working = original, original
        self._settings, self._streams = settings, streams
        self._rounded: dict[str, _Rounded] = {}
        self._bias_importance: dict[str, Tensor] = {}  # [out], of quantized products with a bias
        self._errors: dict[str, float] = {}
        if streams is not None:
            length = streams.sequence_length
            self._attend = BatchAttend(decoder, length)
            rope = decoder.rotations(torch.arange(length, device=decoder.device))[self._config.layers[index].rope]
            self._rope = rope

    @torch.no_grad()
    def run(self) -> LayerResult:
        """Quantize the layer and move the streams behind it."""
        for name in FIELDS:
            self._quantize(name, self._statistics(name))
            host.return_free_memory()  # or every product would add to the peak what it left behind
        if self._streams is not None:
            for batch in self._streams.batches():
                self._add(
                    batch, self._decoder.mlp_out(self._working, self._mixed(batch, self._config.intermediate_size))
                )
        drift = None if self._streams is None else self._streams.drift()
        return self._result(drift)

    def _quantize(self, name: str, statistics: InputStatistics | None) -> None:
        scheme = self._settings.schemes[name]
        if scheme is None:
            return
        linear: Linear = getattr(self._working, name)
        sharing = value_sharing(self._config) if name == "output" else None
        if sharing is not None:
            sharing = sharing.to(linear.weight.device)
        work = Work(
            name=f"{layer_prefix(self._index)}{name}",
            weight=linear.weight.float(),
            scheme=scheme,
            scale_type=self._settings.scale_type,
            statistics=statistics,
            sharing=sharing,
        )
        work = self._settings.recipe.scaled(work)
        if work.scales is not None:
            work = self._fold(name, work, work.scales)
        work = self._settings.recipe.rounded(work)
        assert work.grid is not None
        assert work.codes is not None
        bias = linear.bias
        if bias is not None:
            self._bias_importance[name] = bias_importance(work)
            if self._settings.bias != "keep" and work.statistics is not None:
                bias = corrected_bias(bias, work)
        self._store(name, _Rounded(work.grid, work.codes), bias)
        if work.statistics is not None:
            self._errors[name] = _relative_error(work)

    def _store(self, name: str, rounded: _Rounded, bias: Tensor | None) -> None:
        self._rounded[name] = rounded
        dtype = getattr(self._original, name).weight.dtype
        if bias is not None and self._settings.bias == "int8":
            bias = rounded_bias(bias, self._bias_importance[name])
        bias = None if bias is None else bias.to(dtype)
        linear = Linear(rounded.grid.values(rounded.codes).to(dtype), bias)
        self._change(name, linear)

    def _change(self, name: str, value: Any) -> None:
        self._working = replace(self._working, **{name: value})

    # Folding.

    def _fold(self, name: str, work: Work, scales: Tensor) -> Work:
        """Let the inputs of product `name` be made divided by `scales` [in]; the work in those scales."""
        if name in ("qkv", "gate_up"):
            scales = self._fold_into_norm("input_norm" if name == "qkv" else "mlp_norm", scales)
        else:
            maker, count = ("qkv", self._config.kv_size) if name == "output" else ("gate_up", len(scales))
            rows = scales
            if work.sharing is not None:  # any channel of a value row has the row's scale
                rows = scales.new_ones(count).index_copy_(0, work.sharing, scales)
            self._fold_into_rows(maker, rows)
            if self._streams is not None:
                for batch in self._streams.batches():
                    self._mixed(batch, len(scales)).div_(scales.to(self._streams.mixed.dtype))
        statistics = None if work.statistics is None else work.statistics.divided(scales)
        return replace(work, weight=work.weight * scales, statistics=statistics, scales=None)

    def _fold_into_norm(self, name: str, scales: Tensor) -> Tensor:
        """Divide a norm's weight, as it will be stored; the scales that came out."""
        weight: Tensor = getattr(self._working, name)
        stored = (weight / scales - self._config.norm_offset).to(self._settings.store_type)
        folded = stored.float() + self._config.norm_offset
        usable = (folded != 0) & torch.isfinite(weight / folded) & (weight / folded > 0)
        folded = torch.where(usable, folded, weight)
        self._change(name, folded)
        return torch.where(usable, weight / folded, 1.0)

    def _fold_into_rows(self, name: str, scales: Tensor) -> None:
        """Divide the last rows of a product that is quantized already, or dense."""
        linear: Linear = getattr(self._working, name)
        divisor = torch.cat((scales.new_ones(len(linear.weight) - len(scales)), scales))
        bias = None if linear.bias is None else (linear.bias.float() / divisor).to(linear.bias.dtype)
        rounded = self._rounded.get(name)
        if rounded is None:
            weight = (linear.weight.float() / divisor[:, None]).to(linear.weight.dtype)
            self._change(name, Linear(weight, bias))
            return
        if bias is not None:
            self._bias_importance[name] *= divisor.square()
        divided = storable(rounded.grid.scales / divisor[:, None], self._settings.scale_type)
        self._store(name, _Rounded(replace(rounded.grid, scales=divided), rounded.codes), bias)

    # The calibration text.

    def _statistics(self, name: str) -> InputStatistics | None:
        """Run the text up to the inputs of product `name` and sum them up."""
        if self._streams is None:
            return None
        make: Callable[[slice], Batch] = getattr(self, f"_{name}_inputs")
        accumulator = Accumulator(f"{layer_prefix(self._index)}{name}")
        for batch in self._streams.batches():
            inputs, original, residual = make(batch)
            if self._settings.schemes[name] is not None:
                accumulator.add(inputs, original, residual)
        return None if self._settings.schemes[name] is None else accumulator.result()

    def _qkv_inputs(self, batch: slice) -> Batch:
        return self._normed(batch, "input_norm")

    def _output_inputs(self, batch: slice) -> Batch:
        mixed = self._attended(self._working, self._hidden(batch))
        self._mixed(batch, mixed.shape[1]).copy_(mixed)
        hidden = self._original_hidden(batch)
        if hidden is None:
            return mixed, None, None
        original = self._attended(self._original, hidden)
        residual = self._residual(batch)
        hidden += self._decoder.attention_out(self._original, original)
        return mixed, original, residual

    def _gate_up_inputs(self, batch: slice) -> Batch:
        self._add(batch, self._decoder.attention_out(self._working, self._mixed(batch, self._config.q_size)))
        return self._normed(batch, "mlp_norm")

    def _down_inputs(self, batch: slice) -> Batch:
        mixed = self._decoder.mlp_mix(self._working, self._hidden(batch))
        self._mixed(batch, mixed.shape[1]).copy_(mixed)
        hidden = self._original_hidden(batch)
        if hidden is None:
            return mixed, None, None
        original = self._decoder.mlp_mix(self._original, hidden)
        residual = self._residual(batch)
        hidden += self._decoder.mlp_out(self._original, original)
        return mixed, original, residual

    def _normed(self, batch: slice, norm: str) -> Batch:
        ops, eps = self._decoder.backend, self._config.rms_norm_eps
        inputs = ops.rms_norm(self._hidden(batch), getattr(self._working, norm), eps)
        hidden = self._original_hidden(batch)
        return inputs, None if hidden is None else ops.rms_norm(hidden, getattr(self._original, norm), eps), None

    def _attended(self, layer: LayerWeights[Linear], hidden: Tensor) -> Tensor:
        repeat = len(hidden) // self._rope[0].shape[0]
        rope = (self._rope[0].repeat(repeat, 1), self._rope[1].repeat(repeat, 1))
        return self._decoder.attention_mix(self._index, layer, hidden, rope, self._attend)

    def _residual(self, batch: slice) -> Tensor | None:
        """What the residual stream lacks; unknown where a norm stands between the product and the stream."""
        hidden = self._original_hidden(batch)
        if hidden is None or self._config.post_norms:
            return None
        return hidden.float() - self._hidden(batch).float()

    def _hidden(self, batch: slice) -> Tensor:
        assert self._streams is not None
        return self._streams.quantized[batch].flatten(0, 1)  # [T, C], a view

    def _original_hidden(self, batch: slice) -> Tensor | None:
        assert self._streams is not None
        return None if self._streams.original is None else self._streams.original[batch].flatten(0, 1)

    def _mixed(self, batch: slice, width: int) -> Tensor:
        assert self._streams is not None
        return self._streams.mixed[batch].flatten(0, 1)[:, :width]

    def _add(self, batch: slice, update: Tensor) -> None:
        self._hidden(batch).add_(update)

    # What is left.

    def _result(self, drift: float | None) -> LayerResult:
        result = LayerResult(errors=self._errors, drift=drift)
        for name, parts in layer_modules(self._config, self._index).items():
            start = 0
            for module, count in parts:
                self._put(result, name, module, slice(start, start + count))
                start += count
        for name, tensor in (
            ("input_norm", f"{layer_prefix(self._index)}input_layernorm.weight"),
            ("mlp_norm", mlp_norm_name(self._config, self._index)),
        ):
            if getattr(self._working, name) is not getattr(self._original, name):
                stored = getattr(self._working, name) - self._config.norm_offset
                result.dense[tensor] = stored.to(self._settings.store_type)
        return result

    def _put(self, result: LayerResult, name: str, module: str, rows: slice) -> None:
        linear: Linear = getattr(self._working, name)
        bias = None if linear.bias is None else linear.bias[rows].to(self._settings.store_type)
        rounded = self._rounded.get(name)
        if rounded is not None:
            grid = rounded.grid.rows(rows)
            result.matrices[module] = grid.matrix(rounded.codes[rows], self._settings.scale_type, bias)
        elif linear is not getattr(self._original, name):
            result.dense[f"{module}.weight"] = linear.weight[rows].to(self._settings.store_type)
            if bias is not None:
                result.dense[f"{module}.bias"] = bias


class BatchAttend:
    """Attention of sequences of one length over themselves, laid end to end."""

    def __init__(self, decoder: Decoder, length: int) -> None:
        self._decoder, self._length = decoder, length
        positions = torch.arange(length, device=decoder.device)[None]
        self._masks = {layer.window: window_mask(positions, length, layer.window) for layer in decoder.config.layers}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self._decoder.config
        q, k, v = (x.unflatten(0, (-1, self._length)) for x in (q, k, v))  # [S, L, heads, D]
        mask = self._masks[config.layers[layer].window]
        attended = self._decoder.backend.attention(q, k, v, mask, config.attention_scale, config.attention_softcap)
        return attended.flatten(0, 1)


def value_sharing(config: ModelConfig) -> Tensor:
    """The value row [H * D] that each input of the output projection comes from."""
    heads = torch.arange(config.num_heads) // (config.num_heads // config.num_kv_heads)
    return (heads[:, None] * config.head_dim + torch.arange(config.head_dim)).flatten()


def _relative_error(work: Work) -> float:
    assert work.statistics is not None
    assert work.grid is not None
    assert work.codes is not None
    hessian = work.statistics.hessian
    error = row_errors(work.weight, work.grid.values(work.codes), hessian).sum()
    total = row_errors(work.weight, torch.zeros_like(work.weight), hessian).sum()
    return (error / total.clamp_min(torch.finfo(torch.float32).tiny)).item()

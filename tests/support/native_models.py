"""Tiny models as native programs, and the reference decoder made to round where the kernels round."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tiny import LONGROPE, StateDictSource, TinyModel, tiny_model
from torch import Tensor

from triblade.engine.executor import StepExecutor, TorchExecutor
from triblade.engine.native import NativeExecutor
from triblade.engine.native_program import NativeOptions, make_team
from triblade.engine.request import Request
from triblade.engine.scheduler import ScheduledRequest
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.config import ModelConfig, model_config
from triblade.models.decoder import Decoder
from triblade.models.weights import load_weights
from triblade.ops.attention import eager_attention
from triblade.ops.backend import AttentionMask, Linear
from triblade.ops.reference import ReferenceBackend
from triblade.quant.packed_weights import SCHEME_BITS, PackingReader, group_for
from triblade.quant.rounded_checkpoint import RoundedCheckpoint
from triblade.sampling_params import SamplingParams

# Sizes that the kernels take: hidden and head sizes of whole lanes. The longrope factors are per rotary pair.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 320}
LONG = {**LONGROPE, **{f"{kind}_factor": [*LONGROPE[f"{kind}_factor"], 9.0, 10.0] for kind in ("short", "long")}}
OVERRIDES: Mapping[str, dict[str, Any]] = {
    "llama-head-dim": {"head_dim": 48},
    "phi3-longrope-short": {"rope_scaling": LONG, "max_position_embeddings": 64},
    "phi3-longrope-long": {"rope_scaling": LONG, "max_position_embeddings": 64},
    "llama-dynamic": {"max_position_embeddings": 64},
}
BLOCK = 16
SEQUENCE_BLOCKS = 68


def native_tiny(name: str, **overrides: Any) -> TinyModel:
    return tiny_model(name, **{**SIZES, **OVERRIDES.get(name, {}), **overrides})


def make_cache(config: ModelConfig, codec: str, arrangement: Any, sequences: int = 4) -> KVCache:
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK,
        codec=codec,
        arrangement=arrangement,
    )
    return KVCache(layout, sequences * SEQUENCE_BLOCKS, torch.float32)


def native_executor(
    model: TinyModel, dtype: torch.dtype = torch.float32, scheme: Any = None, codec: str = "bfloat16", **options: Any
) -> NativeExecutor:
    config = model_config(model.hf_config)
    return executor_of(config, PackingReader(model.source, config, dtype, scheme).read(), codec, **options)


def executor_of(config: ModelConfig, weights: Any, codec: str = "bfloat16", **options: Any) -> NativeExecutor:
    settings = {"vocab_size": config.vocab_size, "max_tokens": 256, "max_rows": 256, **options}
    team = make_team(settings.pop("threads", 2), settings.pop("spin_us", 200))
    cache = make_cache(config, codec, "tiles")
    return NativeExecutor(config, weights, cache, config.context_length, NativeOptions(**settings), team)


def scored(executor: StepExecutor, rows: int) -> Tensor:
    """Logits [R, V] of the first rows of the last step; the greedy tokens without them are checked on the way."""
    scores = executor.score(range(rows), with_logits=True)
    assert scores.logits is not None
    assert executor.score(range(rows), with_logits=False).best == scores.best
    return scores.logits.clone()


class Twin(ReferenceBackend):
    """The reference in float32 with the kernels' roundings: queries to bfloat16, inputs of matrices as their format."""

    def __init__(self, inputs: str, group: int | None = None) -> None:
        super().__init__(eager_attention)
        self._inputs, self._group = inputs, group

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        if self._inputs == "bfloat16":
            x = x.bfloat16().float()
        elif self._inputs == "int8":
            groups = x.unflatten(1, (-1, self._group or group_for(x.shape[1])))
            top = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
            x = ((groups * (127 / top)).round() * (top / 127)).flatten(1)
        return F.linear(x, linear.weight, linear.bias)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, softcap: float | None
    ) -> Tensor:
        return super().attention(q.bfloat16().float(), k, v, mask, scale, softcap)


def rounded_source(model: TinyModel, dtype: torch.dtype, scheme: str | None) -> StateDictSource:
    """The model's tensors as the native weights hold them."""
    if scheme is not None:
        rounded = RoundedCheckpoint(model.source, SCHEME_BITS[scheme])
        return StateDictSource({name: rounded.tensor(name) for name in model.source.tensors})
    matrices = {name: tensor.to(dtype).float() for name, tensor in model.source.tensors.items() if tensor.ndim == 2}
    return StateDictSource(model.source.tensors | matrices)


def twin_executor(
    model: TinyModel, dtype: torch.dtype = torch.float32, scheme: str | None = None, codec: str = "bfloat16"
) -> TorchExecutor:
    config = model_config(model.hf_config)
    weights = load_weights(rounded_source(model, dtype, scheme), config, torch.float32)
    inputs = "int8" if scheme else str(dtype).removeprefix("torch.")
    return TorchExecutor(
        Decoder(config, weights, Twin(inputs), config.context_length),
        make_cache(config, codec, "tokens"),
        config.vocab_size,
    )


def sequence(number: int, tokens: Sequence[int]) -> Request:
    """A request whose blocks are its own: those of place `number`, in falling order."""
    request = Request(
        request_id="", number=number, prompt_token_ids=list(tokens), params=SamplingParams(), seed=0, max_tokens=1
    )
    first = number * SEQUENCE_BLOCKS
    request.block_table = array("i", range(first + SEQUENCE_BLOCKS - 1, first - 1, -1))
    return request


@torch.inference_mode()
def compute(executor: StepExecutor, requests: Sequence[Request], sizes: Sequence[int]) -> list[Tensor]:
    """Advance each request by its size in one step: the logits [Q, V] of each one's tokens."""
    pairs = sorted(zip(requests, sizes, strict=True), key=lambda pair: pair[1])
    items = [ScheduledRequest.next(request, size) for request, size in pairs]
    executor.forward(items)
    logits = scored(executor, sum(sizes)).split([item.num_tokens for item in items])
    for item in items:
        item.request.num_computed_tokens += item.num_tokens
    found = {item.request: rows for item, rows in zip(items, logits, strict=True)}
    return [found[request] for request in requests]


def all_logits(executor: StepExecutor, tokens: Sequence[int], chunk: int | None = None, number: int = 0) -> Tensor:
    """[T, V] of a sequence, computed in chunks."""
    request = sequence(number, tokens)
    rows = []
    while left := len(tokens) - request.num_computed_tokens:
        rows += compute(executor, [request], [min(left, chunk or left)])
    return torch.cat(rows)

"""Models for the GPU benchmarks: real shapes with random weights, made on the device, since speed does not depend on what they say.

Knows the configurations of the models that peers were measured with. Weights are small enough that activations stay finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from triblade.models.config import ModelConfig, model_config
from triblade.models.decoder import DecoderWeights, LayerWeights
from triblade.ops.backend import Linear
from triblade.ops.cuda.packing import CHUNK, TILE_ROWS, DeviceMatrix, pack_dense

Weights = Literal["w4", "bf16"]


def _shape(architecture: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    names: tuple[str, ...] = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    names += ("vocab_size", "max_position_embeddings")
    return {"architectures": [architecture], **dict(zip(names, sizes, strict=True)), **more}


SHAPES: Mapping[str, dict[str, Any]] = {
    "qwen2-7b": _shape("Qwen2ForCausalLM", (3584, 18944, 28, 28, 4, 152064, 32768), rope_theta=1e6, rms_norm_eps=1e-6),
    "llama-3-8b": _shape("LlamaForCausalLM", (4096, 14336, 32, 32, 8, 128256, 8192), rope_theta=5e5, rms_norm_eps=1e-5),
    "qwen3-0.6b": _shape(
        "Qwen3ForCausalLM",
        (1024, 3072, 28, 16, 8, 151936, 40960),
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": _shape(
        "LlamaForCausalLM",
        (576, 1536, 30, 9, 3, 49152, 8192),
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
}


def shape(name: str) -> ModelConfig:
    """The configuration of a model."""
    return model_config(SHAPES[name])


def random_weights(config: ModelConfig, kind: Weights, device: torch.device) -> DecoderWeights[DeviceMatrix]:
    """Random weights; with "w4" the layers' matrices are symmetric int4 in groups of 128 (64 where that does not divide)."""
    q, kv, hidden, inner = config.q_size, config.kv_size, config.hidden_size, config.intermediate_size

    def matrix(rows: int, inputs: int, *, bias: bool = False, gated: bool = False) -> DeviceMatrix:
        return random_matrix(rows, inputs, kind, device, bias=bias, is_gated=gated)

    layers = [
        LayerWeights(
            input_norm=_norm(hidden, device),
            qkv=matrix(q + 2 * kv, hidden, bias=config.qkv_bias),
            qk_norm=_norm(config.head_dim, device).repeat(config.num_heads + config.num_kv_heads, 1)
            if config.qk_norm
            else None,
            output=matrix(hidden, q),
            mlp_norm=_norm(hidden, device),
            gate_up=matrix(2 * inner, hidden, gated=True),
            down=matrix(hidden, inner),
        )
        for _ in range(config.num_layers)
    ]
    embedding = random_matrix(config.vocab_size, hidden, "bf16", device)
    head = embedding if config.tie_word_embeddings else random_matrix(config.vocab_size, hidden, "bf16", device)
    return DecoderWeights(embedding=embedding, layers=layers, final_norm=_norm(hidden, device), head=head)


def random_matrix(
    rows: int, inputs: int, kind: Weights, device: torch.device, *, bias: bool = False, is_gated: bool = False
) -> DeviceMatrix:
    """One matrix of unit gain."""
    own_bias = torch.randn(rows, device=device).mul_(0.1).bfloat16() if bias else None
    if kind == "bf16":
        weight = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16).mul_(inputs**-0.5)
        return pack_dense(Linear(weight, own_bias), is_gated=is_gated)
    group = 128 if inputs % 128 == 0 else 64
    tiles = -(-rows // TILE_ROWS)
    # Codes 1 to 15 have the mean 8: a matrix of another mean answers the sign of its inputs' sum and little else.
    shape = (2, tiles, inputs // CHUNK, 1, 32, 16)
    low, high = torch.randint(1, 16, shape, dtype=torch.uint8, device=device).unbind(0)
    spread = 4.3 * inputs**0.5  # of codes minus 8, times the root of the sum's length
    scales = (0.5 + torch.rand(tiles, inputs // group, 8, 2, device=device)).div_(spread).half()
    return DeviceMatrix(
        bits=4,
        rows=rows,
        inputs=inputs,
        group=group,
        codes=low | high << 4,
        scales=scales,
        bias=own_bias,
        tile_bias=None if own_bias is None else own_bias.float(),
        is_gated=is_gated,
    )


def step_bytes(config: ModelConfig, weights: DecoderWeights[DeviceMatrix], num_sequences: int, context: int) -> int:
    """Fewest bytes that a decode step reads: every matrix of the layers and the head once, and the cache in bfloat16."""
    layers = sum(m.nbytes for w in weights.layers for m in (w.qkv, w.output, w.gate_up, w.down))
    cache = num_sequences * context * config.num_layers * 2 * config.kv_size * 2
    return layers + weights.head.nbytes + cache


def _norm(size: int, device: torch.device) -> Tensor:
    return 0.5 + torch.rand(size, device=device)

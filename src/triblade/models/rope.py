"""Rotary embedding tables for every scaling kind, fixed once per engine so that a cached key never changes its meaning.

Dynamic NTK and longrope depend on the sequence length in `transformers`; here the context length served decides once (as if
every sequence had that length), because keys already in the cache cannot be rotated again. Knows no layer and no batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triblade.models.config import RopeConfig


def rope_table(rope: RopeConfig, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [length, rotary_dim / 2] float32, for positions 0 .. length - 1 of sequences up to `length`."""
    frequencies, magnitude = inverse_frequencies(rope, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)  # [L, D/2]
    return (angles.cos() * magnitude).to(device), (angles.sin() * magnitude).to(device)


def inverse_frequencies(rope: RopeConfig, length: int) -> tuple[Tensor, float]:
    """Rotation per position [rotary_dim / 2] in radians, and the factor on cosine and sine."""
    compute = {
        "default": lambda: (_plain(rope, rope.theta), 1.0),
        "linear": lambda: (_plain(rope, rope.theta) / rope.factor, 1.0),
        "dynamic": lambda: (_plain(rope, _ntk_theta(rope, length)), 1.0),
        "yarn": lambda: _yarn(rope),
        "llama3": lambda: (_llama3(rope), 1.0),
        "longrope": lambda: _longrope(rope, length),
    }
    return compute[rope.kind]()


def _exponents(rope: RopeConfig) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim


def _plain(rope: RopeConfig, theta: float) -> Tensor:
    return 1.0 / theta ** _exponents(rope)


def _ntk_theta(rope: RopeConfig, length: int) -> float:
    """Base stretched so that `length` positions span the trained angles (NTK-aware, dynamic form)."""
    ratio = max(length, rope.original_context) / rope.original_context
    stretch: float = (rope.factor * ratio - (rope.factor - 1)) ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return rope.theta * stretch


def _yarn(rope: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, sections 3.2 and 3.4): interpolate slow dimensions, keep fast ones, ramp between."""

    def dimension(rotations: float) -> float:  # the dimension that turns `rotations` times in the original context
        angle = rope.original_context / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(angle) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    fast = _plain(rope, rope.theta)
    return fast / rope.factor * ramp + fast * (1 - ramp), _yarn_magnitude(rope)


def _yarn_magnitude(rope: RopeConfig) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _llama3(rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, a linear blend between."""
    plain = _plain(rope, rope.theta)
    turns = rope.original_context * plain / (2 * math.pi)  # rotations within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return plain / rope.factor * (1 - blend) + plain * blend


def _longrope(rope: RopeConfig, length: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): searched factors per dimension, one set for short contexts and one for long."""
    factors = rope.long_factor if length > rope.original_context else rope.short_factor
    magnitude = rope.attention_factor
    if magnitude is None:
        magnitude = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
    return _plain(rope, rope.theta) / torch.tensor(factors, dtype=torch.float32), magnitude

"""Layouts with a real rotation, and tables for them from random numbers that are correlated as keys and values are."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from triblade.kv.calibration_fit import FitOptions, fit_table
from triblade.kv.calibration_statistics import KVStatistics
from triblade.kv.layout import KVLayout
from triblade.kv.wire_rotation import rope_identity
from triblade.kv.wire_table import KVTable, TableModel
from triblade.models.config import LayerConfig, ModelConfig, RopeConfig


def rope_of(num_layers: int, head_dim: int, theta: float = 10000.0) -> str:
    """The `rope` field of a layout of plain rotations."""
    config = ModelConfig(
        architecture="Any",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        context_length=64,
        tie_word_embeddings=True,
        layers=(LayerConfig(),) * num_layers,
        ropes=(RopeConfig(rotary_dim=head_dim, theta=theta),),
        attention_scale=1.0,
    )
    return rope_identity(config, 64)


def correlated(num_layers: int, width: int, tokens: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """[L, 2, T, C], of which few directions have most of the variance, and a mean far from zero."""
    shape = torch.Generator().manual_seed(7)
    mix = torch.randn(num_layers, 2, width, width, generator=shape) * torch.logspace(0, -2, width)[:, None]
    mean = 3 * torch.randn(num_layers, 2, 1, width, generator=shape)
    own = torch.Generator().manual_seed(seed)
    return torch.randn(num_layers, 2, tokens, width, generator=own) @ mix * spread + mean


@cache
def table_for(layout: KVLayout, bits: float = 6.0, exact_first: int = 1, exact_last: int = 3) -> KVTable:
    """A table fitted to `correlated` numbers."""
    width = layout.num_kv_heads * layout.head_dim
    statistics = KVStatistics(layout.num_layers, width, 2000)
    statistics.add(correlated(layout.num_layers, width, 4000))
    options = FitOptions(bits=bits, exact_first=exact_first, exact_last=exact_last)
    return fit_table(TableModel.of(layout), statistics.moments(), options)

"""Cached keys back to what they were before the rotary embedding, and forward again: before it they are close to low-rank.

The rotation is read from the layout, whose `rope` field says all of it, scaling included, so both sides of a transfer rotate alike.
Knows positions and layers, no codec and no cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from triblade.models.config import ModelConfig, RopeConfig
from triblade.models.rope import inverse_frequencies

# Kinds whose angles depend on the context length that is served (see `models.rope`).
_DEPEND_ON_LENGTH = ("dynamic", "longrope")


def rope_identity(config: ModelConfig, context_length: int) -> str:
    """Everything that the rotation of a model's cached keys depends on, as JSON: the `rope` field of a KV layout."""
    depends = any(rope.kind in _DEPEND_ON_LENGTH for rope in config.ropes)
    return json.dumps(
        {
            "ropes": [_settings(rope) for rope in config.ropes],
            "layers": [layer.rope for layer in config.layers],
            "length": context_length if depends else 0,
        }
    )


def _settings(rope: RopeConfig) -> dict[str, Any]:
    """Fields that differ from their defaults, so that a new one with its default changes no identity."""
    defaults = asdict(RopeConfig(rotary_dim=0))
    return {name: value for name, value in asdict(rope).items() if value != defaults[name]}


class Rotation:
    """The rotations of a model's layers.

    Args:
        identity: see `rope_identity`.
    """

    def __init__(self, identity: str) -> None:
        content: Mapping[str, Any] = json.loads(identity)
        self._ropes = [RopeConfig(**_tuples(settings)) for settings in content["ropes"]]
        self._length = int(content["length"])
        layers: list[int] = content["layers"]
        self._layers = [[i for i, rope in enumerate(layers) if rope == number] for number in range(len(self._ropes))]

    def undo(self, keys: Tensor, positions: Tensor) -> None:
        """Turn keys [L, T, G, D] float32 of all layers at positions [T] back, in place."""
        self._turn(keys, positions, backwards=True)

    def apply(self, keys: Tensor, positions: Tensor) -> None:
        """Turn keys [L, T, G, D] float32 of all layers at positions [T] forward, in place."""
        self._turn(keys, positions, backwards=False)

    def undo_gradient(self, gradients: Tensor, positions: Tensor) -> None:
        """Gradients [L, T, G, D] by rotated keys into those by keys before the rotation (its transpose), in place."""
        self._turn(gradients, positions, backwards=True, transposed=True)

    @cached_property
    def _frequencies(self) -> list[tuple[Tensor, float]]:
        return [inverse_frequencies(rope, self._length) for rope in self._ropes]

    def _turn(self, x: Tensor, positions: Tensor, *, backwards: bool, transposed: bool = False) -> None:
        for layers, (frequencies, magnitude) in zip(self._layers, self._frequencies, strict=True):
            angles = torch.outer(positions.float(), frequencies.to(positions.device))[:, None]  # [T, 1, R]
            factor = 1 / magnitude if backwards and not transposed else magnitude
            cos, sin = angles.cos() * factor, angles.sin() * (-factor if backwards else factor)
            half = cos.shape[-1]
            rows = x if len(layers) == x.shape[0] else x[layers]
            first, second = rows[..., :half].clone(), rows[..., half : 2 * half].clone()
            rows[..., :half] = first * cos - second * sin
            rows[..., half : 2 * half] = second * cos + first * sin
            if rows is not x:
                x[layers] = rows


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}

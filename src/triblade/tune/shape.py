"""What the planner knows of a model: its shape, and how its weights are stored. Knows no file; see `open_shape`."""

from __future__ import annotations

from dataclasses import dataclass

from triblade.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model that was not loaded.

    Attributes:
        stored_bits: of its weights' codes; 16: none, so that the planner may choose.
        has_head: an eagle head for it comes with the package.
    """

    name: str
    config: ModelConfig
    stored_bits: int = 16
    has_head: bool = False

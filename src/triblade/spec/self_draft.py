"""A draft made of the target's own checkpoint: its first layers, lower precision, or both. Nothing to download, nothing to align.

Knows checkpoints and configurations, no executor. Which precision helps where is a matter of kernels: packed weights are read from
the same checkpoint by a scheme of their own, and only engines without such kernels need the rounded numbers from here.
"""

from __future__ import annotations

from dataclasses import replace

from triblade.errors import ConfigError
from triblade.models.loader import OpenModel
from triblade.quant.rounded_checkpoint import RoundedCheckpoint


def first_layers(target: OpenModel, num_layers: int) -> OpenModel:
    """The target without its last layers: the head reads what the first `num_layers` say (Draft & Verify, Zhang et al. 2024, skips
    layers anywhere; a leading part keeps the KV layout one range).

    Raises:
        ConfigError: the target has not that many layers, or no more than that.
    """
    config = target.config
    if not 1 <= num_layers < config.num_layers:
        raise ConfigError(
            f"a draft of {num_layers} layers cannot be made of {target.name}, which has {config.num_layers}",
            hint=f"use 1 to {config.num_layers - 1} layers",
        )
    shorter = replace(
        config,
        num_layers=num_layers,
        layers=config.layers[:num_layers],
        skipped_layers=config.skipped_layers + config.num_layers - num_layers,
    )
    return replace(target, name=f"{target.name} (first {num_layers} layers)", config=shorter)


def rounded(model: OpenModel, bits: int) -> OpenModel:
    """The model with its weights rounded to nearest as they are read."""
    return replace(model, name=f"{model.name} ({bits} bits)", checkpoint=RoundedCheckpoint(model.checkpoint, bits))

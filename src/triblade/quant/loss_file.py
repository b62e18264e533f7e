"""Estimated losses on disk: a second budget for the same model and text asks nothing of the model again.

One JSON file: what it was made from, and by layer, product and scheme the loss in nats per token. It is written under a temporary
name first, so a file that is there is complete. Knows nothing of how losses are estimated or spent.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triblade.errors import CheckpointError, ConfigError, TribladeError
from triblade.files import written_whole
from triblade.models.json_files import read_json_object
from triblade.quant.plan import Losses
from triblade.quant.scheme import QuantScheme

log = logging.getLogger(__name__)


def save_losses(path: Path, losses: Losses, made_from: Mapping[str, str]) -> None:
    """Write losses, and the model and the text they belong to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"made_from": dict(made_from), "layers": [_plain(layer) for layer in losses]}
    with written_whole(path) as part:
        part.write_text(json.dumps(content, indent=1))


def load_losses(path: Path, wanted: Sequence[QuantScheme], made_from: Mapping[str, str]) -> Losses | None:
    """Losses of the schemes `wanted`; None: no such file, or it lacks one of them.

    Raises:
        ConfigError: it was made from another model or text.
        CheckpointError: it is damaged.
    """
    if not path.is_file():
        return None
    content = read_json_object(path)
    found = content.get("made_from")
    if found != dict(made_from):
        raise ConfigError(
            f"the losses in {path} were estimated for another model, text or type",
            hint="name another file, or delete this one",
            param="sensitivity",
        )
    try:
        layers = [_parsed(layer, wanted) for layer in content["layers"]]
    except (KeyError, TypeError, ValueError, AttributeError, TribladeError) as error:
        raise CheckpointError(f"cannot read the losses in {path}: {error!r}", hint="delete the file") from error
    if any(set(product) != set(wanted) for layer in layers for product in layer.values()):
        log.info("%s lacks some of the schemes; estimating again", path)
        return None
    log.info("losses as estimated before: %s", path)
    return layers


def _plain(layer: Mapping[str, Mapping[QuantScheme, float]]) -> dict[str, list[dict[str, Any]]]:
    return {
        product: [{**asdict(scheme), "loss": loss} for scheme, loss in found.items()]
        for product, found in layer.items()
    }


def _parsed(
    layer: Mapping[str, Sequence[Mapping[str, Any]]], wanted: Sequence[QuantScheme]
) -> dict[str, dict[QuantScheme, float]]:
    parsed: dict[str, dict[QuantScheme, float]] = {}
    for product, entries in layer.items():
        parsed[product] = {}
        for entry in entries:
            loss = float(entry["loss"])
            if not math.isfinite(loss):
                raise ValueError(f"{product} has the loss {loss}")
            scheme = QuantScheme(**{name: value for name, value in entry.items() if name != "loss"})
            if scheme in wanted:
                parsed[product][scheme] = loss
    return parsed

"""Read a model's shape without its weights: config.json or the header of a GGUF file, from disk, a package or the hub.

Of a Hugging Face repository only config.json is fetched, so a plan for a model of any size takes seconds.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from triblade.errors import ConfigError
from triblade.models.config import ModelConfig, model_config
from triblade.models.hub_source import fetch_configuration
from triblade.models.json_files import read_json_object
from triblade.models.source import is_repository, resolve
from triblade.tune.shape import ModelShape

CONFIG = "config.json"
GGUF_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # the others are expanded to 16 bits while loading
LARGEST_MATRIX = "model.layers.0.mlp.down_proj.weight"
# What a head names of its target beside its shape: the planner cannot know these without opening the model.
NOT_SHAPE = frozenset({"rope", "tokenizer", "checkpoint"})


def open_shape(name: str) -> ModelShape:
    """A model by any of its names.

    Raises:
        TribladeError: there is no such model, or it is none that can be served.
    """
    path = fetch_configuration(name) if is_repository(name) else resolve(name)
    if path.suffix == ".gguf":
        return _of_gguf(name, path)
    hf = read_json_object(path / CONFIG if path.is_dir() else path)
    return _shape(name, model_config(hf), _bits(hf))


def _of_gguf(name: str, path: Path) -> ModelShape:
    from triblade.models.gguf_checkpoint import GGUFCheckpoint

    checkpoint = GGUFCheckpoint(path)
    kind = checkpoint.raw(LARGEST_MATRIX)[1].name if LARGEST_MATRIX in checkpoint.names() else ""
    return _shape(name, model_config(checkpoint.config), GGUF_BITS.get(kind, 16))


def _shape(name: str, config: ModelConfig, stored_bits: int) -> ModelShape:
    return ModelShape(name=name, config=config, stored_bits=stored_bits, has_head=_has_head(config))


def _has_head(config: ModelConfig) -> bool:
    """Whether the package has an eagle head for a model of this shape; the engine compares the rest when it loads."""
    mine = asdict(config)
    folders = (resources.files("triblade.spec") / "heads").iterdir()
    targets: list[dict[str, Any]] = [read_json_object(Path(str(folder)) / CONFIG)["target"] for folder in folders]
    return any(all(_same(mine[key], value) for key, value in t.items() if key not in NOT_SHAPE) for t in targets)


def _same(mine: Any, value: Any) -> bool:
    """Equal, numbers up to the rounding of files that hold them in 32 bits."""
    is_number = isinstance(mine, float) and isinstance(value, float)
    return math.isclose(mine, value, rel_tol=1e-6) if is_number else bool(mine == value)


def _bits(hf: dict[str, Any]) -> int:
    """Bits of the codes that the weights are stored in.

    Raises:
        ConfigError: they are quantized in a way whose bits are not said.
    """
    found = hf.get("quantization_config") or hf.get("compression_config")
    if not found:
        return 16
    groups = found.get("config_groups", {}).values()
    said = [found.get("bits"), *((group.get("weights") or {}).get("num_bits") for group in groups)]
    known = [int(bits) for bits in said if bits is not None]
    if not known:
        raise ConfigError(f"config.json does not say in how many bits the weights are: {found.get('quant_method')!r}")
    return max(known)

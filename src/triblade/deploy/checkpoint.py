"""What vLLM makes of a plan's files: refused where it could not load them, and which drafter an eagle head is.

Reads `config.json` alone, and only of folders; a name of the Hugging Face hub is taken as it is. The facts about vLLM are those of
docs/reference/checkpoint-formats.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from triblade.config import EngineConfig
from triblade.errors import UnsupportedError
from triblade.models.json_files import read_json_object

CONFIG = "config.json"
BITS = {"cpu": (4,), "cuda": (4, 8)}
ODD_BITS_PACKAGE = "humming"  # multiplies 2 and 3 bits


def check_checkpoint(engine: EngineConfig, device: str, packages: frozenset[str], dtype: str = "auto") -> None:
    """Refuse what vLLM does not load, or could not answer with.

    Args:
        engine: with the model's name.
        device: that vLLM computes on.
        packages: that its environment has.
        dtype: that it is to compute in.

    Raises:
        UnsupportedError: the hint has what to do instead.
    """
    path = Path(engine.model)
    if engine.model.endswith(".gguf") or engine.model.startswith("pypi:"):
        raise UnsupportedError(
            f"vLLM does not load this: {engine.model}",
            hint="make a folder of it: triblade convert MODEL --output DIR",
            param="model",
        )
    if not path.is_dir():
        return
    found = read_json_object(path / CONFIG).get("quantization_config")
    if found is not None:
        for fault, hint in (*_type_faults(found, device, dtype), *_faults(found, device, packages)):
            raise UnsupportedError(f"vLLM on {device} does not load {engine.model}: {fault}", hint=hint, param="model")


def head_method(engine: EngineConfig) -> str | None:
    """vLLM's method for the plan's eagle head; None: a head of this project's format, or there is no head."""
    if engine.drafter != "eagle" or engine.draft_model is None:
        return None
    from triblade.spec.eagle_files import FORMAT  # loads torch

    path = Path(engine.draft_model)
    facts = read_json_object(path / CONFIG) if path.is_dir() else {}
    if facts.get("format") == FORMAT:
        return None
    told = " ".join([engine.draft_model, *facts.get("architectures", [])])
    return "eagle3" if "eagle3" in told.lower() else "eagle"


def _type_faults(config: Mapping[str, Any], device: str, dtype: str) -> Iterator[tuple[str, str]]:
    """vLLM starts with such a type, and its product fails at the first request."""
    if device == "cpu" and dtype == "float32" and any(scheme["bits"] == 4 for scheme, _ in _schemes(config)):
        yield "4-bit weights multiplied in float32", "its kernel has 16 bits only: dtype auto, bfloat16 or float16"


def _faults(config: Mapping[str, Any], device: str, packages: frozenset[str]) -> Iterator[tuple[str, str]]:
    """What is wrong, and what helps."""
    bits = BITS[device] if device in BITS else BITS["cuda"]
    again = "convert the model again with "
    if config.get("quant_method") == "gptq" and not config.get("sym", True):
        yield "GPTQ with zero points", again + "--format compressed-tensors"
    for scheme, targets in _schemes(config):
        if any(target.endswith("embed_tokens") for target in targets):
            yield "a quantized embedding table", again + "--embeddings keep --lm-head keep, as is the default"
        is_whole_int8 = scheme.get("inputs") is not None and scheme["bits"] == 8
        if scheme["bits"] not in bits and not is_whole_int8 and ODD_BITS_PACKAGE not in packages:
            yield f"weights of {scheme['bits']} bits", again + f"--bits {' or '.join(map(str, bits))}"


def _schemes(config: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Bits and input scheme of each group, with the modules it is for."""
    if "bits" in config:
        yield {"bits": config["bits"]}, []
    for group in config.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        if weights.get("type", "int") == "int" and "num_bits" in weights:
            yield {"bits": weights["num_bits"], "inputs": group.get("input_activations")}, group.get("targets", [])

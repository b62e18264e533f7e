"""The `quantization_config` of compressed-tensors: which module has which scheme in which layout, read and written.

Groups of modules are named by full names, by `re:` patterns or by class; what `ignore` matches is left alone. The library refuses
unknown keys in a group's arguments, and so does this file: a key nobody looked at may change what a code means. Knows no tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triblade.errors import CheckpointError, UnsupportedError
from triblade.quant.formats.base import expect_value, is_match, warn_of_unknown_keys
from triblade.quant.scheme import QuantScheme

log = logging.getLogger(__name__)

NAME = "compressed-tensors"
PACKED, INTEGERS, NAIVE, MIXED = "pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"
LAYOUTS = (PACKED, INTEGERS, NAIVE)
_TOP: tuple[str, ...] = (
    "quant_method",
    "format",
    "quantization_status",
    "global_compression_ratio",
    "ignore",
    "kv_cache_scheme",
)
_TOP += ("config_groups", "sparsity_config", "transform_config", "version")
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_MEANING = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder")
# How the scales were found and in what type they were kept; the stored tensors have their own types.
_HARMLESS: tuple[str, ...] = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules with one scheme."""

    targets: tuple[str, ...]
    scheme: QuantScheme
    layout: str  # pack-quantized, int-quantized or naive-quantized
    is_tensor_wise: bool  # one scale for the whole matrix


@dataclass(frozen=True, slots=True)
class CompressionConfig:
    """Everything that a configuration says about weights."""

    groups: tuple[ModuleGroup, ...]
    ignore: tuple[str, ...]

    def group_of(self, module: str) -> ModuleGroup:
        """The group of a module that is stored quantized: a full name wins over a pattern, a pattern over a class.

        Raises:
            CheckpointError: the configuration leaves the module out.
        """
        if not _matches(module, self.ignore):
            for by_class in (False, True):
                for group in self.groups:
                    if _matches_class(module, group.targets) if by_class else _matches(module, group.targets):
                        return group
        raise CheckpointError(
            f"{module} is stored quantized, but no group of the quantization config is for it",
            hint="config.json and the weights do not belong together",
        )


def parse(quantization: Mapping[str, Any]) -> CompressionConfig:
    """Read a `quantization_config`.

    Raises:
        CheckpointError: a key is missing.
        UnsupportedError: a format or a setting that is not read.
    """
    expect_value(quantization.get("format"), [*LAYOUTS, MIXED, "dense"], f"format of a {NAME} checkpoint")
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    expect_value(sparsity, ["dense"], f"sparsity of a {NAME} checkpoint")
    if quantization.get("transform_config"):
        raise UnsupportedError(f"transform_config of a {NAME} checkpoint is not read: its weights are rotated")
    warn_of_unknown_keys(quantization, _TOP, NAME)
    if quantization.get("kv_cache_scheme"):
        log.warning("%s checkpoint: kv_cache_scheme has no effect; see --kv-cache-dtype", NAME)
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping):
        raise CheckpointError(f"a {NAME} checkpoint must have config_groups, got: {groups!r}")
    made = tuple(_group(name, group, str(quantization["format"])) for name, group in groups.items())
    return CompressionConfig(made, tuple(quantization.get("ignore") or ()))


def written(schemes: Mapping[str, QuantScheme], dense: Sequence[str]) -> dict[str, Any]:
    """The configuration of a checkpoint with these modules; `dense` are the linear layers left alone.

    One scheme is said of the class, several of full names.
    """
    by_scheme: dict[QuantScheme, list[str]] = {}
    for module, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(module)
    layouts = {layout_of(scheme) for scheme in by_scheme}
    whole = len(by_scheme) == 1
    groups = {
        f"group_{index}": {
            "targets": _classes(names) if whole else names,
            "weights": _weights(scheme),
            "input_activations": _input_activations(scheme),
            "output_activations": None,
            "format": layout_of(scheme),
        }
        for index, (scheme, names) in enumerate(by_scheme.items())
    }
    return {
        "quant_method": NAME,
        "format": layouts.pop() if len(layouts) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(dense),
        "kv_cache_scheme": None,
        "config_groups": groups,
    }


def _classes(modules: Sequence[str]) -> list[str]:
    return ["Linear", *(["Embedding"] if any(_is_embedding(module) for module in modules) else [])]


def layout_of(scheme: QuantScheme) -> str:
    """How a scheme is written: whole bytes where inputs are rounded too, words otherwise."""
    return PACKED if scheme.activation_bits is None else INTEGERS


def _weights(scheme: QuantScheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "group_size": scheme.group_size,
        "strategy": "channel" if scheme.group_size is None else "group",
        "dynamic": False,
    }


def _input_activations(scheme: QuantScheme) -> dict[str, Any] | None:
    if scheme.activation_bits is None:
        return None
    return {"num_bits": scheme.activation_bits, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _group(name: str, group: Any, format_of_all: str) -> ModuleGroup:
    where = f"config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise CheckpointError(f"{where} of a {NAME} checkpoint must have targets and weights, got: {group!r}")
    _refuse_unknown(group, _GROUP, where)
    if group.get("output_activations"):
        raise UnsupportedError(f"{where} rounds outputs, which is not done")
    layout = group.get("format") or format_of_all
    expect_value(layout, LAYOUTS, f"{where}.format")
    weights = group["weights"]
    _check_weights(weights, f"{where}.weights")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    expect_value(strategy, ["group", "channel", "tensor"], f"{where}.weights.strategy")
    scheme = QuantScheme(
        bits=weights["num_bits"],
        group_size=weights["group_size"] if strategy == "group" else None,
        symmetric=bool(weights.get("symmetric", True)),
        activation_bits=_activation_bits(group.get("input_activations"), where),
    )
    return ModuleGroup(tuple(group.get("targets") or ()), scheme, layout, strategy == "tensor")


def _check_weights(weights: Mapping[str, Any], where: str) -> None:
    _refuse_unknown(weights, (*_MEANING, *_HARMLESS), where)
    for key in ("num_bits", *(["group_size"] if weights.get("strategy") == "group" else [])):
        if not isinstance(weights.get(key), int):
            raise CheckpointError(f"{where}.{key} must be a number, got: {weights.get(key)!r}")
    expect_value(weights.get("type", "int"), ["int"], f"{where}.type")
    expect_value(weights.get("dynamic", False), [False], f"{where}.dynamic")
    expect_value(weights.get("block_structure"), [None], f"{where}.block_structure")
    # "group", also written as true, scatters the inputs of a group; the stored g_idx says how.
    expect_value(weights.get("actorder"), [None, False, True, "static", "weight", "group"], f"{where}.actorder")


def _activation_bits(activations: Any, where: str) -> int | None:
    """8 for inputs rounded per token as they come; nothing else is computed here."""
    if activations is None:
        return None
    where = f"{where}.input_activations"
    _refuse_unknown(activations, (*_MEANING, *_HARMLESS), where)
    for key, value in (("num_bits", 8), ("type", "int"), ("symmetric", True), ("dynamic", True), ("strategy", "token")):
        expect_value(activations.get(key), [value], f"{where}.{key}")
    return 8


def _refuse_unknown(settings: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    unknown = sorted(key for key, value in settings.items() if key not in known and value)
    if unknown:
        raise UnsupportedError(f"{where} has settings that are not known: {', '.join(unknown)}")


def _matches(module: str, targets: Sequence[str]) -> bool:
    """By full name or by a pattern."""
    return any(
        is_match(target.removeprefix("re:"), module) if target.startswith("re:") else target == module
        for target in targets
    )


def _matches_class(module: str, targets: Sequence[str]) -> bool:
    """By class: every module is a Linear but the embedding."""
    return ("Embedding" if _is_embedding(module) else "Linear") in targets


def _is_embedding(module: str) -> bool:
    return module.endswith("embed_tokens")

"""GPTQ's layout, versions 1 and 2, with groups of neighbouring or (read only) of scattered inputs.

    qweight int32 [in * b / 32, out]   qzeros int32 [G, out * b / 32]   scales float16 [G, out]   g_idx int32 [in]
    w[k, n] = scale[g_idx[k], n] * (q - z[g_idx[k], n])

Codes are packed along the inputs, zero points along the outputs, both as one stream of bits. Version 1 stores a zero point less
one, version 2 as it is, and there are files that name the one and hold the other: where the matrix is symmetric the stored
zero points tell. So a symmetric matrix is always read right, and the contradiction is said. Version 1 has no room for a zero
point of 0, and its writers fell apart over it: some wrap the one code, others borrow from the next in the word. So what has
zero points of its own is written as version 2, and read in version 1 as its writer meant it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triblade.errors import CheckpointError, UnsupportedError
from triblade.quant.formats.base import (
    Float16Format,
    QuantizedModule,
    StoredMatrix,
    TensorStore,
    expect_tensor,
    expect_value,
    groups_of,
    is_match,
    prefixes,
    warn_of_unknown_keys,
)
from triblade.quant.formats.bit_packing import dense_words, pack, unpack
from triblade.quant.scheme import IntegerMatrix, QuantScheme

log = logging.getLogger(__name__)

V1, V2 = "gptq", "gptq_v2"
# Layout of a module: version 1 of a writer that subtracts one from all codes of a word by a single subtraction of the word.
_V1_WORDS = "gptq by words"
_CHECKED: tuple[str, ...] = (
    "quant_method",
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "checkpoint_format",
    "format",
    "dynamic",
)
_CHECKED += ("pack_dtype", "is_marlin_format", "rotation", "adapter")
# How the codes were found, or how to compute with them.
_HARMLESS: tuple[str, ...] = (
    "meta",
    "method",
    "damp_percent",
    "static_groups",
    "true_sequential",
    "model_name_or_path",
    "model_file_base_name",
)
_HARMLESS += ("lm_head", "mse", "quantizer", "act_group_aware", "dataset", "tokenizer", "batch_size", "backend")
_HARMLESS += ("use_exllama", "disable_exllama", "exllama_config", "max_input_length", "use_cuda_fp16", "model_seqlen")
_HARMLESS += ("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize")
_HARMLESS += ("pad_token_id", "cache_block_outputs", "damp_auto_increment", "pack_impl", "hyb_act", "v2", "v2_alpha")


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a configuration says of all modules, and of some."""

    scheme: QuantScheme
    version: str
    is_by_words: bool
    dynamic: Mapping[str, Any]  # "+:PATTERN" or "PATTERN": other settings; "-:PATTERN": not quantized

    def scheme_of(self, module: str) -> QuantScheme:
        """The first rule that matches decides."""
        for rule, changes in self.dynamic.items():
            if is_match(rule.removeprefix("+:").removeprefix("-:"), module):
                if rule.startswith("-:"):
                    raise CheckpointError(f"{module} is stored as codes, but the rule {rule!r} leaves it out")
                return _scheme({**_as_settings(self.scheme), **changes})
        return self.scheme


class GPTQ(Float16Format):
    """Reads versions 1 and 2; writes symmetric matrices as version 1, which everybody reads, others as version 2."""

    name = "gptq"
    group_index = "g_idx"

    def modules(self, store: TensorStore, quantization: Mapping[str, Any]) -> dict[str, QuantizedModule]:
        """See `CheckpointFormat`. What a rule leaves out is stored dense, and loads so."""
        settings = _settings(quantization)
        return {name: _module(store, name, settings) for name in prefixes(store, "qweight")}

    def read(self, store: TensorStore, module: QuantizedModule) -> StoredMatrix:
        """See `CheckpointFormat`."""
        name, scheme = module.name, module.scheme
        order = self.input_order(store, module)
        codes = unpack(store.tensor(f"{name}.qweight").T, scheme.bits, module.inputs)  # [out, in]
        matrix = IntegerMatrix(
            codes=codes if order is None else codes[:, order],
            scales=store.tensor(f"{name}.scales").T.contiguous(),
            zero_points=_zero_points(store, module),
            scheme=scheme,
        )
        return StoredMatrix(matrix=matrix, input_order=order)

    def why_not(self, scheme: QuantScheme, rows: int, inputs: int) -> str | None:
        """See `CheckpointFormat`. Other readers want both sizes divisible by 32, and so whole words."""
        if scheme.activation_bits is not None:
            return f"GPTQ holds weights only, not {scheme}"
        for what, size in (("outputs", rows), ("inputs", inputs)):
            if size * scheme.bits % 32:
                return f"GPTQ packs {what} into 32-bit words, and {size} of {scheme.bits} bits do not fill them"
        return None

    def tensors(self, matrix: IntegerMatrix) -> dict[str, Tensor]:
        """See `CheckpointFormat`."""
        bits, inputs = matrix.scheme.bits, matrix.codes.shape[1]
        scales, zeros = self.scales_and_zero_points(matrix, symmetric=matrix.scheme.zero_point - 1)  # version 1
        return {
            "qweight": pack(matrix.codes, bits).T.contiguous(),
            "qzeros": pack(zeros, bits),
            "scales": scales,
            "g_idx": (torch.arange(inputs) // matrix.scheme.group(inputs)).int(),
        }

    def quantization_config(self, schemes: Mapping[str, QuantScheme], dense: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointFormat`."""
        if len(set(schemes.values())) != 1:
            found = sorted({str(scheme) for scheme in schemes.values()})
            raise UnsupportedError(
                f"a GPTQ checkpoint has one scheme, got: {', '.join(found)}",
                hint="use compressed-tensors for mixed precision",
            )
        scheme = next(iter(schemes.values()))
        return {
            "quant_method": self.name,
            **_as_settings(scheme),
            "desc_act": False,
            "lm_head": "lm_head" in schemes,
            "checkpoint_format": V1 if scheme.symmetric else V2,
            "pack_dtype": "int32",
            "dynamic": {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in dense if name != "lm_head"},
        }


def _settings(quantization: Mapping[str, Any]) -> _Settings:
    version = quantization.get("checkpoint_format") or quantization.get("format")
    version = V1 if version is None else version
    expect_value(version, [V1, V2], "checkpoint_format of a GPTQ checkpoint")
    expect_value(quantization.get("is_marlin_format", False), [False], "is_marlin_format of a GPTQ checkpoint")
    expect_value(quantization.get("pack_dtype", "int32"), ["int32"], "pack_dtype of a GPTQ checkpoint")
    for key in ("rotation", "adapter"):  # the weights alone are not the model
        expect_value(quantization.get(key), [None, "", {}], f"{key} of a GPTQ checkpoint")
    warn_of_unknown_keys(quantization, (*_CHECKED, *_HARMLESS), "GPTQ")
    scheme = _scheme(quantization)
    if not scheme.symmetric and "checkpoint_format" not in quantization and "format" not in quantization:
        log.warning("GPTQ checkpoint: it does not say its version; zero points are read as version 1 stores them")
    made_by = str((quantization.get("meta") or {}).get("quantizer"))
    return _Settings(scheme, version, "gptqmodel" in made_by.lower(), quantization.get("dynamic") or {})


def _scheme(settings: Mapping[str, Any]) -> QuantScheme:
    bits, group, symmetric = (settings.get(key) for key in ("bits", "group_size", "sym"))
    if not isinstance(bits, int) or not isinstance(group, int) or not isinstance(symmetric, bool):
        raise CheckpointError(
            f"a GPTQ checkpoint must state bits, group_size and sym, got: {bits}, {group}, {symmetric}"
        )
    return QuantScheme(bits=bits, group_size=None if group == -1 else group, symmetric=symmetric)


def _as_settings(scheme: QuantScheme) -> dict[str, Any]:
    group = -1 if scheme.group_size is None else scheme.group_size
    return {"bits": scheme.bits, "group_size": group, "sym": scheme.symmetric}


def _module(store: TensorStore, name: str, settings: _Settings) -> QuantizedModule:
    scheme = settings.scheme_of(name)
    rows, inputs = _shape(store, name, scheme.bits)
    groups = groups_of(scheme, name, inputs)
    tensors = [
        expect_tensor(store, f"{name}.qweight", (dense_words(inputs, scheme.bits), rows), ["I32"]),
        expect_tensor(store, f"{name}.scales", (groups, rows), ["F16", "BF16", "F32"]),
    ]
    if f"{name}.qzeros" in store.names() or not scheme.symmetric:
        shape = (groups, dense_words(rows, scheme.bits))
        tensors.append(expect_tensor(store, f"{name}.qzeros", shape, ["I32"]))
    if f"{name}.g_idx" in store.names():
        tensors.append(expect_tensor(store, f"{name}.g_idx", (inputs,), ["I32", "I64"]))
    by_words = settings.version == V1 and settings.is_by_words and 32 % scheme.bits == 0
    layout = _V1_WORDS if by_words else settings.version
    return QuantizedModule(
        name=name, scheme=scheme, rows=rows, inputs=inputs, tensors=frozenset(tensors), layout=layout
    )


def _shape(store: TensorStore, name: str, bits: int) -> tuple[int, int]:
    """(outputs, inputs); whole words hold whole groups of codes, as every writer of the format makes sure."""
    shape = store.info(f"{name}.qweight").shape
    if len(shape) != 2 or shape[0] * 32 % bits:
        raise CheckpointError(f"{name}.qweight of {bits} bits cannot have the shape {list(shape)}")
    return shape[1], shape[0] * 32 // bits


def _zero_points(store: TensorStore, module: QuantizedModule) -> Tensor | None:
    """[out, G]; None for a symmetric matrix, whose stored ones are only checked."""
    name, scheme = module.name, module.scheme
    if f"{name}.qzeros" not in module.tensors:
        return None
    words = store.tensor(f"{name}.qzeros")
    if not scheme.symmetric:
        return _own_zero_points(words, module)
    stored = unpack(words, scheme.bits, module.rows)  # [G, out]
    as_stored = {V1: scheme.zero_point - 1, V2: scheme.zero_point}
    found = [version for version, value in as_stored.items() if bool((stored == value).all())]
    if not found:
        raise CheckpointError(
            f"{name} is symmetric by the configuration, but has zero points other than {scheme.zero_point}",
            hint="sym in the quantization config is wrong",
        )
    stated = V2 if module.layout == V2 else V1
    if found != [stated]:
        log.warning("%s: zero points are stored as in %s, the configuration says %s", name, found[0], stated)
    return None


def _own_zero_points(words: Tensor, module: QuantizedModule) -> Tensor:
    """[out, G] from stored words [G, m] of a matrix that is not symmetric."""
    bits = module.scheme.bits
    if module.layout == _V1_WORDS:
        one_each = sum(1 << shift for shift in range(0, 32, bits))
        words = words + one_each  # carries what was borrowed back; wraps around at 32 bits
    stored = unpack(words, bits, module.rows)  # [G, out]
    back = 1 if module.layout == V1 else 0
    return (stored.int() + back & module.scheme.max_code).to(torch.uint8).T.contiguous()

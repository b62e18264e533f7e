"""AutoAWQ's GEMM layout: 4 bits, groups, zero points; codes and zero points packed along the outputs in an order of their own.

    qweight int32 [in, out / 8]   qzeros int32 [G, out / 8]   scales float16 [G, out]      w[k, n] = scale * (q - z)

Zero points are stored as they are. A symmetric matrix goes out with 8 for every one of them. The GEMV and llm-awq layouts pack
along the inputs and are refused: read as GEMM they would be noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    prefixes,
    warn_of_unknown_keys,
)
from triblade.quant.formats.bit_packing import pack_awq, unpack_awq
from triblade.quant.scheme import IntegerMatrix, QuantScheme

BITS, PER_WORD = 4, 8
_CHECKED: tuple[str, ...] = (
    "quant_method",
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "zero_point",
    "version",
    "backend",
    "format",
)
# How to compute or what to leave out, which the tensors themselves show.
_HARMLESS: tuple[str, ...] = (
    "modules_to_not_convert",
    "lm_head",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "exllama_config",
)
_HARMLESS += ("method", "checkpoint_format", "pack_dtype", "meta", "desc_act", "sym", "dynamic")


class AWQ(Float16Format):
    """Reads and writes AutoAWQ GEMM."""

    name = "awq"

    def modules(self, store: TensorStore, quantization: Mapping[str, Any]) -> dict[str, QuantizedModule]:
        """See `CheckpointFormat`."""
        scheme = _scheme(quantization)
        return {name: _module(store, name, scheme) for name in prefixes(store, "qweight")}

    def read(self, store: TensorStore, module: QuantizedModule) -> StoredMatrix:
        """See `CheckpointFormat`."""
        zeros = unpack_awq(store.tensor(f"{module.name}.qzeros"))  # [G, out]
        matrix = IntegerMatrix(
            codes=unpack_awq(store.tensor(f"{module.name}.qweight")).T.contiguous(),
            scales=store.tensor(f"{module.name}.scales").T.contiguous(),
            zero_points=zeros.T.contiguous(),
            scheme=module.scheme,
        )
        return StoredMatrix(matrix=matrix)

    def why_not(self, scheme: QuantScheme, rows: int, inputs: int) -> str | None:
        """See `CheckpointFormat`."""
        if scheme.bits != BITS or scheme.activation_bits is not None:
            return f"AWQ holds 4-bit weights only, not {scheme}"
        if rows % PER_WORD:
            return f"AWQ packs outputs by {PER_WORD}, and {rows} are not divisible by it"
        return None

    def tensors(self, matrix: IntegerMatrix) -> dict[str, Tensor]:
        """See `CheckpointFormat`."""
        scales, zeros = self.scales_and_zero_points(matrix, symmetric=matrix.scheme.zero_point)
        return {"qweight": pack_awq(matrix.codes.T.contiguous()), "qzeros": pack_awq(zeros), "scales": scales}

    def quantization_config(self, schemes: Mapping[str, QuantScheme], dense: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointFormat`."""
        groups = {scheme.group_size for scheme in schemes.values()}
        if len(groups) != 1:
            raise UnsupportedError(
                f"an AWQ checkpoint has one group size, got: {sorted(map(str, groups))}",
                hint="use compressed-tensors for mixed precision",
            )
        (group,) = groups
        return {
            "quant_method": self.name,
            "bits": BITS,
            "group_size": -1 if group is None else group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(dense),
            "lm_head": "lm_head" in schemes,
        }


def _scheme(quantization: Mapping[str, Any]) -> QuantScheme:
    """From the names of AutoAWQ, or its older ones."""
    bits = quantization.get("bits", quantization.get("w_bit"))
    group = quantization.get("group_size", quantization.get("q_group_size"))
    expect_value(bits, [BITS], "bits of an AWQ checkpoint")
    expect_value(str(quantization.get("version", "gemm")).lower(), ["gemm"], "version of an AWQ checkpoint")
    expect_value(str(quantization.get("format", "gemm")).lower(), ["gemm"], "format of an AWQ checkpoint")
    expect_value(quantization.get("backend", "autoawq"), ["autoawq", "auto"], "backend of an AWQ checkpoint")
    if not isinstance(group, int):
        raise CheckpointError(f"group_size of an AWQ checkpoint must be a number, got: {group!r}")
    warn_of_unknown_keys(quantization, (*_CHECKED, *_HARMLESS), "AWQ")
    return QuantScheme(bits=BITS, group_size=None if group == -1 else group, symmetric=False)


def _module(store: TensorStore, name: str, scheme: QuantScheme) -> QuantizedModule:
    shape = store.info(f"{name}.qweight").shape
    if len(shape) != 2:
        raise CheckpointError(f"{name}.qweight must have two dimensions, got: {list(shape)}")
    inputs, rows = shape[0], shape[1] * PER_WORD
    groups = groups_of(scheme, name, inputs)
    tensors = (
        expect_tensor(store, f"{name}.qweight", (inputs, rows // PER_WORD), ["I32"]),
        expect_tensor(store, f"{name}.qzeros", (groups, rows // PER_WORD), ["I32"]),
        expect_tensor(store, f"{name}.scales", (groups, rows), ["F16", "BF16"]),
    )
    return QuantizedModule(name=name, scheme=scheme, rows=rows, inputs=inputs, tensors=frozenset(tensors))

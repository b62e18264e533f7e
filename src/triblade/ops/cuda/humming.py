"""Products by `humming-kernels`, which compiles kernels for quantized weights: where it is faster than ours.

`humming_sm90.json` holds matrices and numbers of tokens that `benchmarks/gpu_humming.py` found it faster at on an H200; nothing
else is given to it. It keeps a copy of the weights in its own order, since fewer tokens stay with our kernels. Knows no model.
Invariant: only symmetric codes of 4 bits are taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module, resources
from typing import Any

import torch
from torch import Tensor

from triblade.ops.cuda.packing import DeviceMatrix, unpack_codes

BITS = 4
CAPABILITY = (9, 0)  # of the devices that it was measured on


class HummingProducts:
    """Matrices in the package's order.

    Args:
        matrices: of a model; those that are not in the table are left alone.
        dtype: of inputs and results.
    """

    def __init__(self, matrices: Sequence[DeviceMatrix], dtype: torch.dtype) -> None:
        self._dtype = dtype
        taken = [matrix for matrix in matrices if token_range(matrix) is not None]
        self._layers = {id(matrix): self._layer(matrix) for matrix in taken}
        self.matrices = taken  # which also keeps their ids

    @staticmethod
    def why_not(capability: tuple[int, int] | None) -> str | None:
        """What keeps it from being taken, or None."""
        if capability != CAPABILITY:
            return "it was measured on compute capability 9.0 only"
        try:
            import_module("humming.layer")
        except Exception as error:  # a broken build raises what it likes
            return f"it cannot be imported ({error})"
        return None

    def takes(self, matrix: DeviceMatrix, tokens: int) -> bool:
        """Whether it is the faster one."""
        found = token_range(matrix) if id(matrix) in self._layers else None
        return found is not None and found[0] <= tokens <= found[1]

    def multiply(self, x: Tensor, matrix: DeviceMatrix) -> Tensor:
        """x [T, in] -> [T, N], rows in the matrix's own order, without its bias."""
        out: Tensor = self._layers[id(matrix)](x)
        return out

    def _layer(self, matrix: DeviceMatrix) -> Any:
        make = import_module("humming.layer").HummingLayer
        config = {"dtype": f"int{BITS}", "group_size": matrix.group}
        with matrix.codes.device:  # where it makes room for weights
            layer = make(shape_n=matrix.rows, shape_k=matrix.inputs, weight_config=config, torch_dtype=self._dtype)
        found = unpack_codes(matrix)
        layer.load_from_tensors({"weight": packed_numbers(found.codes), "weight_scale": found.scales.to(self._dtype)})
        layer.transform()
        return layer


def packed_numbers(codes: Tensor) -> Tensor:
    """Codes [N, in] uint8 as [N, in / 8] int32, the first of eight lowest."""
    low, high = codes.view(*codes.shape[:-1], -1, 2).unbind(-1)
    return (low | high << BITS).contiguous().view(torch.int32)


def key_of(matrix: DeviceMatrix) -> str:
    """What a line of the table is for."""
    return f"{matrix.bits} bits g{matrix.group} {matrix.rows}x{matrix.inputs}{' gated' if matrix.is_gated else ''}"


def token_range(matrix: DeviceMatrix) -> tuple[int, int] | None:
    """Fewest and most tokens of which the package is faster, or None."""
    if matrix.bits != BITS or matrix.offsets is not None:
        return None
    found = measured_ranges().get(key_of(matrix))
    return None if found is None else (found[0], found[1])


@cache
def measured_ranges() -> Mapping[str, Sequence[int]]:
    """By `key_of`."""
    file = resources.files("triblade.ops.cuda") / "humming_sm90.json"
    ranges: Mapping[str, Sequence[int]] = json.loads(file.read_text(encoding="utf-8"))
    return ranges

"""Random quantized matrices, and the stored tensors of a checkpoint in a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from triblade.models.safetensors_checkpoint import TensorInfo
from triblade.quant.formats.base import CheckpointFormat
from triblade.quant.scheme import IntegerMatrix, QuantScheme

TYPES = {
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


@dataclass
class DictionaryStore:
    """Stored tensors in memory."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self.tensors[name]
        return TensorInfo("memory", TYPES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def random_matrix(
    rows: int, inputs: int, scheme: QuantScheme, dtype: torch.dtype = torch.float16, seed: int = 0
) -> IntegerMatrix:
    """Every code and every zero point may occur."""
    generator = torch.Generator().manual_seed(seed)
    grid, top = (rows, scheme.groups(inputs)), scheme.max_code + 1
    zeros = torch.randint(0, top, grid, generator=generator, dtype=torch.uint8)
    return IntegerMatrix(
        codes=torch.randint(0, top, (rows, inputs), generator=generator, dtype=torch.uint8),
        scales=(torch.rand(grid, generator=generator) * 0.02 + 0.001).to(dtype),
        zero_points=None if scheme.symmetric else zeros,
        scheme=scheme,
    )


def same(ours: IntegerMatrix, expected: IntegerMatrix) -> bool:
    """Codes, scales, zero points and scheme are equal; a zero point for every group may stand for symmetric."""
    zeros = [m.scheme.zero_point if m.zero_points is None else m.zero_points.int() for m in (ours, expected)]
    return (
        torch.equal(ours.codes, expected.codes)
        and torch.equal(ours.scales, expected.scales)
        and bool((torch.as_tensor(zeros[0]) == torch.as_tensor(zeros[1])).all())
    )


def store_of(layout: CheckpointFormat, matrices: Mapping[str, IntegerMatrix]) -> tuple[DictionaryStore, dict[str, Any]]:
    """What the format writes for some modules: tensors and quantization config."""
    tensors = {
        f"{name}.{suffix}": tensor
        for name, matrix in matrices.items()
        for suffix, tensor in layout.tensors(matrix).items()
    }
    schemes = {name: matrix.scheme for name, matrix in matrices.items()}
    return DictionaryStore(tensors), layout.quantization_config(schemes, ["lm_head"])

"""Random quantized matrices, the stored tensors of a checkpoint in a dictionary, and tiny models as quantized checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import TinyModel
from torch import Tensor

from triblade.models.safetensors_checkpoint import TensorInfo
from triblade.quant.checkpoint_writer import Export, Part, write_checkpoint
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


def rounded(weight: Tensor, scheme: QuantScheme, dtype: torch.dtype = torch.float16) -> IntegerMatrix:
    """A dense matrix [out, in] to the nearest codes, ranges from the extremes."""
    groups = weight.float().unflatten(1, (scheme.groups(weight.shape[1]), -1))  # [out, G, group]
    if scheme.symmetric:
        scales = (groups.abs().amax(2) / (scheme.max_code / 2)).to(dtype)
        zeros = torch.full(scales.shape, scheme.zero_point)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / scheme.max_code).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, scheme.max_code).int()
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, scheme.max_code)
    return IntegerMatrix(
        codes=codes.to(torch.uint8).flatten(1),
        scales=scales,
        zero_points=None if scheme.symmetric else zeros.to(torch.uint8),
        scheme=scheme,
    )


def is_layer_weight(name: str, tensor: Tensor) -> bool:
    """A linear layer of a block: what tools quantize."""
    return tensor.ndim == 2 and ".layers." in name


def write_tiny(
    path: Path, model: TinyModel, layout: str, schemes: Mapping[str, QuantScheme | None] | QuantScheme, **config: Any
) -> Path:
    """A tiny model as a quantized checkpoint; `schemes` by the end of a module's name, None or absent: dense."""

    def scheme_of(name: str) -> QuantScheme | None:
        if isinstance(schemes, QuantScheme):
            return schemes
        return next((scheme for end, scheme in schemes.items() if name.removesuffix(".weight").endswith(end)), None)

    def parts() -> Iterator[tuple[str, Part]]:
        for name, tensor in model.source.tensors.items():
            scheme = scheme_of(name) if is_layer_weight(name, tensor) else None
            yield (name, tensor) if scheme is None else (name.removesuffix(".weight"), rounded(tensor, scheme))

    settings = {**model.hf_config, **config}
    write_checkpoint(Export(target=path, format=layout, config=settings, companions={}), parts())
    return path

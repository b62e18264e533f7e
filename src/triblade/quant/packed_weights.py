"""Read a checkpoint straight into the layout of the native kernels, one matrix at a time, so that no dense copy exists.

Without a scheme a matrix keeps what the file has: bfloat16 or float32, or the blocks of a GGUF file as they are. With `int4` or
`int8` it is rounded to nearest while loading (embedding and head to 8 bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from triblade.errors import UnsupportedError
from triblade.models.config import ModelConfig
from triblade.models.gguf_checkpoint import GGUFCheckpoint
from triblade.models.weights import TensorSource, WeightReader, check_shape
from triblade.ops.packing import PackedMatrix, QuantizedMatrix, interleaved_halves, pack_dense, pack_quantized
from triblade.quant.gguf_blocks import KERNEL_TYPES, quantized_matrix
from triblade.quant.rtn import round_to_nearest

Scheme = Literal["int4", "int8"]
GROUPS = (64, 32, 16)  # tried in this order; 64 costs half the scales of 32


class PackingReader(WeightReader[PackedMatrix]):
    """Matrices packed for the native kernels.

    Args:
        source: the checkpoint.
        config: the model.
        dtype: bfloat16 or float32, of what stays dense.
        scheme: round the weights while loading.
    """

    def __init__(
        self, source: TensorSource, config: ModelConfig, dtype: torch.dtype, scheme: Scheme | None = None
    ) -> None:
        super().__init__(source, config, torch.device("cpu"))
        self._dtype = dtype
        self._bits = {None: None, "int4": 4, "int8": 8}[scheme]

    def merged(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> PackedMatrix:
        """Rows of all parts, one after the other."""
        return self._pack(parts, inputs, self._bits, self._bias(parts) if bias else None, None)

    def gate_up(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> PackedMatrix:
        """Blocks of gate rows and of up rows in turn, so that one thread has both halves of a result."""
        order = interleaved_halves(sum(rows for _, rows in parts))
        return self._pack(parts, inputs, self._bits, self._bias(parts) if bias else None, order)

    def embedding(self, name: str, rows: int, columns: int) -> PackedMatrix:
        """At least 8 bits: the table is read by rows as well."""
        return self._pack([(name, rows)], columns, self._bits and 8, None, None)

    def _pack(
        self,
        parts: Sequence[tuple[str, int]],
        inputs: int,
        bits: int | None,
        bias: Tensor | None,
        order: Tensor | None,
    ) -> PackedMatrix:
        stored = None if bits is not None else self._stored(parts, inputs, bias)
        if stored is not None:
            return pack_quantized(stored if order is None else stored.rows(order))
        weight = torch.cat([self.fetch(f"{name}.weight", (rows, inputs)) for name, rows in parts])
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        if bits is None:
            return pack_dense(weight.to(self._dtype), bias)
        return pack_quantized(round_to_nearest(weight, bits, group_for(inputs), bias))

    def _stored(self, parts: Sequence[tuple[str, int]], inputs: int, bias: Tensor | None) -> QuantizedMatrix | None:
        """The blocks of a GGUF file as codes, if all parts are of one type that the kernels multiply."""
        if not isinstance(self.source, GGUFCheckpoint):
            return None
        matrices = []
        for name, rows in parts:
            self.expect(f"{name}.weight")
            matrix = quantized_matrix(*self.source.raw(f"{name}.weight"))
            if matrix is not None:
                check_shape(f"{name}.weight", tuple(matrix.codes.shape), (rows, inputs))
            matrices.append(matrix)
        kinds = {None if m is None else (m.bits, m.offsets is None) for m in matrices}
        if len(kinds) != 1 or None in kinds:
            return None
        whole = [m for m in matrices if m is not None]
        offsets = [m.offsets for m in whole if m.offsets is not None]
        return QuantizedMatrix(
            codes=torch.cat([m.codes for m in whole]),
            scales=torch.cat([m.scales for m in whole]),
            offsets=torch.cat(offsets) if offsets else None,
            bits=whole[0].bits,
            bias=bias,
        )

    def _bias(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        return torch.cat([self.fetch(f"{name}.bias", (rows,)).float() for name, rows in parts])


def group_for(inputs: int) -> int:
    """Inputs that share a scale when a matrix is rounded while loading."""
    for group in GROUPS:
        if inputs % group == 0:
            return group
    raise UnsupportedError(f"{inputs} inputs are not divisible by a group of {', '.join(map(str, GROUPS))}")


def packed_bytes(source: TensorSource, config: ModelConfig, dtype: torch.dtype, scheme: Scheme | None) -> int:
    """Memory that the packed weights will take, before reading them."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    body = config.num_parameters - tables
    if scheme is not None:
        bits = {"int4": 4, "int8": 8}[scheme]
        group = group_for(config.hidden_size)
        return int(body * (bits / 8 + 2 / group) + tables * (1 + 2 / group))
    if isinstance(source, GGUFCheckpoint):
        return sum(_stored_bytes(source, name, dtype) for name in source.names())
    return config.num_parameters * dtype.itemsize


def _stored_bytes(source: GGUFCheckpoint, name: str, dtype: torch.dtype) -> int:
    """Of one tensor: its blocks as they are, or dense."""
    rows, kind = source.raw(name)
    if kind in KERNEL_TYPES:
        return rows.nbytes
    elements, size = GGML_QUANT_SIZES[kind]
    return rows.nbytes // size * elements * dtype.itemsize

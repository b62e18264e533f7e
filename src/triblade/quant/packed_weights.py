"""Read a checkpoint straight into the layout of the native kernels, one matrix at a time, so that no dense copy exists.

Without a scheme a matrix keeps what the file has: bfloat16 or float32, the blocks of a GGUF file as they are, or the codes of a
quantized checkpoint. With `int4` or `int8` it is rounded to nearest while loading (embedding and head to 8 bits).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from triblade.errors import UnsupportedError
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights, M
from triblade.models.weights import TensorSource, WeightReader, check_shape, wanted_names
from triblade.ops.packing import (
    BLOCK_ROWS,
    PackedMatrix,
    QuantizedMatrix,
    interleaved_halves,
    pack_dense,
    pack_quantized,
)
from triblade.quant.kernel_matrices import KernelForm, joined, joint_form, kernel_form, kernel_matrix
from triblade.quant.quantized_checkpoint import QuantizedCheckpoint
from triblade.quant.rtn import round_to_nearest

log = logging.getLogger(__name__)

Scheme = Literal["int4", "int8"]
SCHEME_BITS: Mapping[Scheme, int] = {"int4": 4, "int8": 8}
GROUPS = (64, 32, 16)  # tried in this order; 64 costs half the scales of 32
_NO_CODES = "stored dense"


@runtime_checkable
class StoresBlocks(Protocol):
    """A GGUF file. Nothing of the gguf package is imported before there is one."""

    def raw(self, name: str) -> tuple[Any, Any]:
        """See `models.gguf_checkpoint`."""
        ...


class CodesReader(WeightReader[M]):
    """Matrices of which some are multiplied as the codes that the file has.

    Args:
        source: the checkpoint.
        config: the model.
        dtype: of what stays dense.
        device: where norms go.
        scheme: round the weights while loading.
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme | None = None,
    ) -> None:
        super().__init__(source, config, device)
        self._dtype = dtype
        self._bits = None if scheme is None else SCHEME_BITS[scheme]
        self._dense_reasons: dict[str, str] = {}  # reason -> the first module

    def read(self) -> DecoderWeights[M]:
        """Everything; what is not multiplied as stored is said."""
        weights = super().read()
        if isinstance(self.source, QuantizedCheckpoint) and self._bits is None:
            narrow = {m.scheme.bits for m in self.source.modules.values()} & {2, 3}
            for bits in sorted(narrow):
                log.info("codes of %d bits are multiplied as 4-bit ones", bits)
        for reason, name in self._dense_reasons.items():
            if reason != _NO_CODES:
                log.info("%s and all alike are multiplied dense: %s", name, reason)
        return weights

    def stored(self, parts: Sequence[tuple[str, int]], inputs: int, bias: Tensor | None) -> QuantizedMatrix | None:
        """What the file has as codes, if kernels multiply all parts as one matrix."""
        if isinstance(self.source, QuantizedCheckpoint):
            return self._checkpoint_codes(self.source, parts, inputs, bias)
        if not isinstance(self.source, StoresBlocks):
            return None
        from triblade.quant.gguf_blocks import quantized_matrix

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
        return joined([m for m in matrices if m is not None], bias)

    def _checkpoint_codes(
        self, source: QuantizedCheckpoint, parts: Sequence[tuple[str, int]], inputs: int, bias: Tensor | None
    ) -> QuantizedMatrix | None:
        """The codes of a quantized checkpoint; parts of several schemes take a form that holds them all."""
        form = _form(source, parts)
        if isinstance(form, str):
            self._dense_reasons.setdefault(form, parts[0][0])
            return None
        matrices = []
        for name, rows in parts:
            self.expect(f"{name}.weight")
            stored = source.matrix(name)
            assert stored is not None
            check_shape(f"{name}.weight", tuple(stored.matrix.codes.shape), (rows, inputs))
            matrix = kernel_matrix(stored.matrix, form)
            if matrix is None:
                self._dense_reasons.setdefault("scales beyond float16", name)
                return None
            matrices.append(matrix)
        return joined(matrices, bias)

    def bias_of(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        """Of all parts, one after the other, float32."""
        return torch.cat([self.fetch(f"{name}.bias", (rows,)).float() for name, rows in parts])


class PackingReader(CodesReader[PackedMatrix]):
    """Matrices packed for the native kernels; `dtype` is bfloat16 or float32."""

    def __init__(
        self, source: TensorSource, config: ModelConfig, dtype: torch.dtype, scheme: Scheme | None = None
    ) -> None:
        super().__init__(source, config, dtype, torch.device("cpu"), scheme)

    def merged(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> PackedMatrix:
        """Rows of all parts, one after the other."""
        return self._pack(parts, inputs, self._bits, self.bias_of(parts) if bias else None, None)

    def gate_up(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> PackedMatrix:
        """Blocks of gate rows and of up rows in turn, so that one thread has both halves of a result."""
        order = interleaved_halves(sum(rows for _, rows in parts))
        return self._pack(parts, inputs, self._bits, self.bias_of(parts) if bias else None, order)

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
        codes = self.stored(parts, inputs, bias) if bits is None else self._rounded(parts, inputs, bits, bias)
        if codes is not None:
            return pack_quantized(codes if order is None else codes.rows(order))
        weight = torch.cat([self.fetch(f"{name}.weight", (rows, inputs)) for name, rows in parts])
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return pack_dense(weight.to(self._dtype), bias)

    def _rounded(
        self, parts: Sequence[tuple[str, int]], inputs: int, bits: int, bias: Tensor | None
    ) -> QuantizedMatrix:
        """All parts rounded to nearest, one after the other, so that one dense part exists at a time."""
        group = group_for(inputs)
        tensors = (self.fetch(f"{name}.weight", (rows, inputs)) for name, rows in parts)
        return joined([round_to_nearest(tensor, bits, group) for tensor in tensors], bias)


def group_for(inputs: int) -> int:
    """Inputs that share a scale when a matrix is rounded while loading.

    Raises:
        UnsupportedError: no group divides the inputs.
    """
    for group in GROUPS:
        if inputs % group == 0:
            return group
    raise UnsupportedError(f"{inputs} inputs are not divisible by a group of {', '.join(map(str, GROUPS))}")


def _form(source: QuantizedCheckpoint, parts: Sequence[tuple[str, int]]) -> KernelForm | str:
    """How parts are multiplied as one matrix, or why they are multiplied dense."""
    modules = [source.modules[name] for name, _ in parts if name in source.modules]
    if len(modules) < len(parts):
        return "a part of the matrix is stored dense" if modules else _NO_CODES
    forms = []
    for module in modules:
        form = kernel_form(module.scheme, module.inputs)
        if form is None:
            return f"groups of {module.scheme.group(module.inputs)} inputs"
        if source.input_order(module.name) is not None:
            return "its groups are of scattered inputs (act-order)"
        forms.append(form)
    return joint_form(forms)


class _SizeReader(WeightReader[int]):
    """Bytes in place of matrices, by the way on which they will be read."""

    def __init__(self, source: QuantizedCheckpoint, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(source, config, torch.device("cpu"))
        self._checkpoint = source
        self._dtype = dtype

    def total(self) -> int:
        """Of all matrices; norms do not count."""
        weights = self.read()
        layers = sum(layer.qkv + layer.output + layer.gate_up + layer.down for layer in weights.layers)
        return weights.embedding + layers + (0 if self.config.tie_word_embeddings else weights.head)

    def merged(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> int:
        """See `PackingReader`."""
        for name, part_rows in parts:
            self.expect(f"{name}.weight")
            if bias:
                self.expect(f"{name}.bias")
            module = self._checkpoint.modules.get(name)
            if module is not None:
                check_shape(f"{name}.weight", (module.rows, module.inputs), (part_rows, inputs))
        rows = -(-sum(rows for _, rows in parts) // BLOCK_ROWS) * BLOCK_ROWS
        form = _form(self._checkpoint, parts)
        size = form.num_bytes(rows, inputs) if isinstance(form, KernelForm) else rows * inputs * self._dtype.itemsize
        return size + (rows * torch.float32.itemsize if bias else 0)

    def gate_up(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> int:
        """The same bytes in another order."""
        return self.merged(parts, inputs, bias=bias)

    def embedding(self, name: str, rows: int, columns: int) -> int:
        """A table."""
        return self.merged([(name, rows)], columns, bias=False)


def packed_bytes(source: TensorSource, config: ModelConfig, dtype: torch.dtype, scheme: Scheme | None) -> int:
    """Memory that the packed weights will take, before reading them."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    body = config.num_parameters - tables
    if scheme is not None:
        bits = SCHEME_BITS[scheme]
        group = group_for(config.hidden_size)
        return int(body * (bits / 8 + 2 / group) + tables * (1 + 2 / group))
    if isinstance(source, QuantizedCheckpoint):
        return _SizeReader(source, config, dtype).total()
    if isinstance(source, StoresBlocks):
        return sum(_stored_bytes(source, name, dtype) for name in wanted_names(source, config))
    return config.num_parameters * dtype.itemsize


def _stored_bytes(source: StoresBlocks, name: str, dtype: torch.dtype) -> int:
    """Of one tensor: its blocks as they are, or dense."""
    from gguf.constants import GGML_QUANT_SIZES

    from triblade.quant.gguf_blocks import KERNEL_TYPES

    rows, kind = source.raw(name)
    size: int = rows.nbytes
    if kind in KERNEL_TYPES:
        return size
    elements, block_bytes = GGML_QUANT_SIZES[kind]
    return size // block_bytes * elements * dtype.itemsize

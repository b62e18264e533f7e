"""Read a checkpoint straight into the layout of the CUDA kernels, one matrix at a time, packed on the device.

What is multiplied as codes is decided as for the native kernels; the tables of embedding and head stay dense. With `int4` or `int8`
dense weights are rounded to nearest while loading. A matrix whose groups no kernel multiplies is spelled out on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights
from triblade.models.device_tensors import LoadsToDevice
from triblade.models.weights import TensorSource
from triblade.ops.backend import Linear
from triblade.ops.cuda.packing import GROUPS, DeviceMatrix, finer_groups, pack_codes, pack_dense, why_not_packed
from triblade.ops.packing import QuantizedMatrix
from triblade.quant.packed_weights import CodesReader, Scheme, packed_bytes
from triblade.quant.rtn import round_to_nearest


class DeviceReader(CodesReader[DeviceMatrix]):
    """Matrices packed for the CUDA kernels, on their device."""

    def read(self) -> DecoderWeights[DeviceMatrix]:
        """Everything; what a checkpoint can bring onto the device by itself never becomes whole in main memory."""
        if self.device.type != "cuda" or not isinstance(self.source, LoadsToDevice):
            return super().read()
        self.source.load_to(self.device)
        try:
            return super().read()
        finally:
            self.source.load_to(None)

    def merged(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> DeviceMatrix:
        """Rows of all parts, one after the other."""
        return self._pack(parts, inputs, self.bias_of(parts) if bias else None, is_gated=False)

    def gate_up(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> DeviceMatrix:
        """The same; tiles hold rows of both halves."""
        return self._pack(parts, inputs, self.bias_of(parts) if bias else None, is_gated=True)

    def embedding(self, name: str, rows: int, columns: int) -> DeviceMatrix:
        """Dense: the table is read by rows as well."""
        return pack_dense(Linear(self._to_device(self.fetch(f"{name}.weight", (rows, columns)))))

    def _pack(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: Tensor | None, *, is_gated: bool
    ) -> DeviceMatrix:
        codes = self.stored(parts, inputs, bias) if self._bits is None else self._rounded(parts, inputs, bias)
        if codes is None:
            weight = torch.cat([self._to_device(self.fetch(f"{n}.weight", (rows, inputs))) for n, rows in parts])
            return pack_dense(Linear(weight, self._biases(bias)), is_gated=is_gated)
        codes = finer_groups(_on(codes, self.device))
        reason = why_not_packed(inputs, codes.group)
        if reason is None:
            return pack_codes(codes, self._dtype, is_gated=is_gated)
        self._dense_reasons.setdefault(reason, parts[0][0])
        return pack_dense(Linear(codes.dequantize().to(self._dtype), self._biases(bias)), is_gated=is_gated)

    def _rounded(self, parts: Sequence[tuple[str, int]], inputs: int, bias: Tensor | None) -> QuantizedMatrix | None:
        """Dense weights rounded on the device; None where no group divides the row."""
        group = next((group for group in reversed(GROUPS) if inputs % group == 0), None)
        if group is None or self._bits is None:
            return None
        weight = torch.cat([self.fetch(f"{n}.weight", (rows, inputs)).to(self.device) for n, rows in parts])
        return round_to_nearest(weight, self._bits, group, bias)

    def _biases(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self._to_device(bias)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self._dtype)


def device_bytes(source: TensorSource, config: ModelConfig, dtype: torch.dtype, scheme: Scheme | None) -> int:
    """Memory that the weights will take, before reading them; tables that a file stores in fewer bits are counted twice."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    dense = config.num_parameters * dtype.itemsize
    return min(dense, packed_bytes(source, config, dtype, scheme) + tables * dtype.itemsize)


def _on(matrix: QuantizedMatrix, device: torch.device) -> QuantizedMatrix:
    def moved(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.to(device)

    return replace(
        matrix,
        codes=matrix.codes.to(device),
        scales=matrix.scales.to(device),
        offsets=moved(matrix.offsets),
        bias=moved(matrix.bias),
    )

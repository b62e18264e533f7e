"""A checkpoint of packed weights as any other: `MODULE.weight` answers with the dequantized matrix, or with its codes for kernels.

Wraps the checkpoint of stored tensors and a format that understands them; everything else passes through. What a configuration
calls quantized and a file stores dense is dense. Invariant: every stored tensor is part of a module, known to carry no weight, or a
name of its own, so strict loading sees what nobody needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from triblade.models.safetensors_checkpoint import SafetensorsCheckpoint
from triblade.quant.formats.base import CheckpointFormat, QuantizedModule, StoredMatrix

_WEIGHT = ".weight"


class QuantizedCheckpoint:
    """Implements `Checkpoint` over a folder with packed weights.

    Args:
        stored: the folder.
        layout: its format.

    Raises:
        CheckpointError: from the constructor, when headers and quantization config do not fit each other.
        UnsupportedError: they do, but it is not read.
    """

    def __init__(self, stored: SafetensorsCheckpoint, layout: CheckpointFormat) -> None:
        self._stored = stored
        self._format = layout
        self.config: Mapping[str, Any] = stored.config
        self.generation_config: Mapping[str, Any] = stored.generation_config
        self.modules: Mapping[str, QuantizedModule] = layout.modules(stored, stored.quantization)
        parts = frozenset[str]().union(*(module.tensors for module in self.modules.values()))
        ignored = {name for name in stored.names() if layout.is_stored_tensor_ignored(name)}
        self._plain = stored.names() - parts - ignored

    @property
    def format(self) -> str:
        """Name of the format in the registry."""
        return self._format.name

    @cached_property
    def dtype(self) -> torch.dtype:
        """Float32 if that is what is stored beside the codes; bfloat16 for both 16-bit types."""
        return torch.float32 if self._stored.dtype == torch.float32 else torch.bfloat16

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors in `dtype`, weights dequantized."""
        plain = sum(torch.Size(self._stored.info(name).shape).numel() for name in self._plain)
        return (plain + sum(module.num_elements for module in self.modules.values())) * self.dtype.itemsize

    def names(self) -> frozenset[str]:
        """Names of all tensors, one `weight` for every quantized module."""
        return self._plain | {module + _WEIGHT for module in self.modules}

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored; the weight of a quantized module dequantized, float32."""
        stored = self.matrix(name.removesuffix(_WEIGHT)) if name.endswith(_WEIGHT) else None
        return self._stored.tensor(name) if stored is None else stored.dequantize()

    def matrix(self, module: str) -> StoredMatrix | None:
        """The codes of a module, without its bias; None: it is stored dense, or not at all."""
        found = self.modules.get(module)
        return None if found is None else self._format.read(self._stored, found)

    def input_order(self, module: str) -> Tensor | None:
        """Inputs [in] of a quantized module in the order of their groups; None: their own order."""
        return self._format.input_order(self._stored, self.modules[module])

    def load_to(self, device: torch.device | None) -> None:
        """See `LoadsToDevice`."""
        self._stored.load_to(device)

    def release(self) -> None:
        """See `Checkpoint`."""
        self._stored.release()

    def fingerprint(self) -> str:
        """That of the stored tensors; the configuration is in it."""
        return self._stored.fingerprint()

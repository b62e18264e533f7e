"""What a checkpoint format is: how to find its quantized modules among a file's tensors, read one, and write one.

A format holds no state; what it needs is passed in. Everything that headers and configuration can tell is checked when a checkpoint
is opened, and every refusal names the module. Knows no decoder and no kernel.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from triblade.errors import CheckpointError, ConfigError, UnsupportedError
from triblade.models.checkpoint import Checkpoint
from triblade.models.safetensors_checkpoint import SafetensorsCheckpoint, TensorInfo
from triblade.quant.scheme import IntegerMatrix, QuantScheme

log = logging.getLogger(__name__)


class TensorStore(Protocol):
    """The stored tensors of a checkpoint, by the names in its files."""

    def names(self) -> frozenset[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModule:
    """A linear layer whose weight is stored as codes."""

    name: str
    scheme: QuantScheme
    rows: int
    inputs: int
    tensors: frozenset[str]  # names of stored tensors that make the weight; the bias is not among them
    layout: str = ""  # what its format distinguishes: padded or dense words, stored zero points less one

    @property
    def num_elements(self) -> int:
        return self.rows * self.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A module as read; its groups may be of inputs that do not lie side by side.

    With `input_order`, column j of the matrix belongs to input input_order[j] ("act-order" of GPTQ).
    """

    matrix: IntegerMatrix
    input_order: Tensor | None = None  # [in] int64

    def dequantize(self) -> Tensor:
        """The weight [out, in] float32, inputs in their own order."""
        values = self.matrix.dequantize()
        if self.input_order is None:
            return values
        weight = torch.empty_like(values)
        weight[:, self.input_order] = values
        return weight


class CheckpointFormat(ABC):
    """One way of storing quantized modules; its name is the `quant_method` of config.json."""

    name: str
    holds_embeddings: bool = False
    group_index: str | None = None  # suffix of the tensor with each input's group, in formats that have one

    @abstractmethod
    def modules(self, store: TensorStore, quantization: Mapping[str, Any]) -> dict[str, QuantizedModule]:
        """Quantized modules by name, all headers checked.

        Raises:
            CheckpointError: tensors are missing, or have another shape or type than the configuration says.
            UnsupportedError: the configuration asks for something that is not read.
        """

    @abstractmethod
    def read(self, store: TensorStore, module: QuantizedModule) -> StoredMatrix:
        """The codes of one module."""

    def input_order(self, store: TensorStore, module: QuantizedModule) -> Tensor | None:
        """Inputs [in] in the order of their groups; None: their own order, as in every module that has no index of groups."""
        index = f"{module.name}.{self.group_index}"
        if self.group_index is None or index not in module.tensors:
            return None
        return order_of_groups(store.tensor(index), module.scheme.group(module.inputs), module.name)

    @abstractmethod
    def why_not(self, scheme: QuantScheme, rows: int, inputs: int) -> str | None:
        """What keeps a matrix of this scheme and shape out of the format, or None."""

    @abstractmethod
    def tensors(self, matrix: IntegerMatrix) -> dict[str, Tensor]:
        """What is stored for a matrix, by the suffix on the module's name; without the bias."""

    @abstractmethod
    def quantization_config(self, schemes: Mapping[str, QuantScheme], dense: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint with these modules, `dense` being the linear layers left alone.

        Raises:
            UnsupportedError: the format cannot hold these schemes in one checkpoint.
        """

    @abstractmethod
    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The type in which scales are stored beside a model of this type."""

    def is_stored_tensor_ignored(self, name: str) -> bool:
        """Whether a stored tensor outside all modules carries no weight."""
        return False

    def open(self, checkpoint: SafetensorsCheckpoint) -> Checkpoint:
        """The checkpoint with its packed modules as weights."""
        from triblade.quant.quantized_checkpoint import QuantizedCheckpoint

        return QuantizedCheckpoint(checkpoint, self)


class Float16Format(CheckpointFormat):
    """A format that has scales in float16, and a zero point for every group, also where the matrix is symmetric."""

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """See `CheckpointFormat`."""
        return torch.float16

    def scales_and_zero_points(self, matrix: IntegerMatrix, symmetric: int) -> tuple[Tensor, Tensor]:
        """Both [G, out], as stored; `symmetric` is what the format writes for the zero point of a symmetric matrix.

        Raises:
            UnsupportedError: the scales are not float16: rounding them now would shift what the codes mean.
        """
        if matrix.scales.dtype != torch.float16:
            raise UnsupportedError(f"{self.name.upper()} stores float16 scales, got: {matrix.scales.dtype}")
        zeros = matrix.zero_points
        if zeros is None:
            zeros = torch.full(matrix.scales.shape, symmetric, dtype=torch.uint8)
        return matrix.scales.T.contiguous(), zeros.T.contiguous()


def prefixes(store: TensorStore, suffix: str) -> list[str]:
    """Names of modules that have a tensor `MODULE.suffix`, sorted."""
    ending = f".{suffix}"
    return sorted(name.removesuffix(ending) for name in store.names() if name.endswith(ending))


def expect_tensor(store: TensorStore, name: str, shape: tuple[int, ...], types: Iterable[str]) -> str:
    """Check the header of a stored tensor; its name back.

    Raises:
        CheckpointError: it is not there, or has another shape or type.
    """
    if name not in store.names():
        module, _, suffix = name.rpartition(".")
        raise CheckpointError(f"{module} has no {suffix}", hint="is the download complete?")
    info = store.info(name)
    if info.shape != shape:
        raise CheckpointError(f"{name} has shape {list(info.shape)}, its module asks for {list(shape)}")
    if info.dtype not in tuple(types):
        raise CheckpointError(f"{name} has type {info.dtype}, expected: {' or '.join(types)}")
    return name


def groups_of(scheme: QuantScheme, module: str, inputs: int) -> int:
    """Scales in a row of `inputs`.

    Raises:
        CheckpointError: groups do not fill a row; the message names the module.
    """
    try:
        return scheme.groups(inputs)
    except ConfigError as error:
        raise CheckpointError(f"{module}: {error.message}") from error


def expect_value(value: Any, allowed: Sequence[Any], what: str) -> None:
    """Check a setting that changes what the codes mean.

    Raises:
        UnsupportedError: it is none of `allowed`.
    """
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise UnsupportedError(f"{what} is {value!r}, which is not read", hint=f"read: {choices}")


def warn_of_unknown_keys(quantization: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    """Say which settings of a configuration nobody looked at; empty ones do not count."""
    unknown = sorted(key for key, value in quantization.items() if key not in set(known) and value)
    if unknown:
        log.warning("%s checkpoint: settings that are not known and have no effect: %s", name, ", ".join(unknown))


def is_match(pattern: str, name: str) -> bool:
    """Whether a regular expression of a configuration matches from the start of a name.

    Raises:
        CheckpointError: it is no regular expression.
    """
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"not a regular expression in the quantization config: {pattern!r}: {error}") from error


def order_of_groups(group_index: Tensor, group_size: int, module: str) -> Tensor | None:
    """Inputs in the order of their groups, from the group of each input [in]; None: they are in order already.

    Raises:
        CheckpointError: a group does not have `group_size` inputs.
    """
    index = group_index.long().cpu()
    in_order = torch.arange(len(index)) // group_size
    if torch.equal(index, in_order):
        return None
    groups = len(index) // group_size
    if len(index) and (
        int(index.min()) < 0 or not torch.equal(index.bincount(minlength=groups), _all(group_size, groups))
    ):
        raise CheckpointError(f"{module}: g_idx does not put {group_size} inputs into each of {groups} groups")
    return index.argsort(stable=True)


def _all(value: int, count: int) -> Tensor:
    return torch.full((count,), value)

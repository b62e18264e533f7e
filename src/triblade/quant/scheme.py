"""How a matrix is quantized, and the one form in which quantizers, writers and readers hand such a matrix to each other.

A scheme says bits, group size and symmetry; an `IntegerMatrix` holds codes, scales and zero points as plain tensors, not packed
into words. Knows no file format and no kernel. Invariant: w = scale * (code - zero), with the scale already rounded to the
type in which it is stored, so whoever writes, reads or multiplies the matrix sees the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triblade.errors import CheckpointError, ConfigError, UnsupportedError
from triblade.quant.bits import bits_per_weight

BITS = (2, 3, 4, 8)
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """Integer weights with one scale per row and group of inputs.

    Args:
        bits: of a code: 2, 3, 4 or 8.
        group_size: inputs per scale; None: one scale per row.
        symmetric: the zero point is 2 ** (bits - 1) everywhere; otherwise every scale has its own.
        activation_bits: 8: inputs are rounded to 8 bits as well, with a scale per token; None: inputs stay as they are.

    Raises:
        UnsupportedError: bits that no format stores, or rounded inputs under weights of other than 8 bits.
        ConfigError: a group size below 1.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    activation_bits: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a matrix."""
        if self.bits not in BITS:
            raise UnsupportedError(
                f"weights cannot have {self.bits} bits", hint=f"choices: {', '.join(map(str, BITS))}"
            )
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError(f"group size must be at least 1, got: {self.group_size}", hint="None is a scale per row")
        if self.activation_bits not in (None, 8):
            raise UnsupportedError(f"activations cannot have {self.activation_bits} bits", hint="choices: 8, None")
        if self.activation_bits is not None and self.bits != 8:
            raise UnsupportedError(
                f"8-bit activations need 8-bit weights, got: {self.bits} bits", hint="leave one of the two out"
            )

    @property
    def zero_point(self) -> int:
        """The code of zero in a symmetric matrix."""
        return 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def group(self, inputs: int) -> int:
        """Inputs per scale in a row of `inputs`.

        Raises:
            ConfigError: the group size does not divide the row.
        """
        if self.group_size is None:
            return inputs
        if inputs % self.group_size:
            fitting = [size for size in (128, 64, 32) if inputs % size == 0]
            raise ConfigError(
                f"{inputs} inputs are not divisible by the group size {self.group_size}",
                hint=f"use {fitting[0]}" if fitting else "use one scale per row",
            )
        return self.group_size

    def groups(self, inputs: int) -> int:
        """Scales in a row of `inputs`."""
        return inputs // self.group(inputs)

    def bits_per_weight(self, inputs: int) -> float:
        """Average over a row of `inputs`, scales and zero points included."""
        return bits_per_weight(self.bits, self.group(inputs), symmetric=self.symmetric)

    def __str__(self) -> str:
        """`W4 g64 asym`, as reports and log lines call it."""
        activations = "" if self.activation_bits is None else f"A{self.activation_bits}"
        group = "row" if self.group_size is None else f"g{self.group_size}"
        return f"W{self.bits}{activations} {group} {'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerMatrix:
    """A quantized linear layer: codes with a scale per row and group.

    Raises:
        CheckpointError: the parts do not fit each other or the scheme.
    """

    codes: Tensor  # [out, in] uint8, 0 .. 2 ** bits - 1
    scales: Tensor  # [out, G] float16 or bfloat16 (float32 in some files of other tools)
    zero_points: Tensor | None  # [out, G] uint8; None: symmetric, 2 ** (bits - 1)
    scheme: QuantScheme
    bias: Tensor | None = None  # [out]

    def __post_init__(self) -> None:
        """Check types and shapes; values are the quantizer's and the reader's business."""
        rows, inputs = self.codes.shape
        grid = (rows, self.scheme.groups(inputs))
        if self.codes.dtype != torch.uint8 or self.scales.dtype not in SCALE_TYPES:
            raise CheckpointError(f"codes must be uint8 and scales floats: {self.codes.dtype}, {self.scales.dtype}")
        if tuple(self.scales.shape) != grid:
            raise CheckpointError(
                f"scales of {rows} x {inputs} codes must be {list(grid)}, got: {list(self.scales.shape)}"
            )
        if (self.zero_points is None) != self.scheme.symmetric:
            raise CheckpointError(f"zero points and the scheme {self.scheme} contradict each other")
        if self.zero_points is not None and tuple(self.zero_points.shape) != grid:
            raise CheckpointError(f"zero points must be {list(grid)}, got: {list(self.zero_points.shape)}")
        if self.bias is not None and tuple(self.bias.shape) != (rows,):
            raise CheckpointError(f"a bias of {rows} rows must be [{rows}], got: {list(self.bias.shape)}")

    def dequantize(self) -> Tensor:
        """The matrix [out, in] float32."""
        codes: Tensor = self.codes.float().unflatten(1, (self.scales.shape[1], -1))  # [out, G, group]
        zeros = self.scheme.zero_point if self.zero_points is None else self.zero_points.float()[..., None]
        return ((codes - zeros) * self.scales.float()[..., None]).flatten(1)

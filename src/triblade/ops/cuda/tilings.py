"""How products are cut over a device: numbers of `kernels/linear.cu` and `kernels/wide.cu`, measured ones first, else by a rule.

`tilings_sm90.json` holds the fastest of many for the matrices that `benchmarks/gpu_kernels.py` tried. Knows no memory and no
launch. Invariant: no part along the inputs is empty, and what warps exchange fits a block's shared memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import ClassVar

from triblade.ops.cuda.packing import CHUNK, TILE_ROWS, DeviceMatrix

TOKEN_TILE = 8  # the narrow side of the matrix instruction
WARPGROUP_TILES = 4  # of 16 rows
MULTIPROCESSORS = 132  # of the devices that tilings were measured on
MOST_WIDE_SPLITS = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of `kernels/linear.cu`."""

    source: ClassVar[str] = "linear.cu"
    kernel: ClassVar[str] = "linear"

    row_tiles: int  # per warp
    token_tiles: int
    warps_along_rows: int
    warps_along_inputs: int
    depth: int  # chunks in flight per warp
    blocks: int  # that should fit a multiprocessor, which bounds registers
    splits: int  # blocks along inputs

    @property
    def threads(self) -> int:
        return 32 * self.warps_along_rows * self.warps_along_inputs

    @property
    def block_tiles(self) -> int:
        return self.row_tiles * self.warps_along_rows

    @property
    def constants(self) -> dict[str, int]:
        """What is compiled in."""
        return {
            "ROWS": self.row_tiles,
            "NT": self.token_tiles,
            "WM": self.warps_along_rows,
            "WK": self.warps_along_inputs,
            "DEPTH": self.depth,
            "BLOCKS": self.blocks,
        }


@dataclass(frozen=True, slots=True)
class WideTiling:
    """Of `kernels/wide.cu`."""

    source: ClassVar[str] = "wide.cu"
    kernel: ClassVar[str] = "wide"

    groups: int  # of four warps, 64 rows, in a block
    token_tiles: int
    depth: int
    blocks: int
    splits: int

    @property
    def threads(self) -> int:
        return 32 * (WARPGROUP_TILES * self.groups + 1)

    @property
    def block_tiles(self) -> int:
        return WARPGROUP_TILES * self.groups

    @property
    def constants(self) -> dict[str, int]:
        """What is compiled in."""
        return {
            "ROWS": 1,
            "NT": self.token_tiles,
            "GROUPS": self.groups,
            "DEPTH": self.depth,
            "BLOCKS": self.blocks,
        }


def key_of(matrix: DeviceMatrix, columns: int, *, is_wide: bool = False) -> str:
    """What a measured tiling is for: the matrix and tiles of 8 tokens."""
    kind, gated = "w" if is_wide else "t", "gated " if matrix.is_gated else ""
    return f"{matrix.bits} bits g{matrix.group} {matrix.rows}x{matrix.inputs} {gated}{kind}{columns}"


def tiling(matrix: DeviceMatrix, columns: int, capability: int = 90) -> Tiling:
    """How to multiply 8 `columns` (1, 2, 4 or 8) tokens with a matrix: as measured for its size, else a rule made from that."""
    measured = measured_tilings(capability).get(key_of(matrix, columns))
    if measured is not None:
        return Tiling(*measured)
    tiles = -(-matrix.rows // TILE_ROWS)
    units = _units(matrix)
    if columns <= 2:
        warps = _at_most(min(4 if tiles >= 1024 else 8 if tiles >= 256 else 16, units))
        return Tiling(1, columns, 1, warps, 2, max(1, 24 // warps), 1)
    along_rows = 2 if tiles >= 512 else 1
    warps = _at_most(min(4 // along_rows, units))
    row_tiles = 2 if tiles >= 1024 else 1
    splits = _at_most(min(2, units // warps)) if tiles < 512 else 1
    return Tiling(row_tiles, columns, along_rows, warps, 2, 1, splits)


def wide_tiling(matrix: DeviceMatrix, columns: int, capability: int = 90) -> WideTiling:
    """The same with the instruction of warpgroups, for 8 `columns` (4 or 8) tokens."""
    measured = measured_tilings(capability).get(key_of(matrix, columns, is_wide=True))
    if measured is not None:
        return WideTiling(*measured)
    return min(wide_tilings(matrix, columns), key=lambda cut: _wide_cost(matrix, cut))


def wide_tilings(matrix: DeviceMatrix, columns: int) -> list[WideTiling]:
    """All that make sense for a matrix."""
    splits = [number for number in range(1, MOST_WIDE_SPLITS + 1) if number == 1 or 4 * number <= _units(matrix)]
    depth = 2 if matrix.bits > 4 else 4
    return [WideTiling(groups, columns, depth, _resident(groups), k) for groups in range(1, 6) for k in splits]


def _resident(groups: int) -> int:
    """Blocks of so many warpgroups that a multiprocessor holds at a time."""
    return {1: 4, 2: 2}.get(groups, 1)


def _wide_cost(matrix: DeviceMatrix, cut: WideTiling) -> float:
    """About how long a product takes, from what was measured on an H200; 1 is a warpgroup's part of a chunk of 64 inputs.

    A chunk costs the same however few rows share it, and something for each warpgroup on the multiprocessor; blocks cost
    something to begin and to end, splits to write sums and to read them.
    """
    blocks = -(-matrix.rows // (TILE_ROWS * cut.block_tiles)) * cut.splits
    at_once = min(cut.blocks, -(-blocks // MULTIPROCESSORS))
    rounds = -(-blocks // (MULTIPROCESSORS * at_once))
    chunks = matrix.inputs / CHUNK / cut.splits
    return rounds * (chunks * (4.4 + cut.groups * at_once) + 32) + (8 * cut.splits if cut.splits > 1 else 0)


@cache
def measured_tilings(capability: int) -> Mapping[str, tuple[int, ...]]:
    """Tilings that were the fastest of many on such a device, by `key_of`."""
    file = resources.files("triblade.ops.cuda") / f"tilings_sm{capability}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def partial_numbers(matrix: DeviceMatrix, cut: Tiling | WideTiling) -> int:
    """Scratch that a product cut so needs, in numbers."""
    tiles = -(-matrix.rows // TILE_ROWS)
    return cut.splits * tiles * cut.token_tiles * 32 * 4 if cut.splits > 1 else 0


def _units(matrix: DeviceMatrix) -> int:
    """What the inputs can be cut into."""
    return matrix.inputs // max(CHUNK, matrix.group)


def _at_most(number: int) -> int:
    """The largest power of two up to a number; at least 1."""
    return 1 << (max(1, number).bit_length() - 1)

"""The small kernels of a step as launches: embedding, norms, the greedy choice, and the inputs of the next step.

Every method writes into a tensor it is given, so that steps can be recorded. Knows no model.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from triblade.ops.cuda.device import Device, Grid, pointer
from triblade.ops.cuda.linear import Activations

NORM_THREADS = BEST_THREADS = 256
MANY_ROWS = 1024  # of a norm: from so many on each is a warp's, which waits for no other
MAX_WIDTH = 8192  # of a norm: what a warp keeps in registers
BEST_SPLITS = 32
DRAW_THREADS = DRAW_TOKENS = 256
DRAW_SPLITS = 16
DRAW_COLUMNS = 5  # of a row's settings; see `kernels/draw.cu`


def why_not_width(hidden_size: int) -> str | None:
    """What keeps the norm kernel from rows of this size, or None."""
    if hidden_size % 8 or hidden_size > MAX_WIDTH:
        return f"hidden size {hidden_size} (CUDA kernels: a multiple of 8 up to {MAX_WIDTH})"
    return None


class _Draws(ctypes.Structure):
    _fields_ = (("columns", ctypes.c_void_p), ("rows", ctypes.c_int))


class VectorKernels:
    """Row-wise operations on one device.

    Args:
        device: where kernels run.
        dtype: of activations.
        memory: where scratch lies.
        max_rows: most rows of `best_token`.
    """

    def __init__(self, device: Device, dtype: torch.dtype, memory: torch.device, max_rows: int) -> None:
        self._device = device
        self._constants = {"FLOAT16": int(dtype == torch.float16)}
        self._workspace = torch.empty(max_rows * BEST_SPLITS, 2, dtype=torch.int32, device=memory)
        self._counters = torch.zeros(max_rows, dtype=torch.int32, device=memory)
        self._sums = torch.empty(0, dtype=torch.int64, device=memory)

    def reserve_draws(self, vocabulary: int) -> None:
        """Scratch for `draw_token`, made once, since recorded steps keep its address."""
        blocks = -(-vocabulary // DRAW_TOKENS)
        self._sums = torch.empty(len(self._counters) * blocks, dtype=torch.int64, device=self._counters.device)

    def embed(self, table: Tensor, ids: Tensor, scale: float, out: Tensor) -> None:
        """out [T, C] = rows `ids` [T] int32 of `table` [V, C], times `scale`.

        Begins a step: what earlier ones wrote (the cache) is there for every kernel that follows, also before it waits for its
        predecessor.
        """
        numbers = (ctypes.c_int(table.shape[0]), ctypes.c_int(table.shape[1]), ctypes.c_float(scale))
        self._launch(
            "embed", (len(ids), 1, 1), 128, [pointer(table), pointer(ids), pointer(out), *numbers], overlaps=False
        )

    def arrange(self, x: Tensor, out: Activations) -> None:
        """out = x [T, C] in the layout of inputs of products."""
        numbers = (ctypes.c_int(x.shape[1]), ctypes.c_int(out.layout))
        self._launch("arrange", (x.shape[0], 1, 1), 128, [pointer(x), pointer(out.values), *numbers])

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Activations, added: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """out [T, C] = norm(x) * weight; with `added` (y [T, C], its norm's weight) x += norm(y) * weight comes first, in place."""
        y, y_weight = added or (None, None)
        arguments = [pointer(t) for t in (x, y, y_weight, weight, out.values)]
        rows, width = x.shape
        threads = 32 if rows >= MANY_ROWS else NORM_THREADS
        numbers = (ctypes.c_int(rows), ctypes.c_int(width), ctypes.c_float(eps), ctypes.c_int(out.layout))
        constants = {**self._constants, "ROW_THREADS": threads, "LOADS": -(-width // (8 * threads))}
        kernel = self._device.kernel("norm.cu", "rms_norm", constants)
        grid = (-(-rows * threads // NORM_THREADS), 1, 1)
        self._device.launch(kernel, grid, NORM_THREADS, [*arguments, *numbers])

    def best_token(self, logits: Tensor, vocabulary: int, softcap: float | None, out: Tensor) -> None:
        """out [R] int32: see `spec.sampler.best_tokens`, of the first `vocabulary` columns of logits [R, V], capped in place."""
        numbers = (ctypes.c_int(logits.shape[1]), ctypes.c_int(vocabulary), ctypes.c_float(softcap or 0.0))
        scratch = [pointer(t) for t in (self._workspace, self._counters, out)]
        grid = (BEST_SPLITS, logits.shape[0], 1)
        self._launch("best_token", grid, BEST_THREADS, [pointer(logits), *numbers, *scratch])

    def draw_token(self, logits: Tensor, vocabulary: int, draws: Tensor, tokens: Tensor) -> None:
        """Best tokens [R] of capped logits [R, V] become draws where `draws` [5, R] int32 (`kernels/draw.cu`) has a temperature."""
        numbers = (ctypes.c_int(logits.shape[1]), ctypes.c_int(vocabulary))
        settings = _Draws(draws.data_ptr(), draws.shape[1])
        scratch = [pointer(t) for t in (self._sums, self._counters, tokens)]
        grid = (DRAW_SPLITS, logits.shape[0], 1)
        self._launch(
            "draw_token", grid, DRAW_THREADS, [pointer(logits), *numbers, settings, *scratch], source="draw.cu"
        )

    def advance(
        self,
        best: Tensor,
        inputs: Tensor,
        tables: Tensor,
        num_blocks: Tensor,
        block_size: int,
        drawn: Tensor | None = None,
    ) -> None:
        """inputs [3, R] int32 (ids, positions, slots) of one token per row become the next step's; see `kernels/vectors.cu`."""
        rows = inputs.shape[1]
        arguments = [pointer(t) for t in (best, *inputs.unbind(0), drawn, tables, num_blocks)]
        numbers = (tables.shape[1], block_size, rows)
        grid = (-(-rows // 128), 1, 1)
        self._launch("advance", grid, 128, [*arguments, *map(ctypes.c_int, numbers)], overlaps=False)

    def _launch(
        self,
        name: str,
        grid: Grid,
        threads: int,
        arguments: list[object],
        *,
        source: str = "vectors.cu",
        overlaps: bool = True,
    ) -> None:
        kernel = self._device.kernel(source, name, self._constants)
        self._device.launch(kernel, grid, threads, arguments, overlaps=overlaps)

"""What native step programs have in common: kernels, team, buffers, and how a decoder layer is recorded.

Knows the kernels by `triblade._native` only. Whatever a program points to (weights, cache, tables) is held here, so that it lives
as long as the program does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from triblade.engine.batch import StepItem
from triblade.errors import UnsupportedError
from triblade.kv.cache import KVCache
from triblade.kv.layout import TILE_TOKENS
from triblade.models.config import ModelConfig
from triblade.models.decoder import LayerWeights
from triblade.models.rope import rope_table
from triblade.ops.packing import BLOCK_ROWS, PackedMatrix

_CACHES = {"bfloat16": 0, "int8": 1}
EPILOGUES = {"silu": 2, "gelu_tanh": 3}
MAX_HEAD_DIM, MAX_COLUMNS, MAX_LAYERS = 512, 65536, 1024  # as in csrc/


@dataclass(frozen=True, kw_only=True)
class NativeOptions:
    """How the program runs."""

    vocab_size: int  # tokens that may be chosen
    max_tokens: int
    max_rows: int  # of logits kept at a time
    isa: str = ""  # "": the best one


def native_module() -> Any | None:
    """The compiled module, or None where it was not built."""
    try:
        return import_module("triblade._native")
    except ImportError:
        return None


def why_not_native(config: ModelConfig, kv_dtype: str, block_size: int) -> str | None:
    """What keeps the native kernels from running this, or None."""
    widest = max(config.hidden_size, config.intermediate_size, config.q_size)
    checks = (
        (native_module() is None, "the native module was not built (no compiler at installation)"),
        (kv_dtype not in _CACHES, f"KV cache dtype {kv_dtype} (native: {', '.join(_CACHES)})"),
        (block_size % TILE_TOKENS != 0, f"block size {block_size} (native: a multiple of {TILE_TOKENS})"),
        (config.head_dim % BLOCK_ROWS != 0, f"head size {config.head_dim} (native: a multiple of {BLOCK_ROWS})"),
        (config.head_dim > MAX_HEAD_DIM, f"head size {config.head_dim} (native: at most {MAX_HEAD_DIM})"),
        (
            config.hidden_size % BLOCK_ROWS != 0,
            f"hidden size {config.hidden_size} (native: a multiple of {BLOCK_ROWS})",
        ),
        (
            config.intermediate_size % BLOCK_ROWS != 0,
            f"intermediate size {config.intermediate_size} (native: a multiple of {BLOCK_ROWS})",
        ),
        (widest > MAX_COLUMNS, f"{widest} columns (native: at most {MAX_COLUMNS})"),
        (config.num_layers > MAX_LAYERS, f"{config.num_layers} layers (native: at most {MAX_LAYERS})"),
    )
    return next((reason for fails, reason in checks if fails), None)


def make_team(threads: int, spin_us: int = 200, cores: Sequence[int] = ()) -> Any:
    """Threads that programs run on, one program at a time.

    Args:
        threads: the caller's included.
        spin_us: microseconds that an idle thread spins before it parks.
        cores: where to pin the other threads; none: wherever the system puts them.
    """
    return native_or_error().Team(threads=threads, spin_us=spin_us, cores=list(cores))


def native_or_error() -> Any:
    """The compiled module.

    Raises:
        UnsupportedError: it was not built.
    """
    native = native_module()
    if native is None:
        raise UnsupportedError("the native module was not built", hint="install a C++ compiler and reinstall triblade")
    return native


class NativeProgram:
    """A program to be recorded over one cache.

    Args:
        config: the model.
        cache: with arrangement "tiles".
        context_length: positions of the rope tables.
        options: sizes.
    """

    def __init__(self, config: ModelConfig, cache: KVCache, context_length: int, options: NativeOptions) -> None:
        self._native = native = native_or_error()
        _check_isa(options.isa, native.isas())
        self.name = f"native ({native.isa(options.isa)})"
        self.cache = cache
        self._config = config
        self._options = options
        self._ropes = [rope_table(rope, context_length) for rope in config.ropes]
        self._held: list[Tensor] = []

    @property
    def buffer_bytes(self) -> int:
        """Memory of the program's own buffers."""
        size: int = self._program.buffer_bytes
        return size

    def _open(self, matrices: Iterable[PackedMatrix], team: Any) -> None:
        """Make the program, to be recorded now; buffers are sized for these matrices."""
        config, options = self._config, self._options
        self._program: Any = self._native.Program(
            isa=options.isa,
            team=team,
            max_tokens=options.max_tokens,
            max_rows=options.max_rows,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocabulary=options.vocab_size,
            max_inputs=max(matrix.num_inputs for matrix in matrices),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
        )

    def _record_layer(self, index: int, layer: LayerWeights[PackedMatrix], rope: Any) -> None:
        """Layer `index` of the model and of the cache."""
        config, program = self._config, self._program
        eps = config.rms_norm_eps
        qkv, output, gate_up, down = map(self._matrix, matrices_of(layer))
        program.norm(self._keep(layer.input_norm), eps, qkv)
        program.qkv(qkv)
        window = config.layers[index].window or 0
        program.attention(self._layer_cache(index), window, rope, self._keep(layer.qk_norm), eps, output)
        program.project(output, self._keep(layer.attention_post_norm), eps)
        program.norm(self._keep(layer.mlp_norm), eps, gate_up)
        program.gate_up(gate_up, EPILOGUES[config.activation], down)
        program.project(down, self._keep(layer.mlp_post_norm), eps)
        program.end_layer()

    def _rope_tables(self) -> list[Any]:
        return [self._native.RopeTable(address(cos), address(sin), cos.shape[1]) for cos, sin in self._ropes]

    def _layer_cache(self, index: int) -> Any:
        layout, layer = self.cache.layout, self.cache.first_layer + index
        keys, values = layout.planes(layer)
        scales = (keys[1].offset_bytes, values[1].offset_bytes) if len(keys) > 1 else (0, 0)
        return self._native.LayerCache(
            pool=self.cache.pool.data_ptr(),
            row_bytes=layout.row_bytes,
            planes=[keys[0].offset_bytes, values[0].offset_bytes, *scales],
            cache=_CACHES[layout.codec],
            block_size=layout.block_size,
            kv_heads=layout.group(layer).num_kv_heads,
            head_dim=layout.group(layer).head_dim,
        )

    def _matrix(self, matrix: PackedMatrix) -> Any:
        addresses = (address(part) for part in (matrix.weights, matrix.scales, matrix.offsets, matrix.bias))
        return self._native.matrix(int(matrix.format), matrix.num_rows, matrix.num_inputs, matrix.group, *addresses)

    def _keep(self, tensor: Tensor | None) -> int:
        """The address of a tensor that must live as long as the program; 0 for none."""
        if tensor is not None:
            tensor = tensor.contiguous()
            self._held.append(tensor)
        return address(tensor)


@dataclass(frozen=True, slots=True)
class FlatSteps:
    """Items as arrays that native code reads in place."""

    token_ids: array[int]
    first_rows: array[int]
    lengths: array[int]
    tables: array[int]

    @classmethod
    def of(cls, items: Sequence[StepItem]) -> FlatSteps:
        """In the order of the items."""
        flat = cls(array("i"), array("i", [0]), array("i"), array("q"))
        for item in items:
            flat.token_ids.extend(item.token_ids)
            flat.first_rows.append(len(flat.token_ids))
            flat.lengths.append(item.start + item.num_tokens)
            flat.tables.append(start_of(item.request.block_table))
        return flat

    def sequences(self) -> tuple[int, int, int, int]:
        """Number of sequences, then addresses."""
        return len(self.lengths), start_of(self.first_rows), start_of(self.lengths), start_of(self.tables)


def matrices_of(layer: LayerWeights[PackedMatrix]) -> tuple[PackedMatrix, ...]:
    """In the order in which a step reads them."""
    return (layer.qkv, layer.output, layer.gate_up, layer.down)


def _check_isa(wanted: str, here: list[str]) -> None:
    if wanted and wanted not in here:
        raise UnsupportedError(
            f"instruction set not on this processor or unknown: {wanted!r}",
            hint=f"this processor runs: {', '.join(here)}",
            param="isa",
        )


def start_of(numbers: array[int]) -> int:
    """The address of an array's first number; good while the array is neither changed nor dropped."""
    return numbers.buffer_info()[0]


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

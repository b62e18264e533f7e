"""The native step program as a `StepExecutor`: records the decoder once, then one native call a step.

Knows the kernels by `triblade._native` only. Whatever the program points to (weights, cache, tables) is held here, so that it lives
as long as the program does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from triblade.engine.batch import StepItem
from triblade.engine.executor import Scores
from triblade.errors import UnsupportedError
from triblade.kv.cache import KVCache
from triblade.kv.layout import ALIGNMENT_BYTES, TILE_TOKENS
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights, LayerWeights
from triblade.models.rope import rope_table
from triblade.ops.packing import BLOCK_ROWS, PackedMatrix

_CACHES = {"bfloat16": 0, "int8": 1}
_EPILOGUES = {"silu": 2, "gelu_tanh": 3}
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


class NativeExecutor:
    """One recorded program over one cache.

    Args:
        config: the model.
        weights: packed; see `quant.packed_weights`. Their layers are taken out.
        cache: with arrangement "tiles".
        context_length: positions of the rope tables.
        options: sizes.
        team: threads; the programs of one engine share it. See `make_team`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[PackedMatrix],
        cache: KVCache,
        context_length: int,
        options: NativeOptions,
        team: Any,
    ) -> None:
        self._native = native = _module_or_error()
        _check_isa(options.isa, native.isas())
        self.name = f"native ({native.isa(options.isa)})"
        self.cache = cache
        self._config = config
        native.advise_huge_pages(cache.pool.data_ptr(), cache.pool.nbytes)
        self._weights = _in_one_piece(weights, native)
        self._ropes = [rope_table(rope, context_length) for rope in config.ropes]
        self._held: list[Tensor] = []
        self._logits = torch.empty(options.max_rows, weights.head.num_rows)
        self._vocab_size = min(options.vocab_size, weights.head.num_rows)
        self._program = self._make_program(options, team)
        self._record()
        native.release_memory()

    @property
    def weight_bytes(self) -> int:
        """See `StepExecutor`."""
        return sum(matrix.nbytes for matrix in {id(m): m for m in self._matrices()}.values())

    @property
    def buffer_bytes(self) -> int:
        """Memory of the program's own buffers."""
        size: int = self._program.buffer_bytes
        return size

    def forward(self, items: Sequence[StepItem]) -> None:
        """See `StepExecutor`."""
        ids, first_rows, lengths, tables = array("i"), array("i", [0]), array("i"), array("q")
        for item in items:
            ids.extend(item.token_ids)
            first_rows.append(len(ids))
            lengths.append(item.start + item.num_tokens)
            tables.append(_start(item.request.block_table))
        self._program.run(_start(ids), len(items), _start(first_rows), _start(lengths), _start(tables))

    @property
    def max_rows(self) -> int | None:
        """See `StepExecutor`."""
        return len(self._logits)

    def score(self, rows: Sequence[int], *, with_logits: bool) -> Scores:
        """See `StepExecutor`."""
        index, best = array("i", rows), array("i", bytes(4 * len(rows)))
        out = self._logits.data_ptr() if with_logits else 0
        self._program.score(_start(index), len(index), out, _start(best))
        return Scores(best.tolist(), self._logits[: len(index), : self._vocab_size] if with_logits else None)

    def _make_program(self, options: NativeOptions, team: Any) -> Any:
        config = self._config
        return self._native.Program(
            isa=options.isa,
            team=team,
            max_tokens=options.max_tokens,
            max_rows=options.max_rows,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocabulary=self._vocab_size,
            max_inputs=max(matrix.num_inputs for matrix in self._matrices()),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
        )

    def _record(self) -> None:
        config, weights, program = self._config, self._weights, self._program
        eps = config.rms_norm_eps
        embedding = self._matrix(weights.embedding)
        # The scale is rounded to the weights' type first, as the models that have one were trained.
        scale = (
            float(torch.tensor(config.embedding_scale, dtype=torch.bfloat16)) if config.embedding_scale != 1 else 1.0
        )
        program.embed(embedding, scale)
        ropes = [self._native.RopeTable(_address(cos), _address(sin), cos.shape[1]) for cos, sin in self._ropes]
        for index, layer in enumerate(weights.layers):
            self._record_layer(index, layer, ropes[config.layers[index].rope])
        head = embedding if weights.head is weights.embedding else self._matrix(weights.head)
        program.head(self._keep(weights.final_norm), eps, head, config.logits_softcap or 0.0)

    def _record_layer(self, index: int, layer: LayerWeights[PackedMatrix], rope: Any) -> None:
        config, program = self._config, self._program
        eps = config.rms_norm_eps
        qkv, output, gate_up, down = map(self._matrix, _matrices_of(layer))
        program.norm(self._keep(layer.input_norm), eps, qkv)
        program.qkv(qkv)
        window = config.layers[index].window or 0
        program.attention(self._layer_cache(index), window, rope, self._keep(layer.qk_norm), eps, output)
        program.project(output, self._keep(layer.attention_post_norm), eps)
        program.norm(self._keep(layer.mlp_norm), eps, gate_up)
        program.gate_up(gate_up, _EPILOGUES[config.activation], down)
        program.project(down, self._keep(layer.mlp_post_norm), eps)

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
        addresses = (_address(part) for part in (matrix.weights, matrix.scales, matrix.offsets, matrix.bias))
        return self._native.matrix(int(matrix.format), matrix.num_rows, matrix.num_inputs, matrix.group, *addresses)

    def _keep(self, tensor: Tensor | None) -> int:
        """The address of a tensor that must live as long as the program; 0 for none."""
        if tensor is not None:
            tensor = tensor.contiguous()
            self._held.append(tensor)
        return _address(tensor)

    def _matrices(self) -> list[PackedMatrix]:
        layers = [matrix for layer in self._weights.layers for matrix in _matrices_of(layer)]
        return [self._weights.embedding, self._weights.head, *layers]


def make_team(threads: int, spin_us: int = 200, cores: Sequence[int] = ()) -> Any:
    """Threads that programs run on, one program at a time.

    Args:
        threads: the caller's included.
        spin_us: microseconds that an idle thread spins before it parks.
        cores: where to pin the other threads; none: wherever the system puts them.
    """
    return _module_or_error().Team(threads=threads, spin_us=spin_us, cores=list(cores))


def _module_or_error() -> Any:
    native = native_module()
    if native is None:
        raise UnsupportedError("the native module was not built", hint="install a C++ compiler and reinstall triblade")
    return native


def _check_isa(wanted: str, here: list[str]) -> None:
    if wanted and wanted not in here:
        raise UnsupportedError(
            f"instruction set not on this processor or unknown: {wanted!r}",
            hint=f"this processor runs: {', '.join(here)}",
            param="isa",
        )


def _in_one_piece(weights: DecoderWeights[PackedMatrix], native: Any) -> DecoderWeights[PackedMatrix]:
    """The same weights side by side in one allocation with huge pages, in the order in which a step reads them.

    Takes the layers out of `weights` as it goes, so that there are never two copies of more than one of them.
    """
    tables = [weights.head] if weights.head is weights.embedding else [weights.head, weights.embedding]
    sizes = [_room(m) for layer in weights.layers for m in _matrices_of(layer)] + [_room(table) for table in tables]
    arena = torch.empty(sum(sizes) + ALIGNMENT_BYTES, dtype=torch.uint8)
    native.advise_huge_pages(arena.data_ptr(), arena.nbytes)
    places = iter(arena[-arena.data_ptr() % ALIGNMENT_BYTES :][: sum(sizes)].split(sizes))
    layers: list[LayerWeights[PackedMatrix]] = []
    while weights.layers:
        old = weights.layers.pop(0)
        qkv, output, gate_up, down = (_moved(matrix, next(places)) for matrix in _matrices_of(old))
        layers.append(replace(old, qkv=qkv, output=output, gate_up=gate_up, down=down))
    moved = [_moved(table, next(places)) for table in tables]
    return replace(weights, embedding=moved[-1], layers=layers, head=moved[0])


def _matrices_of(layer: LayerWeights[PackedMatrix]) -> tuple[PackedMatrix, ...]:
    """In the order in which a step reads them."""
    return (layer.qkv, layer.output, layer.gate_up, layer.down)


def _room(matrix: PackedMatrix) -> int:
    return sum(-(-part.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for part in matrix.parts().values())


def _moved(matrix: PackedMatrix, place: Tensor) -> PackedMatrix:
    """A copy of a matrix whose tensors lie in `place` (bytes)."""
    parts: dict[str, Any] = {}
    offset = 0
    for name, part in matrix.parts().items():
        parts[name] = place[offset : offset + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
        offset += -(-part.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return replace(matrix, **parts)


def _start(numbers: array[int]) -> int:
    """The address of an array's first number; good while the array is neither changed nor dropped."""
    return numbers.buffer_info()[0]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

"""The native step program as a `StepExecutor`: records the decoder once, then one native call a step.

`in_one_piece` takes the weights into one piece of memory, which several executors may read. How a layer is recorded stands in
`engine.native_program`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from triblade.engine.batch import StepItem
from triblade.engine.executor import Choice, Scores
from triblade.engine.native_program import (
    FlatSteps,
    NativeOptions,
    NativeProgram,
    matrices_of,
    native_or_error,
    start_of,
)
from triblade.kv.cache import KVCache
from triblade.kv.layout import ALIGNMENT_BYTES
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights, LayerWeights
from triblade.ops.packing import PackedMatrix
from triblade.spec.distribution import WEIGHT_OF_BEST

_CHOICE = struct.Struct("dffQ")  # `Choice` of csrc/kernels.h


class NativeExecutor(NativeProgram):
    """One recorded decoder over one cache.

    Args:
        config: the model.
        weights: packed; see `quant.packed_weights` and `in_one_piece`. They are only read.
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
        self._vocab_size = min(options.vocab_size, weights.head.num_rows)
        super().__init__(config, cache, context_length, replace(options, vocab_size=self._vocab_size))
        self._native.advise_huge_pages(cache.pool.data_ptr(), cache.pool.nbytes)
        self._weights = weights
        self._logits = torch.empty(options.max_rows, weights.head.num_rows)
        self._num_kept_layers = 0
        self._open(self._matrices(), team)
        self._record()
        self._native.release_memory()

    @property
    def weight_bytes(self) -> int:
        """See `StepExecutor`."""
        return sum(matrix.nbytes for matrix in {id(m): m for m in self._matrices()}.values())

    @property
    def embedding(self) -> PackedMatrix:
        """The table of the tokens, which a head shares."""
        return self._weights.embedding

    @property
    def program(self) -> Any:
        """The recorded program, whose states of the last step a head reads in place."""
        return self._program

    @property
    def max_rows(self) -> int | None:
        """See `StepExecutor`."""
        return len(self._logits)

    def forward(self, items: Sequence[StepItem], *, with_states: bool = False) -> None:
        """See `StepExecutor`."""
        flat = FlatSteps.of(items)
        self._program.run(start_of(flat.token_ids), *flat.sequences())

    def score(self, rows: Sequence[int], *, with_logits: bool) -> Scores:
        """See `StepExecutor`."""
        index, best = array("i", rows), array("i", bytes(4 * len(rows)))
        out = self._logits.data_ptr() if with_logits else 0
        self._program.score(start_of(index), len(index), out, start_of(best))
        return Scores(best.tolist(), self._logits[: len(index), : self._vocab_size] if with_logits else None)

    def choose(self, rows: Sequence[int], choices: Sequence[Choice | None]) -> Scores:
        """See `ChoosesTokens`; at most `max_rows` at a time."""
        index, chosen = array("i", rows), array("i", bytes(4 * len(rows)))
        packed = b"".join(map(_packed, choices))
        out = self._logits.data_ptr()
        self._program.score(start_of(index), len(index), out, start_of(chosen), packed)
        return Scores(chosen.tolist(), self._logits[: len(index), : self._vocab_size])

    def final_states(self, rows: Sequence[int]) -> Tensor:
        """See `StepExecutor`."""
        index, hidden = array("i", rows), self._config.hidden_size
        states = torch.empty(len(index), (1 + self._num_kept_layers) * hidden)
        self._program.states(start_of(index), len(index), states.data_ptr())
        return states[:, :hidden]

    def keep_layers(self, layers: Sequence[int]) -> None:
        """From now on what these layers (not the last one) leave behind them belongs to a token's states, too; called once."""
        self._program.keep(list(layers))
        self._num_kept_layers = len(layers)

    def _record(self) -> None:
        config, weights, program = self._config, self._weights, self._program
        eps = config.rms_norm_eps
        embedding = self._matrix(weights.embedding)
        # The scale is rounded to the weights' type first, as the models that have one were trained.
        scale = (
            float(torch.tensor(config.embedding_scale, dtype=torch.bfloat16)) if config.embedding_scale != 1 else 1.0
        )
        program.embed(embedding, scale)
        ropes = self._rope_tables()
        for index, layer in enumerate(weights.layers):
            self._record_layer(index, layer, ropes[config.layers[index].rope])
        head = embedding if weights.head is weights.embedding else self._matrix(weights.head)
        program.head(self._keep(weights.final_norm), eps, head, config.logits_softcap or 0.0)

    def _matrices(self) -> list[PackedMatrix]:
        layers = [matrix for layer in self._weights.layers for matrix in matrices_of(layer)]
        return [self._weights.embedding, self._weights.head, *layers]


def _packed(choice: Choice | None) -> bytes:
    """A choice as native code reads it; its mask must outlive the call."""
    if choice is None:
        return _CHOICE.pack(0.0, 0.0, 0.0, 0)
    allowed = 0 if choice.allowed is None else choice.allowed.data_ptr()
    return _CHOICE.pack(choice.uniform, choice.temperature, choice.min_p * WEIGHT_OF_BEST, allowed)


def in_one_piece(weights: DecoderWeights[PackedMatrix]) -> DecoderWeights[PackedMatrix]:
    """The same weights side by side in one allocation with huge pages, in the order in which a step reads them.

    Takes the layers out of `weights` as it goes, so that there are never two copies of more than one of them.
    """
    native = native_or_error()
    tables = [weights.head] if weights.head is weights.embedding else [weights.head, weights.embedding]
    sizes = [_room(m) for layer in weights.layers for m in matrices_of(layer)] + [_room(table) for table in tables]
    arena = torch.empty(sum(sizes) + ALIGNMENT_BYTES, dtype=torch.uint8)
    native.advise_huge_pages(arena.data_ptr(), arena.nbytes)
    places = iter(arena[-arena.data_ptr() % ALIGNMENT_BYTES :][: sum(sizes)].split(sizes))
    layers: list[LayerWeights[PackedMatrix]] = []
    while weights.layers:
        old = weights.layers.pop(0)
        qkv, output, gate_up, down = (_moved(matrix, next(places)) for matrix in matrices_of(old))
        layers.append(replace(old, qkv=qkv, output=output, gate_up=gate_up, down=down))
        del old
        native.release_memory()
    moved = [_moved(table, next(places)) for table in tables]
    return replace(weights, embedding=moved[-1], layers=layers, head=moved[0])


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

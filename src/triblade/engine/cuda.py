"""The CUDA kernels as a `StepExecutor`: decode steps are recorded once per size as CUDA graphs and replayed.

1. `forward` writes the step's ids, positions, slots and block tables into fixed buffers (one copy) and replays the graph of the
   smallest recorded size, which goes from token ids to logits, the best tokens and, for steps of one token, the inputs of the next
   step; places that no sequence takes have negative slots.
2. `score` waits for the graph and reads the tokens. Where every sequence takes its best token and has room for one more, it replays
   the graph at once: the device computes the next step while the host still deals with this one.
3. The next `forward`, if it asks for exactly that step, finds it under way. Otherwise that step was computed for nothing: what it
   wrote lies behind the sequences' ends, in blocks that were theirs, before anything that follows in the stream.
Steps with prompt chunks, or with more rows than a graph takes, are launched kernel by kernel. Knows no sampling. Invariant:
recorded steps only touch memory that lives as long as the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triblade.engine.batch import StepItem
from triblade.engine.cuda_decoder import CudaDecoder, Group
from triblade.engine.executor import Scores
from triblade.kv.cache import KVCache
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights
from triblade.ops.cuda import attention, linear, packing, vectors
from triblade.ops.cuda.attention import Sequences
from triblade.ops.cuda.device import Device
from triblade.ops.cuda.linear import Activations
from triblade.ops.cuda.packing import DeviceMatrix

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # sequences of a recorded step
MOST_ROWS = linear.STREAMED_TOKENS  # of a recorded step, and of the head at a time
MOST_QUERIES = 16  # per sequence of a recorded step
NO_SLOT = -1
FLOATS = (torch.bfloat16, torch.float16)

Integers = NDArray[np.int32]


def why_not_cuda(config: ModelConfig, dtype: torch.dtype, codec: str) -> str | None:
    """What keeps the CUDA kernels from running this model, or None."""
    if dtype not in FLOATS:
        return f"dtype {dtype} (CUDA kernels: bfloat16, float16)"
    widths = (config.hidden_size, config.q_size, config.intermediate_size)
    reasons = [packing.why_not_dense(width) for width in widths]
    reasons += [attention.why_not(config.head_dim, codec, dtype), vectors.why_not_width(config.hidden_size)]
    return next((reason for reason in reasons if reason), None)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Fixed places of a recorded step's inputs: host side (pinned) and device side of one piece of memory."""

    host: Tensor  # int32
    device: Tensor
    tokens: Tensor  # device, [3, rows]: ids, positions, slots
    num_blocks: Tensor  # device, [sequences]
    tables: Tensor  # device, [sequences, width]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step as a graph."""

    graph: Any  # torch.cuda.CUDAGraph
    inputs: _Inputs
    queries: int


class CudaExecutor:
    """One model over one cache.

    Args:
        config: the model.
        weights: packed, on the device.
        cache: arrangement "tokens", on the device.
        context_length: longest sequence.
        vocab_size: tokens that may be chosen.
        device: runs kernels. With a cache in main memory (tests) nothing is recorded.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[DeviceMatrix],
        cache: KVCache,
        *,
        context_length: int,
        vocab_size: int,
        device: Device,
    ) -> None:
        self.name = "cuda"
        self.cache = cache
        self._decoder = CudaDecoder(config, weights, cache, context_length, device, MOST_ROWS)
        self._memory = cache.pool.device
        self._vocab_size = min(vocab_size, config.vocab_size)
        self._records = self._memory.type == "cuda"
        self._width = cache.layout.blocks_for(context_length)
        self._buffers = self._decoder.buffers(MOST_ROWS)
        self._logits = torch.empty(MOST_ROWS, weights.head.rows, dtype=torch.float32, device=self._memory)
        self._best = torch.empty(MOST_ROWS, dtype=torch.int32, device=self._memory)
        self._host_best = self._pinned(MOST_ROWS)
        self._decoder.reserve(MOST_ROWS, 1)
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._hidden = Activations(torch.empty(0), 0, 0)  # of the last step, if it was launched
        self._step: tuple[Sequence[StepItem], _Recorded] | None = None  # the last one, if it was replayed
        self._unread = False  # whether a replay was queued that nobody waited for yet
        self._ahead: list[tuple[Any, int, int]] | None = None  # request, start and token of the step after the last one
        self._runs_ahead = True  # whether the step after the last one is likely to be asked for

    @property
    def weight_bytes(self) -> int:
        """See `StepExecutor`."""
        weights = self._decoder.weights
        return sum(m.nbytes for m in {id(m): m for m in (weights.embedding, *self._decoder.matrices())}.values())

    @property
    def max_rows(self) -> int | None:
        """See `StepExecutor`."""
        return MOST_ROWS

    @torch.inference_mode()
    def forward(self, items: Sequence[StepItem]) -> None:
        """See `StepExecutor`."""
        if self._is_under_way(items):
            assert self._step is not None
            self._step = (items, self._step[1])
            return
        queries, count = items[0].num_tokens, len(items)
        size = next((bucket for bucket in BUCKETS if bucket >= count), 0)
        fits = self._records and 0 < size * queries <= MOST_ROWS and queries <= MOST_QUERIES
        if fits and items[-1].num_tokens == queries:
            self._replay(items, size, queries)
        else:
            self._step = None
            self._launch(items)

    @torch.inference_mode()
    def score(self, rows: Sequence[int], *, with_logits: bool) -> Scores:
        """See `StepExecutor`. The last call of a step may start the next one; logits are not to be had after it."""
        if self._step is None:
            return self._score_launched(rows, with_logits)
        self._wait()
        self._unread = False
        everything: list[int] = self._host_best.tolist()
        best = [everything[row] for row in rows]
        if not with_logits:
            self._run_ahead(rows, best)
            return Scores(best, None)
        index = list(rows)
        logits = self._logits[: len(index)] if index == list(range(len(index))) else self._logits[index]
        return Scores(best, logits[:, : self._vocab_size])

    # The step after this one

    def _run_ahead(self, rows: Sequence[int], best: list[int]) -> None:
        """Start the next step if every sequence goes on with its best token."""
        assert self._step is not None
        items, recorded = self._step
        block_size = self.cache.layout.block_size
        has_room = all(item.start + 1 < len(item.request.block_table) * block_size for item in items)
        if recorded.queries != 1 or list(rows) != list(range(len(items))) or not has_room:
            return
        self._ahead = [(item.request, item.start + 1, token) for item, token in zip(items, best, strict=True)]
        if self._runs_ahead:
            self._unread = True
            recorded.graph.replay()

    def _is_under_way(self, items: Sequence[StepItem]) -> bool:
        """Whether this is the step that was started ahead. A wrong guess stops guessing until one would have been right."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return False
        asked = [(item.request, item.start, item.token_ids) for item in items]
        is_asked = asked == [(request, start, [token]) for request, start, token in ahead]
        was_started, self._runs_ahead = self._runs_ahead, is_asked
        return is_asked and was_started

    # Recorded steps

    def _replay(self, items: Sequence[StepItem], size: int, queries: int) -> None:
        key = (size, queries)
        if key not in self._recorded:
            self._recorded[key] = self._record(size, queries)
        recorded = self._recorded[key]
        if self._unread:  # the host's side of the inputs may still be on its way
            self._wait()
        self._unread, self._step = True, (items, recorded)
        self._fill(recorded.inputs, items, queries)
        recorded.inputs.device.copy_(recorded.inputs.host, non_blocking=True)
        recorded.graph.replay()

    def _record(self, size: int, queries: int) -> _Recorded:
        """Record a step. It is launched once first, with nobody in it, so that every kernel is compiled and loaded."""
        inputs = self._inputs(size, queries)
        inputs.tokens[1:].fill_(NO_SLOT)
        self._decoder.reserve(size, queries)
        self._run(inputs, queries)
        torch.cuda.synchronize(self._memory)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(inputs, queries)
        return _Recorded(graph, inputs, queries)

    def _run(self, inputs: _Inputs, queries: int) -> None:
        ids, positions, slots = inputs.tokens.unbind(0)
        rows = len(ids)
        sequences = Sequences(positions=positions, slots=slots, tables=inputs.tables, queries=queries)
        buffers = self._decoder.part_of(self._buffers, rows)
        self._decoder.forward(ids, sequences, [Group(sequences, 0, 0)], buffers, buffers.hidden)
        self._decoder.logits(buffers.hidden, self._logits[:rows])
        self._decoder.choose(self._logits[:rows], self._vocab_size, self._best[:rows])
        self._host_best[:rows].copy_(self._best[:rows], non_blocking=True)
        if queries == 1:
            self._decoder.advance(self._best[:rows], inputs.tokens, inputs.tables, inputs.num_blocks)

    def _inputs(self, size: int, queries: int) -> _Inputs:
        rows = size * queries
        places = [3 * rows, size, size * self._width]
        host = self._pinned(sum(places))
        device = torch.zeros(sum(places), dtype=torch.int32, device=self._memory)
        tokens, num_blocks, tables = device.split(places)
        return _Inputs(host, device, tokens.view(3, rows), num_blocks, tables.view(size, self._width))

    def _fill(self, inputs: _Inputs, items: Sequence[StepItem], queries: int) -> None:
        """Write a step's inputs on the host side."""
        rows, size = inputs.tokens.shape[1], len(inputs.num_blocks)
        host: Integers = inputs.host.numpy()
        tokens, num_blocks = host[: 3 * rows].reshape(3, rows), host[3 * rows : 3 * rows + size]
        tables = host[3 * rows + size :].reshape(size, self._width)
        tokens[0].fill(0)
        tokens[1:].fill(NO_SLOT)
        for number, item in enumerate(items):
            table = _blocks(item)[: self._width]
            tables[number, : len(table)] = table
            num_blocks[number] = len(table)
            part = slice(number * queries, (number + 1) * queries)
            positions = np.arange(item.start, item.start + queries, dtype=np.int32)
            tokens[0, part], tokens[1, part] = item.token_ids, positions
            tokens[2, part] = _slots(table, positions, self.cache.layout.block_size)

    def _wait(self) -> None:
        torch.cuda.current_stream(self._memory).synchronize()

    def _pinned(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.int32, pin_memory=self._memory.type == "cuda")

    # Launched steps

    def _launch(self, items: Sequence[StepItem]) -> None:
        decoder, size = self._decoder, self.cache.layout.block_size
        spans = [np.arange(item.start, item.start + item.num_tokens, dtype=np.int32) for item in items]
        slots = [_slots(_blocks(item), span, size) for item, span in zip(items, spans, strict=True)]
        ids = np.concatenate([np.asarray(item.token_ids, dtype=np.int32) for item in items])
        flat = torch.from_numpy(np.stack((ids, np.concatenate(spans), np.concatenate(slots)))).to(self._memory)
        groups, row = list[Group](), 0
        for _, members in groupby(items, key=lambda item: item.num_tokens):
            groups.append(self._group(list(members), row, flat))
            row = groups[-1].rows.stop
        buffers = decoder.part_of(self._buffers, row) if row <= MOST_ROWS else decoder.buffers(row)
        everyone = Sequences(positions=flat[1], slots=flat[2], tables=groups[0].sequences.tables, queries=1)
        hidden = torch.empty(row, decoder.config.hidden_size, dtype=decoder.dtype, device=self._memory)
        self._hidden = Activations(hidden, row, 0)
        decoder.forward(flat[0], everyone, groups, buffers, self._hidden)

    def _group(self, items: list[StepItem], first_row: int, flat: Tensor) -> Group:
        queries = items[0].num_tokens
        lengths = [item.start + queries for item in items]
        width = self.cache.layout.blocks_for(max(lengths))
        tables = np.zeros((len(items), width), dtype=np.int32)
        for number, item in enumerate(items):
            known = _blocks(item)[:width]
            tables[number, : len(known)] = known
        rows = slice(first_row, first_row + queries * len(items))
        sequences = Sequences(
            positions=flat[1, rows],
            slots=flat[2, rows],
            tables=torch.from_numpy(tables).to(self._memory),
            queries=queries,
        )
        on_device = torch.tensor(lengths, dtype=torch.int32).to(self._memory)
        return Group(sequences, first_row, max(lengths), on_device)

    def _score_launched(self, rows: Sequence[int], with_logits: bool) -> Scores:
        best = list[int]()
        for start in range(0, len(rows), MOST_ROWS):
            index = torch.tensor(list(rows[start : start + MOST_ROWS])).to(self._memory)
            logits, chosen = self._logits[: len(index)], self._best[: len(index)]
            self._decoder.logits(self._decoder.rows(self._hidden, index), logits)
            self._decoder.choose(logits, self._vocab_size, chosen)
            best += chosen.tolist()
        return Scores(best, self._logits[: len(rows), : self._vocab_size] if with_logits else None)


def _blocks(item: StepItem) -> Integers:
    return np.frombuffer(item.request.block_table, dtype=np.int32)


def _slots(table: Integers, positions: Integers, block_size: int) -> Integers:
    """Slots [T] of positions [T] in a sequence's blocks."""
    slots: Integers = table[positions // block_size] * block_size + positions % block_size
    return slots

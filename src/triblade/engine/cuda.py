"""The CUDA kernels as a `StepExecutor`: decode steps are recorded once per size as CUDA graphs and replayed, others run as launched.

1. `forward` writes the step's ids, positions, slots and block tables into fixed buffers (one copy) and replays the graph of the
   smallest recorded size, which goes from token ids to logits, the best tokens and, for steps of one token, the inputs of the next
   step; places that no sequence takes have negative slots.
2. `best` waits for the graph and reads the tokens. Where every sequence takes its best token and has room for one more, it replays the
   graph at once: the device computes the next step while the host still deals with this one.
3. The next `forward`, if it asks for exactly that step, finds it under way. Otherwise that step is computed for nothing: what it
   wrote lies behind the sequences' ends, in blocks that were theirs, before anything that follows in the stream.
Steps with prompt chunks, or with more rows than a graph takes, are launched kernel by kernel. Knows no sampling. Invariant: recorded
steps only touch memory that lives as long as the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from triblade.engine.cuda_decoder import CudaDecoder, Group
from triblade.engine.request import Request
from triblade.engine.runner import sampler_row
from triblade.engine.scheduler import ScheduledRequest
from triblade.kv.cache import KVCache
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights
from triblade.ops.cuda import attention, linear, packing, vectors
from triblade.ops.cuda.attention import Sequences
from triblade.ops.cuda.device import Device
from triblade.ops.cuda.linear import Activations
from triblade.ops.cuda.packing import DeviceMatrix

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # sequences of a recorded step
MOST_ROWS = linear.STREAMED_TOKENS  # of a recorded step
MOST_QUERIES = 16  # per sequence of a recorded step
NO_SLOT = -1
FLOATS = (torch.bfloat16, torch.float16)


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
        self._all_logits = torch.empty(MOST_ROWS, weights.head.rows, dtype=torch.float32, device=self._memory)
        self._all_best = torch.empty(MOST_ROWS, dtype=torch.int32, device=self._memory)
        self._host_best = self._pinned(MOST_ROWS)
        self._decoder.reserve(MOST_ROWS, 1)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, _Inputs]] = {}
        self._hidden = Activations(torch.empty(0), 0, 0)  # of the last step, if it was not replayed
        self._launched_best = torch.empty(0)
        self._replayed = False  # whether the last step was; then logits and best tokens of its rows exist
        self._chosen: list[int] = []
        self._unread = False  # whether a replay was queued that nobody waited for yet
        self._step_items: Sequence[ScheduledRequest] = ()  # of the last replayed step
        self._ahead: list[tuple[Request, int, int]] | None = None  # request, start, token of the step that is under way

    @property
    def weight_bytes(self) -> int:
        """See `StepExecutor`."""
        weights = self._decoder.weights
        return sum(m.nbytes for m in {id(m): m for m in (weights.embedding, *self._decoder.matrices())}.values())

    @torch.inference_mode()
    def forward(self, items: Sequence[ScheduledRequest]) -> None:
        """See `StepExecutor`."""
        if self._is_under_way(items):
            self._step_items = items
            return
        queries, count = items[0].num_tokens, len(items)
        size = next((bucket for bucket in BUCKETS if bucket >= count), 0)
        fits = self._records and 0 < size * queries <= MOST_ROWS and queries <= MOST_QUERIES
        self._replayed = fits and items[-1].num_tokens == queries
        if self._replayed:
            self._replay(items, size, queries)
        else:
            self._launch(items)

    @torch.inference_mode()
    def logits(self, rows: Sequence[int]) -> Tensor:
        """See `StepExecutor`."""
        self._chosen = list(rows)
        if self._replayed:
            index = rows[0] if len(rows) == 1 else None
            found = self._all_logits[: len(rows)] if self._chosen == list(range(len(rows))) else None
            if found is None:
                found = self._all_logits[index : index + 1] if index is not None else self._all_logits[self._chosen]
            return found[:, : self._vocab_size]
        count = len(self._chosen)
        logits = torch.empty(count, self._all_logits.shape[1], dtype=torch.float32, device=self._memory)
        best = torch.empty(count, dtype=torch.int32, device=self._memory)
        for start in range(0, count, MOST_ROWS):
            part = slice(start, start + MOST_ROWS)
            index = torch.tensor(self._chosen[part]).to(self._memory)
            self._decoder.logits(self._decoder.rows(self._hidden, index), logits[part])
            self._decoder.choose(logits[part], self._vocab_size, best[part])
        self._launched_best = best
        return logits[:, : self._vocab_size]

    def best(self) -> list[int]:
        """See `StepExecutor`."""
        if not self._replayed:
            launched: list[int] = self._launched_best.tolist()
            return launched
        torch.cuda.current_stream(self._memory).synchronize()
        self._unread = False
        everything: list[int] = self._host_best.tolist()
        best = [everything[row] for row in self._chosen]
        self._run_ahead(everything)
        return best

    # The step after this one

    def _run_ahead(self, best: list[int]) -> None:
        """Start the next step if every sequence will go on with its best token, as far as can be known."""
        items = self._step_items
        if len(self._chosen) != len(items) or not all(map(self._goes_on, items)):
            return
        self._ahead = [(item.request, item.start + 1, token) for item, token in zip(items, best, strict=False)]
        size = next(bucket for bucket in BUCKETS if bucket >= len(items))
        self._graphs[size, 1][0].replay()

    def _goes_on(self, item: ScheduledRequest) -> bool:
        request = item.request
        row = sampler_row(request)
        is_best = request.params.is_greedy and row.is_plain and request.params.logprobs is None
        room = len(request.block_table) * self.cache.layout.block_size
        ends = len(request.output_token_ids) + 1 >= request.max_tokens
        return item.num_tokens == 1 and item.samples and is_best and item.start + 1 < room and not ends

    def _is_under_way(self, items: Sequence[ScheduledRequest]) -> bool:
        """Whether this is the step that was started ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or len(ahead) != len(items):
            return False
        asked = [(item.request, item.start, item.request.token_ids[-1]) for item in items]
        return asked == ahead and all(item.num_tokens == 1 for item in items)

    # Recorded steps

    def _replay(self, items: Sequence[ScheduledRequest], size: int, queries: int) -> None:
        key = (size, queries)
        if key not in self._graphs:
            self._graphs[key] = self._record(size, queries)
        graph, inputs = self._graphs[key]
        if self._unread:  # the host's side of the inputs may still be on its way
            torch.cuda.current_stream(self._memory).synchronize()
        self._unread, self._step_items = True, items
        self._fill(inputs, items, size, queries)
        inputs.device.copy_(inputs.host, non_blocking=True)
        graph.replay()

    def _record(self, size: int, queries: int) -> tuple[torch.cuda.CUDAGraph, _Inputs]:
        """The step as a graph. It is launched once first, with nobody in it, so that every kernel is compiled and loaded."""
        inputs = self._inputs(size, queries)
        inputs.tokens[1:].fill_(NO_SLOT)
        self._decoder.reserve(size, queries)
        self._step(inputs, size, queries)
        torch.cuda.synchronize(self._memory)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(inputs, size, queries)
        return graph, inputs

    def _step(self, inputs: _Inputs, size: int, queries: int) -> None:
        rows = size * queries
        ids, positions, slots = inputs.tokens.unbind(0)
        sequences = Sequences(positions=positions, slots=slots, tables=inputs.tables, queries=queries)
        buffers = self._decoder.part_of(self._buffers, rows)
        self._decoder.forward(ids, sequences, [Group(sequences, 0, 0)], buffers, buffers.normed)
        self._decoder.logits(buffers.normed, self._all_logits[:rows])
        self._decoder.choose(self._all_logits[:rows], self._vocab_size, self._all_best[:rows])
        self._host_best[:rows].copy_(self._all_best[:rows], non_blocking=True)
        if queries == 1:
            self._decoder.advance(self._all_best[:rows], inputs.tokens, inputs.tables, inputs.num_blocks)

    def _inputs(self, size: int, queries: int) -> _Inputs:
        rows = size * queries
        places = [3 * rows, size, size * self._width]
        host = self._pinned(sum(places))
        device = torch.zeros(sum(places), dtype=torch.int32, device=self._memory)
        tokens, num_blocks, tables = device.split(places)
        return _Inputs(host, device, tokens.view(3, rows), num_blocks, tables.view(size, self._width))

    def _fill(self, inputs: _Inputs, items: Sequence[ScheduledRequest], size: int, queries: int) -> None:
        """Write a step's inputs on the host side."""
        rows = size * queries
        host = inputs.host.numpy()
        tokens, num_blocks = host[: 3 * rows].reshape(3, rows), host[3 * rows : 3 * rows + size]
        tables = host[3 * rows + size :].reshape(size, self._width)
        tokens[0].fill(0)
        tokens[1:].fill(NO_SLOT)
        for number, item in enumerate(items):
            table = np.frombuffer(item.request.block_table, dtype=np.int32)
            tables[number, : len(table)] = table
            num_blocks[number] = len(table)
            part = slice(number * queries, (number + 1) * queries)
            tokens[0, part] = item.token_ids
            tokens[1, part] = positions = np.arange(item.start, item.start + queries)
            tokens[2, part] = _slots(table, positions, self.cache.layout.block_size)

    def _pinned(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.int32, pin_memory=self._records)

    # Launched steps

    def _launch(self, items: Sequence[ScheduledRequest]) -> None:
        size = self.cache.layout.block_size
        ids, positions, slots = list[int](), list[np.ndarray](), list[np.ndarray]()
        for item in items:
            span = np.arange(item.start, item.start + item.num_tokens)
            ids += item.token_ids
            positions.append(span)
            slots.append(_slots(np.frombuffer(item.request.block_table, dtype=np.int32), span, size))
        columns = [np.asarray(ids), np.concatenate(positions), np.concatenate(slots)]
        flat = torch.from_numpy(np.stack(columns).astype(np.int32)).to(self._memory)  # one transfer
        groups, row = list[Group](), 0
        for _, members in groupby(items, key=lambda item: item.num_tokens):
            groups.append(self._group(list(members), row, flat))
            row = groups[-1].rows.stop
        decoder, config = self._decoder, self._decoder.config
        buffers = decoder.part_of(self._buffers, row) if row <= MOST_ROWS else decoder.buffers(row)
        everyone = Sequences(positions=flat[1], slots=flat[2], tables=groups[0].sequences.tables, queries=1)
        hidden = torch.empty(row, config.hidden_size, dtype=decoder.dtype, device=self._memory)
        self._hidden = Activations(hidden, row, 0)
        decoder.forward(flat[0], everyone, groups, buffers, self._hidden)

    def _group(self, items: list[ScheduledRequest], first_row: int, flat: Tensor) -> Group:
        queries = items[0].num_tokens
        lengths = [item.start + queries for item in items]
        width = self.cache.layout.blocks_for(max(lengths))
        tables = np.zeros((len(items), width), dtype=np.int32)
        for number, item in enumerate(items):
            known = item.request.block_table[:width]
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


def _slots(table: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Slots [T] of positions [T] in a sequence's blocks."""
    slots: np.ndarray = table[positions // block_size] * block_size + positions % block_size
    return slots

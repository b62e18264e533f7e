"""The CUDA kernels as a `StepExecutor`: decode steps are recorded once per size as CUDA graphs and replayed ahead of the host.

1. `forward` writes the step's inputs and replays the graph of the smallest recorded size (`cuda_steps`).
2. `score` waits for the tokens. Where every sequence takes its best one, the next step is started at once; and when
   `forward` then asks for exactly that step, the one after it as well, so that the device never waits for the host.
3. A step that was started ahead is right for the sequences that go on with their best tokens; those that ended leave it.
   If anything else is asked for, it was computed for nothing, and the step begins from the host's inputs.
Steps with prompt chunks, or with more rows than a graph takes, are launched kernel by kernel. Knows no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from triblade.engine.batch import StepItem
from triblade.engine.cuda_decoder import CudaDecoder, Group
from triblade.engine.cuda_steps import Flight, RecordedSteps, blocks_of, slots_of, write_draws
from triblade.engine.executor import Draw, Scores
from triblade.kv.cache import KVCache
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights
from triblade.ops.cuda import attention, packing, vectors
from triblade.ops.cuda.attention import Sequences
from triblade.ops.cuda.device import Device
from triblade.ops.cuda.linear import Activations
from triblade.ops.cuda.packing import DeviceMatrix

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # sequences of a recorded step
MOST_ROWS = 256  # of a recorded step, and of the head at a time
MOST_QUERIES = 16  # per sequence of a recorded step
FLOATS = (torch.bfloat16, torch.float16)


def _bucket(count: int) -> int:
    """The smallest size of a recorded step that has places for `count` sequences; 0: none has."""
    return next((bucket for bucket in BUCKETS if bucket >= count), 0)


def why_not_cuda(config: ModelConfig, dtype: torch.dtype, codec: str) -> str | None:
    """What keeps the CUDA kernels from running this model, or None."""
    if dtype not in FLOATS:
        return f"dtype {dtype} (CUDA kernels: bfloat16, float16)"
    widths = (config.hidden_size, config.q_size, config.intermediate_size)
    reasons = [packing.why_not_dense(width) for width in widths]
    reasons += [attention.why_not(config.head_dim, codec, dtype), vectors.why_not_width(config.hidden_size)]
    reasons += [attention.why_not_rotated(rope.rotary_dim) for rope in config.ropes]
    return next((reason for reason in reasons if reason), None)


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

    steps_kind: type[RecordedSteps] = RecordedSteps

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
        self._context_length = context_length
        self._decoder = CudaDecoder(config, weights, cache, context_length, device, MOST_ROWS)
        self._memory = cache.pool.device
        self._vocab_size = min(vocab_size, config.vocab_size)
        self._records = self._memory.type == "cuda"
        self._logits = torch.empty(MOST_ROWS, weights.head.rows, dtype=torch.float32, device=self._memory)
        self._best = torch.empty(MOST_ROWS, dtype=torch.int32, device=self._memory)
        self._decoder.reserve(MOST_ROWS, 1)
        self._steps = self._recorded_steps()
        self._hidden = Activations(torch.empty(0), 0, 0)  # of the last step, if it was launched
        self._now: Flight | None = None  # the last step, if it was replayed
        self._items: Sequence[StepItem] = ()  # of it
        self._rows: list[int] = []  # of it, item by item
        self._next: Flight | None = None  # the step after it, if it was started
        self._best_now: list[int] | None = None  # its best tokens, once they were waited for
        self._draws: Sequence[Draw] | None = None  # of the step
        self._launched_draws: dict[int, Draw] = {}  # of the last step, by row, if it was launched
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

    def expect_draws(self, draws: Sequence[Draw] | None) -> None:
        """See `DrawsTokens`."""
        self._draws = draws

    @torch.inference_mode()
    def forward(self, items: Sequence[StepItem]) -> None:
        """See `StepExecutor`."""
        rows = self._expected(items)
        ahead, self._next = self._next, None
        if rows is not None:
            self._runs_ahead = True
            if ahead is not None:
                self._go_on(ahead, items, rows)
                return
        elif ahead is not None:
            self._runs_ahead = False
        queries, count = items[0].num_tokens, len(items)
        size = _bucket(count)
        fits = self._records and 0 < size * queries <= MOST_ROWS and queries <= MOST_QUERIES
        if fits and items[-1].num_tokens == queries:
            self._begin(items, size)
        else:
            self._now, self._runs_ahead = None, True
            self._launch(items)

    @torch.inference_mode()
    def score(self, rows: Sequence[int], *, with_logits: bool) -> Scores:
        """See `StepExecutor`. A call without logits may start the next step."""
        if self._now is None:
            return self._score_launched(rows, with_logits)
        if with_logits and self._next is not None:  # which takes the place of this one's logits
            self._next = None
            self._draws = None
            self._begin(self._items, len(self._now.recorded.inputs.num_blocks))
        everything = self._best_now = self._steps.best(self._now)
        index = [self._rows[row] for row in rows]
        best = [everything[row] for row in index]
        if not with_logits:
            if self._next is None and self._runs_ahead and self._now.recorded.queries == 1:
                self._next = self._follow(self._now)
            return Scores(best, None)
        logits = self._logits[: len(index)] if index == list(range(len(index))) else self._logits[index]
        return Scores(best, logits[:, : self._vocab_size])

    # Recorded steps

    def _recorded_steps(self) -> RecordedSteps:
        layout = self.cache.layout
        return self.steps_kind(
            self._decoder,
            width=layout.blocks_for(self._context_length),
            block_size=layout.block_size,
            max_rows=MOST_ROWS,
            vocab_size=self._vocab_size,
            logits=self._logits,
        )

    def _begin(self, items: Sequence[StepItem], size: int) -> None:
        self._now, self._items, self._best_now = self._steps.begin(items, size, self._draws), items, None
        self._rows = list(range(len(items) * items[0].num_tokens))

    def _expected(self, items: Sequence[StepItem]) -> list[int] | None:
        """The rows of these items in the step after the last one, if each goes on there with its best token."""
        if self._now is None or self._best_now is None or self._now.recorded.queries != 1:
            return None
        if self._now.recorded.draws != (self._draws is not None):
            return None
        places, number, best = self._now.places, self._now.number + 1, self._best_now
        rows = []
        for item in items:
            place = places.get(item.request)
            if place is None or item.num_tokens != 1 or item.start != place.start + number:
                return None
            if item.request.block_table is not place.table or item.token_ids[0] != best[place.row]:
                return None
            rows.append(place.row)
        return rows

    def _go_on(self, ahead: Flight, items: Sequence[StepItem], rows: list[int]) -> None:
        """The step is under way; start the one after it."""
        if len(items) < len(ahead.places):
            asked = {item.request for item in items}
            self._steps.leave(ahead, [request for request in ahead.places if request not in asked])
        self._now, self._items, self._rows, self._best_now = ahead, items, rows, None
        self._next = self._follow(ahead)

    def _follow(self, flight: Flight) -> Flight | None:
        """The step after `flight`; None where its sequences have no room, or are so few that a step of half the size takes them."""
        size = len(flight.recorded.inputs.num_blocks)
        return None if 2 * _bucket(len(flight.places)) <= size else self._steps.follow(flight)

    # Launched steps

    def _launch(self, items: Sequence[StepItem]) -> None:
        decoder, size = self._decoder, self.cache.layout.block_size
        spans = [np.arange(item.start, item.start + item.num_tokens, dtype=np.int32) for item in items]
        slots = [slots_of(blocks_of(item), span, size) for item, span in zip(items, spans, strict=True)]
        ids = np.concatenate([np.asarray(item.token_ids, dtype=np.int32) for item in items])
        flat = torch.from_numpy(np.stack((ids, np.concatenate(spans), np.concatenate(slots)))).to(self._memory)
        groups, row = list[Group](), 0
        for _, members in groupby(items, key=lambda item: item.num_tokens):
            groups.append(self._group(list(members), row, flat))
            row = groups[-1].rows.stop
        self._launched_draws = {}
        if self._draws is not None:
            ends = np.cumsum([item.num_tokens for item in items]) - 1
            self._launched_draws = dict(zip(ends.tolist(), self._draws, strict=True))
        buffers = decoder.part_of(self._steps.buffers, row) if row <= MOST_ROWS else decoder.buffers(row)
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
            known = blocks_of(item)[:width]
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
            draws = None if with_logits else self._draws_of(rows[start : start + MOST_ROWS])
            self._decoder.choose(logits, self._vocab_size, chosen, draws)
            best += chosen.tolist()
        return Scores(best, self._logits[: len(rows), : self._vocab_size] if with_logits else None)

    def _draws_of(self, rows: Sequence[int]) -> Tensor | None:
        """How rows of a launched step go on."""
        if not self._launched_draws:
            return None
        columns = np.zeros((vectors.DRAW_COLUMNS, len(rows)), dtype=np.int32)
        write_draws(columns, [self._launched_draws[row] for row in rows])
        return torch.from_numpy(columns).to(self._memory)

"""The CUDA kernels as a `StepExecutor`: decode steps are recorded once per size as CUDA graphs and replayed ahead of the host.

1. `forward` writes the step's inputs and replays the graph of the smallest recorded size (`cuda_steps`).
2. `score` waits for the tokens. Where every sequence takes its best one, the next step is started at once; and when
   `forward` then asks for exactly that step, the one after it as well, so that the device never waits for the host.
   Rows of drafts are such a step with several tokens each, but never started ahead: what follows is not known.
3. A step that was started ahead is right for the sequences that go on with their best tokens; those that ended leave it.
   If anything else is asked for, it was computed for nothing, and the step begins from the host's inputs.
Steps with prompt chunks, or with more rows than a graph takes, are launched kernel by kernel. Knows no sampling.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from triblade.engine.attend import StepAttention
from triblade.engine.batch import NobodysItem, StepItem
from triblade.engine.cuda_decoder import CudaDecoder, Group
from triblade.engine.cuda_steps import Flight, RecordedSteps, Shape, blocks_of, later, rows_of, slots_of, write_draws
from triblade.engine.executor import Draw, Scores
from triblade.engine.memory import explained
from triblade.kv.cache import KVCache
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights
from triblade.ops.cuda import attention, packing, vectors
from triblade.ops.cuda.attention import Sequences
from triblade.ops.cuda.device import Device
from triblade.ops.cuda.humming import HummingProducts
from triblade.ops.cuda.linear import Activations
from triblade.ops.cuda.packing import DeviceMatrix

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # sequences of a recorded step
MOST_ROWS = 256  # of a recorded step, and of the head at a time
QUERIES = (
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    9,
    12,
    16,
)  # per sequence of a recorded step: tokens to verify, the last of them perhaps nobody's
TOO_MANY_TOKENS = "lower --max-num-batched-tokens, --gpu-memory-utilization or --kv-cache-memory-bytes"
FLOATS = (torch.bfloat16, torch.float16)


def why_not_cuda(config: ModelConfig, dtype: torch.dtype, codec: str) -> str | None:
    """What keeps the CUDA kernels from running this model, or None."""
    if dtype not in FLOATS:
        return f"dtype {dtype} (CUDA kernels: bfloat16, float16)"
    widths = (config.hidden_size, config.q_size, config.intermediate_size)
    reasons = [packing.why_not_dense(width) for width in widths]
    reasons += [attention.why_not(config.head_dim, codec, dtype), vectors.why_not_width(config.hidden_size)]
    reasons += [attention.why_not_rotated(rope.rotary_dim) for rope in config.ropes]
    return next((reason for reason in reasons if reason), None)


def _recorded_shape(items: Sequence[StepItem]) -> Shape | None:
    """Of the recorded step that takes these items; None: none does.

    Not a place for each token: a row reads keys before its step wrote those of the rows beside it (`kernels/attention.cu`).
    """
    size, queries = bucket_of(BUCKETS, len(items)), bucket_of(QUERIES, max(item.num_tokens for item in items))
    return None if size is None or queries is None or size * queries > MOST_ROWS else Shape(size, queries)


def _are_consecutive(numbers: list[int]) -> bool:
    return bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def bucket_of(buckets: Sequence[int], number: int) -> int | None:
    """The smallest that holds `number`."""
    return next((bucket for bucket in buckets if bucket >= number), None)


def scratch_bytes(config: ModelConfig) -> int:
    """Memory that an executor takes besides weights, cache and activations: the largest matrix spelled out, and logits."""
    qkv, gate_up = config.q_size + 2 * config.kv_size, 2 * config.intermediate_size
    widest = max(config.hidden_size * max(qkv, gate_up, config.q_size), config.hidden_size * config.intermediate_size)
    return 2 * widest + MOST_ROWS * config.vocab_size * 4


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
        self.device = device
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
        self._launched_states = torch.empty(0)  # of the last step, if it was launched and keeps them
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

    @torch.inference_mode()
    def warm_up(self, num_sequences: int, num_tokens: int) -> None:
        """Have ready what steps of up to so many sequences and `num_tokens` tokens of prompts launch; record the smallest step."""
        shapes = [Shape(size, 1) for size in BUCKETS if size <= (bucket_of(BUCKETS, num_sequences) or BUCKETS[-1])]
        layout = self.cache.layout
        tokens = min(num_tokens, self._context_length, layout.block_size * self.cache.num_blocks)
        prompt = NobodysItem(array("i", range(layout.blocks_for(tokens))), 0, tokens)

        def everything() -> None:
            if self._records:
                for shape in shapes:
                    self._steps.rehearse(shape)
            self._launch([prompt])
            self._score_launched([tokens - 1], with_logits=False)

        start = time.monotonic()
        count = self.device.gather(everything)
        if count and self._records:
            self._steps.record(shapes[0], draws=False)
        log.info("%d kernels ready in %.1f s", count, time.monotonic() - start)

    @property
    def embedding(self) -> DeviceMatrix:
        """The table [V, C], dense."""
        return self._decoder.weights.embedding

    def keep_layers(self, layers: Sequence[int]) -> None:
        """From now on steps keep their final-norm hidden states, and what these layers leave behind them; see `states`."""
        self._decoder.keeps_states, self._decoder.kept_layers = True, tuple(layers)
        self._steps = self._recorded_steps()

    @torch.inference_mode()
    def states(self, rows: Sequence[int]) -> Tensor:
        """[R, F * C] of rows of the last `forward`: final-norm hidden states, then those of the layers that are kept."""
        kept = self._launched_states if self._now is None else self._steps.states(self._now)  # [F, T, C]
        places = list(rows) if self._now is None else [self._rows[row] for row in rows]
        chosen = (
            kept[:, places[0] : places[0] + len(places)] if _are_consecutive(places) else kept[:, self._sent(places)]
        )
        return torch.cat(chosen.unbind(), -1)  # a copy always: a later step writes there

    def _sent(self, numbers: list[int]) -> Tensor:
        """On the device, without waiting for the steps that are under way."""
        is_cuda = self._memory.type == "cuda"
        return torch.tensor(numbers, pin_memory=is_cuda).to(self._memory, non_blocking=is_cuda)

    def attend_by(self, attention: StepAttention) -> None:
        """Attend so from now on, not by the kernels; steps are launched then, since nobody else's can be relied on in a graph."""
        self._decoder.other_attention = attention
        self._records = False

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self._decoder.dtype

    @property
    def capability(self) -> tuple[int, int] | None:
        """Of the device that holds the weights; None: main memory (tests)."""
        return torch.cuda.get_device_capability(self._memory) if self._memory.type == "cuda" else None

    def matrices(self) -> list[DeviceMatrix]:
        """All that steps multiply with."""
        return self._decoder.matrices()

    def multiply_by(self, products: HummingProducts) -> None:
        """Multiply so where that is faster; steps that were recorded before stay as they are."""
        self._decoder.multiply_by(products)

    def expect_draws(self, draws: Sequence[Draw] | None) -> None:
        """See `DrawsTokens`."""
        self._draws = draws

    def forward(self, items: Sequence[StepItem], *, with_states: bool = False) -> None:
        """See `StepExecutor`.

        Raises:
            MemoryBudgetError: the device has no memory left for a step of this size.
        """
        tokens = sum(item.num_tokens for item in items)
        with explained(f"computing a step of {tokens} tokens", self._memory, TOO_MANY_TOKENS):
            self._forward(items, with_states)

    @torch.inference_mode()
    def _forward(self, items: Sequence[StepItem], with_states: bool) -> None:
        rows = None if with_states else self._expected(items)
        ahead, self._next = self._next, None
        if rows is not None:
            self._runs_ahead = True
            if ahead is not None:
                self._go_on(ahead, items, rows)
                return
        elif ahead is not None:
            self._runs_ahead = False
        shape = _recorded_shape(items) if self._records and not with_states else None
        if shape is not None:
            self._begin(items, shape)
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
            self._begin(self._items, self._now.recorded.shape)
        everything = self._best_now = self._steps.best(self._now)
        index = [self._rows[row] for row in rows]
        best = [everything[row] for row in index]
        if not with_logits:
            if self._next is None and self._runs_ahead and self._now.goes_on:
                self._next = self._follow(self._now)
            return Scores(best, None)
        logits = self._logits[: len(index)] if index == list(range(len(index))) else self._logits[index]
        return Scores(best, logits[:, : self._vocab_size])

    @torch.inference_mode()
    def final_states(self, rows: Sequence[int]) -> Tensor:
        """See `StepExecutor`. Steps that are recorded lay them out for the head only, so one that keeps them is launched."""
        return self._hidden.values[torch.tensor(list(rows)).to(self._memory)].float()

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

    def _begin(self, items: Sequence[StepItem], shape: Shape) -> None:
        self._now, self._items, self._best_now = self._steps.begin(items, shape, self._draws), items, None
        self._rows = [row for rows in rows_of(items, shape) for row in rows]

    def _expected(self, items: Sequence[StepItem]) -> list[int] | None:
        """The rows of these items in the step after the last one, if each goes on there with its best token."""
        if self._now is None or self._best_now is None or not self._now.goes_on:
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
        fewest = bucket_of(BUCKETS, len(flight.places)) or size
        return None if 2 * fewest <= size else self._steps.follow(flight)

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
            ends = np.cumsum([item.num_tokens for item in items]).tolist()
            self._launched_draws = {
                end - draw.rows + number: later(draw, number)
                for end, draw in zip(ends, self._draws, strict=True)
                for number in range(draw.rows)
            }
        buffers = decoder.part_of(self._steps.buffers, row) if row <= MOST_ROWS else decoder.buffers(row)
        everyone = Sequences(positions=flat[1], slots=flat[2], tables=groups[0].sequences.tables, queries=1)
        hidden = torch.empty(row, decoder.config.hidden_size, dtype=decoder.dtype, device=self._memory)
        self._hidden = Activations(hidden, row, 0)
        decoder.forward(flat[0], everyone, groups, buffers, self._hidden)
        if buffers.states is not None:
            self._launched_states = buffers.states

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
        write_draws(columns, ((number, self._launched_draws[row]) for number, row in enumerate(rows)))
        return torch.from_numpy(columns).to(self._memory)

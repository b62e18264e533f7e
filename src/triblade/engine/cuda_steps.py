"""Recorded decode steps: CUDA graphs with fixed places for their inputs, replayed one after the other without the host.

A step of S sequences with up to Q tokens each goes from token ids to logits and the best tokens; places that no token takes
have negative slots. `begin` writes inputs and replays; `follow`, for one token each, has the device turn the best tokens
into the next inputs and replays again, while earlier steps still run. A sequence that leaves is taken off its place before
the next `follow`: what the step under way still writes for it lies behind its end, in blocks that were its own, before
anything that follows in the stream. Knows no sampling. Invariant: recorded steps only touch memory that lives as long as
this.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triblade.engine.batch import StepItem
from triblade.engine.cuda_decoder import CudaDecoder, Group
from triblade.engine.executor import GREEDY, Draw
from triblade.ops.cuda.attention import Sequences
from triblade.ops.cuda.vectors import DRAW_COLUMNS

NO_SLOT = -1
ONE_RECORDS = Lock()  # torch's rule for a process, whatever number of engines it has
RESULTS = 2  # steps whose tokens the host has not read: the one that runs and the one behind it

Integers = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Fixed places of a recorded step's inputs: host side (pinned) and device side of one piece of memory."""

    host: Tensor  # int32
    device: Tensor
    tokens: Tensor  # device, [3, rows]: ids, positions, slots
    draws: Tensor  # device, [5, rows]; see `kernels/draw.cu`
    num_blocks: Tensor  # device, [sequences]
    tables: Tensor  # device, [sequences, width]

    def on_host(self) -> tuple[Integers, Integers, Integers, Integers]:
        """The host side of tokens, draws, num_blocks and tables."""
        parts = (self.tokens, self.draws, self.num_blocks, self.tables)
        whole: Integers = self.host.numpy()
        ends = np.cumsum([part.numel() for part in parts])
        tokens, draws, num_blocks, tables, _ = np.split(whole, ends)
        return tokens.reshape(3, -1), draws.reshape(DRAW_COLUMNS, -1), num_blocks, tables.reshape(self.tables.shape)

    def send(self) -> None:
        """Everything, in stream order."""
        self.device.copy_(self.host, non_blocking=True)

    def send_tables(self) -> None:
        """What follows the draws. Tables only grow while steps run, so it is no harm if a later state is sent than meant."""
        first = self.tokens.numel() + self.draws.numel()
        self.device[first:].copy_(self.host[first:], non_blocking=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a recorded step."""

    size: int  # sequences
    queries: int  # most tokens of each


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step as a graph."""

    graph: Any  # torch.cuda.CUDAGraph
    inputs: StepInputs
    shape: Shape
    draws: bool  # whether tokens are drawn


@dataclass(slots=True)
class Place:
    """A sequence in a chain of steps."""

    row: int
    start: int  # position of its token in the chain's first step
    table: array[int]  # the request's own, which grows in place
    num_blocks: int  # of it that the device knows


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was replayed, and perhaps still runs."""

    recorded: Recorded
    places: dict[Any, Place]  # by request; shared by all steps of a chain
    number: int  # in the chain
    slot: int  # of results
    goes_on: bool  # whether every item took one token, so that the next step can follow by itself


@contextmanager
def recording(graph: Any, pool: Any) -> Iterator[None]:
    """Launches within become the graph (torch.cuda.CUDAGraph); its kernels keep the priority of the calling thread's stream.

    The default stream cannot be recorded: torch takes one of its own then. Other threads may allocate meanwhile.
    """
    stream = torch.cuda.current_stream()
    own = None if stream == torch.cuda.default_stream() else stream
    with ONE_RECORDS, torch.cuda.graph(graph, pool=pool, stream=own, capture_error_mode="thread_local"):
        yield


class RecordedSteps:
    """Records steps when a size is first needed, and runs them.

    Args:
        decoder: launches kernels.
        width: most blocks of a sequence.
        block_size: tokens of a block.
        max_rows: most tokens of a step.
        vocab_size: tokens that may be chosen.
        logits: [max_rows, V] float32, where a step leaves them.
    """

    def __init__(
        self, decoder: CudaDecoder, *, width: int, block_size: int, max_rows: int, vocab_size: int, logits: Tensor
    ) -> None:
        self._decoder = decoder
        self._memory = decoder.memory
        self._width = width
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._logits = logits
        self.buffers = decoder.buffers(max_rows)
        # Beside the step's own, since the one behind it writes there before the host asks for these.
        self._states = [torch.empty_like(kept) for kept in [self.buffers.states] * RESULTS if kept is not None]
        self._best = torch.empty(max_rows, dtype=torch.int32, device=self._memory)
        self._is_cuda = self._memory.type == "cuda"
        self._results = [self._pinned(max_rows) for _ in range(RESULTS)]
        self._done = [torch.cuda.Event() for _ in range(RESULTS)] if self._is_cuda else []
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._numbers = count()
        self._recorded: dict[tuple[Shape, bool], Recorded] = {}

    @property
    def recorded(self) -> dict[tuple[Shape, bool], Recorded]:
        """Steps by shape, and whether tokens are drawn."""
        return self._recorded

    def rehearse(self, shape: Shape) -> None:
        """Launch what a recorded step of this shape does, with nobody in it."""
        inputs = self._inputs(shape)
        inputs.tokens[1:].fill_(NO_SLOT)
        self._decoder.reserve(shape.size, shape.queries)
        self._run(inputs, shape.queries, draws=True)

    def record(self, shape: Shape, *, draws: bool) -> Recorded:
        """The step of a shape, recorded when it is first asked for."""
        key = (shape, draws)
        if key not in self._recorded:
            self._recorded[key] = self._record(*key)
        return self._recorded[key]

    def begin(self, items: Sequence[StepItem], shape: Shape, draws: Sequence[Draw] | None = None) -> Flight:
        """Run a step of items in places of a shape that holds them."""
        recorded = self.record(shape, draws=draws is not None)
        self._wait_for_all()  # the host's side of the inputs may still be on its way
        self._fill(recorded.inputs, items, shape)
        if draws is not None:
            pairs = zip(rows_of(items, shape), draws, strict=True)
            every = ((rows[n - draw.rows], later(draw, n)) for rows, draw in pairs for n in range(draw.rows))
            write_draws(recorded.inputs.on_host()[1], every)
        recorded.inputs.send()
        places = {
            item.request: Place(row, item.start, item.request.block_table, len(item.request.block_table))
            for row, item in enumerate(items)
        }
        return self._replay(recorded, places, 0, all(item.num_tokens == 1 for item in items))

    def follow(self, flight: Flight) -> Flight | None:
        """Run the step after `flight`, the last one so far, for its sequences; None where one has no room for another token."""
        inputs, grew = flight.recorded.inputs, False
        _, _, num_blocks, tables = inputs.on_host()
        for place in flight.places.values():
            known = min(len(place.table), self._width)
            if place.start + flight.number + 1 >= known * self._block_size:
                return None
            if known != place.num_blocks:
                tables[place.row, place.num_blocks : known] = place.table[place.num_blocks : known]
                num_blocks[place.row] = place.num_blocks = known
                grew = True
        if grew:
            inputs.send_tables()
        best = self._best[: inputs.tokens.shape[1]]
        drawn = inputs.draws[2] if flight.recorded.draws else None
        self._decoder.advance(best, inputs.tokens, inputs.tables, inputs.num_blocks, drawn)
        return self._replay(flight.recorded, flight.places, flight.number + 1, True)

    def leave(self, flight: Flight, requests: Sequence[Any]) -> None:
        """Take sequences off their places; `flight` is the last step so far."""
        for request in requests:
            row = flight.places.pop(request).row
            flight.recorded.inputs.tokens[1:, row].fill_(NO_SLOT)

    def best(self, flight: Flight) -> list[int]:
        """The best token of every row of a step; waits for it."""
        if self._is_cuda:
            self._done[flight.slot].synchronize()
        rows = flight.recorded.inputs.tokens.shape[1]
        tokens: list[int] = self._results[flight.slot][:rows].tolist()
        return tokens

    def states(self, flight: Flight) -> Tensor:
        """What `CudaDecoder` keeps [F, rows, C] of a step; good until the second step after it."""
        return self._states[flight.slot]

    def _replay(self, recorded: Recorded, places: dict[Any, Place], number: int, goes_on: bool) -> Flight:
        slot, rows = next(self._numbers) % RESULTS, recorded.inputs.tokens.shape[1]
        recorded.graph.replay()
        self._results[slot][:rows].copy_(self._best[:rows], non_blocking=True)
        if self.buffers.states is not None:
            self._states[slot][:, :rows].copy_(self.buffers.states[:, :rows])
        if self._is_cuda:
            self._done[slot].record()
        return Flight(recorded, places, number, slot, goes_on)

    def _record(self, shape: Shape, draws: bool) -> Recorded:
        """Record a step. It is launched once first, with nobody in it, so that every kernel is compiled and loaded."""
        inputs = self._inputs(shape)
        inputs.tokens[1:].fill_(NO_SLOT)
        self._decoder.reserve(shape.size, shape.queries)
        self._run(inputs, shape.queries, draws)
        torch.cuda.synchronize(self._memory)
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._pool):
            self._run(inputs, shape.queries, draws)
        return Recorded(graph, inputs, shape, draws)

    def _run(self, inputs: StepInputs, queries: int, draws: bool) -> None:
        ids, positions, slots = inputs.tokens.unbind(0)
        rows = len(ids)
        sequences = Sequences(positions=positions, slots=slots, tables=inputs.tables, queries=queries)
        buffers = self._decoder.part_of(self.buffers, rows)
        self._decoder.forward(ids, sequences, [Group(sequences, 0, 0)], buffers, buffers.hidden)
        self._decoder.logits(buffers.hidden, self._logits[:rows])
        settings = inputs.draws if draws else None
        self._decoder.choose(self._logits[:rows], self._vocab_size, self._best[:rows], settings)

    def _inputs(self, shape: Shape) -> StepInputs:
        size, rows = shape.size, shape.size * shape.queries
        places = [3 * rows, DRAW_COLUMNS * rows, size, size * self._width]
        host = self._pinned(sum(places))
        device = torch.zeros(sum(places), dtype=torch.int32, device=self._memory)
        tokens, draws, num_blocks, tables = device.split(places)
        return StepInputs(
            host, device, tokens.view(3, rows), draws.view(DRAW_COLUMNS, rows), num_blocks, tables.view(size, -1)
        )

    def _fill(self, inputs: StepInputs, items: Sequence[StepItem], shape: Shape) -> None:
        """Write a step's inputs on the host side."""
        tokens, draws, num_blocks, tables = inputs.on_host()
        draws.fill(0)
        tokens[0].fill(0)
        tokens[1:].fill(NO_SLOT)
        for rows, item in zip(rows_of(items, shape), items, strict=True):
            table = blocks_of(item)[: self._width]
            part, number = slice(rows.start, rows.stop), rows.start // shape.queries
            tables[number, : len(table)] = table
            num_blocks[number] = len(table)
            positions = np.arange(item.start, item.start + item.num_tokens, dtype=np.int32)
            tokens[0, part], tokens[1, part] = item.token_ids, positions
            tokens[2, part] = slots_of(table, positions, self._block_size)
            # The kernels take positions that do not descend; without a slot a row still changes nothing.
            tokens[1, rows.stop : rows.start + shape.queries] = positions[-1]

    def _wait_for_all(self) -> None:
        if self._is_cuda:
            torch.cuda.current_stream(self._memory).synchronize()

    def _pinned(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.int32, pin_memory=self._is_cuda)


def write_draws(columns: Integers, draws: Iterable[tuple[int, Draw]]) -> None:
    """Settings of rows as columns [5, R] of `kernels/draw.cu`; other columns stay as they are."""
    for row, draw in draws:
        if draw is not GREEDY:
            seed = np.array([draw.seed], dtype=np.uint64).view(np.int32)
            settings = np.array([draw.temperature, draw.min_p], dtype=np.float32).view(np.int32)
            columns[:, row] = (*seed, draw.position, *settings)


def later(draw: Draw, number: int) -> Draw:
    """Of the row `number` rows behind the first one of a draw."""
    return draw if number == 0 else replace(draw, position=draw.position + number)


def rows_of(items: Sequence[StepItem], shape: Shape) -> Iterator[range]:
    """The rows that the tokens of each item take."""
    for number, item in enumerate(items):
        yield range(number * shape.queries, number * shape.queries + item.num_tokens)


def blocks_of(item: StepItem) -> Integers:
    """The blocks of an item's sequence; a view, while which lives the table cannot grow."""
    return np.frombuffer(item.request.block_table, dtype=np.int32)


def slots_of(table: Integers, positions: Integers, block_size: int) -> Integers:
    """Slots [T] of positions [T] in a sequence's blocks."""
    slots: Integers = table[positions // block_size] * block_size + positions % block_size
    return slots

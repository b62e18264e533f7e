"""Rows that a prefill worker writes where they belong: into the pool of its decode worker, whose memory it has opened.

P, chunk by chunk: a step is launched -> its rows are queued here -> the step is done -> they are written, by a stream of their own
while the next step computes -> Rows goes out, with their sum. D compares the sum of what it has. Who writes is a thread beside the
engine's, so that neither waits for the other.

Blocks of D are named by D alone, and never taken back from P in secret: whatever ends a transfer, D uses its blocks for something
else only after P's End, which comes when nothing is being written, or some time after P is gone. Knows no driver and no socket.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from triblade.disagg.cuda_ipc import Offer, RowMemory
from triblade.disagg.identity import canary_block, compare_canary, one_block
from triblade.disagg.links import Connector, Link
from triblade.disagg.wire import End, Fetch, Hello, Rows, Taken
from triblade.errors import TribladeError, UnsupportedError, WireError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.ops.cuda.rows import Place, Quantization, RowKernels

log = logging.getLogger(__name__)

CODECS = ("raw", "int8")  # others make less of the rows than they are: nothing is placed then


def row_memory_of(connector: Connector, pool: Tensor) -> RowMemory | None:
    """How rows of this pool get from device to device over a connector, if they do."""
    try:
        return connector.row_memory(pool)
    except UnsupportedError as error:
        log.warning("rows are sent, not placed: %s", error.message)
        return None


def quantization(own: KVLayout, theirs: KVLayout, codec: str) -> Quantization | None:
    """What rows need on their way from one pool to another; None: nothing.

    Raises:
        UnsupportedError: something that is not done on the way.
    """
    if codec not in CODECS:
        raise UnsupportedError(f"the codec {codec} changes rows on their way")
    if own == theirs:
        return None
    is_known = own.codec in ("bfloat16", "float16") and own.head_dim % 4 == 0 and own.draft is None
    if theirs.codec != "int8" or replace(own, codec="int8") != theirs or not is_known:
        raise UnsupportedError(f"rows of {own.codec} do not become rows of {theirs.codec} on their way")
    return Quantization(
        source=_place(own),
        target=_place(theirs),
        num_layers=own.num_layers,
        num_vectors=own.block_size * own.num_kv_heads,
        head_dim=own.head_dim,
        is_float16=own.codec == "float16",
    )


def _place(layout: KVLayout) -> Place:
    keys, values = (tuple(plane.offset_bytes for plane in planes) for planes in layout.planes(0))
    return Place(layout.row_bytes, layout.layer_bytes(), keys[0], values[0], keys[-1], values[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The pool of a decode worker, open."""

    offers: tuple[tuple[Offer, int], ...]  # with the address of each
    address: int
    num_blocks: int
    quantization: Quantization | None

    def ticket(self, fetch: Fetch, stop: int, block_size: int) -> Ticket:
        """Of a transfer of the rows of tokens up to `stop`.

        Raises:
            WireError: its blocks are not those of its rows.
        """
        first = fetch.first_token // block_size
        is_inside = all(0 <= block < self.num_blocks for block in fetch.blocks)
        if len(fetch.blocks) != -(-stop // block_size) - first or not is_inside:
            raise WireError(f"{len(fetch.blocks)} blocks do not take rows of tokens {fetch.first_token} to {stop}")
        return Ticket(self, fetch.blocks, first)


@dataclass(slots=True, eq=False)
class Ticket:
    """A transfer into a target."""

    target: Target
    blocks: tuple[int, ...]  # of the decode worker
    first_block: int  # of the request, whose rows go into the first of these
    is_wanted: bool = True
    end: End | None = None  # to be sent as soon as nothing is being written


@dataclass(frozen=True, slots=True)
class Write:
    """Rows to be placed."""

    link: Link
    ticket: Ticket
    rows: Rows  # what to say then
    blocks: Sequence[int]  # of the own pool
    mark: Any  # behind what computes them


class RowWriter:
    """Places rows of one cache, in order, in a thread of its own.

    Args:
        cache: of the prefill worker.
        codec: on the wire.
        memory: the way.
        written: called from the thread when rows were written, or are not wanted any more.
    """

    def __init__(self, cache: KVCache, codec: str, memory: RowMemory, written: Callable[[Link, Taken], None]) -> None:
        self._cache, self._codec, self._memory, self._written = cache, codec, memory, written
        self._kernels = memory.kernels(cache.pool)
        self._inbox: queue.SimpleQueue[Write | Target | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="triblade-rows", daemon=True)
        self._thread.start()

    def open(self, hello: Hello, theirs: KVLayout) -> Target:
        """The pool that a decode worker offers, with the canary in place.

        Raises:
            UnsupportedError: it cannot be written into, and why.
            WireError: the offer is none.
        """
        memory = hello.memory or {}
        conversion = quantization(self._cache.layout, theirs, self._codec)
        offers = [Offer.read(memory.get(name) or {}) for name in ("rows", "canary")]
        if offers[0].size < hello.num_blocks * theirs.row_bytes or offers[1].size < theirs.row_bytes:
            raise WireError("the decode worker's memory is smaller than its rows")
        opened = list[tuple[Offer, int]]()
        try:
            opened += ((offer, self._memory.open(offer)) for offer in offers)
            target = Target(tuple(opened), opened[0][1], hello.num_blocks, conversion)
            self._place_canary(target, opened[1][1])
        except BaseException:
            self._close(opened)
            raise
        return target

    def try_open(self, link: Link, hello: Hello, theirs: KVLayout) -> tuple[Target | None, str]:
        """The pool of a decode worker, or why rows are sent to it instead."""
        if hello.memory is None:
            return None, ""
        try:
            return self.open(hello, theirs), ""
        except (UnsupportedError, WireError, RuntimeError) as error:
            reason = error.message if isinstance(error, TribladeError) else str(error)
            log.warning("rows for decode worker %s are sent, not placed: %s", link.peer, reason)
            return None, reason

    def put(self, write: Write) -> None:
        """Place rows when their turn comes."""
        self._inbox.put(write)

    def leave(self, target: Target) -> None:
        """Nothing more will be written there."""
        self._inbox.put(target)

    def mark(self) -> Any:
        """Behind what the calling thread has launched."""
        return self._memory.mark()

    def close(self) -> None:
        """End the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            if isinstance(item, Target):
                self._leave(item)
                continue
            try:
                self._write(item)
            except Exception:  # the decode worker finds a gap, and computes what is missing
                log.exception("rows of %s were not written", item.link.peer)
            rows = item.rows
            self._written(item.link, Taken(transfer=rows.transfer, attempt=rows.attempt, stop=rows.stop))

    def _leave(self, target: Target) -> None:
        try:
            self._close(target.offers)
        except Exception:  # memory of a worker that is gone stays taken; rows for others go on
            log.exception("the memory of a decode worker was not closed")

    def _write(self, write: Write) -> None:
        self._memory.wait(write.mark)
        if write.ticket.is_wanted:
            ticket = write.ticket
            first = write.rows.first_token // self._cache.layout.block_size - ticket.first_block
            theirs = ticket.blocks[first : first + len(write.blocks)]
            write.link.send(
                replace(write.rows, checksum=self._place(self._kernels, ticket.target, write.blocks, theirs))
            )

    def _place_canary(self, target: Target, address: int) -> None:
        canary = canary_block(self._cache)
        self._memory.wait(self._memory.mark())
        self._place(self._memory.kernels(canary.pool), replace(target, address=address), [0], [0])

    def _close(self, offers: Iterable[tuple[Offer, int]]) -> None:
        for offer, address in offers:
            self._memory.close(offer, address)

    def _place(self, kernels: RowKernels, target: Target, blocks: Sequence[int], theirs: Sequence[int]) -> int:
        """Write rows and wait; their sum."""
        with self._memory.queue():
            if target.quantization is None:
                kernels.copy(blocks, target.address, theirs)
            else:
                kernels.quantize(blocks, target.address, theirs, target.quantization)
        return kernels.total()


class PlacedRows:
    """The decode worker's end.

    Args:
        cache: whose pool others write into.
        memory: the way.

    Raises:
        UnsupportedError: the pool cannot be shared.
    """

    def __init__(self, cache: KVCache, memory: RowMemory) -> None:
        self._cache, self._memory = cache, memory
        self._offer = memory.offer(cache.pool)
        self._kernels = memory.kernels(cache.pool)
        self._canaries: weakref.WeakKeyDictionary[Link, KVCache] = weakref.WeakKeyDictionary()

    def offer(self, link: Link) -> dict[str, Any]:
        """What a peer needs to write; it begins with a canary."""
        canary = self._canaries[link] = one_block(self._cache)
        return {"rows": self._offer.fields(), "canary": self._memory.offer(canary.pool).fields()}

    def check(self, link: Link) -> None:
        """Raises:
        WireError: the peer did not write the canary, or another one.
        """
        compare_canary(self._canaries.pop(link))

    def verify(self, blocks: Sequence[int], checksum: int) -> None:
        """Raises:
        WireError: what lies in these blocks is not what was written.
        """
        with self._memory.queue():
            self._kernels.copy(blocks, None, blocks)
        if self._kernels.total() != checksum:
            raise WireError(f"{len(blocks)} rows that were placed are not what was sent")


def placed_rows(cache: KVCache, codec: str, memory: RowMemory | None) -> PlacedRows | None:
    """The decode worker's end, where there is a way; the reason against it is logged."""
    if memory is None or codec not in CODECS:
        return None
    try:
        return PlacedRows(cache, memory)
    except UnsupportedError as error:
        log.warning("rows are sent, not placed: %s", error.message)
        return None

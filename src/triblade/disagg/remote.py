"""The decode engine's side of a transfer: which prompts are left to a prefill worker, and rows into reserved blocks between
steps.

Life of a fetched request: the scheduler gave it blocks and asks `wants` -> `begin` sends a Fetch -> rows come, in order, and are
decoded into its blocks by the engine's thread, or checked where a peer placed them -> all there, or no more will come:
`Scheduler.arrived` with the tokens that lie side by side from the beginning, and the engine computes the rest. Everything here
runs in the engine's thread, so a dropped request's blocks are free at once: whatever still comes for it finds no transfer. Only
blocks that a peer may be writing into are held until it is known that nobody does. Knows no transport.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from triblade.config import TransferConfig
from triblade.disagg import shared_rows
from triblade.disagg.codecs import Receiver
from triblade.disagg.cuda_ipc import RowMemory
from triblade.disagg.fetcher import Fetcher
from triblade.disagg.identity import check_canary, described, layout_from, why_not
from triblade.disagg.kv_connector import Arrival, KVConnector, Settled
from triblade.disagg.links import Connector, Link
from triblade.disagg.placed_rows import placed_rows, row_memory_of
from triblade.disagg.wire import End, Fetch, Hello, Rows, Table, Taken, token_payload
from triblade.engine.engine import Engine
from triblade.engine.request import Request
from triblade.engine.transfers import TransferCounts
from triblade.errors import WireError
from triblade.kv.cache import KVCache
from triblade.kv.wire import WireSpan
from triblade.spec.drafter import ReceivedRows

log = logging.getLogger(__name__)

# Time between two steps that rows may take; the next ones wait for the next gap, so that streams keep their pace.
STORE_BUDGET_S = 0.004


@dataclass(slots=True)
class _Transfer:
    """Rows on their way to a request."""

    request: Request
    received: int  # tokens whose rows are there
    stop: int  # tokens whose rows are wanted
    begin_s: float
    wire_bytes: int = 0
    queue_s: float = 0.0
    errors: tuple[float, ...] = ()
    error: str | None = None  # it is over, but its blocks may be being written


class RowTerms:
    """Implements `peer.Terms` for a cache.

    Attributes:
        sources: pools of peers whose rows are read where they are.
        placed: how peers write into this pool themselves, if they may.
        same_drafter: links of peers whose drafter, if any, is that of this side.
    """

    def __init__(self, cache: KVCache, codec: str, *, by_reference: bool, memory: RowMemory | None = None) -> None:
        self.placed = placed_rows(cache, codec, memory)
        self.sources: weakref.WeakKeyDictionary[Link, Tensor] = weakref.WeakKeyDictionary()
        self.same_drafter: weakref.WeakSet[Link] = weakref.WeakSet()
        self._receivers: weakref.WeakKeyDictionary[Link, Receiver] = weakref.WeakKeyDictionary()
        self._cache, self._codec = cache, codec
        self._by_reference = by_reference and codec == "raw" and cache.pool.device.type == "cpu"

    def hello(self, link: Link) -> Hello:
        """See `peer.Terms`."""
        return Hello(
            role="decode",
            layout=described(self._cache.layout),
            codec=self._codec,
            by_reference=self._by_reference,
            num_blocks=self._cache.num_blocks,
            memory=None if self.placed is None else self.placed.offer(link),
        )

    def check(self, link: Link, hello: Hello) -> None:
        """See `peer.Terms`."""
        layout = self._cache.layout
        theirs = layout_from(hello.layout)
        difference = why_not(theirs, layout, hello.codec, self._codec)
        if difference is not None:
            raise WireError(f"prefill and decode worker differ in {difference}", hint="start both with equal options")
        check_canary(self._cache, self.receiver(link).any, hello.payload)
        if theirs.draft == layout.draft:
            self.same_drafter.add(link)
        if hello.places:
            if self.placed is None:
                raise WireError("the prefill worker places its rows, and was not told where")
            self.placed.check(link)
        if hello.by_reference:
            if link.file is None:
                raise WireError("the prefill worker promised its rows and sent no memory")
            self.sources[link] = shared_rows.mapped(link.file, hello.num_blocks, layout.row_bytes)

    def use(self, link: Link, table: Table) -> None:
        """See `peer.Terms`."""
        self.receiver(link).use(table.payload)

    def receiver(self, link: Link) -> Receiver:
        """The codecs of what comes over a link."""
        if link not in self._receivers:
            self._receivers[link] = Receiver(self._cache.layout)
        return self._receivers[link]


class RemotePrefill:
    """Implements the scheduler's `RemoteRows`.

    Args:
        engine: decodes.
        config: when to fetch.
        terms: knows what the rows of a link are.
        again: called when rows are left that did not fit between two steps.

    Attributes:
        connector: where rows come from.
        counts: of all transfers since the start.
    """

    def __init__(self, engine: Engine, config: TransferConfig, terms: RowTerms, again: Callable[[], None]) -> None:
        self.connector: KVConnector | None = None
        self.counts = TransferCounts()
        self._engine, self._scheduler = engine, engine.scheduler
        self._cache = engine.runner.executor.cache
        self._config, self._terms, self._again = config, terms, again
        self._numbers = itertools.count()
        self._transfers: dict[int, _Transfer] = {}
        self._by_request: dict[Request, int] = {}
        self._held: dict[int, list[int]] = {}  # blocks that peers may write into, by transfer, until it is settled
        self._dropped = set[int]()  # of these, whose requests do not have them any more

    def wants(self, request: Request, num_tokens: int) -> bool:
        """See `RemoteRows`: long enough, blocks to spare, and somebody who has time."""
        if num_tokens < self._config.remote_prefill_tokens or not request.reads_prefix_cache:
            return False
        reserved = sum(len(transfer.request.block_table) for transfer in self._transfers.values())
        most = self._config.remote_kv_share * self._scheduler.pool.num_blocks
        accepted = self.connector is not None and self.connector.accepts(num_tokens)
        if not accepted or reserved + len(request.block_table) > most:
            self.counts.num_declined += 1
            return False
        return True

    def begin(self, request: Request) -> None:
        """See `RemoteRows`."""
        assert self.connector is not None
        number = next(self._numbers)
        first = request.num_computed_tokens
        self._transfers[number] = _Transfer(request, first, request.num_tokens - 1, time.perf_counter())
        self._by_request[request] = number
        self.counts.num_fetches += 1
        self._tell_drafter(request, ReceivedRows(first, first, request.num_tokens - 1))
        self._hold(number, request)
        self.connector.fetch(
            Fetch(
                transfer=number,
                first_token=first,
                priority=request.priority,
                blocks=tuple(self._held.get(number, ())),
                payload=token_payload(request.token_ids),
            )
        )

    def drop(self, request: Request) -> None:
        """See `RemoteRows`."""
        assert self.connector is not None
        number = self._by_request.pop(request)
        del self._transfers[number]
        self.counts.num_dropped += 1
        if number in self._held:
            self._dropped.add(number)
            self._scheduler.num_returning_blocks += len(self._held[number])
        self.connector.cancel(number)

    def _hold(self, number: int, request: Request) -> None:
        """Keep the blocks that will be named, whatever becomes of the request."""
        if self._terms.placed is None:
            return
        size = self._scheduler.block_size
        blocks = request.block_table[request.num_computed_tokens // size : -(-(request.num_tokens - 1) // size)]
        self._held[number] = blocks.tolist()
        self._scheduler.pool.retain(self._held[number])

    def receive(self) -> None:
        """Store what came. Call it in the engine's thread between two steps."""
        assert self.connector is not None
        start = time.perf_counter()
        while (arrival := self.connector.poll()) is not None:
            self._take(arrival)
            if time.perf_counter() - start > STORE_BUDGET_S:
                self._again()
                break
        self.counts.store_s += time.perf_counter() - start

    def _take(self, arrival: Arrival) -> None:
        message = arrival.message
        transfer = self._transfers.get(message.transfer)
        if isinstance(message, Settled):
            self._settled(message.transfer)
            return
        if transfer is None or transfer.error is not None:
            return
        if isinstance(message, End):
            if arrival.link is None:
                self._leave(message.transfer, str(message.error))
            else:
                self._finish(message.transfer, message.error)
            return
        try:
            self._store(transfer, message, arrival.link)
        except (WireError, OSError) as error:
            self.counts.num_damaged += 1
            self._leave(message.transfer, str(error))
            return
        except Exception as error:  # the engine's thread goes on, and computes what is missing
            log.exception("%s: rows could not be stored", transfer.request.request_id)
            self.counts.num_faults += 1
            self._leave(message.transfer, f"internal error: {type(error).__name__}")
            return
        if transfer.received == transfer.stop:
            self._finish(message.transfer, None)

    def _leave(self, number: int, error: str) -> None:
        """No more rows are wanted; the rest is computed here as soon as nobody else writes into these blocks."""
        assert self.connector is not None
        if number not in self._held:
            self._finish(number, error)
            return
        self._transfers[number].error = error
        self.connector.cancel(number)

    def _settled(self, number: int) -> None:
        blocks = self._held.pop(number, [])
        self._scheduler.pool.release(blocks)
        if number in self._dropped:
            self._dropped.remove(number)
            self._scheduler.num_returning_blocks -= len(blocks)
        if (transfer := self._transfers.get(number)) is not None:
            self._finish(number, transfer.error)

    def _store(self, transfer: _Transfer, rows: Rows, link: Link | None) -> None:
        """Rows into the blocks that were reserved for them.

        Raises:
            WireError: they are not the next ones, damaged, or do not stand any more.
        """
        block_size = self._scheduler.block_size
        if rows.stop <= transfer.received:
            return  # twice
        if rows.first_token != transfer.received or rows.stop > transfer.stop or rows.num_tokens < 1:
            raise WireError(
                f"rows of tokens {rows.first_token} to {rows.stop} came, expected {transfer.received} to {transfer.stop}"
            )
        if rows.first_token % block_size or (rows.stop % block_size and rows.stop != transfer.stop):
            raise WireError(f"rows of tokens {rows.first_token} to {rows.stop} are no whole blocks")
        table = transfer.request.block_table
        blocks = table[rows.first_token // block_size : -(-rows.stop // block_size)].tolist()
        if rows.blocks:
            self._copy(blocks, rows, link)
        elif rows.is_placed:
            self._verify(blocks, rows)
        else:
            span = WireSpan(rows.first_token, rows.num_tokens, transfer.stop + 1)
            assert link is not None, "rows came without a link"
            self._terms.receiver(link).any.decode(self._cache, blocks, span, rows.payload)
        count = min(rows.num_draft_tokens, rows.num_tokens) if link in self._terms.same_drafter else 0
        self._tell_drafter(transfer.request, ReceivedRows(rows.first_token, rows.first_token + count, rows.stop))
        transfer.received, transfer.queue_s, transfer.errors = rows.stop, rows.queue_s, rows.errors
        row_bytes = len(blocks) * self._cache.layout.row_bytes
        wire_bytes = len(rows.payload) or row_bytes
        transfer.wire_bytes += wire_bytes
        self.counts.num_tokens += rows.num_tokens
        self.counts.row_bytes += row_bytes
        self.counts.wire_bytes += wire_bytes

    def _tell_drafter(self, request: Request, rows: ReceivedRows) -> None:
        if (speculator := self._engine.speculator) is not None:
            speculator.received(request, rows)

    def _copy(self, blocks: list[int], rows: Rows, link: Link | None) -> None:
        """Rows by reference. They are checked where they are now, so it does not matter when the sender took them back."""
        source = None if link is None else self._terms.sources.get(link)
        if link is None or source is None or len(rows.blocks) != len(blocks):
            raise WireError(f"{len(rows.blocks)} rows by reference came, expected {len(blocks)}")
        if not all(0 <= block < len(source) for block in rows.blocks):
            raise WireError(f"a row by reference lies outside the pool of {len(source)} blocks")
        found = shared_rows.take(self._cache, blocks, source, rows.blocks)
        if found != rows.checksum or not shared_rows.still_stand(rows.expires_s):
            raise WireError(f"rows of tokens {rows.first_token} to {rows.stop} changed before they were read")
        link.send(Taken(transfer=rows.transfer, attempt=rows.attempt, stop=rows.stop))

    def _verify(self, blocks: list[int], rows: Rows) -> None:
        if self._terms.placed is None:
            raise WireError("rows are said to be here, and nobody was told where")
        self._terms.placed.verify(blocks, rows.checksum)

    def _finish(self, number: int, error: str | None) -> None:
        """No more rows: the request goes on with what is there."""
        assert self.connector is not None
        transfer = self._transfers.pop(number)
        del self._by_request[transfer.request]
        if transfer.received == transfer.stop:
            self._note_complete(transfer)
        else:
            self.counts.num_failed += 1
            missing = transfer.stop - transfer.received
            log.warning("%s: %d tokens are computed here: %s", transfer.request.request_id, missing, error)
        self.connector.cancel(number)
        self._scheduler.arrived(transfer.request, transfer.received)

    def _note_complete(self, transfer: _Transfer) -> None:
        self.counts.num_complete += 1
        self.counts.observe("seconds", time.perf_counter() - transfer.begin_s)
        self.counts.observe("size_bytes", transfer.wire_bytes)
        self.counts.observe("queue_s", transfer.queue_s)
        for name, error in zip(("key_error", "value_error"), transfer.errors, strict=False):  # none without loss
            self.counts.observe(name, error)


def connect_prefill(
    engine: Engine,
    between_steps: Callable[[Callable[[], None]], None],
    config: TransferConfig,
    connector: Connector,
    addresses: list[str],
) -> tuple[RemotePrefill, Fetcher]:
    """Let an engine fetch rows from prefill workers.

    Args:
        engine: whose thread may not run yet, or is the caller's.
        between_steps: has the engine's thread call something.
        config: when and how.
        connector: the way.
        addresses: of the prefill workers.
    """
    cache = engine.runner.executor.cache
    memory = row_memory_of(connector, cache.pool)
    terms = RowTerms(cache, config.wire_codec, by_reference=connector.carries_files, memory=memory)
    remote = RemotePrefill(engine, config, terms, lambda: between_steps(remote.receive))
    fetcher = Fetcher(
        connector,
        addresses,
        terms,
        lambda: between_steps(remote.receive),
        max_backlog=config.max_prefill_backlog,
        timeout_s=config.transfer_timeout_s,
    )
    remote.connector = fetcher
    engine.scheduler.remote = remote
    return remote, fetcher

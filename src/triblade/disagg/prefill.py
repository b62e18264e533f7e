"""A prefill worker: an engine that computes prompts for others and sends their rows. Knows links, no transport and no HTTP.

Life of a link: a Hello that fits is answered with ours -> its Fetches are jobs of `disagg.prefill_transfers` -> it is lost, and
its jobs with it. From the first moment it hears every now and then how busy this worker is.

One thread owns the engine; links only put what they hear into its inbox, and a heartbeat speaks while a step takes its time.
Invariant: no peer and no job ends that thread. A fault of a step ends the jobs that were running; only an engine that fails again
and again is given up. When the thread ends, so do its links.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from dataclasses import replace

from triblade.config import TransferConfig
from triblade.disagg.codecs import Sender
from triblade.disagg.cuda_ipc import RowMemory
from triblade.disagg.frames import Message
from triblade.disagg.heartbeat import Heartbeat
from triblade.disagg.identity import canary, described, layout_from, why_not
from triblade.disagg.links import Link
from triblade.disagg.pace import Window
from triblade.disagg.placed_rows import RowWriter
from triblade.disagg.prefill_jobs import Reader
from triblade.disagg.prefill_transfers import Transfers, queued_s
from triblade.disagg.shared_rows import SharedPool
from triblade.disagg.wire import Cancel, Fetch, Hello, Refusal, State, Table, Taken
from triblade.engine.engine import Engine
from triblade.engine.local import end_thread
from triblade.errors import WireError

log = logging.getLogger(__name__)

STATE_INTERVAL_S = 0.25
LEAST_CHUNK_TOKENS = 16
MAX_FAULTS_IN_A_ROW = 3
NO_WAY = "the prefill worker has no way to"

Heard = tuple[Link, Message | None]  # None: the link is lost; a message without a link: look around


class PrefillService:
    """Serves fetches with an engine, in a thread of its own.

    Args:
        engine: computes.
        config: codec and leases.
        pool: the memory of the engine's rows, if readers may have it.
        memory: how rows get into the pools of decode workers, if they do.
    """

    def __init__(
        self,
        engine: Engine,
        config: TransferConfig,
        pool: SharedPool | None = None,
        memory: RowMemory | None = None,
    ) -> None:
        self.engine = engine
        self._cache = engine.runner.executor.cache
        self._config = config
        Sender(config, self._cache.layout, self._cache.layout)  # fails now where it would with every peer
        self._pool = pool if config.wire_codec == "raw" else None
        self._writer = None if memory is None else RowWriter(self._cache, config.wire_codec, memory, self.received)
        self._transfers = Transfers(engine, config, self._writer)
        self._inbox: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()
        self._links: dict[Link, Reader] = {}  # greeted ones
        self._state = State(backlog_tokens=0)
        self._num_faults = 0
        self._next_state_s = 0.0
        self._turn_s = time.monotonic()  # when the present turn began
        self._waits_for_blocks = False
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="triblade-prefill", daemon=True)
        self._thread.start()
        self._heartbeat = Heartbeat(self._thread, self._sign_of_life, STATE_INTERVAL_S)
        self._closing = weakref.finalize(self, end_thread, self._inbox, self._thread)

    @property
    def num_jobs(self) -> int:
        """Transfers that are not over, leases included."""
        return len(self._transfers)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def accept(self, link: Link) -> None:
        """Serve a new link."""
        self._heartbeat.join(link)
        link.start(self)

    def received(self, link: Link, message: Message) -> None:
        """See `links.Receiver`."""
        if isinstance(message, Cancel):
            self._transfers.stop_placing(link, message.transfer)
        self._inbox.put((link, message))

    def writable(self, link: Link) -> None:
        """See `links.Receiver`."""
        self._inbox.put((link, State(backlog_tokens=0)))  # nothing to heed, but a reason to look

    def lost(self, link: Link, reason: str) -> None:
        """See `links.Receiver`."""
        log.info("decode worker %s left: %s", link.peer, reason)
        self._heartbeat.leave(link)
        self._transfers.stop_placing(link)
        self._inbox.put((link, None))

    def close(self) -> None:
        """End the thread after the current step, and all links."""
        self._closing()
        self._heartbeat.close()
        if self._writer is not None:
            self._writer.close()

    def _run(self) -> None:
        try:
            while self._is_open:
                self._turn()
        except Exception:
            log.exception("the thread of the engine ends")
        finally:
            self._leave()

    def _turn(self) -> None:
        """Messages come first: what peers took during the last step is no lease that expired.

        Where a step could compute nothing and no block came free, peers hold them all: the next turn waits for a word of theirs.
        """
        self._read_inbox()
        self._turn_s = time.monotonic()
        self._tend(self._turn_s)
        num_free = self.engine.pool.num_free
        is_moving = not self.engine.has_work or self._step()
        self._transfers.publish()
        self._waits_for_blocks = not is_moving and self.engine.pool.num_free <= num_free

    def _leave(self) -> None:
        for link in list(self._links):
            self._forget_link(link)
            link.close()
            link.join()

    def _read_inbox(self) -> None:
        """Take what waits; without work that can be done, wait a little for it."""
        timeout = 0.0 if self.engine.has_work and not self._waits_for_blocks else STATE_INTERVAL_S
        while True:
            try:
                heard = self._inbox.get(block=timeout > 0, timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.0
            if heard is None:
                self._is_open = False
                return
            self._heed_or_leave(*heard)

    def _heed_or_leave(self, link: Link, message: Message | None) -> None:
        """A peer whose message cannot be handled does not know what holds between us any more: it may dial again."""
        try:
            self._heed(link, message)
        except Exception:
            log.exception("a message from decode worker %s could not be handled", link.peer)
            self._transfers.num_faults += 1
            link.close()

    def _heed(self, link: Link, message: Message | None) -> None:
        match message:
            case None:
                self._forget_link(link)
            case Hello():
                self._greet(link, message)
            case Refusal(reason=reason):
                log.error("decode worker %s: %s", link.peer, reason)
            case Fetch() if link in self._links:
                self._transfers.begin(self._links[link], message)
            case Cancel():
                self._transfers.cancel(link, message)
            case Taken():
                self._transfers.taken(link, message)
            case _:
                pass

    def _greet(self, link: Link, hello: Hello) -> None:
        layout, codec = self._cache.layout, self._config.wire_codec
        try:
            theirs = layout_from(hello.layout)
            difference = why_not(layout, theirs, codec, hello.codec)
            if difference is not None:
                raise WireError(f"prefill and decode worker differ in {difference}")
        except WireError as error:
            log.error("decode worker %s refused: %s", link.peer, error.message)
            link.send(Refusal(reason=error.message))
            link.close()
            return
        target, why_not_placed = None, NO_WAY
        if self._writer is not None:
            target, why_not_placed = self._writer.try_open(link, hello, theirs)
        pool = self._pool if hello.by_reference and target is None else None
        sender = Sender(self._config, layout, theirs)
        reader = self._links[link] = Reader(link, sender, pool is not None, Window(time.monotonic()), target)
        if (table := reader.sender.table) is not None:
            link.send(Table(payload=table))
        answer = Hello(
            role="prefill",
            layout=described(layout),
            codec=codec,
            by_reference=reader.by_reference,
            num_blocks=self._cache.num_blocks,
            places=target is not None,
            places_not="" if hello.memory is None else why_not_placed,
            payload=canary(self._cache, reader.sender.codec),
        )
        link.send(answer, file=None if pool is None else pool.file)
        link.send(self._sign_of_life(link))

    def _step(self) -> bool:
        """One step; its faults end the jobs that were running, never the worker, unless nothing works any more.

        False if everybody waits for blocks.
        """
        try:
            outputs = self.engine.step()
            self._num_faults = 0
        except Exception as error:
            log.exception("a step failed; its transfers end")
            self._shrink_chunks(error)
            outputs = self.engine.fail(f"internal error: {type(error).__name__}")
            self._num_faults += 1
            self._is_open = self._num_faults < MAX_FAULTS_IN_A_ROW
        self._transfers.end_starved(outputs)
        return bool(outputs or self.engine.scheduler.running)

    def _shrink_chunks(self, error: Exception) -> None:
        """Out of memory: smaller steps need less of it (row P6)."""
        scheduler = self.engine.scheduler
        is_memory = isinstance(error, MemoryError) or "out of memory" in str(error).lower()
        if is_memory and scheduler.max_num_batched_tokens > LEAST_CHUNK_TOKENS:
            scheduler.max_num_batched_tokens = max(LEAST_CHUNK_TOKENS, scheduler.max_num_batched_tokens // 2)
            log.warning("prefill chunks are %d tokens from now on", scheduler.max_num_batched_tokens)

    def _forget_link(self, link: Link) -> None:
        reader = self._links.pop(link, None)
        self._transfers.leave(link)
        if reader is not None and reader.target is not None and self._writer is not None:
            self._writer.leave(reader.target)

    def _tend(self, now: float) -> None:
        """How fast links are, leases that expired, and what the heartbeat says."""
        if now >= self._next_state_s:
            self._next_state_s = now + STATE_INTERVAL_S
            for link, reader in self._links.items():
                reader.window.look(link.traffic, now)
                self._refresh(link, reader)
        self._transfers.expire(now)
        self._state = self._current_state()

    def _refresh(self, link: Link, reader: Reader) -> None:
        """A new table where the traffic is another one than the table was made for; when there is nothing else to do (row P5)."""
        if self.engine.has_work:
            return
        try:
            if reader.sender.refresh(lambda table: link.send(Table(payload=table))):
                log.info("KV rows for decode worker %s have a new table", link.peer)
        except Exception:
            log.exception("no new table for decode worker %s: the one before stays", link.peer)
            self._transfers.num_faults += 1

    def _sign_of_life(self, link: Link) -> State:
        """From any thread."""
        state = replace(self._state, step_s=time.monotonic() - self._turn_s)
        reader = self._links.get(link)
        return state if reader is None else replace(state, num_fallbacks=reader.sender.num_fallbacks)

    def _current_state(self) -> State:
        requests = self._transfers.requests
        pool = self.engine.pool
        return State(
            backlog_tokens=sum(request.num_tokens - request.num_computed_tokens for request in requests),
            num_requests=len(requests),
            queue_s=max(map(queued_s, requests), default=0.0),
            kv_usage=1 - pool.num_free / pool.num_blocks,
            num_expired=self._transfers.num_expired,
            num_faults=self._transfers.num_faults,
        )

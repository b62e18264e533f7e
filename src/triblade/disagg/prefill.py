"""A prefill worker: an engine that computes prompts for others and sends their rows. Knows links, no transport and no HTTP.

Life of a job: Fetch -> a request over all tokens but the last, which samples none -> after every step its finished blocks go out
as Rows, while the next chunk is computed -> the last ones and End -> its blocks are released. Rows by value are copies, so they
owe nobody anything; rows by reference are leased: their blocks are retained until the reader has `Taken` them, or the lease
expires. Rows that are placed (`disagg.placed_rows`) are leased to the own writer, and the End waits for it, also after a Cancel.
What a peer does not take is not encoded either, and jobs take turns, the one that waited longest first. A job that makes no
progress for as long as a lease is given up, on a link that moves no byte; a slow link gets smaller messages instead.

One thread owns the engine; links only put what they hear into its inbox. Invariant: every Fetch ends in exactly one End, unless
it was cancelled or its link is gone, and then nothing of it is left.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from dataclasses import replace

from triblade.config import TransferConfig
from triblade.disagg import shared_rows
from triblade.disagg.codecs import Sender
from triblade.disagg.cuda_ipc import RowMemory
from triblade.disagg.frames import Message
from triblade.disagg.identity import canary, described, layout_from, why_not
from triblade.disagg.links import Link
from triblade.disagg.pace import Window
from triblade.disagg.placed_rows import RowWriter, Write
from triblade.disagg.prefill_jobs import Job, Lease, Reader
from triblade.disagg.shared_rows import SharedPool
from triblade.disagg.wire import Cancel, End, Fetch, Hello, Refusal, Rows, State, Table, Taken
from triblade.engine.engine import Engine
from triblade.engine.local import end_thread
from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.engine.request import Request
from triblade.errors import TribladeError, WireError
from triblade.kv.wire import WireSpan
from triblade.sampling_params import SamplingParams

log = logging.getLogger(__name__)

ROWS_TOKENS = 64  # of one message: a decode worker stores it between two steps
STATE_INTERVAL_S = 0.25
GRACE_S = 1.0  # between the end of a lease as the reader knows it and the reuse of its blocks
LEAST_CHUNK_TOKENS = 16
MAX_FAULTS_IN_A_ROW = 3
NO_WAY = "the prefill worker has no way to"
COMPUTE_ONLY = SamplingParams(max_tokens=0, temperature=0.0)

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
        self._lease_s = config.lease_s
        self._inbox: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()
        self._links: dict[Link, Reader] = {}  # greeted ones
        self._jobs: dict[tuple[Link, int, int], Job] = {}
        self._state = State(backlog_tokens=0)
        self._num_expired = self._num_faults = 0
        self._next_state_s = 0.0
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="triblade-prefill", daemon=True)
        self._thread.start()
        self._closing = weakref.finalize(self, end_thread, self._inbox, self._thread)

    @property
    def num_jobs(self) -> int:
        """Transfers that are not over, leases included."""
        return len(self._jobs)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def accept(self, link: Link) -> None:
        """Serve a new link."""
        link.start(self)

    def received(self, link: Link, message: Message) -> None:
        """See `links.Receiver`."""
        if isinstance(message, Cancel):
            self._stop_placing(link, message.transfer)
        self._inbox.put((link, message))

    def writable(self, link: Link) -> None:
        """See `links.Receiver`."""
        self._inbox.put((link, State(backlog_tokens=0)))  # nothing to heed, but a reason to look

    def lost(self, link: Link, reason: str) -> None:
        """See `links.Receiver`."""
        log.info("decode worker %s left: %s", link.peer, reason)
        self._stop_placing(link)
        self._inbox.put((link, None))

    def close(self) -> None:
        """End the thread after the current step, and all links."""
        self._closing()
        if self._writer is not None:
            self._writer.close()

    def _stop_placing(self, link: Link, transfer: int | None = None) -> None:
        """At once, not after the step: of one transfer, or of a link that is lost."""
        for job in list(self._jobs.values()):
            if job.ticket is not None and job.link is link and transfer in (None, job.fetch.transfer):
                job.ticket.is_wanted = False

    def _run(self) -> None:
        while self._is_open:
            self._read_inbox()
            if self.engine.has_work:
                self._step()
            self._publish()
            self._tend(time.monotonic())
        for link in list(self._links):
            self._forget_link(link)
            link.close()
            link.join()

    def _read_inbox(self) -> None:
        """Take what waits; without work, wait a little for it."""
        timeout = 0.0 if self.engine.has_work else STATE_INTERVAL_S
        while True:
            try:
                heard = self._inbox.get(block=timeout > 0, timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.0
            if heard is None:
                self._is_open = False
                return
            self._heed(*heard)

    def _heed(self, link: Link, message: Message | None) -> None:
        match message:
            case None:
                self._forget_link(link)
            case Hello():
                self._greet(link, message)
            case Refusal(reason=reason):
                log.error("decode worker %s: %s", link.peer, reason)
            case Fetch() if link in self._links:
                self._begin(link, message)
            case Cancel(transfer=transfer, attempt=attempt):
                self._forget(self._jobs.get((link, transfer, attempt)))
            case Taken(transfer=transfer, attempt=attempt, stop=stop):
                self._taken(self._jobs.get((link, transfer, attempt)), stop)
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
        reader = self._links[link] = Reader(
            Sender(self._config, layout, theirs), pool is not None, Window(time.monotonic()), target
        )
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
        link.send(self._state)

    def _begin(self, link: Link, fetch: Fetch) -> None:
        try:
            tokens = fetch.token_ids[:-1]
            if not 0 <= fetch.first_token < len(tokens) or fetch.first_token % self.engine.scheduler.block_size:
                raise WireError(f"no rows to compute from token {fetch.first_token} of {len(tokens)}")
            label = f"transfer-{fetch.transfer}"
            target, block_size = self._links[link].target, self.engine.scheduler.block_size
            ticket = None if target is None else target.ticket(fetch, len(tokens), block_size)
            (request,) = self.engine.prepare(tokens, COMPUTE_ONLY, request_id=label, priority=fetch.priority)
        except TribladeError as error:
            link.send(End(transfer=fetch.transfer, attempt=fetch.attempt, error=error.message))
            return
        wire = self._links[link].sender.request()
        job = Job(link, fetch, request, len(tokens), fetch.first_token, time.monotonic(), wire, ticket)
        if job.key in self._jobs:
            return  # twice
        request.keeps_blocks = True
        self._jobs[job.key] = job
        self.engine.add([request])

    def _step(self) -> None:
        """One step; its faults end the jobs that were running, never the worker, unless nothing works any more."""
        try:
            outputs = self.engine.step()
            self._num_faults = 0
        except Exception as error:
            log.exception("a step failed; its transfers end")
            self._shrink_chunks(error)
            outputs = self.engine.fail(f"internal error: {type(error).__name__}")
            self._num_faults += 1
            self._is_open = self._num_faults < MAX_FAULTS_IN_A_ROW
        self._note_ends(outputs)

    def _note_ends(self, outputs: list[tuple[Request, RequestOutput]]) -> None:
        """End the jobs whose requests ended before everything was computed."""
        ended = {request: output for request, output in outputs if output.finished}
        for job in [job for job in self._jobs.values() if job.request in ended]:
            output = ended[job.request]
            if output.finish_reason is not FinishReason.LENGTH or job.request.num_computed_tokens < job.stop:
                self._give_up(job, output.error or "no room for the prompt's KV rows")

    def _shrink_chunks(self, error: Exception) -> None:
        """Out of memory: smaller steps need less of it (row P6)."""
        scheduler = self.engine.scheduler
        is_memory = isinstance(error, MemoryError) or "out of memory" in str(error).lower()
        if is_memory and scheduler.max_num_batched_tokens > LEAST_CHUNK_TOKENS:
            scheduler.max_num_batched_tokens = max(LEAST_CHUNK_TOKENS, scheduler.max_num_batched_tokens // 2)
            log.warning("prefill chunks are %d tokens from now on", scheduler.max_num_batched_tokens)

    def _publish(self) -> None:
        """Send what is finished and wanted by now, one message of each job at a time."""
        waiting = sorted((job for job in self._jobs.values() if not job.has_ended), key=lambda job: job.progress_s)
        while waiting:
            waiting = [job for job in waiting if self._publish_some(job)]

    def _publish_some(self, job: Job) -> bool:
        """The next rows, behind the last ones the End; False if there are none, or the link has enough."""
        block_size = self.engine.scheduler.block_size
        done = min(job.request.num_computed_tokens, job.stop)
        if done < job.stop:  # a drafter that is behind will still write to rows; behind the last step it does not
            filled = self._num_filled(job.request)
            done = (done if filled is None else min(done, filled)) // block_size * block_size
        if job.sent >= done or job.link.unsent_bytes >= self._links[job.link].window.limit_bytes:
            return False
        most = done - job.sent
        self._send(job, most if job.ticket is not None else min(self._message_tokens(job.link), most))
        if job.sent == job.stop:
            self._end(job, None)
        return not job.has_ended

    def _message_tokens(self, link: Link) -> int:
        """Tokens of one message: fewer on a slow link, so that others get their turn there."""
        reader, block_size = self._links[link], self.engine.scheduler.block_size
        window_blocks = reader.window.limit_bytes // self._cache.layout.row_bytes
        most = ROWS_TOKENS // block_size if reader.by_reference else min(ROWS_TOKENS // block_size, window_blocks)
        return max(1, most) * block_size

    def _send(self, job: Job, num_tokens: int) -> None:
        """The next rows, as a copy, as a reference, or to where they belong."""
        block_size = self.engine.scheduler.block_size
        first, now = job.sent, time.monotonic()
        blocks = job.request.block_table[first // block_size : -(-(first + num_tokens) // block_size)].tolist()
        span = WireSpan(first, num_tokens, job.stop + 1)
        by_reference, is_placed = self._links[job.link].by_reference, job.ticket is not None
        lease = Lease(first + num_tokens, blocks, now + self._lease_s)
        if by_reference or is_placed:
            self.engine.pool.retain(blocks)
            job.leases.append(lease)
        payload = b"" if by_reference or is_placed else job.wire.encode(self._cache, blocks, span)
        rows = Rows(
            transfer=job.fetch.transfer,
            attempt=job.fetch.attempt,
            first_token=first,
            num_tokens=num_tokens,
            num_prompt_tokens=span.num_prompt_tokens,
            num_draft_tokens=max(0, min((self._num_filled(job.request) or 0) - first, num_tokens)),
            blocks=tuple(blocks) if by_reference else (),
            checksum=shared_rows.checksum(self._cache.pool, blocks) if by_reference else 0,
            expires_s=lease.expires_s if by_reference else 0.0,
            queue_s=_queued_s(job.request),
            errors=job.wire.errors,
            is_placed=is_placed,
            payload=payload,
        )
        if job.ticket is not None and self._writer is not None:
            self._writer.put(Write(job.link, job.ticket, rows, blocks, self._writer.mark()))
        else:
            job.link.send(rows)
        job.sent, job.progress_s = lease.stop, now

    def _num_filled(self, request: Request) -> int | None:
        speculator = self.engine.speculator
        return None if speculator is None else speculator.num_filled(request)

    def _taken(self, job: Job | None, stop: int) -> None:
        if job is None:
            return
        job.progress_s = time.monotonic()
        while job.leases and job.leases[0].stop <= stop:
            self.engine.pool.release(job.leases.popleft().blocks)
        if job.has_ended and not job.leases:
            del self._jobs[job.key]
            if job.ticket is not None and job.ticket.end is not None:
                job.link.send(job.ticket.end)

    def _end(self, job: Job, error: str | None) -> None:
        """Tell the peer; the request's own blocks are not needed any more."""
        end = End(transfer=job.fetch.transfer, attempt=job.fetch.attempt, error=error)
        if job.ticket is not None and job.leases:
            job.ticket.end = end
        else:
            job.link.send(end)
        job.has_ended = True
        self.engine.let_go(job.request)
        if not job.leases:
            del self._jobs[job.key]

    def _give_up(self, job: Job, reason: str) -> None:
        log.warning("%s of %s: %s", job.request.request_id, job.link.peer, reason)
        if not job.has_ended:
            self._end(job, reason)
        self._forget(job)

    def _forget(self, job: Job | None) -> None:
        """Leave nothing of a job; its peer knows, or is gone. What is being placed is waited for."""
        if job is not None and job.ticket is not None:
            job.ticket.is_wanted = False
            if not job.has_ended:
                self._end(job, "cancelled")
            return
        if job is None or self._jobs.pop(job.key, None) is None:
            return
        if not job.has_ended:
            self.engine.let_go(job.request)
        for lease in job.leases:
            self.engine.pool.release(lease.blocks)
        job.leases.clear()

    def _forget_link(self, link: Link) -> None:
        reader = self._links.pop(link, None)
        for job in [job for job in self._jobs.values() if job.link is link]:
            self._forget(job)
        if reader is not None and reader.target is not None and self._writer is not None:
            self._writer.leave(reader.target)

    def _tend(self, now: float) -> None:
        """Leases that expired, and a sign of life for everybody."""
        for job in list(self._jobs.values()):
            if job.ticket is not None:
                continue  # its writer takes them
            moved_s = max(job.progress_s, self._links[job.link].window.moved_s)
            is_stuck = job.request.is_finished and now > moved_s + self._lease_s + GRACE_S
            if is_stuck or (job.leases and now > job.leases[0].expires_s + GRACE_S):
                self._num_expired += 1
                self._give_up(job, f"lease expired: rows were not taken for {self._lease_s:g} s")
        if now >= self._next_state_s:
            self._next_state_s = now + STATE_INTERVAL_S
            self._state = self._current_state()
            for link, reader in self._links.items():
                reader.window.look(link.traffic, now)
                link.send(replace(self._state, num_fallbacks=reader.sender.num_fallbacks))
                self._refresh(link, reader)

    def _refresh(self, link: Link, reader: Reader) -> None:
        """A new table where the traffic is another one than the table was made for; when there is nothing else to do (row P5)."""
        if not self.engine.has_work and reader.sender.refresh(lambda table: link.send(Table(payload=table))):
            log.info("KV rows for decode worker %s have a new table", link.peer)

    def _current_state(self) -> State:
        requests = [job.request for job in self._jobs.values() if not job.request.is_finished]
        pool = self.engine.pool
        return State(
            backlog_tokens=sum(request.num_tokens - request.num_computed_tokens for request in requests),
            num_requests=len(requests),
            queue_s=max(map(_queued_s, requests), default=0.0),
            kv_usage=1 - pool.num_free / pool.num_blocks,
            num_expired=self._num_expired,
        )


def _queued_s(request: Request) -> float:
    """Seconds from its arrival to its first step; 0 before that."""
    return 0.0 if request.first_scheduled_s is None else request.first_scheduled_s - request.arrival_s

"""The transfers of a prefill worker: prompts that it computes for readers, and their rows on the way out. Knows no greeting and no
thread; whoever owns the engine calls everything here.

Life of a job: `begin` -> a request over all tokens but the last, which samples none -> `publish` after every step: its finished
blocks go out as Rows, while the next chunk is computed -> the last ones and End -> its blocks are released. Rows by value are
copies, so they owe nobody anything; rows by reference are leased: their blocks are retained until the reader has `Taken` them, or
the lease expires. Rows that are placed (`disagg.placed_rows`) are leased to the own writer, and the End waits for it, also after a
Cancel. What a peer does not take is not encoded either, and jobs take turns, the one that waited longest first. A job that makes no
progress for as long as a lease is given up, on a link that moves no byte; a slow link gets smaller messages instead.

Memory: all rows of a prompt stay until its last chunk has read them, then go as fast as they are taken. Until there is room for
the next prompt it waits. One that the whole pool does not hold is computed as far as it does, and its End says so.

Invariant: every Fetch ends in exactly one End, unless it was cancelled or its link is gone, and then nothing of it is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from triblade.config import TransferConfig
from triblade.disagg import shared_rows
from triblade.disagg.links import Link
from triblade.disagg.placed_rows import RowWriter, Write
from triblade.disagg.prefill_jobs import Job, JobKey, Lease, Reader
from triblade.disagg.wire import Cancel, End, Fetch, Rows, Taken
from triblade.engine.engine import Engine
from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.engine.request import Request
from triblade.errors import TribladeError, WireError
from triblade.kv.wire import WireSpan
from triblade.sampling_params import SamplingParams

log = logging.getLogger(__name__)

ROWS_TOKENS = 64  # of one message: a decode worker stores it between two steps
GRACE_S = 1.0  # between the end of a lease as the reader knows it and the reuse of its blocks
COMPUTE_ONLY = SamplingParams(max_tokens=0, temperature=0.0)


class Transfers:
    """The jobs of one engine.

    Args:
        engine: computes; its thread is the caller's.
        config: leases.
        writer: places rows, where some reader has a target.

    Attributes:
        num_expired: jobs whose rows were not taken in time.
        num_faults: jobs that an error of this worker ended, and messages that it could not handle.
    """

    def __init__(self, engine: Engine, config: TransferConfig, writer: RowWriter | None) -> None:
        self.num_expired = self.num_faults = 0
        self._engine, self._block_size = engine, engine.scheduler.block_size
        self._cache = engine.runner.executor.cache
        self._lease_s, self._writer = config.lease_s, writer
        self._jobs: dict[JobKey, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def requests(self) -> list[Request]:
        """Those that are not computed yet."""
        return [job.request for job in self._jobs.values() if not job.request.is_finished]

    def begin(self, reader: Reader, fetch: Fetch) -> None:
        """Compute what is asked for, or say why not."""
        try:
            job = self._made(reader, fetch)
        except Exception as error:
            reason = self._reason(reader.link, error)
            reader.link.send(End(transfer=fetch.transfer, attempt=fetch.attempt, error=reason))
            return
        if job.key in self._jobs:
            return  # twice
        self._jobs[job.key] = job
        self._engine.add([job.request])

    def end_starved(self, outputs: Sequence[tuple[Request, RequestOutput]]) -> None:
        """End the jobs whose requests ended in these outputs before everything was computed."""
        ended = {request: output for request, output in outputs if output.finished}
        for job in [job for job in self._jobs.values() if job.request in ended]:
            output = ended[job.request]
            if output.finish_reason is not FinishReason.LENGTH or job.request.num_computed_tokens < job.stop:
                self._give_up(job, output.error or "no room for the prompt's KV rows")

    def publish(self) -> None:
        """Send what is finished and wanted by now, one message of each job at a time."""
        waiting = sorted((job for job in self._jobs.values() if not job.has_ended), key=lambda job: job.progress_s)
        while waiting:
            waiting = [job for job in waiting if self._publish_or_end(job)]

    def taken(self, link: Link, message: Taken) -> None:
        """The reader, or the writer, is done with these rows."""
        job = self._jobs.get((link, message.transfer, message.attempt))
        if job is None:
            return
        job.progress_s = time.monotonic()
        while job.leases and job.leases[0].stop <= message.stop:
            self._engine.pool.release(job.leases.popleft().blocks)
        if job.has_ended and not job.leases:
            del self._jobs[job.key]
            if job.ticket is not None and job.ticket.end is not None:
                job.link.send(job.ticket.end)

    def cancel(self, link: Link, message: Cancel) -> None:
        """The reader does not want the rest."""
        if (job := self._jobs.get((link, message.transfer, message.attempt))) is not None:
            self._forget(job)

    def stop_placing(self, link: Link, transfer: int | None = None) -> None:
        """At once, not after the step: of one transfer, or of a link that is lost. From any thread."""
        for job in list(self._jobs.values()):
            if job.ticket is not None and job.link is link and transfer in (None, job.fetch.transfer):
                job.ticket.is_wanted = False

    def leave(self, link: Link) -> None:
        """Nobody reads there any more."""
        for job in [job for job in self._jobs.values() if job.link is link]:
            self._forget(job)

    def expire(self, now: float) -> None:
        """Give up what nobody takes."""
        for job in list(self._jobs.values()):
            if job.ticket is not None:
                continue  # its writer takes them
            moved_s = max(job.progress_s, job.reader.window.moved_s)
            is_stuck = job.request.is_finished and now > moved_s + self._lease_s + GRACE_S
            if is_stuck or (job.leases and now > job.leases[0].expires_s + GRACE_S):
                self.num_expired += 1
                self._give_up(job, f"lease expired: rows were not taken for {self._lease_s:g} s")

    def _made(self, reader: Reader, fetch: Fetch) -> Job:
        """Raises:
        TribladeError: the prompt cannot be computed here, or its rows do not go where they are to be placed.
        """
        tokens, first = fetch.token_ids[:-1], fetch.first_token
        stop = min(len(tokens), self._room_tokens)
        if not 0 <= first < stop or first % self._block_size:
            raise WireError(
                f"no rows to compute from token {first} of {len(tokens)}, with room for {self._room_tokens}"
            )
        ticket = None if reader.target is None else reader.target.ticket(fetch, len(tokens), self._block_size)
        label = f"transfer-{fetch.transfer}"
        (request,) = self._engine.prepare(tokens[:stop], COMPUTE_ONLY, request_id=label, priority=fetch.priority)
        request.keeps_blocks = True
        wire = reader.sender.request()
        return Job(reader, fetch, request, len(tokens), stop, first, time.monotonic(), wire, ticket)

    @property
    def _room_tokens(self) -> int:
        """Whole blocks of one prompt that can be computed here."""
        limits = self._engine.admission
        return min(limits.context_length, limits.kv_tokens) // self._block_size * self._block_size

    def _publish_or_end(self, job: Job) -> bool:
        """`_publish_some`; whatever it raises costs this job alone, which its peer computes itself."""
        try:
            return self._publish_some(job)
        except Exception as error:
            self._give_up(job, self._reason(job.link, error))
            return False

    def _reason(self, link: Link, error: Exception) -> str:
        """What the peer is told of an error; one that nobody expected is logged and counted."""
        if isinstance(error, TribladeError):
            return error.message
        log.error("a transfer to %s failed", link.peer, exc_info=error)
        self.num_faults += 1
        return f"internal error: {type(error).__name__}"

    def _publish_some(self, job: Job) -> bool:
        """The next rows, behind the last ones the End; False if there are none, or the link has enough."""
        done = min(job.request.num_computed_tokens, job.stop)
        if done < job.stop:  # a drafter that is behind will still write to rows; behind the last step it does not
            filled = self._num_filled(job.request)
            done = (done if filled is None else min(done, filled)) // self._block_size * self._block_size
        if job.sent >= done or job.link.unsent_bytes >= job.reader.window.limit_bytes:
            return False
        most = done - job.sent
        self._send(job, most if job.ticket is not None else min(self._message_tokens(job.reader), most))
        if job.sent == job.stop:
            self._end(job, job.shortage)
        return not job.has_ended

    def _message_tokens(self, reader: Reader) -> int:
        """Tokens of one message: fewer on a slow link, so that others get their turn there."""
        most = ROWS_TOKENS // self._block_size
        if not reader.by_reference:
            most = min(most, reader.window.limit_bytes // self._cache.layout.row_bytes)
        return max(1, most) * self._block_size

    def _send(self, job: Job, num_tokens: int) -> None:
        """The next rows, as a copy, as a reference, or to where they belong."""
        first, now = job.sent, time.monotonic()
        blocks = job.request.block_table[first // self._block_size : -(-(first + num_tokens) // self._block_size)]
        lease = Lease(first + num_tokens, blocks.tolist(), now + self._lease_s)
        rows = self._rows(job, num_tokens, lease)
        if job.ticket is not None and self._writer is not None:
            write = Write(job.link, job.ticket, rows, lease.blocks, self._writer.mark())
            self._retain(job, lease)
            self._writer.put(write)
        else:
            if job.reader.by_reference:
                self._retain(job, lease)
            job.link.send(rows)
        job.sent, job.progress_s = lease.stop, now

    def _rows(self, job: Job, num_tokens: int, lease: Lease) -> Rows:
        """What is said of the next rows, and by value the rows."""
        first, blocks = job.sent, lease.blocks
        by_reference, is_placed = job.reader.by_reference, job.ticket is not None
        span = WireSpan(first, num_tokens, job.num_prompt_tokens + 1)
        payload = b"" if by_reference or is_placed else job.wire.encode(self._cache, blocks, span)
        return Rows(
            transfer=job.fetch.transfer,
            attempt=job.fetch.attempt,
            first_token=first,
            num_tokens=num_tokens,
            num_prompt_tokens=span.num_prompt_tokens,
            num_draft_tokens=max(0, min((self._num_filled(job.request) or 0) - first, num_tokens)),
            blocks=tuple(blocks) if by_reference else (),
            checksum=shared_rows.checksum(self._cache.pool, blocks) if by_reference else 0,
            expires_s=lease.expires_s if by_reference else 0.0,
            queue_s=queued_s(job.request),
            errors=job.wire.errors,
            is_placed=is_placed,
            payload=payload,
        )

    def _retain(self, job: Job, lease: Lease) -> None:
        self._engine.pool.retain(lease.blocks)
        job.leases.append(lease)

    def _num_filled(self, request: Request) -> int | None:
        speculator = self._engine.speculator
        return None if speculator is None else speculator.num_filled(request)

    def _end(self, job: Job, error: str | None) -> None:
        """Tell the peer; the request's own blocks are not needed any more."""
        end = End(transfer=job.fetch.transfer, attempt=job.fetch.attempt, error=error)
        if job.ticket is not None and job.leases:
            job.ticket.end = end
        else:
            job.link.send(end)
        job.has_ended = True
        self._engine.let_go(job.request)
        if not job.leases:
            del self._jobs[job.key]

    def _give_up(self, job: Job, reason: str) -> None:
        log.warning("%s of %s: %s", job.request.request_id, job.link.peer, reason)
        if not job.has_ended:
            self._end(job, reason)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """Leave nothing of a job; its peer knows, or is gone. What is being placed is waited for."""
        if job.ticket is not None:
            job.ticket.is_wanted = False
            if not job.has_ended:
                self._end(job, "cancelled")
            return
        if self._jobs.pop(job.key, None) is not None and not job.has_ended:
            self._engine.let_go(job.request)
        while job.leases:
            self._engine.pool.release(job.leases.popleft().blocks)


def queued_s(request: Request) -> float:
    """Seconds from its arrival to its first step; 0 before that."""
    return 0.0 if request.first_scheduled_s is None else request.first_scheduled_s - request.arrival_s

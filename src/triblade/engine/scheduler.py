"""What the next step computes: which requests, and how many tokens of each, under one budget of tokens.

Knows ids and counts only; it is tested on a fake runner in milliseconds. Invariants: a request's blocks cover the tokens it
computes; a block is published only after the step that computed it; the first request in order always makes progress.

Life of a request here:
  add -> WAITING -> admitted when blocks for all its tokens are free (minus its cached prefix) -> RUNNING, chunk by chunk, then
  one token a step -> finish. When a running request needs a block and none is free, the last in order is preempted: it loses its
  blocks and waits again; its published blocks stay cached while nobody takes them.

Where rows can come from elsewhere (`RemoteRows`), a request that has its blocks may be WAITING_FOR_KV until they are filled, and
then waits for a seat like any other, with a longer prefix. Reserved blocks are the first that are taken back, so they never stop
those who run.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from triblade.engine.block_pool import BlockPool, CachedBlock
from triblade.engine.request import Request, Status


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Compute tokens [start, start + num_tokens) of a request; the last num_draft_tokens of them are not verified yet."""

    request: Request
    start: int
    num_tokens: int
    num_draft_tokens: int
    samples: bool  # the step reaches the end of the known tokens, so that a new one can be sampled

    @classmethod
    def next(cls, request: Request, num_tokens: int) -> ScheduledRequest:
        """The next `num_tokens` of a request."""
        start = request.num_computed_tokens
        beyond = start + num_tokens - request.num_tokens
        return cls(request, start, num_tokens, max(0, beyond), beyond >= 0)

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute, drafts included."""
        request, stop = self.request, self.start + self.num_tokens
        known = request.token_ids[self.start : stop]
        return known + request.draft_token_ids[: self.num_draft_tokens] if self.num_draft_tokens else known


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step; false when there is nothing to compute."""

    scheduled: list[ScheduledRequest]
    preempted: list[Request]  # lost their blocks and wait again
    starved: list[Request]  # cannot get a block even with the pool to themselves; the engine ends them

    def __bool__(self) -> bool:
        return bool(self.scheduled)


class RemoteRows(Protocol):
    """A prefix cache elsewhere that computes what it does not have."""

    def wants(self, request: Request, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens of a request that has its blocks are better computed there."""
        ...

    def begin(self, request: Request) -> None:
        """Fill its blocks from `num_computed_tokens` on, all but the last token, then call `Scheduler.arrived`."""
        ...

    def drop(self, request: Request) -> None:
        """From now on its blocks are somebody else's."""
        ...


class Scheduler:
    """Chooses the work of each step.

    Args:
        pool: the blocks.
        block_size: tokens per block.
        max_num_seqs: most requests running.
        max_num_batched_tokens: most tokens in a step.
        enable_prefix_caching: look for, and publish, cached prefixes.
        num_lookahead_tokens: for so many tokens beyond a step, requests get blocks while plenty are free, so that an executor can
            begin the next step before the host knows this one.

    Attributes:
        remote: where rows can be had beside computing them; None, as at the beginning, computes everything here.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        num_lookahead_tokens: int = 0,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.num_lookahead_tokens = num_lookahead_tokens
        self.waiting: list[Request] = []  # in order
        self.running: list[Request] = []  # in order
        self.receiving: list[Request] = []  # in order; their rows are computed elsewhere
        self.remote: RemoteRows | None = None
        self.num_returning_blocks = 0  # dropped by those who received, and free as soon as nobody writes into them
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        bisect.insort(self.waiting, request, key=_order)

    def finish(self, request: Request) -> None:
        """Take a request out, in whatever state, and release its blocks if it does not keep them. Twice is harmless."""
        if request.is_finished:
            return
        if request.status is Status.WAITING_FOR_KV:
            self._stop_receiving(request)
        else:
            (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        if not request.keeps_blocks:
            self.release(request)
        request.status = Status.FINISHED

    def release(self, request: Request) -> None:
        """Give its blocks back."""
        self.pool.release(request.block_table)
        request.block_table, request.published = array("i"), []
        request.num_computed_tokens = 0
        request.propose([])

    def arrived(self, request: Request, num_tokens: int) -> None:
        """A request WAITING_FOR_KV has the KV of its first `num_tokens` tokens; the rest (the last one, at least) is computed."""
        self.receiving.remove(request)
        request.num_computed_tokens = num_tokens
        self._publish(request)
        request.status = Status.WAITING
        self.add(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step: running requests that decode, running ones that prefill, then waiting ones."""
        output = SchedulerOutput([], [], [])
        budget = self._schedule_running(output, self.max_num_batched_tokens)
        if not output.preempted:
            self._schedule_waiting(output, budget)
        if self.num_lookahead_tokens:
            self._look_ahead(output)
        return output

    def update(self, item: ScheduledRequest, num_accepted_tokens: int = 0) -> None:
        """After the step, its new tokens committed: advance the frontier, publish the blocks that became full, drop the draft.

        The KV of rejected drafts stays behind the frontier, where nobody reads it and the next step writes.
        """
        request = item.request
        if request.status is Status.RUNNING:
            request.num_computed_tokens += item.num_tokens - item.num_draft_tokens + num_accepted_tokens
            request.propose([])
            self._publish(request)

    def reserve(self, request: Request, num_draft_tokens: int) -> int:
        """Blocks for the KV of a draft, as far as they are free; returns how many drafted tokens they hold.

        A draft never preempts anybody.
        """
        wanted = self._blocks_for(request.num_tokens + num_draft_tokens) - len(request.block_table)
        if wanted <= 0:
            return num_draft_tokens
        request.block_table.extend(self.pool.allocate(min(wanted, self.pool.num_free)))
        return max(0, min(num_draft_tokens, len(request.block_table) * self.block_size - request.num_tokens))

    def owned_blocks(self) -> Iterator[int]:
        """Every block reference held by a request, for `BlockPool.check`."""
        for request in (*self.running, *self.receiving, *self.waiting):
            yield from request.block_table

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Decodes first, so that a long prompt never stalls a stream. Returns the budget that is left."""
        for request in sorted(self.running, key=attrgetter("is_prefilling")):
            if budget == 0:
                break
            if request.status is not Status.RUNNING:  # preempted by one before it
                continue
            num_tokens = min(request.num_pending_tokens, budget)
            if self._grow(request, num_tokens, output):
                output.scheduled.append(ScheduledRequest.next(request, num_tokens))
                budget -= num_tokens
        return budget

    def _grow(self, request: Request, num_tokens: int, output: SchedulerOutput) -> bool:
        """Give a running request the blocks for its next tokens, preempting later ones while none are free."""
        needed = self._blocks_for(request.num_computed_tokens + num_tokens) - len(request.block_table)
        while needed > self.pool.num_free:
            if needed <= self.pool.num_free + self.num_returning_blocks:
                return False
            if self._take_back():
                continue
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                output.starved.append(request)
                return False
            self._preempt(victim, output)
            if victim is request:
                return False
        if needed > 0:
            request.block_table.extend(self.pool.allocate(needed))
        return True

    def _look_ahead(self, output: SchedulerOutput) -> None:
        """Blocks for the tokens after this step, as long as every running request could still get one of its own."""
        for item in output.scheduled:
            table = item.request.block_table
            end = item.start + item.num_tokens + self.num_lookahead_tokens
            wanted = self._blocks_for(end) - len(table)
            if wanted > 0 and item.samples and self.pool.num_free - wanted >= len(self.running):
                table.extend(self.pool.allocate(wanted))

    def _preempt(self, victim: Request, output: SchedulerOutput) -> None:
        """Take a running request's blocks; it will be computed again, through the cache where that still has them."""
        self.running.remove(victim)
        self._send_back(victim)
        output.preempted.append(victim)
        output.scheduled[:] = [item for item in output.scheduled if item.request is not victim]

    def _take_back(self) -> bool:
        """Free the blocks of the last request in order that has some and does not run; False if there is none."""
        if self.remote is None:
            return False
        last = max((r for r in (*self.receiving, *self.waiting) if r.block_table), key=_order, default=None)
        if last is None:
            return False
        if last.status is Status.WAITING_FOR_KV:
            self._stop_receiving(last)
        else:
            self.waiting.remove(last)
        self._send_back(last)
        return True

    def _stop_receiving(self, request: Request) -> None:
        assert self.remote is not None
        self.receiving.remove(request)
        self.remote.drop(request)

    def _send_back(self, request: Request) -> None:
        """Among those who wait, without blocks."""
        self.release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit in order while budget, seats and blocks last; a choice whose leader still prefills lets others pass."""
        is_short = False
        for request in self.waiting[:]:
            if budget == 0 or len(self.running) >= self.max_num_seqs:
                break
            if self._waits_for_leader(request):
                continue
            if not request.block_table and (is_short or not self._take_blocks(request)):
                if self.remote is None:
                    break
                is_short = True  # only those go on that hold blocks: the first may be waiting for these
                continue
            if self.remote is not None and self._fetch(request):
                continue
            self._start(request)
            num_tokens = min(request.num_pending_tokens, budget)
            output.scheduled.append(ScheduledRequest.next(request, num_tokens))
            budget -= num_tokens

    def _waits_for_leader(self, request: Request) -> bool:
        leader = request.leader
        if not self.enable_prefix_caching or leader is None or leader.is_finished:
            return False
        return leader.num_computed_tokens < leader.num_prompt_tokens

    def _take_blocks(self, request: Request) -> bool:
        """Blocks for all tokens of a waiting request, its cached prefix shared; False when they are not free."""
        prefix = self._cached_prefix(request)
        needed = self._blocks_for(request.num_tokens) - len(prefix)
        if needed > self.pool.num_free - self.pool.count_free(prefix):
            return False
        request.block_table = array("i", self.pool.share(prefix) + self.pool.allocate(needed))
        request.published = prefix
        request.num_computed_tokens = len(prefix) * self.block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        return True

    def _fetch(self, request: Request) -> bool:
        """Leave a request's missing tokens to somebody else where that is better; once each time it got blocks."""
        assert self.remote is not None
        missing = request.num_tokens - 1 - request.num_computed_tokens
        if request.num_fetches > request.num_preemptions or not self.remote.wants(request, missing):
            return False
        request.num_fetches += 1
        self.waiting.remove(request)
        request.status = Status.WAITING_FOR_KV
        bisect.insort(self.receiving, request, key=_order)
        self.remote.begin(request)
        return True

    def _start(self, request: Request) -> None:
        self.waiting.remove(request)
        request.status = Status.RUNNING
        bisect.insort(self.running, request, key=_order)

    def _cached_prefix(self, request: Request) -> list[CachedBlock]:
        """Cached blocks of a request; the last token is always computed, for its logits."""
        if not self.enable_prefix_caching or not request.reads_prefix_cache:
            return []
        return self.pool.match(request.token_ids, self.block_size, (request.num_tokens - 1) // self.block_size)

    def _publish(self, request: Request) -> None:
        if not self.enable_prefix_caching:
            return
        for index in range(len(request.published), request.num_computed_tokens // self.block_size):
            tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
            parent = request.published[-1] if request.published else None
            request.published.append(self.pool.publish(request.block_table[index], tokens, parent))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _order(request: Request) -> tuple[int, int]:
    return request.order

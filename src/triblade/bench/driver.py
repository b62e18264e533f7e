"""Sends conversations to a target and notes when everything came.

    closed loop: `concurrency` users, each plays a conversation after the other; they may begin one by one (spawn rate)
    open loop:   conversations begin at their arrival times, whatever is still running

A turn is due when its conversation begins, or when the answer before it came (plus think time); all waiting after that counts, also
for the limit on requests in flight and for a driver that is too slow. Knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from triblade.bench.arrivals import arrival_times, fixed, poisson, ramp
from triblade.bench.dataset import Conversation
from triblade.bench.metrics import Record
from triblade.bench.target import Ask, Message, Target, TargetError
from triblade.config import BenchConfig

DEFAULT_CONCURRENCY = 8


@dataclass(eq=False)
class Driver:
    """One run. `records` has every request that ended, also after an interruption."""

    target: Target
    config: BenchConfig
    start_s: float = field(default_factory=time.perf_counter)
    records: list[Record] = field(default_factory=list)
    _left: int = 0

    async def run(self, conversations: Iterator[Conversation], num_requests: int) -> None:
        """Send up to `num_requests` requests and wait for their answers."""
        self.start_s = time.perf_counter()
        self._left = num_requests
        self._in_flight = asyncio.Semaphore(self.config.max_in_flight or num_requests)
        numbered = enumerate(conversations)
        async with asyncio.TaskGroup() as group:
            if self.config.is_open_loop:
                await self._open_loop(group, numbered, num_requests)
            else:
                for user in range(min(self.config.concurrency or DEFAULT_CONCURRENCY, num_requests)):
                    group.create_task(self._user(user, numbered))

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start_s

    async def _user(self, user: int, conversations: Iterator[tuple[int, Conversation]]) -> None:
        """A user of the closed loop: comes, and plays conversations until none is left."""
        if self.config.spawn_rate is not None:
            await asyncio.sleep(user / self.config.spawn_rate)
        for number, conversation in conversations:
            if not self._may_send():
                return
            await self._play(number, conversation, self.now_s)

    async def _open_loop(
        self, group: asyncio.TaskGroup, conversations: Iterator[tuple[int, Conversation]], num_requests: int
    ) -> None:
        times = self._arrivals(num_requests)
        for number, conversation in conversations:
            due_s = conversation.arrival_s
            due_s = next(times) if due_s is None or self.config.arrivals != "trace" else due_s / self.config.trace_speed
            await asyncio.sleep(max(0.0, due_s - self.now_s))
            if not self._may_send():
                break
            group.create_task(self._play(number, conversation, due_s))
            await asyncio.sleep(0)  # let it take its request before the next one is thought of

    def _arrivals(self, num_requests: int) -> Iterator[float]:
        start = self.config.request_rate or 1.0
        end = self.config.ramp_to_rate or start
        gap = fixed if self.config.arrivals == "fixed" else poisson(self.config.seed)
        return arrival_times(gap, ramp(start, end, num_requests))

    def _may_send(self) -> bool:
        is_late = self.config.duration_s is not None and self.now_s >= self.config.duration_s
        return self._left > 0 and not is_late

    async def _play(self, number: int, conversation: Conversation, due_s: float) -> None:
        """Send the turns of a conversation, each with everything said before it; a failed one ends it."""
        said: list[Message] = [{"role": "system", "content": conversation.system}] if conversation.system else []
        for turn, asked in enumerate(conversation.turns):
            if turn and self.config.think_time_s:
                await asyncio.sleep(self.config.think_time_s)
            if not self._may_send():
                return
            self._left -= 1
            said.append({"role": "user", "content": asked.text})
            record = Record(number, turn, due_s if turn == 0 else self.now_s)
            text = await self._ask(record, said, asked.max_tokens)
            if record.error is not None:
                return
            said.append({"role": "assistant", "content": text})

    async def _ask(self, record: Record, said: list[Message], max_tokens: int) -> str:
        """One request, noted whatever becomes of it; the text of its answer."""
        ask = Ask(
            messages=tuple(said),
            max_tokens=max_tokens,
            temperature=self.config.temperature,
            ignore_eos=self.config.ignore_eos,
        )
        parts: list[str] = []
        try:
            async with self._in_flight, asyncio.timeout(self.config.request_timeout_s):
                await self._listen(record, ask, parts)
        except TargetError as error:
            record.error = str(error)
        except TimeoutError:
            record.error = f"no answer within {self.config.request_timeout_s:g} s"
        record.end_s = record.piece_s[-1] if record.is_good else self.now_s
        self.records.append(record)
        return "".join(parts)

    async def _listen(self, record: Record, ask: Ask, parts: list[str]) -> None:
        has_usage = False
        async with aclosing(self.target.answer(ask)) as pieces:
            async for piece in pieces:
                if piece.text or piece.has_tokens:
                    record.piece_s.append(self.now_s)
                    parts.append(piece.text)
                if piece.usage is not None:
                    has_usage = True
                    record.count(piece.usage)
                record.finish_reason = piece.finish_reason or record.finish_reason
        if not has_usage:
            record.output_tokens = len(record.piece_s)

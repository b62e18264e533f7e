"""Calls that nothing can stop, made by a thread of their own, so that whoever waits for them can stop waiting.

Knows no grammar. Threads that nobody waits for any more run on at the lowest priority until their call returns; how many there are
is known, so that those who make them can be refused.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

SLOW = "the grammar takes too long to follow; simplify it"
LOWEST_PRIORITY = 19
MOST_WAITS = 4
SHORTEST_WAIT_S = 0.001


class Worker:
    """A thread that makes one call after the other; it ends with this object."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name="triblade-grammar", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def run(self, call: Callable[[], None], limit_s: float) -> bool:
        """Have a call made; False if it did not return in time, and then this was the last one.

        What counts is the processor time of the thread where that is known, up to `MOST_WAITS` limits of time that passes: a busy
        machine makes no call slow.
        """
        done = threading.Event()
        start_s, until_s = self._spent_s(), time.monotonic() + MOST_WAITS * limit_s
        self._calls.put((call, done))
        left_s = limit_s
        while left_s > 0:
            if done.wait(max(left_s, SHORTEST_WAIT_S)):
                return True
            left_s = min(limit_s - (self._spent_s() - start_s), until_s - time.monotonic())
        self._calls.put(None)
        if sys.platform == "linux" and self._thread.native_id is not None:
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id, LOWEST_PRIORITY)  # Linux: of this thread alone
        return False

    def _spent_s(self) -> float:
        """Processor time of the thread; elsewhere than on Linux, and of a thread that is gone, time that passes."""
        if sys.platform == "linux" and self._thread.ident is not None and self.is_alive:
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        return time.monotonic()


class Abandoned:
    """Workers whose call goes on though nobody waits for it."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def put(self, worker: Worker) -> None:
        """Put one down."""
        self._workers = [*self._alive(), worker]

    def __len__(self) -> int:
        return len(self._alive())

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_alive]


def _work(calls: SimpleQueue[tuple[Callable[[], None], threading.Event] | None]) -> None:
    while (item := calls.get()) is not None:
        call, done = item
        call()
        done.set()
        del call, item

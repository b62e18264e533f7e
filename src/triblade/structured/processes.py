"""The processes that compile grammars: a few at a time, each with a time limit, and room for quick forms beside slow ones.

Knows no grammar: lines in, lines out; what a process is stands in `structured.child`. Invariants: a form that takes longer than
`SLICE_S` counts as slow, and slow ones never hold all processes; whoever waits, waits a limited time.
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO

from triblade.errors import QueueFullError

START_LIMIT_S = 120.0  # a process imports for seconds
SLICE_S = 0.5
WAIT_LIMIT_S = 30.0
MAX_PROCESSES = 2  # the second is started when the first is busy


class CompileProcess:
    """One process; ends with this object, at the latest.

    Args:
        vocabulary: the line that it is told first.
        memory_bytes: that it may take beyond what it has when it starts.
    """

    def __init__(self, vocabulary: str, memory_bytes: int) -> None:
        command = [sys.executable, "-m", "triblade.structured.child", str(memory_bytes)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self.end = weakref.finalize(self, _end, self._process)
        self.send(vocabulary)
        self.receive(START_LIMIT_S)

    def send(self, line: str) -> None:
        """Ask; BrokenPipeError if the process is gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, limit_s: float) -> bytes:
        """Its answer.

        Raises:
            TimeoutError: none within `limit_s`; it may come later.
            EOFError: the process is gone.
        """
        assert self._process.stdout is not None
        return _read_line(self._process.stdout, time.monotonic() + limit_s)


class CompilePool:
    """Processes that answer lines. Safe to use from several threads.

    Args:
        start: makes a process.
        limit_s: seconds for one line.
    """

    def __init__(self, start: Callable[[], CompileProcess], limit_s: float) -> None:
        self._start = start
        self._limit_s = limit_s
        self._idle: list[CompileProcess] = []
        self._num_busy = 0
        self._changed = threading.Condition()
        self._slow_seats = threading.Semaphore(MAX_PROCESSES - 1)

    def ask(self, line: str) -> bytes:
        """The answer to a line.

        Raises:
            TimeoutError: none within the limit.
            EOFError, BrokenPipeError: the process that should answer is gone.
            QueueFullError: all processes are busy for too long, or too many with slow lines.
        """
        process = self._take()
        try:
            process = process or self._start()
            answer = self._answer(process, line)
        except BaseException:
            if process is not None:
                process.end()
            self._give_back(None)
            raise
        self._give_back(process)
        return answer

    def _answer(self, process: CompileProcess, line: str) -> bytes:
        process.send(line)
        slice_s = min(SLICE_S, self._limit_s)
        try:
            return process.receive(slice_s)
        except TimeoutError:
            if self._limit_s <= slice_s:
                raise
        if not self._slow_seats.acquire(blocking=False):
            raise QueueFullError("too many forms that take long are being compiled", hint="try again later")
        try:
            return process.receive(self._limit_s - slice_s)
        finally:
            self._slow_seats.release()

    def _take(self) -> CompileProcess | None:
        """A process that is idle; None: one more may be started."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._idle or self._num_busy < MAX_PROCESSES, WAIT_LIMIT_S):
                raise QueueFullError("too many forms wait to be compiled", hint="try again later")
            self._num_busy += 1
            return self._idle.pop() if self._idle else None

    def _give_back(self, process: CompileProcess | None) -> None:
        with self._changed:
            self._num_busy -= 1
            if process is not None:
                self._idle.append(process)
            self._changed.notify()


def _read_line(stream: IO[bytes], deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        # `stream` has a buffer of its own that `select` does not see: `read1` never leaves anything in it.
        piece = stream.read1(2**20)  # type: ignore[attr-defined]
        if not piece:
            raise EOFError
        line += piece
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()

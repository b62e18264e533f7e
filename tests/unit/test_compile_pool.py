"""Who compiles what when: quick forms beside slow ones, limits of waiting, and processes that are lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from triblade.errors import QueueFullError
from triblade.structured import processes
from triblade.structured.processes import CompilePool

PATIENCE_S = 10.0


class FakeProcess:
    """Answers a line by itself; "slow" lines only when they are let go, "dead" ones never."""

    def __init__(self, let_go: threading.Event) -> None:
        self.is_ended = False
        self._let_go = let_go
        self._line = ""

    def send(self, line: str) -> None:
        self._line = line

    def receive(self, limit_s: float) -> bytes:
        if self._line == "dead":
            raise EOFError
        if self._line == "slow" and not self._let_go.wait(limit_s):
            raise TimeoutError
        return self._line.encode()

    def end(self) -> None:
        self.is_ended = True


class World:
    """A pool of such processes."""

    def __init__(self, limit_s: float) -> None:
        self.let_go = threading.Event()
        self.made: list[FakeProcess] = []
        self.pool = CompilePool(self._start, limit_s)

    def _start(self) -> Any:
        self.made.append(FakeProcess(self.let_go))
        return self.made[-1]


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SLICE_S", 0.01)


def test_quick_lines_pass_a_slow_one() -> None:  # D14
    world = World(PATIENCE_S)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(world.pool.ask, "slow")
        assert [world.pool.ask(f"quick {n}") for n in range(5)] == [f"quick {n}".encode() for n in range(5)]
        assert not slow.done()
        assert len(world.made) <= processes.MAX_PROCESSES
        world.let_go.set()
        assert slow.result() == b"slow"
    assert not any(process.is_ended for process in world.made)


def test_slow_lines_never_hold_all_processes() -> None:  # D14
    world = World(PATIENCE_S)
    with ThreadPoolExecutor() as threads:
        slow = [threads.submit(world.pool.ask, "slow") for _ in range(4)]
        refused = 0
        while refused < 3:
            refused = sum(future.done() for future in slow)
        assert world.pool.ask("quick") == b"quick"
        world.let_go.set()
        errors = [future.exception() for future in slow]
    assert sum(isinstance(error, QueueFullError) for error in errors) == 3
    assert sum(process.is_ended for process in world.made) == 3


def test_who_waits_waits_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(PATIENCE_S)
    monkeypatch.setattr(processes, "MAX_PROCESSES", 1)
    monkeypatch.setattr(processes, "WAIT_LIMIT_S", 0.01)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(world.pool.ask, "slow")
        while not world.made:
            pass
        with pytest.raises(QueueFullError, match="wait to be compiled"):
            world.pool.ask("quick")
        world.let_go.set()
        assert slow.result() == b"slow"


@pytest.mark.parametrize(("line", "error"), [("dead", EOFError), ("slow", TimeoutError)])
def test_a_process_that_is_lost_is_replaced(line: str, error: type[Exception]) -> None:
    world = World(0.03)
    for number in range(3):
        with pytest.raises(error):
            world.pool.ask(line)
        assert world.made[-1].is_ended
        assert world.pool.ask("quick") == b"quick"
        assert len(world.made) == 2 * number + 2 - number

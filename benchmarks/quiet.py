"""Whether the machine did anything else while something was measured.

Machines are shared: a measurement that another process disturbed says nothing. The watch compares the processor time of the whole
machine with that of this process and its descendants. Knows nothing of what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


class Watch:
    """Repeats what was disturbed.

    Args:
        share: of one core that others may use meanwhile.
        wait_s: longest wait for a quiet machine before a try.
        tries: per measurement; the last one counts whatever happens.
    """

    def __init__(self, share: float, wait_s: float, tries: int) -> None:
        self._share, self._wait_s, self._tries = share, wait_s, tries
        self.shares: list[float] = []  # of each measurement that counts
        self.repeated = 0

    def undisturbed(self, measure: Callable[[], T]) -> T:
        """The result of a try during which nobody else worked, or of the last one."""
        for left in reversed(range(self._tries)):
            self._wait()
            start, others = time.perf_counter(), _others_s()
            result = measure()
            share = max(0.0, _others_s() - others) / (time.perf_counter() - start)
            if share <= self._share or not left:
                break
            self.repeated += 1
        self.shares.append(share)
        return result

    def _wait(self) -> None:
        end = time.monotonic() + self._wait_s
        while time.monotonic() < end:
            start, others = time.perf_counter(), _others_s()
            time.sleep(0.1)
            if (_others_s() - others) / (time.perf_counter() - start) <= self._share:
                return


def _others_s() -> float:
    """Processor seconds of everything but this process and its descendants; a machine stolen from us counts as well."""
    machine = psutil.cpu_times()
    busy = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - getattr(machine, "guest", 0.0)
    own = psutil.Process()
    ended = own.cpu_times()
    return (
        busy - ended.children_user - ended.children_system - sum(map(_process_s, [own, *own.children(recursive=True)]))
    )


def _process_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)

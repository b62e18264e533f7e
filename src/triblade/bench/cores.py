"""Who keeps the processor busy: this process, a server that is measured, or others, who make every measurement worth less.

Figures are of the whole machine, whatever part of it this process may use, and means since the beginning, in cores. Knows nothing
of what is measured.
"""

from __future__ import annotations

import time

import psutil


class Cores:
    """Processor time of the machine and of this process, from now on."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._all_s, self._own_s = self._now()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begun

    @property
    def own(self) -> float:
        """Cores that this process kept busy, its children not counted."""
        return (self._now()[1] - self._own_s) / self.seconds

    def others(self, known: float) -> float:
        """Cores that were busy beside `known` ones."""
        return max(0.0, (self._now()[0] - self._all_s) / self.seconds - known)

    @staticmethod
    def _now() -> tuple[float, float]:
        whole, own = psutil.cpu_times(), psutil.Process().cpu_times()
        return sum(whole) - whole.idle - getattr(whole, "iowait", 0.0), own.user + own.system

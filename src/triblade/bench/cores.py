"""Who keeps the processor busy: this process, a server that is measured, or others, who make every measurement worth less.

Figures are of the whole machine, whatever part of it this process may use. Knows nothing of what is measured.
"""

from __future__ import annotations

import time

import psutil


class Cores:
    """Processor time of the machine and of this process, from now on."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._all, self._own = self._now()

    def used(self, server_s: float = 0.0) -> tuple[float, float]:
        """Cores that a server kept busy, and those that everybody else but this process did.

        Args:
            server_s: processor seconds of the server since then.
        """
        seconds = time.monotonic() - self._begun
        everything, own = self._now()
        others = everything - self._all - (own - self._own) - server_s
        return server_s / seconds, max(0.0, others / seconds)

    @staticmethod
    def _now() -> tuple[float, float]:
        whole, own = psutil.cpu_times(), psutil.Process().cpu_times()
        return sum(whole) - whole.idle - getattr(whole, "iowait", 0.0), own.user + own.system

"""A running request that others may end: the client by leaving, the clock, the server by shutting down.

Knows nothing of requests. Invariant: exactly one of "the work returned", "the work raised" and "the first reason
given to `stop`" is how a run ends, and a reason given too late changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from triblade.serve.errors import ServeError


class Stoppable:
    """Runs one coroutine that others may end with an error of their choice."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._reason: ServeError | None = None

    def stop(self, reason: ServeError) -> None:
        """End the coroutine with `reason`; the first reason counts, and none does after its end."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def run(self, work: Awaitable[None]) -> None:
        """Await `work` in the current task.

        Raises:
            ServeError: the reason given to `stop`.
        """
        self._task = asyncio.current_task()
        try:
            await work
        except asyncio.CancelledError:
            if self._reason is None or self._task is None:
                raise  # somebody else cancels the whole task
            self._task.uncancel()
            raise self._reason from None
        finally:
            self._task = None

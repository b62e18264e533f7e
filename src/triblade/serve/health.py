"""Whether the engine works, found out by making it generate one token.

Any number of probes at the same time share one generation. A busy engine may not come to the probe's token in time;
as long as it computes steps it is healthy, and a cluster must not kill it for being busy.
"""

from __future__ import annotations

import asyncio

from triblade.engine.outputs import FinishReason
from triblade.errors import TribladeError
from triblade.sampling_params import SamplingParams
from triblade.serve.errors import UnhealthyError
from triblade.serve.state import ServedEngine, ServerState

TIMEOUT_S = 5.0
FIRST = -(2**31)  # priority: before every request


class HealthProbe:
    """Probes one server's engine."""

    def __init__(self, state: ServerState, timeout_s: float = TIMEOUT_S) -> None:
        self._state = state
        self._timeout_s = timeout_s
        self._running: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Return if the server is ready and the engine works.

        Raises:
            UnavailableError: it is loading or draining, or the engine gave no token.
        """
        engine = self._state.require_ready()
        if self._running is None:
            self._running = asyncio.create_task(self._probe(engine))
            self._running.add_done_callback(self._done)
        await asyncio.shield(self._running)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # seen, even if every prober has left

    async def _probe(self, engine: ServedEngine) -> None:
        steps = engine.load().num_steps
        try:
            async with asyncio.timeout(self._timeout_s):
                await _one_token(engine)
        except TimeoutError:
            if engine.load().num_steps == steps:
                raise UnhealthyError(f"the engine gave no token within {self._timeout_s:g} s") from None
        except TribladeError as error:
            raise UnhealthyError(f"the engine does not generate: {error.message}") from error


async def _one_token(engine: ServedEngine) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    async for output in engine.generate([0], params, request_id="health", priority=FIRST):
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise UnhealthyError(f"the engine ended the probe: {output.error or output.finish_reason}")

"""The seam between an engine and whoever uses it: server, benchmarks, tuner, router.

`EngineClient` is all they know. `LocalClient` implements it with an engine in a thread of this process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triblade.engine.outputs import RequestOutput
from triblade.engine.transfers import TransferCounts
from triblade.sampling_params import SamplingParams
from triblade.spec.record import SpeculationCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A snapshot of how busy an engine is, and its counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0  # cached blocks that nobody uses count as free
    num_preemptions: int = 0  # counters from here on
    num_prompt_tokens: int = 0  # prompt tokens of requests, once per request whatever `n`
    num_computed_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    transfers: TransferCounts | None = None  # None: everything is computed where it is answered


class EngineClient(Protocol):
    """Generate text for requests; every implementation gives the same answers."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of all `params.n` choices until each has a finish reason.

        Leaving the iteration early (or cancelling the task) aborts the request. `request_id` is a label for logs; two
        requests may bear the same. A lower `priority` value is served first.

        Raises:
            RequestError: on the first iteration, when the request cannot be served; nothing was computed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End the requests with this label; their streams finish with FinishReason.ABORT."""
        ...

    def load(self) -> EngineLoad:
        """How busy the engine is now."""
        ...

"""Whoever is measured: the seam between the load driver and an engine in this process or a server somewhere.

A target answers one request at a time, piece by piece, and tells its counters under vLLM's names without a prefix. It measures
nothing itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from triblade.bench.metrics import Usage

Message = Mapping[str, str]  # role and content

# Growing counters that a load test reports the increase of, and gauges that it watches.
COUNTERS = (
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "kv_transfer_wire_bytes_total",
    "kv_transfer_seconds_total",
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    messages: Sequence[Message]
    max_tokens: int
    temperature: float
    ignore_eos: bool

    @property
    def text(self) -> str:
        """The messages as one prompt, where no chat template is wanted."""
        return "\n\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class Piece:
    """News of an answer. A piece with neither text nor tokens does not count as one."""

    text: str = ""
    has_tokens: bool = False  # tokens came, even if they are no whole character yet
    usage: Usage | None = None
    finish_reason: str | None = None


class TargetError(Exception):
    """A request failed; the message says how, without anything that differs from request to request."""


class Target(Protocol):
    """Answers requests."""

    name: str

    def answer(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """The pieces of an answer as they come, the usage with one of them.

        Raises:
            TargetError: there is no answer, or not all of it.
        """
        ...

    async def readings(self) -> Mapping[str, float]:
        """Those of COUNTERS and GAUGES that are known."""
        ...

    async def close(self) -> None:
        """End connections and whatever the target runs."""
        ...

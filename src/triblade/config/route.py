"""Options of the router in front of many replicas. Knows no replica's address but those of prefill and decode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from triblade.config.checks import require_at_least, require_positive
from triblade.config.server import LogLevel
from triblade.errors import ConfigError

Policy = Literal["prefix", "least-load", "round-robin", "random"]


@dataclass(frozen=True, kw_only=True)
class RouteConfig:
    """A router in front of OpenAI servers that serve the same model."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on every interface."""

    port: int = 9000
    """Port to listen on. 0 picks a free one."""

    prefill: tuple[str, ...] = ()
    """Addresses of vLLM servers that only prefill; their KV is fetched by those of `decode`."""

    decode: tuple[str, ...] = ()
    """Addresses of vLLM servers that decode what `prefill` computed."""

    policy: Policy = "prefix"
    """Who gets a request: the replica with the least to compute, given what it has cached (`prefix`), or one by load or turn."""

    stream_weight_tokens: int = 256
    """What a running answer weighs against prompt tokens that a replica would have to compute (`prefix`)."""

    short_prompt_tokens: int = 64
    """A prompt with fewer tokens (4 bytes each) to compute goes where the least runs, and to no prefill server."""

    affinity_entries: int = 131_072
    """Pieces of prompts (512 bytes each) that are remembered with the replicas that have them."""

    max_attempts: int = 3
    """Replicas that are asked, one after the other, until one answers; none after the client got a token."""

    wait_s: float = 10.0
    """Seconds that a request waits for a replica when none is there."""

    connect_timeout_s: float = 2.0
    """Seconds until a replica that does not take a connection counts as gone."""

    idle_timeout_s: float = 300.0
    """Seconds of silence after which an answer is given up, the first token included; 0 is no limit."""

    request_timeout_s: float = 600.0
    """Seconds until a request is ended; 0 is no limit."""

    health_interval_s: float = 2.0
    """Seconds between two questions for a replica's health."""

    health_timeout_s: float = 6.0
    """Seconds that a replica may take to answer them."""

    eject_after: int = 2
    """Failures in a row after which a replica gets no requests; as many good answers in a row bring it back."""

    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body; a larger one is answered with 413."""

    drain_timeout_s: float = 30.0
    """After SIGTERM, seconds that running requests have to finish; a second signal ends at once."""

    admin_key: str = ""
    """Bearer token for /replicas (list, drain, resume); also read from TRIBLADE_ADMIN_KEY. None: the route is off."""

    log_level: LogLevel = "info"
    """Least severe messages to log (to standard error)."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got: {self.port}")
        for name in ("affinity_entries", "max_attempts", "eject_after", "max_body_bytes"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("stream_weight_tokens", "short_prompt_tokens"):
            require_at_least(name, getattr(self, name), 0)
        for name in ("connect_timeout_s", "health_interval_s", "health_timeout_s"):
            require_positive(name, getattr(self, name))
        for name in ("wait_s", "idle_timeout_s", "request_timeout_s", "drain_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must be a finite number, at least 0, got: {getattr(self, name)}")
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError(
                "prefill and decode servers come together", hint="give --prefill and --decode, or neither"
            )

"""Options of a simulation: traffic, step times, what counts as good enough. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from triblade.config.checks import require_at_least, require_positive
from triblade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """How many replicas does this traffic need?"""

    plan: Path | None = None
    """File made by `triblade plan`: its cost model gives the step times, and its workload what is not given here."""

    request_rate: float | None = None
    """Requests per second, all together."""

    prompt_tokens: int | None = None
    """Mean tokens that a turn adds to its prompt."""

    output_tokens: int | None = None
    """Mean tokens of an answer."""

    shared_tokens: int = 0
    """Tokens of a system prompt that all conversations begin with."""

    turns: int = 1
    """Turns of a conversation; each prompt holds all turns before it."""

    think_s: float = 5.0
    """Mean seconds between two turns."""

    length_spread: float = 0.5
    """Lengths differ from their mean by up to this share."""

    step_ms: float | None = None
    """Measured, instead of a plan: a step of an empty batch."""

    sequence_us: float = 0.0
    """Measured: what a step takes longer for each running sequence."""

    context_token_ns: float = 0.0
    """Measured: what a step takes longer for each token in the caches of the running sequences."""

    prompt_token_us: float = 0.0
    """Measured: what a prompt token takes."""

    transfer_ms: float = 0.0
    """From prefill to decode, before the first byte of KV."""

    transfer_token_us: float | None = None
    """From prefill to decode, for each token; default: by the plan's link, without plan none."""

    request_ms: float = 2.0
    """Network and router, there and back."""

    chunk_tokens: int = 2048
    """Prompt tokens of a step."""

    max_num_seqs: int = 256
    """Sequences of a step."""

    kv_tokens: int | None = None
    """Tokens that fit in the KV cache of a replica; default: what the plan leaves room for, without plan 400,000."""

    replicas: int | None = None
    """Simulate so many, instead of searching; with `prefill` the ones that decode."""

    prefill: int | None = None
    """Simulate so many prefill replicas; without `replicas` 0 searches replicas that do everything only."""

    max_replicas: int = 4096
    """Search up to here."""

    ttft_ms: float = 1000.0
    """Good enough: time to the first token, at `percentile`."""

    tpot_ms: float = 100.0
    """Good enough: time per further token, at `percentile`."""

    percentile: int = 99
    """Share of the requests, in percent, that are to be good enough: 50, 90 or 99."""

    requests: int | None = None
    """Requests to simulate; default: 20 for each replica, at least 4,000 and at most 40,000."""

    seed: int = 0
    """Equal seeds, equal traffic."""

    output: Path | None = None
    """TOML file for the plan with the fewest engines that were found, each kind; `triblade deploy FILE` runs them."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("request_rate", "think_s", "step_ms", "ttft_ms", "tpot_ms"):
            require_positive(name, getattr(self, name))
        for name in (
            "prompt_tokens",
            "output_tokens",
            "turns",
            "chunk_tokens",
            "max_num_seqs",
            "kv_tokens",
            "replicas",
        ):
            require_at_least(name, getattr(self, name), 1)
        for name in (
            "shared_tokens",
            "sequence_us",
            "context_token_ns",
            "prompt_token_us",
            "transfer_ms",
            "request_ms",
        ):
            require_at_least(name, getattr(self, name), 0)
        for name in ("transfer_token_us", "prefill"):
            require_at_least(name, getattr(self, name), 0)
        for name, least in (("max_replicas", 1), ("requests", 10)):
            require_at_least(name, getattr(self, name), least)
        if not 0 <= self.length_spread < 1:
            raise ConfigError(f"length_spread must be in [0, 1), got: {self.length_spread}", param="length_spread")
        if self.percentile not in (50, 90, 99):
            raise ConfigError(f"percentile must be 50, 90 or 99, got: {self.percentile}", param="percentile")

    def check_sources(self) -> None:
        """Whether it is known what steps take and what is asked for.

        Raises:
            ConfigError: both must come from a plan, or be given; what is written comes from a plan.
        """
        if (self.plan is None) == (self.step_ms is None):
            raise ConfigError(
                "step times come from a plan or were measured", hint="give --plan, or --step-ms and the like"
            )
        if self.plan is None and self.output is not None:
            raise ConfigError(
                "a plan is written from a plan", hint="give --plan, or leave --output out", param="output"
            )
        missing = [name for name in ("request_rate", "prompt_tokens", "output_tokens") if getattr(self, name) is None]
        if self.plan is None and missing:
            raise ConfigError(f"without a plan the traffic is not known: {', '.join(missing)}", param=missing[0])

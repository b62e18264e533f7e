"""The tuning run: which trials, one after the other, and what follows from them.

    none of the techniques -> nine by design, or a search -> the best one's corners -> repairs where a technique hurts -> choice

Every step asks the journal what was measured already, so a run that is resumed goes through the same steps and makes only what is
missing. Knows no process and no file: a laboratory makes, serves and measures. Failures of trials are kept as data; nothing else is
caught.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from triblade.config import Plan, TuneConfig
from triblade.errors import TribladeError
from triblade.tune.ablation import Corners, Verdict, repairs
from triblade.tune.journal import Journal, Wanted
from triblade.tune.laboratory import Laboratory
from triblade.tune.measured import Measurement, Run, Trial, choose, hopeless, measured, pareto_set
from triblade.tune.points import Point, Space, corners, nine
from triblade.tune.trial_plan import TrialPlanner, prediction

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a tuning run knows when it ends.

    Attributes:
        chosen: None if nothing that was measured may be chosen.
        anchor: the combination whose techniques were examined.
        unfinished: why trials are missing; None if none are.
    """

    trials: Sequence[Trial]
    pareto: Sequence[Trial]
    chosen: Trial | None
    none: Trial | None
    anchor: Trial | None = None
    verdicts: Sequence[Verdict] = ()
    unfinished: str | None = None


@dataclass(eq=False)
class Tuner:
    """One run.

    Args:
        can_smooth: see `ablation.repairs`.
        clock: seconds.
    """

    config: TuneConfig
    space: Space
    planner: TrialPlanner
    journal: Journal
    laboratory: Laboratory
    can_smooth: bool = False
    clock: Callable[[], float] = time.monotonic
    _unfinished: str | None = field(default=None, init=False)
    _start_s: float = field(default=0.0, init=False)

    def run(self) -> Findings:
        """Make all trials that are missing, within the time."""
        self._start_s, self._unfinished = self.clock(), None
        self._measure([Wanted(point=self.space.none, kind="none", why="none of the techniques")])
        if self.config.trials is None:
            self._measure([Wanted(point=point, kind="grid") for point in nine(self.space)])
        else:
            self._search(self.config.trials)
        anchor = choose([trial for trial in self.journal.trials() if trial.kind in ("grid", "search")], self.config)
        verdicts = [] if anchor is None or not self.config.ablation else self._examine(anchor)
        return self.findings(anchor, verdicts)

    def findings(self, anchor: Trial | None = None, verdicts: Sequence[Verdict] = ()) -> Findings:
        """What follows from all trials so far."""
        trials = self.journal.trials()
        return Findings(
            trials=trials,
            pareto=pareto_set(trials),
            chosen=choose(trials, self.config),
            none=self._at(self.space.none),
            anchor=anchor,
            verdicts=verdicts,
            unfinished=self._unfinished,
        )

    def plan_of(self, trial: Trial) -> Plan:
        """What a trial served."""
        return self.planner.plan(trial.point, self.laboratory.checkpoint(trial.point))

    def _examine(self, anchor: Trial) -> list[Verdict]:
        """Measure a combination's corners, and repairs of what hurts."""
        self._measure(
            [Wanted(point=p, kind="ablation", why=_why(p, anchor.point)) for p in corners(anchor.point, self.space)]
        )
        verdicts = Corners(anchor, self.journal.trials(), self.space, self.config.objective).verdicts()
        for verdict in verdicts:
            if verdict.hurts:
                tries = repairs(verdict, anchor.point, self.space, can_smooth=self.can_smooth)
                self._measure([Wanted(point=p, kind="repair", why=f"{verdict.technique}: {why}") for p, why in tries])
        return verdicts

    def _search(self, count: int) -> None:
        """So many trials: first what the plan (without one, the design) would begin with, the rest as the search proposes."""
        planned = self.planner.chosen(self.space)
        begin, why = (nine(self.space)[0], "to begin with") if planned is None else (planned, "as planned")
        self._measure([Wanted(point=begin, kind="search", why=why)])
        while sum(trial.kind == "search" for trial in self.journal.trials()) < count and self._has_time():
            self._try(self.journal.begin(None))

    def _measure(self, wanted: Sequence[Wanted]) -> None:
        """Make the trials that nobody has made."""
        for one in wanted:
            while not self._is_known(one.point) and self._has_time():
                self._try(self.journal.begin(one))

    def _is_known(self, point: Point) -> bool:
        return any(trial.point.plain == point.plain for trial in self.journal.trials())

    def _has_time(self) -> bool:
        if self.config.minutes is not None and self.clock() - self._start_s >= 60 * self.config.minutes:
            self._unfinished = f"the {self.config.minutes:g} minutes were over; --resume goes on"
        return self._unfinished is None

    def _try(self, trial: Trial) -> None:
        """Make one trial and tell the journal how it ended."""
        log.info("trial %d (%s): %s", trial.number, trial.why or trial.kind, trial.point)
        start_s, known = self.clock(), self._at(trial.point)
        try:
            ended = self._again(trial, known) if known is not None else self._made(trial)
        except (TribladeError, OSError) as error:
            reason = error.message if isinstance(error, TribladeError) else str(error)
            ended = replace(trial, error=reason)
            log.warning("trial %d failed: %s", trial.number, reason)
        self.journal.tell(replace(ended, seconds=round(self.clock() - start_s, 1)))

    def _again(self, trial: Trial, known: Trial) -> Trial:
        """What a search proposes a second time was measured the first time."""
        return replace(trial, measurement=known.measurement, predicted=known.predicted, why=f"as trial {known.number}")

    def _made(self, trial: Trial) -> Trial:
        checkpoint = self.laboratory.checkpoint(trial.point)
        plan = self.planner.plan(trial.point, checkpoint)
        quality = self.laboratory.quality(trial.point, checkpoint)
        runs: list[Run] = []
        stopped = None
        with self.laboratory.serving(f"trial-{trial.number}", plan) as measure:
            while len(runs) < self.config.repeats and stopped is None:
                runs.append(measure(len(runs)))
                if trial.kind != "none" and len(runs) < self.config.repeats:
                    stopped = hopeless(runs, quality, self.journal.trials(), self.config)
        found = Measurement(runs=tuple(runs), quality=quality, stopped=stopped)
        log.info("%.0f ms, %.1f tokens/s%s", found.mean("e2el_ms"), found.mean("output_tokens_per_s"), _ended(stopped))
        return replace(trial, measurement=found, predicted=prediction(plan))

    def _at(self, point: Point) -> Trial | None:
        found = (trial for trial in measured(self.journal.trials()) if trial.point.plain == point.plain)
        return next(found, None)


def _ended(stopped: str | None) -> str:
    return "" if stopped is None else f", ended early: {stopped}"


def _why(corner: Point, whole: Point) -> str:
    """Which techniques are left, in words."""
    kept = corner.techniques
    if len(kept) + 1 == len(whole.techniques):
        return f"without {next(name for name in whole.techniques if name not in kept)}"
    return f"only {' and '.join(kept)}" if kept else "none of the techniques"

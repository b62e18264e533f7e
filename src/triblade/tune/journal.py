"""The trials of a study in an Optuna journal: a file that only grows, so that a process that is killed loses the trial it was in.

    begun -> measured | failed; or its process died: then it never was, until it has been the death of several

Knows Optuna and nobody else does; whoever tunes sees points and trials.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triblade.errors import ConfigError, UnsupportedError
from triblade.tune.measured import OBJECTIVES, Trial, measurement_from, objectives
from triblade.tune.points import LONGEST_DRAFT, Point, Space, from_values

if TYPE_CHECKING:
    import optuna

FILE = "journal.log"
MOST_TRIES = 2  # of a trial in which the process dies
DIED = f"the process died {MOST_TRIES} times in this trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A trial to make."""

    point: Point
    kind: str
    why: str = ""


class Journal:
    """One study.

    Args:
        folder: where the file is, or will be.
        circumstances: what trials have in common; another study has others.
        resume: go on with a study that is there.
        seed: of the search.

    Raises:
        ConfigError: there is a study already, or none, or one of other circumstances.
        UnsupportedError: Optuna is not installed.
    """

    def __init__(
        self, folder: Path, space: Space, circumstances: Mapping[str, Any], *, resume: bool = False, seed: int = 0
    ) -> None:
        path = folder / FILE
        _check(path, resume)
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        backend = JournalFileBackend(str(path))
        self._study = optuna.create_study(
            study_name="tune",
            storage=optuna.storages.JournalStorage(backend),
            directions=["minimize"] * len(OBJECTIVES),
            sampler=optuna.samplers.TPESampler(seed=seed),
            load_if_exists=True,
        )
        self._distributions = _distributions(space)
        self._handles: dict[int, optuna.Trial] = {}
        self._agree_on(json.loads(json.dumps(circumstances)), path)
        self._bury()

    def trials(self) -> list[Trial]:
        """Those that have ended, in order."""
        found = self._study.get_trials(deepcopy=False)
        deaths = Counter(_key(trial) for trial in found if _has_died(trial))
        fatal = {_key(trial): trial.number for trial in found if _has_died(trial) and deaths[_key(trial)] >= MOST_TRIES}
        ended = [_trial(one) for one in found if {"error", "measurement"} & set(one.user_attrs)]
        ended += [_trial(one, DIED) for one in found if one.number in fatal.values()]
        return sorted(ended, key=lambda trial: trial.number)

    def begin(self, wanted: Wanted | None) -> Trial:
        """Begin a trial: the wanted one (or one that was wanted when the process died), or what the search proposes."""
        if wanted is not None and not any(t.state.name == "WAITING" for t in self._study.get_trials(deepcopy=False)):
            attributes = {"kind": wanted.kind, "why": wanted.why}
            self._study.enqueue_trial(asdict(wanted.point), user_attrs=attributes)
        handle = self._study.ask(self._distributions)
        self._handles[handle.number] = handle
        for name, value in (("kind", "search"), ("why", "")):
            if name not in handle.user_attrs:
                handle.set_user_attr(name, value)
        return _trial(self._study.get_trials(deepcopy=False)[handle.number])

    def tell(self, trial: Trial) -> None:
        """How it ended: with a measurement, or with an error."""
        handle = self._handles.pop(trial.number)
        handle.set_user_attr("seconds", trial.seconds)
        handle.set_user_attr("predicted", dict(trial.predicted))
        if trial.measurement is None:
            handle.set_user_attr("error", trial.error)
            self._study.tell(handle, state=_failed())
        else:
            handle.set_user_attr("measurement", asdict(trial.measurement))
            self._study.tell(handle, objectives(trial.measurement))

    def _agree_on(self, circumstances: Mapping[str, Any], path: Path) -> None:
        known = self._study.user_attrs.get("circumstances")
        if known is None:
            self._study.set_user_attr("circumstances", circumstances)
        elif known != circumstances:
            differing = sorted(n for n in {*known, *circumstances} if known.get(n) != circumstances.get(n))
            raise ConfigError(
                f"the trials in {path} were made with other options: {', '.join(differing)}",
                hint="give the same options, another --output, or --overwrite",
            )

    def _bury(self) -> None:
        """Trials that nobody will end are over."""
        for dead in self._study.get_trials(deepcopy=False):
            if dead.state.name == "RUNNING":
                self._study.tell(dead.number, state=_failed())


def _check(path: Path, resume: bool) -> None:
    if find_spec("optuna") is None:
        raise UnsupportedError("tuning needs Optuna, which is not installed", hint="pip install 'triblade[tune]'")
    if resume and not path.exists():
        raise ConfigError(f"there is nothing to resume: {path}", hint="leave --resume out", param="resume")
    if path.exists() and not resume:
        raise ConfigError(
            f"there are trials in {path}", hint="--resume goes on, --overwrite begins again", param="output"
        )


def _distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    found: dict[str, optuna.distributions.BaseDistribution] = {
        name: CategoricalDistribution(list(values)) for name, values in space.choices.items()
    }
    return {**found, "draft_length": IntDistribution(1, LONGEST_DRAFT)}


def _trial(found: optuna.trial.FrozenTrial, error: str | None = None) -> Trial:
    attributes = found.user_attrs
    values = attributes.get("measurement")
    return Trial(
        number=found.number,
        kind=attributes["kind"],
        point=from_values(found.params),
        why=attributes["why"],
        measurement=None if values is None else measurement_from(values),
        error=attributes.get("error", error),
        seconds=attributes.get("seconds", 0.0),
        predicted=attributes.get("predicted", {}),
    )


def _key(trial: optuna.trial.FrozenTrial) -> str:
    return json.dumps(trial.params, sort_keys=True)


def _has_died(trial: optuna.trial.FrozenTrial) -> bool:
    """It ended without a word, and had a point."""
    is_known = len(trial.params) == len(fields(Point))
    return trial.state.name == "FAIL" and "error" not in trial.user_attrs and is_known


def _failed() -> optuna.trial.TrialState:
    from optuna.trial import TrialState

    return TrialState.FAIL

"""`triblade tune`: look at the model and the machine, tune, write the chosen plan, all trials and the report.

All of them are written again after every run, also one that was interrupted, from all trials so far.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from triblade.bench.run import is_url
from triblade.config import Plan, TuneConfig, to_toml
from triblade.errors import UnsupportedError
from triblade.files import written_whole
from triblade.models.checkpoint import open_checkpoint
from triblade.models.source import resolve
from triblade.tune.journal import FILE, Journal
from triblade.tune.laboratory import CommandLaboratory
from triblade.tune.measured import Trial
from triblade.tune.open_shape import open_shape
from triblade.tune.points import Space, space_of
from triblade.tune.profile import this_machine
from triblade.tune.shape import ModelShape
from triblade.tune.trial_plan import TrialPlanner, with_figures
from triblade.tune.tune_page import report_page
from triblade.tune.tune_report import Report, describe
from triblade.tune.tuner import Findings, Tuner

log = logging.getLogger(__name__)

PLAN, PAGE, TRIALS = "plan.toml", "report.html", "trials.json"
# Options that may change between a run and the one that goes on with it.
OF_A_RUN = frozenset(
    {"output", "resume", "overwrite", "trials", "minutes", "trial_minutes", "ablation", "objective"}
    | {"max_ppl_increase", "ttft_ms", "tpot_ms", "e2el_ms"}
)


def tune(config: TuneConfig) -> str:
    """Tune, write plan and report, and tell what was found.

    Raises:
        UnsupportedError: the model is the address of a server.
        ConfigError: see `Journal`.
        TribladeError: the model cannot be read.
        KeyboardInterrupt: interrupted; plan and report hold what was measured.
    """
    if is_url(config.model):
        raise UnsupportedError(
            f"tune starts the engines that it measures, got an address: {config.model}",
            hint="`triblade bench URL` measures a fleet, `triblade simulate` says how many engines of each kind it should have",
            param="model",
        )
    if config.overwrite:
        (config.output / FILE).unlink(missing_ok=True)
    shape = open_shape(config.model)
    tuner = _tuner(config, shape, open_checkpoint(resolve(config.model)).fingerprint())
    try:
        findings = tuner.run()
    except KeyboardInterrupt:
        _write(tuner, replace(tuner.findings(), unfinished="interrupted; --resume goes on"))
        raise
    return describe(_write(tuner, findings))


def _tuner(config: TuneConfig, shape: ModelShape, fingerprint: str) -> Tuner:
    hardware = this_machine()
    drafters = ["suffix", *(["eagle"] if shape.has_head else []), *(["draft"] if config.draft_model else [])]
    space = space_of(config, shape.stored_bits, drafters, shape.has_head)
    planner = TrialPlanner(config, shape, hardware)
    laboratory = CommandLaboratory(config, planner.workload, fingerprint)
    return Tuner(
        config=config,
        space=space,
        planner=planner,
        journal=Journal(
            config.output,
            space,
            circumstances(config, space, fingerprint),
            resume=config.resume,
            seed=config.seed,
        ),
        laboratory=laboratory,
        can_smooth=laboratory.can_smooth,
    )


def circumstances(config: TuneConfig, space: Space, fingerprint: str) -> dict[str, Any]:
    """What trials must have in common to be compared."""
    said = {name: value for name, value in asdict(config).items() if name not in OF_A_RUN}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in said.items()}
    return {**plain, "model content": fingerprint, "space": asdict(space)}


def _write(tuner: Tuner, findings: Findings) -> Report:
    """The chosen plan, all trials, and the page."""
    config, plan = tuner.config, None
    if findings.chosen is not None:
        plan = chosen_plan(tuner.plan_of(findings.chosen), findings)
        _put(config.output / PLAN, to_toml(plan))
    report = Report(
        config=config,
        space=tuner.space,
        findings=findings,
        machine=tuner.planner.hardware.name,
        plan=plan,
        plan_file=config.output / PLAN,
    )
    _put(config.output / TRIALS, json.dumps([asdict(trial) for trial in findings.trials], indent=1))
    _put(config.output / PAGE, report_page(report))
    return report


def _put(path: Path, content: str) -> None:
    with written_whole(path) as part:
        part.write_text(content, encoding="utf-8")


def chosen_plan(plan: Plan, findings: Findings) -> Plan:
    """The plan of the chosen trial, with what was measured and why it was chosen."""
    chosen = findings.chosen
    assert chosen is not None
    reasons = [f"the best of {len(findings.trials)} trials that may be chosen: trial {chosen.number}"]
    reasons += [str(verdict) for verdict in findings.verdicts]
    return with_figures(replace(plan, reasons=tuple(reasons)), _figures(chosen))


def _figures(trial: Trial) -> dict[str, tuple[float, str]]:
    names = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2el_ms"}
    found = {name: (trial.mean(of), "ms") for name, of in names.items()}
    found["output_throughput"] = (trial.mean("output_tokens_per_s"), "tokens/s")
    found["memory"] = (trial.mean("memory_mib") * 2**20 / 1e9, "GB")
    quality = None if trial.measurement is None else trial.measurement.quality
    return found if quality is None else {**found, "ppl_increase": (quality.ppl_increase, "share")}

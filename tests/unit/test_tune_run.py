"""A whole tuning run over a fake laboratory: the journal, failures, interruptions, the time budget, the choice, plan and report."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest
from tuning import SMALL, Killed, World, space, tuner

from triblade.commands.planning import with_plan
from triblade.config import Plan, TuneConfig, Workload, read_toml, to_toml
from triblade.errors import ConfigError, TuneError
from triblade.tune.journal import DIED, Journal, Wanted
from triblade.tune.laboratory import CommandLaboratory, end_leftover
from triblade.tune.measured import Quality, Trial
from triblade.tune.points import Point, nine
from triblade.tune.run import chosen_plan, circumstances
from triblade.tune.trial_plan import Checkpoint
from triblade.tune.tune_page import labels_apart, report_page
from triblade.tune.tune_report import Report, describe, effects, gains
from triblade.tune.tuner import Findings, Tuner

RANDOM_DRAFT = dict.fromkeys(("bf16", "int8", "int4", "int3"), 0.02)


def report_of(made: Tuner, findings: Findings) -> Report:
    return Report(
        config=made.config,
        space=made.space,
        findings=findings,
        machine="a machine",
        plan=None if findings.chosen is None else made.plan_of(findings.chosen),
        plan_file=made.config.output / "plan.toml",
    )


def test_a_run_measures_the_design_and_the_corners_of_the_best(tmp_path: Path) -> None:
    world = World()
    found = tuner(tmp_path, world).run()
    kinds = [trial.kind for trial in found.trials]
    assert kinds.count("none") == 1
    assert kinds.count("grid") == 9
    assert kinds.count("ablation") == 6
    assert all(trial.measurement and trial.predicted for trial in found.trials)
    assert found.anchor is not None
    allowed = [trial for trial in found.trials if trial.point.weights != "int3"]
    assert found.chosen == min(allowed, key=lambda trial: trial.mean("e2el_ms"))
    assert len(set(world.served)) == len(world.served) == len(found.trials)


def test_trials_beyond_the_quality_floor_are_measured_once(tmp_path: Path) -> None:
    found = tuner(tmp_path, World(), ablation=False, repeats=3).run()
    runs = {t.point.weights: len(t.measurement.runs) for t in found.trials if t.kind == "grid" and t.measurement}
    assert runs == {"int8": 3, "int4": 3, "int3": 1}


def test_a_random_draft_is_turned_off(tmp_path: Path) -> None:  # F19
    found = tuner(tmp_path, World(RANDOM_DRAFT)).run()
    assert found.chosen is not None
    assert "drafts" not in found.chosen.point.techniques
    verdicts = {verdict.technique: verdict for verdict in found.verdicts}
    assert verdicts["drafts"].hurts
    assert any(trial.kind == "repair" for trial in found.trials)


def test_failures_are_data(tmp_path: Path) -> None:
    found = tuner(tmp_path, World(broken=frozenset({"int4"})), ablation=False).run()
    failed = [trial for trial in found.trials if trial.error]
    assert [trial.point.weights for trial in failed] == ["int4"] * 3
    assert all("cannot make int4" in (trial.error or "") for trial in failed)
    assert len(found.trials) == 10
    assert found.chosen is not None


def test_a_run_that_is_killed_goes_on_at_its_next_trial(tmp_path: Path) -> None:
    world = World()
    whole = tuner(tmp_path / "whole", World()).run()
    world.dies_at = [nine(space(TuneConfig(model="small")))[4].plain]
    with pytest.raises(Killed):
        tuner(tmp_path / "killed", world).run()
    assert len(world.served) == 5  # none and four of nine
    world.dies_at = []
    found = tuner(tmp_path / "killed", world, resume=True).run()
    assert len(set(world.served)) == len(world.served) == len(whole.trials)
    assert {t.point for t in found.trials} == {t.point for t in whole.trials}
    assert found.chosen is not None
    assert whole.chosen is not None
    assert found.chosen.point == whole.chosen.point
    again = tuner(tmp_path / "killed", world, resume=True).run()
    assert again.trials == found.trials


def test_a_trial_that_kills_the_process_twice_has_failed(tmp_path: Path) -> None:
    fatal = nine(space(TuneConfig(model="small")))[4].plain
    world = World(dies_at=[fatal])
    for resume in (False, True):
        with pytest.raises(Killed):
            tuner(tmp_path, world, resume=resume, ablation=False).run()
    found = tuner(tmp_path, world, resume=True, ablation=False).run()
    assert [trial.error for trial in found.trials if trial.point.plain == fatal] == [DIED]
    assert len(found.trials) == 10


def test_the_time_budget_ends_a_run_that_can_go_on(tmp_path: Path) -> None:
    world, now = World(), iter(range(0, 100_000, 20))
    found = tuner(tmp_path, world, minutes=2.0, clock=lambda: float(next(now)), ablation=False).run()
    assert 0 < len(found.trials) < 10
    assert "--resume goes on" in (found.unfinished or "")
    rest = tuner(tmp_path, world, resume=True, minutes=2.0, clock=lambda: 0.0, ablation=False).run()
    assert len(rest.trials) == 10
    assert rest.unfinished is None


def test_a_search_makes_so_many_trials_and_measures_nothing_twice(tmp_path: Path) -> None:
    world = World()
    found = tuner(tmp_path, world, trials=14, ablation=False).run()
    assert [trial.kind for trial in found.trials].count("search") == 14
    assert len(world.served) == len({trial.point.plain for trial in found.trials})
    assert found.chosen is not None


def test_a_search_begins_with_the_plan(tmp_path: Path) -> None:
    made = tuner(tmp_path, World(), trials=2, ablation=False)
    first = made.run().trials[1]
    assert first.why == "as planned"
    assert first.point == made.planner.chosen(made.space)


def test_a_plan_outside_the_space_is_no_beginning(tmp_path: Path) -> None:
    made = tuner(tmp_path, World(), trials=1, ablation=False)
    planned = made.planner.chosen(made.space)
    assert planned is not None
    made.space = replace(made.space, drafters=tuple(name for name in made.space.drafters if name != planned.drafter))
    assert made.planner.chosen(made.space) is None
    first = made.run().trials[1]
    assert (first.why, first.point) == ("to begin with", nine(made.space)[0])


def test_a_study_must_be_there_to_go_on_and_must_not_to_begin(tmp_path: Path) -> None:
    where = space(TuneConfig(model="m"))
    with pytest.raises(ConfigError, match="nothing to resume"):
        Journal(tmp_path, where, {}, resume=True)
    Journal(tmp_path, where, {"workload": "chat"})
    with pytest.raises(ConfigError, match="there are trials") as caught:
        Journal(tmp_path, where, {"workload": "chat"})
    assert "--resume" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="other options: workload"):
        Journal(tmp_path, where, {"workload": "document"}, resume=True)


def test_a_trial_wanted_when_the_process_died_is_asked_for_once(tmp_path: Path) -> None:
    where = space(TuneConfig(model="m"))
    point = Point(weights="int4")
    first = Journal(tmp_path, where, {})
    assert first.begin(Wanted(point=point, kind="grid", why="x")).point == point
    second = Journal(tmp_path, where, {}, resume=True)
    assert second.trials() == []
    begun = second.begin(Wanted(point=point, kind="grid", why="x"))
    second.tell(replace(begun, error="no"))
    assert [(t.point, t.kind, t.why, t.error) for t in second.trials()] == [(point, "grid", "x", "no")]


def test_what_trials_have_in_common_leaves_out_what_may_change() -> None:
    config = TuneConfig(model="m")
    where = space(config)
    same = replace(config, minutes=1.0, resume=True, max_ppl_increase=0.1, output=Path("x"))
    assert circumstances(config, where, "f") == circumstances(same, where, "f")
    for other in (replace(config, workload="document"), replace(config, num_requests=3), replace(config, seed=1)):
        assert circumstances(other, where, "f") != circumstances(config, where, "f")
    json.dumps(circumstances(replace(config, text=Path("t")), where, "f"))


def test_the_chosen_plan_can_be_served(tmp_path: Path) -> None:
    made = tuner(tmp_path, World())
    found = made.run()
    assert found.chosen is not None
    plan = chosen_plan(made.plan_of(found.chosen), found)
    model = tmp_path / "model"
    model.mkdir()
    plan = replace(plan, decode=replace(plan.decode, model=str(model)))
    plan = replace(plan, prefill=None if plan.prefill is None else plan.decode)
    file = tmp_path / "plan.toml"
    file.write_text(to_toml(plan))
    assert read_toml(Plan, file) == plan
    flags = with_plan(["serve", "--plan", str(file)])
    assert f"--model={model}" in flags
    assert "--drafter=eagle" in flags
    labels = {(figure.name, figure.label) for figure in plan.prediction}
    assert {("e2el", "measured"), ("e2el", "predicted")} <= labels
    assert plan.figure("e2el") == pytest.approx(found.chosen.mean("e2el_ms"), abs=1e-3)


class Seen(HTMLParser):
    """Text by kind of element, and everything that would leave the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.headings: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            self._open = self._open[: len(self._open) - 1 - self._open[::-1].index(tag)]

    def handle_data(self, data: str) -> None:
        if "td" in self._open:
            self.cells[-1] += data
        if "h2" in self._open:
            self.headings.append(data)


def test_the_report_shows_everything_and_needs_nothing(tmp_path: Path) -> None:
    made = tuner(tmp_path, World(RANDOM_DRAFT, broken=frozenset({"int3"})))
    found = made.run()
    page = report_page(report_of(made, found))
    seen = Seen(page)
    assert {"The matrix", "Trials", "What each technique does", "Predicted and measured"} <= set(seen.headings)
    assert seen.tags.count("figure") == 4
    grid = [trial for trial in found.trials if trial.kind == "grid" and trial.measurement]
    for trial in grid:
        assert f"{trial.mean('e2el_ms'):.4g}{trial.point.placement} #{trial.number}" in seen.cells
    assert any("failed: convert ended with exit code 1" in cell for cell in seen.cells)
    assert seen.cells.count("failed") == 3 * 4
    assert "hurts" in seen.cells
    assert any("too few to pay" in cell for cell in seen.cells)
    assert seen.links == []
    assert "script" not in seen.tags
    assert "prefers-color-scheme:dark" in page
    assert 'content="width=device-width' in page


def test_names_in_the_report_are_escaped(tmp_path: Path) -> None:
    made = tuner(tmp_path, World(), ablation=False)
    report = report_of(made, made.run())
    odd = replace(report, config=replace(report.config, model="<b>m</b>"), machine="<i>x</i>")
    assert "<b>m</b>" not in report_page(odd)
    assert "<i>x</i>" not in report_page(odd)


def test_a_report_of_nothing_but_failures_is_a_report(tmp_path: Path) -> None:
    made = tuner(tmp_path, World(broken=frozenset({"int8", "int4", "int3"})), ablation=False, e2el_ms=1.0)
    report = report_of(made, made.run())
    assert "nothing: no trial keeps" in report_page(report)
    assert "nothing that was measured keeps" in describe(report)


def test_labels_of_dots_do_not_cover_each_other() -> None:
    found = labels_apart([(10.0, 10.0), (11.0, 12.0), (12.0, 11.0), (200.0, 10.0)])
    assert found[0] == (18.0, 14.0)
    assert found[3] == (208.0, 14.0)
    near = [(x, y) for x, y in found if x < 100]
    assert all(abs(x - z) >= 14 or abs(y - w) >= 10 for x, y in near for z, w in near if (x, y) != (z, w))


def test_a_search_and_stored_weights_have_reports(tmp_path: Path) -> None:
    search = tuner(tmp_path / "search", World(), trials=5, ablation=False)
    assert "each cell is the best trial there" in report_page(report_of(search, search.run()))
    stored = tuner(tmp_path / "stored", World(), shape=replace(SMALL, stored_bits=4), ablation=False)
    page = report_page(report_of(stored, stored.run()))
    assert all(f"<th>{split}</th>" in page for split in ("20:80", "30:70", "50:50"))


def test_effects_and_gains_are_means_and_changes(tmp_path: Path) -> None:
    made = tuner(tmp_path, World(), ablation=False)
    report = report_of(made, made.run())
    rows = {(axis, value): (time, count) for axis, value, time, _, count in effects(report)}
    eight = [t.mean("e2el_ms") for t in report.grid if t.point.weights == "int8"]
    assert rows["weights", "int8"] == (pytest.approx(sum(eight) / 3), 3)
    assert len(rows) == 9
    assert report.findings.chosen is not None
    before, after = gains(report)[0].before, gains(report)[0].after
    assert (before, after) == (pytest.approx(1005), report.findings.chosen.mean("e2el_ms"))
    assert "chosen" in describe(report)


def laboratory(tmp_path: Path, fingerprint: str = "f", **options: object) -> CommandLaboratory:
    config = replace(TuneConfig(model="m", output=tmp_path), **options)  # type: ignore[arg-type]
    load = Workload(name="chat", prompt_tokens=8, output_tokens=8, concurrency=1)
    return CommandLaboratory(config, load, fingerprint)


CONVERT = """
import json, pathlib, sys
output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
output.mkdir(parents=True)
with open(output.parent.parent / "conversions.txt", "a") as log:
    log.write(output.name + "\\n")
print(json.dumps({"quality": {"perplexity": 11.0, "original_perplexity": 10.0, "kl": 0.1, "num_tokens": 5}}))
"""


def test_checkpoints_are_kept_by_what_they_are_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triblade.tune.laboratory._command", lambda words: [sys.executable, "-c", CONVERT, *words])
    text, point = tmp_path / "text.txt", Point(weights="int4")
    text.write_text("one")
    lab = laboratory(tmp_path, calibration=str(text))
    made = lab.checkpoint(point)
    assert lab.checkpoint(point) == made
    assert made.convert.startswith("triblade convert m --output")
    assert lab.quality(point, made) == Quality(perplexity=11.0, ppl_increase=pytest.approx(0.1), kl=0.1, num_tokens=5)
    others = [lab.checkpoint(Point(weights="int8")), laboratory(tmp_path, "g", calibration=str(text)).checkpoint(point)]
    text.write_text("two")
    others.append(lab.checkpoint(point))
    assert len({made.model, *(other.model for other in others)}) == 4
    assert len((tmp_path / "conversions.txt").read_text().splitlines()) == 4


def test_a_command_that_fails_says_what_it_said_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.exit('error: no such model')"
    monkeypatch.setattr("triblade.tune.laboratory._command", lambda words: [sys.executable, "-c", script])
    with pytest.raises(TuneError, match="convert ended with exit code 1: error: no such model"):
        laboratory(tmp_path).checkpoint(Point(weights="int4"))
    plan = tuner(tmp_path / "study", World()).planner.plan(Point(weights="bf16"), Checkpoint(model="m"))
    with pytest.raises(TuneError, match="serve ended with exit code 1: error: no such model"):
        laboratory(tmp_path).serving("trial", plan).__enter__()
    assert not (tmp_path / "process.json").exists()
    slow = "import time; time.sleep(60)"
    monkeypatch.setattr("triblade.tune.laboratory._command", lambda words: [sys.executable, "-c", slow])
    with pytest.raises(TuneError, match="took longer"):
        laboratory(tmp_path, trial_minutes=0.001).checkpoint(Point(weights="int8"))
    with pytest.raises(TuneError, match="not ready"):
        laboratory(tmp_path, trial_minutes=0.001).serving("trial", plan).__enter__()


def test_weights_as_they_are_need_nothing(tmp_path: Path) -> None:
    lab = laboratory(tmp_path)
    assert lab.checkpoint(Point(weights="bf16")) == Checkpoint(model="m")
    found = lab.quality(Point(weights="bf16"), Checkpoint(model="m"))
    assert found is not None
    assert found.ppl_increase == 0.0
    assert lab.quality(Point(weights="int4"), Checkpoint(model=str(tmp_path / "x"))) is None


def test_smoothing_is_offered_where_it_adds_something(tmp_path: Path) -> None:
    assert laboratory(tmp_path, quantization="rtn", calibration="t").can_smooth
    assert not laboratory(tmp_path, quantization="rtn").can_smooth
    assert not laboratory(tmp_path, quantization="awq+gptq", calibration="t").can_smooth
    assert not laboratory(tmp_path, calibration="t").can_smooth


def test_a_process_that_was_left_behind_is_ended_and_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "process.json"
    end_leftover(file)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        created = psutil.Process(process.pid).create_time()
        file.write_text(json.dumps({"pid": process.pid, "created": created - 1}))
        end_leftover(file)
        assert process.poll() is None
        file.write_text(json.dumps({"pid": process.pid, "created": created}))
        end_leftover(file)
        assert not psutil.pid_exists(process.pid)


def test_a_trial_tells_its_kind(tmp_path: Path) -> None:
    made = tuner(tmp_path, World(), ablation=False)
    trial: Trial = made.run().trials[0]
    assert (trial.kind, trial.why, trial.point) == ("none", "none of the techniques", made.space.none)

"""The report of a tuning run as one HTML page: matrices, trials, techniques, predictions. Knows figures only, measures nothing.

Colours say better (blue) or worse (orange) than none of the three techniques, the stronger the further; every cell has its number
as well, so that nothing depends on colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from triblade.page import facts, page, section, table, text
from triblade.tune.ablation import Verdict
from triblade.tune.measured import MEASURES, Trial, measured
from triblade.tune.points import NO_DRAFTER
from triblade.tune.tune_report import (
    PREDICTED,
    Report,
    effects,
    gains,
    prediction_errors,
    quality_text,
    state,
)

BETTER, WORSE = "0,114,178", "213,94,0"  # told apart by people who see colours differently
STRONGEST, FULL = 0.6, math.log(3)  # opacity of three times as good or as bad
WIDTH, HEIGHT, LEFT, BOTTOM, PAD = 400, 280, 48, 36, 24
TICKS = 4
LABEL = (14, 10)  # room of a trial's number
STYLE = """<style>
.matrices{display:flex;flex-wrap:wrap;gap:1.2rem 2rem}.matrices figure{margin:0}.matrices figcaption{font-weight:600}
.matrix{border-collapse:separate;border-spacing:3px}.matrix td,.matrix th{border:0;padding:.3rem .5rem;border-radius:4px}
.matrix td{min-width:4.2rem}.matrix td,.matrix tr:first-child th{text-align:center}.matrix small{opacity:.85}
.matrix td b{display:block;font-size:15px}.matrix td.chosen{outline:2px solid var(--ink)}.scatter{max-width:480px}
.wide td:last-child:not(.number){min-width:11rem}pre{overflow-x:auto}
.dot{fill:#0072b2}.dot.dominated{fill:none;stroke:var(--faint)}.dot.none{fill:#d55e00}
</style>"""


def report_page(report: Report) -> str:
    """The whole page."""
    sections = [STYLE, _summary(report)]
    if report.grid:
        sections.append(section("The matrix", _legend(report), _matrices(report)))
    if measured(report.findings.trials):
        sections.append(section("Time and throughput", _scatter_legend(), _scatter(report)))
    sections.append(section("Trials", _trials(report)))
    if report.findings.verdicts:
        sections.append(section("What each technique does", _techniques(report)))
    if effects(report):
        head = ["", "value", "end to end, ms", "tokens/s", "trials"]
        sections.append(section("Effect of each value, means over its trials", table(head, effects(report))))
    if report.findings.trials:
        sections.append(section("Predicted and measured", _predictions(report)))
    return page(f"Tuning {report.config.model}", sections)


def _summary(report: Report) -> str:
    config, chosen = report.config, report.findings.chosen
    load = f"{config.workload}, {config.concurrency:g} at once" + (f", {config.dataset.name}" if config.dataset else "")
    rows: list[tuple[str, object]] = [("machine", report.machine), ("workload", load)]
    rows.append(("measured", f"{config.repeats} run{'s' * (config.repeats > 1)} of {config.num_requests} requests"))
    if chosen is None:
        rows.append(("chosen", "nothing: no trial keeps the quality floor and the goals"))
    else:
        rows.append(("chosen", f"trial {chosen.number}: {chosen.point}"))
        rows += [(f"{g.label}, {g.unit}", _gain(g.before, g.after)) for g in gains(report)]
        rows.append(("quality", quality_text(chosen.measurement) if chosen.measurement else ""))
    if report.findings.unfinished is not None:
        rows.append(("unfinished", report.findings.unfinished))
    command = f"<pre>{text(report.serve_command)}</pre>" if report.plan is not None else ""
    return facts(rows) + command


def _gain(before: float, after: float) -> str:
    change = f" ({after / before - 1:+.0%})" if before else ""
    return f"{after:.4g}{change}, with none of the techniques {before:.4g}"


def _legend(report: Report) -> str:
    with_rest = "the small print is the memory of prefill to decode, and the trial"
    if report.config.trials is not None:
        with_rest = "each cell is the best trial there"
    compared = (
        "Compared with none of the three techniques" if report.findings.none else "No trial without the techniques"
    )
    return (
        f"<p>{compared}: <span style='background:rgba({BETTER},.5)'>&nbsp;better&nbsp;</span> "
        f"<span style='background:rgba({WORSE},.5)'>&nbsp;worse&nbsp;</span>; {with_rest}.</p>"
    )


def _matrices(report: Report) -> str:
    return f'<div class="matrices">{"".join(_matrix(report, name) for name in MEASURES)}</div>'


def _matrix(report: Report, name: str) -> str:
    """Weights (or splits, where weights are one) by length of drafts (or drafter, after a search)."""
    row_of, column_of = _axes(report)
    rows = dict.fromkeys(row_of(trial) for trial in report.tried)
    columns = sorted(dict.fromkeys(column_of(trial) for trial in report.tried))
    head = "".join(f"<th>{text(column)}</th>" for column in columns)
    lines = []
    for row in rows:
        cells = []
        for column in columns:
            here = [trial for trial in report.tried if (row_of(trial), column_of(trial)) == (row, column)]
            cells.append(_cell(report, name, here))
        lines.append(f"<tr><th>{text(row)}</th>{''.join(cells)}</tr>")
    label, unit, more = MEASURES[name]
    caption = f"{label}{', ' + unit if unit else ' (KL)'}, {'more' if more else 'less'} is better"
    body = "".join(lines)
    return f'<figure><figcaption>{caption}</figcaption><table class="matrix"><tr><th></th>{head}</tr>{body}</table></figure>'


def _axes(report: Report) -> tuple[Callable[[Trial], str], Callable[[Trial], str]]:
    is_one = len({trial.point.weights for trial in report.tried}) == 1
    row = (lambda trial: trial.point.placement) if is_one else (lambda trial: trial.point.weights)
    if report.config.trials is None:
        return row, lambda trial: f"k {trial.point.draft_length}"
    return row, lambda trial: "no drafts" if trial.point.drafter == NO_DRAFTER else trial.point.drafter


def _cell(report: Report, name: str, trials: Sequence[Trial]) -> str:
    found = measured(trials)
    if not found:
        return "<td>failed</td>" if trials else "<td>-</td>"
    more = MEASURES[name][2]
    best = (max if more else min)(found, key=lambda trial: trial.mean(name))
    if name == "quality" and best.measurement is not None and best.measurement.quality is None:
        return "<td>not measured</td>"
    value, chosen = best.mean(name), " chosen" if best == report.findings.chosen else ""
    ratio = _goodness(report, name, best)
    color = f"rgba({BETTER if ratio > 0 else WORSE},{min(1.0, abs(ratio) / FULL) * STRONGEST:.2f})"
    shown = f"{value:.3g}" if name == "quality" else f"{value:.4g}"
    small = f"{text(best.point.placement)} #{best.number}"
    return f'<td class="cell{chosen}" style="background:{color}"><b>{shown}</b><small>{small}</small></td>'


def _goodness(report: Report, name: str, trial: Trial) -> float:
    """Logarithm of how many times better than none it is; lost quality is set against the floor."""
    if name == "quality":
        quality = trial.measurement.quality if trial.measurement else None
        floor = max(report.config.max_ppl_increase, 1e-6)
        return -FULL * min(1.0, max(0.0, quality.ppl_increase) / (2 * floor)) if quality else 0.0
    none = report.findings.none
    before, after = (0.0, 0.0) if none is None else (none.mean(name), trial.mean(name))
    if before <= 0 or after <= 0:
        return 0.0
    return math.log(after / before) * (1 if MEASURES[name][2] else -1)


def _scatter_legend() -> str:
    return (
        "<p>Filled: none is better in all of time, throughput, memory and quality. Orange: none of the techniques.</p>"
    )


def _scatter(report: Report) -> str:
    """Trials by time (x) and throughput (y), numbered."""
    trials = measured(report.findings.trials)
    times, rates = ([trial.mean(name) for trial in trials] for name in ("e2el_ms", "output_tokens_per_s"))
    right, top = _round_up(max(times)), _round_up(max(rates))
    across, up, base = WIDTH - LEFT - PAD, HEIGHT - BOTTOM - PAD, HEIGHT - BOTTOM
    parts = [f'<path class="axis" d="M{LEFT} {PAD}V{base}H{WIDTH - PAD}"/><text x="{LEFT}" y="12">tokens/s</text>']
    parts.append(f'<text x="{WIDTH - PAD}" y="{HEIGHT - 4}" text-anchor="end">end to end, ms</text>')
    for i in range(TICKS + 1):
        x, y = LEFT + across * i / TICKS, base - up * i / TICKS
        parts.append(f'<text x="{x:.0f}" y="{base + 14}" text-anchor="middle">{right * i / TICKS:g}</text>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 4:.0f}" text-anchor="end">{top * i / TICKS:g}</text>')
    places = [(LEFT + across * t / right, base - up * r / top) for t, r in zip(times, rates, strict=True)]
    for trial, (x, y), (label_x, label_y) in zip(trials, places, labels_apart(places), strict=True):
        kind = "none" if trial == report.findings.none else "" if trial in report.findings.pareto else "dominated"
        parts.append(f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        parts.append(f'<text x="{label_x:.1f}" y="{label_y:.1f}">{trial.number}</text>')
    opening = f'<svg class="scatter" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="throughput over time">'
    return f"{opening}{''.join(parts)}</svg>"


def labels_apart(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Where the labels of dots stand: to the right, and further to the right where another one stands already."""
    taken: list[tuple[float, float]] = []
    for x, y in places:
        place = (x + 8, y + 4)
        while any(abs(place[0] - other[0]) < LABEL[0] and abs(place[1] - other[1]) < LABEL[1] for other in taken):
            place = (place[0] + LABEL[0], place[1])
        taken.append(place)
    return taken


def _round_up(value: float) -> float:
    """The next number whose quarters are easy to read."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10) if power * step >= value)


def _trials(report: Report) -> str:
    head = ["#", "combination", "end to end, ms", "TTFT", "TPOT", "tokens/s", "MiB", "right guesses", "quality", ""]
    rows: list[Sequence[object]] = []
    for trial in report.findings.trials:
        name = f"{trial.point}" + (f" ({trial.why})" if trial.why else "")
        if trial.measurement is None:
            rows.append([trial.number, name, *[""] * 7, state(trial, report)])
            continue
        figures = [trial.mean(n) for n in ("e2el_ms", "ttft_ms", "tpot_ms", "output_tokens_per_s", "memory_mib")]
        right = f"{trial.mean('acceptance_rate'):.0%}" if trial.measurement.knows("acceptance_rate") else ""
        rows.append([trial.number, name, *figures, right, quality_text(trial.measurement), state(trial, report)])
    return table(head, rows)


def _techniques(report: Report) -> str:
    anchor = report.findings.anchor
    rows = [
        (v.technique, "" if v.alone is None else f"{v.alone:+.0%}", f"{v.together:+.0%}", _word(v), "; ".join(v.causes))
        for v in report.findings.verdicts
    ]
    whole = (
        ""
        if anchor is None
        else f"<p>Of trial {anchor.number} ({text(anchor.point)}): change of time by each technique.</p>"
    )
    repairs = [trial for trial in report.findings.trials if trial.kind == "repair"]
    tried = [(t.number, t.why, t.mean("e2el_ms") if t.measurement else f"failed: {t.error}") for t in repairs]
    found = whole + table(["technique", "alone", "with the others", "", "why"], rows)
    return found + (table(["#", "repair", "end to end, ms"], tried) if tried else "")


def _word(verdict: Verdict) -> str:
    return "hurts" if verdict.hurts else "weakened by the others" if verdict.is_weakened else ""


def _predictions(report: Report) -> str:
    errors = prediction_errors(report.findings.trials)
    summary = facts([(f"median error, {PREDICTED[name]}", f"{error:.0%}") for name, error in errors.items()])
    rows: list[Sequence[object]] = []
    for trial in measured(report.findings.trials):
        pairs = [
            f"{trial.predicted[name]:.4g} / {trial.mean(name):.4g}" if name in trial.predicted else ""
            for name in PREDICTED
        ]
        rows.append([trial.number, *pairs])
    return summary + table(["#", *(f"{label}: predicted / measured" for label in PREDICTED.values())], rows)

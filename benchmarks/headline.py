"""None of the three techniques, each alone, and all together, on the same traffic: latency, throughput, memory, quality.

    python benchmarks/headline.py MODEL --work FOLDER --output FILE.json --chart FILE.svg [--calibration TEXT] [--text TEXT]

MODEL has 16-bit weights. Each way is served by a plan (`triblade serve --plan`) and driven over HTTP: chat questions in two turns
(benchmarks/prompts/chat.jsonl) and long documents. Ways take turns, so that what else the machine does meets all of them. The
quantized checkpoint is made first, once, and kept in --work; that is not part of the ten minutes that the rest takes.
Invariant: --output has every run that ended, so that the same command goes on where it was stopped (by --seconds or otherwise).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from triblade import host
from triblade.config import TuneConfig
from triblade.files import written_whole
from triblade.models.checkpoint import open_checkpoint
from triblade.models.source import resolve
from triblade.tune.laboratory import CommandLaboratory
from triblade.tune.measured import Quality, Run
from triblade.tune.open_shape import open_shape
from triblade.tune.points import Point
from triblade.tune.profile import this_machine
from triblade.tune.trial_plan import Checkpoint, TrialPlanner

CHAT = Path(__file__).parent / "prompts" / "chat.jsonl"
MEASURES = {  # label, unit, whether more is better
    "e2el_ms": ("latency", "ms", False),
    "output_tokens_per_s": ("throughput", "tokens/s", True),
    "memory_mib": ("memory", "MiB", False),
}
NONE = "none"
BAR, GAP, LEFT, WIDTH, PANEL = 18, 8, 130, 620, 150
COLORS = ("#999999", "#56b4e9", "#e69f00", "#cc79a7", "#009e73")
NOT_ASKED = frozenset({"work", "output", "chart", "seconds", "rounds"})  # options that change no figure of a run


@dataclass(frozen=True)
class Traffic:
    """A workload, and how it is served and driven."""

    name: str
    config: TuneConfig
    laboratory: CommandLaboratory
    planner: TrialPlanner
    ready: Path | None

    def checkpoint(self, point: Point) -> Checkpoint:
        """The weights of a way."""
        if point.is_quantized and self.ready is not None:
            return Checkpoint(model=str(self.ready))
        return self.laboratory.checkpoint(point)


def ways(scheme: str, drafter: str, length: int, split: str) -> dict[str, Point]:
    """The combinations, by name."""
    plain = Point(weights="bf16")
    return {
        NONE: plain,
        "quantization": replace(plain, weights=scheme),
        "speculation": replace(plain, drafter=drafter, draft_length=length),
        "prefill/decode": replace(plain, placement=split),
        "all three": Point(weights=scheme, drafter=drafter, draft_length=length, placement=split),
    }


def workloads(options: argparse.Namespace) -> Iterator[Traffic]:
    """Chat and documents."""
    shape, hardware = open_shape(options.model), this_machine()
    fingerprint = open_checkpoint(resolve(options.model)).fingerprint()
    common = TuneConfig(
        model=options.model,
        output=options.work,
        quantization=options.quantization,
        calibration=options.calibration,
        text=options.text,
        concurrency=options.concurrency,
        trial_minutes=30,
    )
    chat = replace(common, workload="chat", dataset=CHAT, num_requests=options.chat_requests)
    chat = replace(chat, prompt_tokens=256, output_tokens=options.chat_tokens)
    document = replace(common, workload="document", num_requests=options.documents)
    document = replace(document, prompt_tokens=options.document_tokens, output_tokens=options.answer_tokens)
    for name, config in (("chat", chat), ("document", document)):
        planner = TrialPlanner(config, shape, hardware)
        yield Traffic(
            name, config, CommandLaboratory(config, planner.workload, fingerprint), planner, options.checkpoint
        )


def measured(traffic: Traffic, name: str, point: Point, number: int) -> Run:
    """One load test of one way, on a server of its own."""
    checkpoint = traffic.checkpoint(point)
    with traffic.laboratory.serving(
        f"{traffic.name}-{name.replace('/', '-')}", traffic.planner.plan(point, checkpoint)
    ) as run:
        return run(number)


def summary(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds of each way, and how they compare with none."""
    found = {}
    for name, of_way in runs.items():
        row = {measure: statistics.median(getattr(run, measure) for run in of_way) for measure in MEASURES}
        for extra in ("ttft_ms", "tpot_ms"):
            row[extra] = statistics.median(getattr(run, extra) for run in of_way)
        found[name] = {key: round(value, 2) for key, value in row.items()}
    for row in found.values():
        row |= {f"{measure} of none": round(row[measure] / found[NONE][measure], 3) for measure in MEASURES}
    return found


def markdown(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The table of the README: changes against none, the absolute figures of none."""
    lines = []
    for workload, rows in results.items():
        lines += [f"| {workload} | latency, ms | throughput, tokens/s | memory, MiB |", "|---|---|---|---|"]
        for name, row in rows.items():
            cells = [f"{row[m]:.4g}" + ("" if name == NONE else f" ({_change(row, m)})") for m in MEASURES]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _change(row: Mapping[str, float], measure: str) -> str:
    ratio = row[f"{measure} of none"]
    return f"{ratio:.2f}x" if MEASURES[measure][2] else f"{ratio - 1:+.0%}"


def chart(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Bars of each measure as a share of none's; SVG for light and dark pages."""
    parts, top = [], 24
    for workload, rows in results.items():
        parts.append(f'<text x="0" y="{top}" class="head">{escape(workload)}, none = 1</text>')
        for column, (measure, (label, _, more)) in enumerate(MEASURES.items()):
            x = LEFT + column * (PANEL + 16)
            parts.append(f'<text x="{x}" y="{top + 20}">{label}, {"more" if more else "less"} is better</text>')
            longest = max(row[f"{measure} of none"] for row in rows.values())
            for number, (name, row) in enumerate(rows.items()):
                y, share = top + 30 + number * (BAR + GAP), row[f"{measure} of none"]
                width = (PANEL - 40) * share / longest
                if not column:
                    parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
                parts.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLORS[number]}"/>')
                parts.append(f'<text x="{x + width + 4:.1f}" y="{y + 13}">{share:.2f}</text>')
        top += 60 + len(rows) * (BAR + GAP)
    style = "text{font:11px system-ui,sans-serif;fill:#444}.head{font-weight:600;font-size:13px}"
    style += "@media(prefers-color-scheme:dark){text{fill:#ccc}}"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - 20}" role="img">'
    return (
        f"{opening}<title>{(__doc__ or '').partition(chr(10))[0]}</title><style>{style}</style>{''.join(parts)}</svg>\n"
    )


def arguments() -> argparse.Namespace:
    """Options; the defaults take about six minutes on two cores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint, plans and logs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long; go on later")
    parser.add_argument("--scheme", default="int4")
    parser.add_argument("--checkpoint", type=Path, help="of the model, quantized already; default: make one")
    parser.add_argument("--quantization", default="best")
    parser.add_argument("--calibration", help="text; default: the model writes its own")
    parser.add_argument("--text", type=Path, help="text to measure quality on")
    parser.add_argument("--drafter", default="eagle")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--split", default="50:50")
    parser.add_argument("--concurrency", type=float, default=4)
    parser.add_argument("--chat-requests", type=int, default=24)
    parser.add_argument("--chat-tokens", type=int, default=96)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--document-tokens", type=int, default=1536)
    parser.add_argument("--answer-tokens", type=int, default=64)
    return parser.parse_args()


@dataclass
class Progress:
    """Every run that ended, by workload and way, one for each round; kept in a file, if there is one.

    Raises:
        SystemExit: the file is of another question.
    """

    file: Path | None
    asked: Mapping[str, Any]
    quality: Quality | None
    runs: dict[str, dict[str, list[Run]]]

    def __post_init__(self) -> None:
        if self.file is None or not self.file.exists():
            return
        found = json.loads(self.file.read_text(encoding="utf-8"))
        if found["options"] != self.asked:
            raise SystemExit(f"{self.file} was begun with {found['options']}; go on with these")
        for load, of_load in found["runs"].items():
            for name, rows in of_load.items():
                self.runs[load][name] = [Run(**row) for row in rows]

    def add(self, load: str, name: str, run: Run) -> None:
        """Note a run, and write everything."""
        self.runs[load][name].append(run)
        print(f"{load:9} {name:15} {run.e2el_ms:8.0f} ms {run.output_tokens_per_s:8.1f} tokens/s", flush=True)
        if self.file is not None:
            with written_whole(self.file) as part:
                part.write_text(json.dumps(self._record(), indent=1) + "\n", encoding="utf-8")

    def results(self) -> dict[str, dict[str, dict[str, float]]]:
        """Of the workloads whose ways have all been run."""
        return {load: summary(of_load) for load, of_load in self.runs.items() if all(of_load.values())}

    def _record(self) -> dict[str, Any]:
        every = {
            load: {name: [asdict(run) for run in found] for name, found in of_load.items()}
            for load, of_load in self.runs.items()
        }
        return {
            "what": (__doc__ or "").partition("\n")[0],
            "options": self.asked,
            "machine": {"cores": host.usable_cores(), "platform": platform.platform()},
            "quality": None if self.quality is None else asdict(self.quality),
            "results": self.results(),
            "runs": every,
        }


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What makes two runs comparable; models and files by name, not by place."""
    told = {n: Path(v).name if isinstance(v, Path) else v for n, v in vars(options).items() if n not in NOT_ASKED}
    places = [name for name in ("model", "calibration") if told[name] is not None]
    return told | {name: Path(told[name]).name for name in places}


def main() -> None:
    """Measure in rounds, print the table, write result and chart."""
    options, began = arguments(), time.monotonic()
    points = ways(options.scheme, options.drafter, options.draft_length, options.split)
    loads = list(workloads(options))
    made = loads[0].checkpoint(points["quantization"])
    quality = loads[0].laboratory.quality(points["quantization"], made)
    empty: dict[str, dict[str, list[Run]]] = {load.name: {name: [] for name in points} for load in loads}
    progress = Progress(options.output, asked(options), quality, empty)
    for number, load, name in product(range(options.rounds), loads, points):
        if len(progress.runs[load.name][name]) > number:
            continue
        if time.monotonic() - began > options.seconds:
            raise SystemExit(f"{options.seconds:g} s are over; the same command goes on here")
        progress.add(load.name, name, measured(load, name, points[name], number))
    print(markdown(progress.results()))
    if options.chart is not None:
        options.chart.write_text(chart(progress.results()), encoding="utf-8")


if __name__ == "__main__":
    main()

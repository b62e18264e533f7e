"""What `triblade plan` predicts of two dozen ways to serve on this machine, against what they do: latencies, throughput, memory.

    python benchmarks/plan_grid.py MODEL --part held-out --work FOLDER --output FILE [--checkpoint int4=FOLDER] [--seconds 180]
    python benchmarks/plan_grid.py MODEL --part held-out --work FOLDER --output FILE --again

MODEL has 16-bit weights. Every way is predicted first, from the profile that the machine measures of itself, then served by its
plan and driven over HTTP. The cost model was mended with the rows of the part `mended-with` in sight; those of `held-out` were
measured afterwards, and theirs are the errors that count. Invariant: --output has every way that was measured, so that the same
command goes on where it was stopped. --again measures nothing: it predicts with the formulas of today from the profile of then,
and keeps what was predicted first as `foretold`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from triblade import host
from triblade.config import TuneConfig, from_mapping
from triblade.files import written_whole
from triblade.models.checkpoint import open_checkpoint
from triblade.models.source import resolve
from triblade.tune.hardware import Hardware
from triblade.tune.laboratory import CommandLaboratory
from triblade.tune.open_shape import open_shape
from triblade.tune.points import Point
from triblade.tune.profile import this_machine
from triblade.tune.shape import ModelShape
from triblade.tune.trial_plan import Checkpoint, TrialPlanner, prediction

CHAT = Path(__file__).parent / "prompts" / "chat.jsonl"
SECONDS_EACH = 6.0
MEDIANS = ("output_tokens_per_s", "tpot_ms", "ttft_ms", "e2el_ms", "memory_mib")
CHAT_LENGTHS, DOCUMENT_LENGTHS = (108, 96), (768, 48)  # tokens of prompts and answers
PARTS = ("mended-with", "held-out")
PLAIN = Point(weights="bf16")
INT8, INT4 = replace(PLAIN, weights="int8"), replace(PLAIN, weights="int4")


@dataclass(frozen=True)
class Way:
    """A combination and what is asked of it."""

    point: Point
    workload: str
    users: int

    @property
    def lengths(self) -> tuple[int, int]:
        """Of prompts and answers."""
        return CHAT_LENGTHS if self.workload == "chat" else DOCUMENT_LENGTHS

    def __str__(self) -> str:
        return f"{self.workload}, {self.users} users: {self.point}"


def ways(part: str) -> list[Way]:
    """Those of a part: both have all techniques, workloads and numbers of users, in other combinations."""
    eagle = {length: replace(INT4, drafter="eagle", draft_length=length) for length in (2, 4, 6)}
    if part == "mended-with":
        return [
            Way(PLAIN, "chat", 4),
            Way(PLAIN, "chat", 1),
            Way(INT4, "chat", 4),
            Way(INT4, "chat", 16),
            Way(INT8, "chat", 4),
            Way(replace(INT4, kv_dtype="int8"), "document", 4),
            Way(INT4, "document", 1),
            Way(replace(INT4, drafter="suffix"), "chat", 1),
            Way(eagle[4], "chat", 1),
            Way(eagle[4], "chat", 4),
            Way(replace(INT4, placement="50:50"), "chat", 4),
            Way(replace(PLAIN, chunk=256), "document", 4),
        ]
    return [
        Way(INT4, "chat", 1),
        Way(PLAIN, "chat", 16),
        Way(INT8, "chat", 1),
        Way(replace(INT8, kv_dtype="int8"), "document", 4),
        Way(replace(INT4, chunk=128), "document", 4),
        Way(replace(INT4, kv_dtype="int8"), "chat", 16),
        Way(eagle[2], "chat", 16),
        Way(replace(PLAIN, drafter="eagle", draft_length=4), "chat", 1),
        Way(replace(INT4, drafter="suffix"), "document", 4),
        Way(replace(INT4, placement="20:80"), "document", 4),
        Way(replace(PLAIN, placement="50:50"), "chat", 4),
        Way(replace(eagle[6], placement="50:50"), "chat", 1),
    ]


@dataclass(frozen=True)
class Site:
    """What all ways have in common."""

    model: str
    work: Path
    shape: ModelShape
    hardware: Hardware
    fingerprint: str
    checkpoints: Mapping[str, str]  # by scheme, those that need not be made

    def config(self, way: Way) -> TuneConfig:
        """Options of a way, but for the number of requests."""
        prompt, output = way.lengths
        return TuneConfig(
            model=self.model,
            output=self.work,
            quantization="rtn",
            workload=way.workload,  # type: ignore[arg-type]
            dataset=CHAT if way.workload == "chat" else None,
            prompt_tokens=prompt,
            output_tokens=output,
            concurrency=way.users,
        )

    def predicted(self, way: Way, requests: int) -> dict[str, float]:
        """Of so many requests."""
        planner = TrialPlanner(replace(self.config(way), num_requests=requests), self.shape, self.hardware)
        return prediction(planner.plan(way.point, Checkpoint(model=self.model)))

    def requests(self, way: Way, output_tokens_per_s: float) -> int:
        """So many that each user has a few in SECONDS_EACH."""
        rate = output_tokens_per_s / way.lengths[1]
        return max(2, round(SECONDS_EACH * rate / way.users)) * way.users

    def row(self, way: Way) -> dict[str, Any]:
        """Predict, serve, measure."""
        requests = self.requests(way, self.predicted(way, way.users)["output_tokens_per_s"])
        config = replace(self.config(way), num_requests=requests)
        planner = TrialPlanner(config, self.shape, self.hardware)
        laboratory = CommandLaboratory(config, planner.workload, self.fingerprint)
        ready = self.checkpoints.get(way.point.weights)
        checkpoint = Checkpoint(model=ready) if ready else laboratory.checkpoint(way.point)
        plan = planner.plan(way.point, checkpoint)
        predicted = prediction(plan)
        with laboratory.serving("way", plan) as run:
            measured = run(0)
        return {"way": str(way), "requests": requests, "predicted": predicted, "measured": asdict(measured)}

    def row_again(self, way: Way, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row that was measured, predicted by today's formulas."""
        foretold = row.get("foretold", row["predicted"])
        requests = row.get("requests", self.requests(way, foretold["output_tokens_per_s"]))
        return {**row, "requests": requests, "predicted": self.predicted(way, requests), "foretold": foretold}


def site(options: argparse.Namespace, hardware: Hardware) -> Site:
    """The model on a machine."""
    return Site(
        model=options.model,
        work=options.work,
        shape=open_shape(options.model),
        hardware=hardware,
        fingerprint=open_checkpoint(resolve(options.model)).fingerprint(),
        checkpoints=dict(said.split("=", 1) for said in options.checkpoint),
    )


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and largest error of each figure, as shares of what was measured."""
    found = {}
    for name in MEDIANS:
        sizes = [abs(row["predicted"][name] / row["measured"][name] - 1) for row in rows]
        found[name] = {"median": round(statistics.median(sizes), 4), "worst": round(max(sizes), 4)}
    return found


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table: predicted / measured."""
    yield f"{'':50}" + "".join(f"{name.removesuffix('_per_s'):>18}" for name in MEDIANS)
    for row in rows:
        cells = (f"{row['predicted'][name]:.4g} / {row['measured'][name]:.4g}" for name in MEDIANS)
        yield f"{row['way']:50}" + "".join(f"{cell:>18}" for cell in cells)
    for kind in ("median", "worst"):
        yield f"{kind + ' error':50}" + "".join(f"{error[kind]:>18.1%}" for error in errors(rows).values())


def arguments() -> argparse.Namespace:
    """Options; a way takes about a quarter of a minute."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, plans, logs and the profile")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--checkpoint", nargs="*", default=[], help="SCHEME=FOLDER, quantized already")
    parser.add_argument("--again", action="store_true", help="predict what was measured anew")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no way after so long; go on later")
    return parser.parse_args()


def main() -> None:
    """Measure what is missing, or predict again what was measured; print the table, keep everything."""
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"what": (__doc__ or "").partition("\n")[0], "model": Path(options.model).name}
    record |= {"machine": {"cores": host.usable_cores(), "platform": platform.platform()}, "parts": {}}
    if options.output.exists():
        record = json.loads(options.output.read_text(encoding="utf-8"))
    part = record["parts"].setdefault(options.part, {"rows": []})
    rows = predicted_again(options, part) if options.again else measured(options, part)
    for row in rows:
        part["rows"] = [*(one for one in part["rows"] if one["way"] != row["way"]), row]
        part["errors"] = errors(part["rows"])
        with written_whole(options.output) as file:
            file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(part["rows"])))


def measured(options: argparse.Namespace, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows that are missing, as long as there is time."""
    began, here = time.monotonic(), site(options, this_machine(options.work))
    part.setdefault("hardware", asdict(here.hardware))
    known = {row["way"] for row in part["rows"]}
    for way in ways(options.part):
        if str(way) in known:
            continue
        if time.monotonic() - began > options.seconds:
            raise SystemExit(f"{options.seconds:g} s are over; the same command goes on here")
        yield here.row(way)


def predicted_again(options: argparse.Namespace, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows that are there, from the profile they were measured with."""
    then = site(options, from_mapping(Hardware, part["hardware"]))
    known = {str(way): way for way in ways(options.part)}
    yield from [then.row_again(known[row["way"]], row) for row in part["rows"]]


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""A plan carried out by vLLM (`triblade deploy`) and by our own engine (`triblade serve`): the same answers, the same load test.

    python benchmarks/deploy_vllm.py --vllm-python ENVIRONMENT/bin/python --output FILE.json NAME=PLAN.toml ...

Both are asked by the `openai` client at temperature 0: short prompts, and a long one. Where answers part, the distance of the two
tokens' log-probabilities tells a near tie from an error; how far these distances are from each other in the two engines, wherever
both had the same tokens before, tells how near a tie has to be. `triblade bench` then measures both with one command.

One server at a time runs, and the file is written after each: a run that was cut short goes on with the engine that is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from cpu_server import serving
from deployed import Answer, Deployment, answer, deployed, parting, stored
from vllm_parity import PROMPTS

from triblade.bench.result import load_result
from triblade.config import Plan, read_toml

NAMES = ("vllm", "triblade")
SHORT_PROMPTS = 8
LONG_PROMPT = Path(__file__).resolve().parent / "prompts" / "edit.jsonl"
LONG_CHARACTERS = 2400
PERCENT = 95
COUNTED = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
)


def main() -> None:
    """Measure one plan after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", help="NAME=PLAN.toml")
    parser.add_argument("--vllm-python", required=True, help="of the environment with vLLM")
    parser.add_argument("--deploy-option", action="append", default=[], help="NAME=VALUE of `deploy`, without dashes")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--requests", type=int, default=8, help="of the load test; 0: none")
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    for plan in args.plans:
        name, _, path = plan.partition("=")
        compare(args, name, Path(path))


def compare(args: argparse.Namespace, name: str, path: Path) -> None:
    """vLLM first, then our engine, by the same plan; what an unfinished record has is not done again."""
    found = next((run for run in runs(args.output) if run["plan"] == name and "answers" in run), {})
    record = {"plan": name, "options": args.deploy_option, "bench": " ".join(bench_words(args)), "answers": {}, **found}
    if "vllm" not in record["answers"]:
        with deployed(path, args.vllm_python, args.deploy_option) as there:
            note(args, record, "vllm", there)
        record["vllm"]["end_s"] = round(there.end_s, 1)
    plan = read_toml(Plan, path)
    with serving(plan.decode.model, ("--plan", str(path))) as (port, _, ready_s):
        note(args, record, "triblade", Deployment(f"http://127.0.0.1:{port}", ready_s))
    answers = record.pop("answers")
    pairs = [tuple(Answer(**side) for side in pair) for pair in zip(*map(answers.get, NAMES), strict=True)]
    written(args.output, {**record, **agreement(pairs), "vllm_texts": [their.text for their, _ in pairs]})


def note(args: argparse.Namespace, record: dict[str, Any], name: str, server: Deployment) -> None:
    """Ask one server, load it, and write what the record has so far."""
    record["answers"][name] = stored([answer(server.url, prompt, args.new_tokens) for prompt in prompts()])
    load = bench(server.url, bench_words(args)) if args.requests else {}
    record[name] = {"ready_s": round(server.ready_s, 1), **load, **server.counted(COUNTED)}
    written(args.output, record)


def runs(path: Path) -> list[dict[str, Any]]:
    """What a file has."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.is_file() else []
    return found


def written(path: Path, record: dict[str, Any]) -> None:
    """The file with this record in the place of one of the same name."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    content["runs"] = [*(run for run in runs(path) if run["plan"] != record["plan"]), record]
    path.write_text(json.dumps(content, indent=1) + "\n")


def agreement(pairs: Sequence[tuple[Answer, ...]]) -> dict[str, Any]:
    """How many answers are equal, where the others part, and by how much the two engines' distances differ anyway."""
    partings = [found for their, our in pairs if (found := parting(their, our, NAMES)) is not None]
    moved = sorted(found for their, our in pairs for found in shifts(their, our))
    return {
        "equal": len(pairs) - len(partings),
        "of": len(pairs),
        "partings": partings,
        "shift": {
            "places": len(moved),
            "median": round(median(moved), 4),
            "p95": round(quantiles(moved, n=100)[PERCENT - 1], 4),
            "largest": round(moved[-1], 4),
        },
    }


def shifts(theirs: Answer, ours: Answer) -> Iterator[float]:
    """At each token, as long as all before are equal: the distance of vLLM's two best tokens, in vLLM and in our engine."""
    for place, likely in enumerate(theirs.likely):
        best, second = sorted(likely, key=lambda token: -likely[token])[:2]
        our = ours.likely[place]
        if best in our and second in our:
            yield abs((likely[best] - likely[second]) - (our[best] - our[second]))
        if theirs.tokens[place] != ours.tokens[place]:
            return


def prompts() -> list[str]:
    """Short ones, and a long one last."""
    with LONG_PROMPT.open(encoding="utf-8") as lines:
        text = " ".join(json.loads(line)["turns"][0] for line in lines)
    return [*PROMPTS[:SHORT_PROMPTS], text[:LONG_CHARACTERS]]


def bench_words(args: argparse.Namespace) -> list[str]:
    """Options of the load test, the same for both."""
    sizes = {"num-requests": args.requests, "concurrency": args.users, "prompt-tokens": 128}
    return [f"--{name}={value}" for name, value in {**sizes, "output-tokens": args.new_tokens}.items()]


def bench(url: str, words: Sequence[str]) -> dict[str, Any]:
    """Figures of `triblade bench URL`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        command = [sys.executable, "-m", "triblade", "bench", url, *words, "--output", str(path)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        summary = load_result(path).summary
    return {
        "failed": summary["failed"],
        "output_tokens_per_s": round(summary["output_tokens_per_s"], 1),
        "ttft_ms_p50": round(summary["ttft_ms"]["quantiles"]["p50"], 1),
        "tpot_ms_p50": round(summary["tpot_ms"]["quantiles"]["p50"], 2),
    }


if __name__ == "__main__":
    main()

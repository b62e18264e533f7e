#!/usr/bin/env python3
"""Are structured outputs valid, and what do they cost? 500 random JSON schemas on a real model, and time per token with a form.

    python benchmarks/structured.py MODEL --output FILE.json [--schemas 500] [--batch 8] [--seconds 250] [--parts plain suffix time]

`plain` and `suffix` (four drafts a step): an answer to every schema of `tests/support/random_schemas.py` at temperature 1.0, judged
by jsonschema-rs; an answer that the length limit cut is counted and not judged. `time`: 8 requests with a form (a JSON list of
strings, as long as the answer) and 8 without, in turns, at temperature 1.0, where the native kernels draw the tokens of the latter;
the difference of the time per step. A run stops after
`--seconds` and goes on with what is missing when it is started again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from cpu import commit
from random_schemas import random_schema

from triblade import __version__
from triblade.config import EngineConfig
from triblade.llm import LLM
from triblade.sampling_params import SamplingParams, StructuredOutputs

PROMPT = "Write a JSON value.\n"
ANSWER_TOKENS = 300
GROUP = 25
ROUNDS, STEP_TOKENS = 5, 96
DRAFTING: dict[str, Any] = {"drafter": "suffix", "draft_policy": "fixed", "num_speculative_tokens": 4}
LIST = {"type": "array", "minItems": 1000, "items": {"type": "string"}}


def main() -> None:
    """What is missing, as far as time goes."""
    args = arguments()
    rows: dict[str, Any] = json.loads(args.output.read_text())["rows"] if args.output.exists() else {}
    for part in args.parts:
        stop_at = time.monotonic() + args.seconds / len(args.parts)
        if part == "time":
            rows[part] = cost(args.model, args.batch, args.threads)
        else:
            judge(args, part, rows.setdefault(part, {"answers": 0, "finished": 0, "invalid": [], "tokens": 0}), stop_at)
        save(args.output, args.model, rows)
        sys.stderr.write(f"{part}: {rows[part]}\n")
    invalid = {name: row["invalid"] for name, row in rows.items() if row.get("invalid")}
    if invalid:
        raise SystemExit(f"not valid: {invalid}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=250, help="of all parts, after which nothing new is begun")
    parser.add_argument("--parts", nargs="+", default=["plain", "suffix", "time"], choices=["plain", "suffix", "time"])
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def opened(model: str, threads: int, **options: Any) -> LLM:
    """The model on the native backend, with int4 weights."""
    fixed: dict[str, Any] = {"backend": "native", "threads": threads, "max_model_len": 512, "max_num_seqs": GROUP}
    return LLM(EngineConfig(model=model, **fixed, **options))


def judge(args: argparse.Namespace, part: str, row: dict[str, Any], stop_at: float) -> None:
    """Go on answering schemas, a group of requests at a time."""
    llm = opened(args.model, args.threads, **(DRAFTING if part == "suffix" else {}))
    while row["answers"] < args.schemas and time.monotonic() < stop_at:
        seeds = range(row["answers"], min(args.schemas, row["answers"] + GROUP))
        params = [
            SamplingParams(
                max_tokens=ANSWER_TOKENS,
                seed=seed,
                structured_outputs=StructuredOutputs("json_schema", json.dumps(random_schema(seed))),
            )
            for seed in seeds
        ]
        answers = [found for (found,) in llm.generate([PROMPT] * len(seeds), params)]
        row["answers"] += len(seeds)
        for seed, answer in zip(seeds, answers, strict=True):
            row["tokens"] += len(answer.token_ids)
            if answer.finish_reason == "length":
                continue
            row["finished"] += 1
            if answer.finish_reason != "stop" or not _is_valid(random_schema(seed), answer.text):
                row["invalid"].append(seed)
    counts = llm.engine.load().speculation
    row["accepted"] = row.get("accepted", 0) + counts.num_accepted_tokens


def _is_valid(schema: dict[str, Any], text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text))
    except ValueError:
        return False


def cost(model: str, batch: int, threads: int) -> dict[str, Any]:
    """Milliseconds per step of `batch` requests, without and with a form, in turns."""
    llm = opened(model, threads)
    form = StructuredOutputs("json_schema", json.dumps(LIST))
    plain: dict[str, Any] = {"max_tokens": STEP_TOKENS, "ignore_eos": True}
    times: dict[str, list[float]] = {"plain": [], "form": []}
    for number in range(ROUNDS + 1):  # the first round compiles and warms up
        for name, wanted in (("plain", None), ("form", form)):
            each = [SamplingParams(seed=seed, structured_outputs=wanted, **plain) for seed in range(batch)]
            start = time.perf_counter()
            answers = llm.generate([PROMPT] * batch, each)
            seconds = time.perf_counter() - start
            steps = max(len(found.token_ids) for (found,) in answers)
            if number:
                times[name].append(seconds * 1e3 / steps)
    before, behind = (statistics.median(times[name]) for name in ("plain", "form"))
    return {
        "batch": batch,
        "threads": threads,
        "ms_per_step": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "added_percent": round(100 * (behind / before - 1), 2),
    }


def save(output: Path, model: str, rows: dict[str, Any]) -> None:
    """The result so far."""
    figures = {
        "what": "answers at temperature 1.0 under random JSON schemas, judged; time per step with and without a form",
        "model": Path(model).stem,
        "rows": rows,
        "commit": commit(),
        "versions": {"triblade": __version__, "torch": torch.__version__},
    }
    output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

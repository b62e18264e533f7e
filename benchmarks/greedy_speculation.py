#!/usr/bin/env python3
"""Greedy tokens with every drafter against those without, on a real model: alone, batched, chunked, preempted, warm prefix.

    python benchmarks/greedy_speculation.py --backend native --output FILE.json
        [--model smollm2-135m] [--drafters suffix self eagle draft:MODEL] [--ways alone batched ...] [--prompts 100]
        [--new-tokens 128] [--seconds 250] [--processes 1]

Prompts are the questions and editing tasks of `prompts/`, half and half. In float32 (`--backend reference`, deterministic) all
tokens must be equal. The native kernels compute a step of many rows in another order than one of few, so a difference is allowed
where the two tokens are less than 0.1 nats apart; how far they are is in the result, for each. A target that drafts for itself
(`--drafters draft:TARGET`, reference) must be accepted to the last token. A run stops after `--seconds` and goes on where it
stopped when it is started again with the same output. Several processes take a share of the prompts each, on one thread, and keep
their states in files beside the output, which is their sum.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cpu import commit
from speculation_runs import Tokens, first_difference, nats_behind

from triblade import __version__
from triblade.llm import LLM
from triblade.sampling_params import SamplingParams

PROMPTS = Path(__file__).parent / "prompts"
NEAR_TIE_NATS = 0.1
LENGTH = 4
CONTEXT = 1024
PIECE = 10  # prompts between two looks at the clock, where they are served together
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "batched": {"max_num_seqs": 8},
    "chunks of 48": {"max_num_seqs": 8, "max_num_batched_tokens": 48},
    "preempted": {"max_num_seqs": 8, "num_kv_blocks": CONTEXT // 16},
    "warm prefix": {"max_num_seqs": 8, "enable_prefix_caching": True},
}


class Comparison:
    """One model, its plain answers, and what was compared so far; `figures` is the state and the result."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.stop_at: float = time.monotonic() + args.seconds
        self.figures: dict[str, Any] = {"what": __doc__.splitlines()[0] if __doc__ else "", "rows": {}, "plain": []}
        if args.output.exists():
            self.figures = json.loads(args.output.read_text())
            before = self.figures.get("asked", args.prompts)
            if before != args.prompts:
                raise SystemExit(f"{args.output} was begun with --prompts {before}, which are others; go on with these")
        self.figures["asked"] = args.prompts  # they are spread over the files, so another number means other ones
        first, step = args.share
        # In float32 rows do not depend on the batch, and a step of eight takes as long as one of one.
        self.plain = engine(args, None, WAYS["alone" if args.backend == "native" else "batched"])
        self.prompts = prompts(self.plain, args.prompts)[first::step]

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.stop_at

    def run(self) -> None:
        """Everything that is left, as far as time goes."""
        known: list[Tokens] = self.figures["plain"]
        while len(known) < len(self.prompts) and not self.is_over:
            known += answers(self.plain, self.prompts[len(known) : len(known) + PIECE], self.args.new_tokens)
        for way in self.args.ways:
            for drafter in self.args.drafters:
                if not self.is_over:
                    self.compare(drafter, way)
                self.save()

    def compare(self, drafter: str, way: str) -> None:
        """One drafter in one way of serving, from where it stopped."""
        name = f"{drafter.partition(':')[0]}, {way}"
        fresh = {
            "prompts": 0,
            "equal": 0,
            "nats": [],
            "drafted": 0,
            "accepted": 0,
            "steps": 0,
            "preemptions": 0,
            "cached": 0,
        }
        row = self.figures["rows"].setdefault(name, fresh)
        if row["prompts"] >= len(self.figures["plain"]):
            return
        llm = engine(self.args, drafter, WAYS[way])
        piece = 1 if way == "alone" else PIECE
        while row["prompts"] < len(self.figures["plain"]) and not self.is_over:
            part = slice(row["prompts"], row["prompts"] + piece)
            if way == "warm prefix":
                answers(llm, self.prompts[part], 1)
            before = llm.engine.load()
            found = answers(llm, self.prompts[part], self.args.new_tokens)
            self.count(row, part, found)
            after = llm.engine.load()
            row["drafted"] += after.speculation.num_draft_tokens - before.speculation.num_draft_tokens
            row["accepted"] += after.speculation.num_accepted_tokens - before.speculation.num_accepted_tokens
            row["steps"] += after.num_steps - before.num_steps
            row["preemptions"] += after.num_preemptions - before.num_preemptions
            row["cached"] += after.num_cached_prompt_tokens - before.num_cached_prompt_tokens
            self.save()
        llm.engine.check_idle()
        sys.stderr.write(f"{name}: {row}\n")

    def count(self, row: dict[str, Any], part: slice, found: list[Tokens]) -> None:
        """Compare answers with the plain ones."""
        for prompt, tokens, expected in zip(self.prompts[part], found, self.figures["plain"][part], strict=True):
            at = first_difference(tokens, expected)
            row["prompts"] += 1
            row["equal"] += at is None
            if at is not None:
                row["nats"].append(round(nats_behind(self.plain, prompt, expected[:at], tokens[at]), 5))

    def save(self) -> None:
        """The state, as a result."""
        args = self.args
        backend = self.plain.engine.runner.executor.name
        self.figures |= {
            "model": Path(args.model).name,
            "backend": backend,
            "dtype": str(self.plain.engine.model.dtype),
            "new_tokens": args.new_tokens,
            "length": LENGTH,
            "commit": commit(),
            "versions": {"triblade": __version__, "torch": torch.__version__},
        }
        args.output.write_text(json.dumps(self.figures) + "\n")


def main() -> None:
    """Compare, and fail where tokens differ."""
    args = arguments()
    if args.processes > 1:
        figures = in_processes(args)
        args.output.write_text(json.dumps(figures, indent=1) + "\n")
    else:
        comparison = Comparison(args)
        comparison.run()
        figures = comparison.figures
    rows = figures["rows"]
    allowed = NEAR_TIE_NATS if args.backend == "native" else 0.0
    wrong = {name: row["nats"] for name, row in rows.items() if any(nats >= allowed for nats in row["nats"])}
    sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"tokens differ: {wrong}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, GGUF file or alias")
    parser.add_argument("--backend", choices=["reference", "native"], required=True)
    parser.add_argument("--drafters", nargs="+", default=["suffix", "self", "eagle"], help="NAME or NAME:MODEL")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=250, help="after which no new piece is begun")
    parser.add_argument("--processes", type=int, default=1, help="with a share of the prompts and one thread each")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="of a process: first prompt and step")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def in_processes(args: argparse.Namespace) -> dict[str, Any]:
    """The sum of all shares, as far as each came."""
    shares = [args.output.with_suffix(f".{i}-of-{args.processes}.json") for i in range(args.processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = []
    for i, path in enumerate(shares):
        own = ["--processes", "1", "--share", str(i), str(args.processes), "--output", str(path)]  # the last one counts
        command = [sys.executable, __file__, *sys.argv[1:], *own]
        begun.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    for process in begun:
        process.wait()
    return merged([json.loads(path.read_text()) for path in shares if path.exists()])


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result of several shares: their counts added up."""
    rows: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, row in part["rows"].items():
            known = rows.get(name)
            rows[name] = row if known is None else {key: known[key] + row[key] for key in row}
    return {**{key: value for key, value in parts[0].items() if key != "plain"}, "rows": rows}


def engine(args: argparse.Namespace, drafter: str | None, way: dict[str, Any]) -> LLM:
    """An engine with a drafter of fixed length, or a plain one."""
    name, _, model = (drafter or "").partition(":")
    options: dict[str, Any] = {"max_model_len": CONTEXT, "num_kv_blocks": 8 * CONTEXT // 16, "seed": 0}
    options |= {"enable_prefix_caching": False, "backend": args.backend, **way}
    if args.backend == "reference":
        options |= {"dtype": "float32", "deterministic": True}
    if args.share[1] > 1:
        options["threads"] = 1
    if drafter is not None:
        options |= {"drafter": name, "draft_model": model or None}
        options |= {"draft_policy": "fixed", "num_speculative_tokens": LENGTH}
    return LLM(args.model, **options)


def prompts(llm: LLM, number: int) -> list[Tokens]:
    """Questions and editing tasks in turns, as chats."""
    found: list[Tokens] = []
    for name in ("chat", "edit"):
        lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        turns = [json.loads(line)["turns"] for line in lines]
        found += [llm.tokenizer.encode_chat([{"role": "user", "content": turn}]) for each in turns for turn in each[:1]]
    spread = [found[i * len(found) // number] for i in range(min(number, len(found)))]
    return spread[::2] + spread[1::2]


def answers(llm: LLM, some: list[Tokens], new_tokens: int) -> list[Tokens]:
    """Greedy tokens beyond the end of a turn."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    return [choices[0].token_ids for choices in llm.generate(some, params)]


if __name__ == "__main__":
    main()

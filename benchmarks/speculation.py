#!/usr/bin/env python3
"""Speculative decoding against plain decoding of the same weights, interleaved in one run.

    python benchmarks/speculation.py [--model smollm2-135m] [--drafters suffix draft:MODEL eagle:FOLDER eagle@3] [--policy adaptive]
        [--workloads chat edit] [--batches 1 4 16] [--prompts 16] [--rounds 3] [--output FILE.json]

Two workloads of this project (`prompts/`): 80 open questions and 40 tasks whose answers repeat much of the input. The plain engine
first writes every answer, greedily; an answer ends where the model ended it, or where a stretch was said for the third time in a
row, because small models fall into loops, and loops are too easy to draft. Then each round runs every engine on every workload and
batch size, one after the other; figures are medians over the rounds. Ratios are of tokens per second: `whole` with prompts,
`decode` over the steps without one. Answers must be the plain ones up to near ties: tokens less than 0.1 nats apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cpu import commit
from cpu_reference import cpu_name
from quiet import Watch
from speculation_runs import Run, Task, Tokens, before_loop, first_difference, nats_behind, run

from triblade import __version__
from triblade.llm import LLM

PROMPTS = Path(__file__).parent / "prompts"
NEAR_TIE_NATS = 0.1
OTHERS_SHARE = 0.1  # of one core, above which a measurement is repeated
PLAIN = "plain"
Key = tuple[str, str, int]  # engine, workload, batch


@dataclass
class Workload:
    """Tasks with the plain engine's answers."""

    tasks: list[Task]
    answers: list[Tokens]


@dataclass
class Bench:
    """Engines, tasks and what was measured."""

    args: argparse.Namespace
    engines: dict[str, LLM]
    workloads: dict[str, Workload]
    watch: Watch
    runs: dict[Key, list[Run]] = field(default_factory=dict)

    def round(self, *, keep: bool) -> None:
        """Everything once; the engines alternate within a workload and batch size."""
        for workload, batch in ((w, b) for w in self.workloads for b in self.args.batches):
            for name, llm in self.engines.items():
                tasks = self.workloads[workload].tasks
                found = self.watch.undisturbed(partial(run, llm, tasks, batch))
                if keep:
                    self.runs.setdefault((name, workload, batch), []).append(found)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One line per drafter, workload and batch size."""
        for (name, workload, batch), runs in self.runs.items():
            plain = self.runs[(PLAIN, workload, batch)]
            differences = self.differences(runs[-1], self.workloads[workload])
            ties = sum(nats < NEAR_TIE_NATS for nats in differences)
            figures = {"differing": len(differences), "near_ties": ties, "nats": [round(n, 4) for n in differences]}
            yield {"drafter": name, "workload": workload, "batch": batch, **summary(runs, plain), **figures}

    def differences(self, found: Run, workload: Workload) -> list[float]:
        """For each answer that is not the plain engine's: how far its first other token is behind the best, in nats."""
        result = []
        for number, (task, expected) in enumerate(zip(workload.tasks, workload.answers, strict=True)):
            answer = found.answers[number]
            at = first_difference(answer, expected)
            if at is not None:
                token = answer[at] if at < len(answer) else expected[at]
                result.append(nats_behind(self.engines[PLAIN], task.prompt, expected[:at], token))
        return result


def main() -> None:
    """Measure and report."""
    args = arguments()
    engines = {PLAIN: engine(args, None), **{name: engine(args, name) for name in args.drafters}}
    workloads = {name: workload(args, engines[PLAIN], name) for name in args.workloads}
    bench = Bench(args, engines, workloads, Watch(OTHERS_SHARE, args.quiet_s, args.tries))
    bench.round(keep=False)  # warms up
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
        bench.round(keep=True)
    figures = report(bench)
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(figures["rows"]))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, GGUF file or alias")
    parser.add_argument("--quantization", help="int4 or int8, for weights that are not quantized yet")
    parser.add_argument("--drafters", nargs="+", default=["suffix"], help="NAME[:MODEL][@FIXED LENGTH]")
    parser.add_argument("--policy", choices=["adaptive", "fixed"], default="adaptive")
    parser.add_argument("--length", type=int, default=8, help="most tokens drafted for a request and step")
    parser.add_argument("--workloads", nargs="+", default=["chat", "edit"], help="files of benchmarks/prompts")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16, help="of each workload, spread over its categories")
    parser.add_argument("--new-tokens", type=int, default=192, help="longest answer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quiet-s", type=float, default=5, help="longest wait for a quiet machine before a measurement"
    )
    parser.add_argument("--tries", type=int, default=2, help="of a measurement while the machine is not quiet")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def engine(args: argparse.Namespace, drafter: str | None) -> LLM:
    """An engine with a drafter, or a plain one. No prefix cache: every round computes its prompts."""
    stated, _, fixed = (drafter or "").partition("@")
    name, _, model = stated.partition(":")
    options: dict[str, Any] = {"drafter": name or None, "draft_model": model or None}
    return LLM(
        args.model,
        quantization=args.quantization,
        num_speculative_tokens=int(fixed or args.length),
        draft_policy="fixed" if fixed else args.policy,
        max_model_len=2048,
        max_num_seqs=max(args.batches),
        threads=args.threads,
        seed=args.seed,
        enable_prefix_caching=False,
        **options,
    )


def workload(args: argparse.Namespace, plain: LLM, name: str) -> Workload:
    """Some prompts of a file, spread over it, as tasks that end before the answers loop."""
    lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    number = min(args.prompts, len(lines))
    chosen = [json.loads(lines[i * len(lines) // number]) for i in range(number)]
    random.Random(args.seed).shuffle(chosen)
    encode = plain.tokenizer.encode_chat
    prompts = [encode([{"role": "user", "content": item["turns"][0]}]) for item in chosen]
    answers = run(plain, [Task(prompt, args.new_tokens) for prompt in prompts], 1).answers
    lengths = [before_loop(answers[i]) for i in range(number)]
    tasks = [Task(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    return Workload(tasks, [answers[i][:length] for i, length in enumerate(lengths)])


def summary(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Medians over the rounds, and counts of the last one."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    whole, decode = [r.tokens / r.seconds for r in runs], [r.decode_tokens / r.decode_seconds for r in runs]
    last = runs[-1]
    positions = zip(last.drafted, last.accepted, strict=True)
    return {
        "tokens_per_s": {"whole": median(whole), "decode": median(decode)},
        "ratio": {
            "whole": median([rate * p.seconds / p.tokens for rate, p in zip(whole, plain, strict=True)]),
            "decode": median(
                [rate * p.decode_seconds / p.decode_tokens for rate, p in zip(decode, plain, strict=True)]
            ),
        },
        "tokens_per_step": round(last.decode_tokens / last.decode_rows, 3),
        "drafted_by_position": last.drafted,
        "acceptance_by_position": [round(accepted / drafted, 3) for drafted, accepted in positions if drafted],
        "drafter_share": median([r.drafter_seconds / r.seconds for r in runs]),
        "tokens": last.tokens,
    }


def report(bench: Bench) -> dict[str, Any]:
    """Everything about the run."""
    args = bench.args
    lengths = {name: [len(answer) for answer in found.answers] for name, found in bench.workloads.items()}
    return {
        "what": "greedy answers with a drafter against plain decoding, tokens per second, ratios within a round",
        "model": Path(args.model).name,
        "quantization": args.quantization or "as stored",
        "policy": args.policy,
        "length": args.length,
        "rows": list(bench.rows()),
        "answer_tokens": lengths,
        "rounds": args.rounds,
        "seed": args.seed,
        "threads": args.threads,
        "backend": bench.engines[PLAIN].engine.runner.executor.name,
        "commit": commit(),
        "versions": {"triblade": __version__, "torch": torch.__version__},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "others": {"mean_share_of_a_core": statistics.mean(bench.watch.shares), "repeated": bench.watch.repeated},
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The figures as Markdown."""
    heads = (
        "drafter",
        "workload",
        "batch",
        "whole",
        "decode",
        "tokens a step",
        "acceptance",
        "drafter",
        "differing (ties)",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        acceptance = " ".join(f"{value:.2f}" for value in row["acceptance_by_position"])
        ratios = [f"{row['ratio'][kind]:.2f} ({row['tokens_per_s'][kind]:.0f}/s)" for kind in ("whole", "decode")]
        cells = [
            row["drafter"],
            row["workload"],
            str(row["batch"]),
            *ratios,
            f"{row['tokens_per_step']:.2f}",
            acceptance,
        ]
        cells += [f"{row['drafter_share']:.1%}", f"{row['differing']} ({row['near_ties']})"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

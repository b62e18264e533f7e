#!/usr/bin/env python3
"""What an eagle head's guesses are worth on targets of several precisions: tokens per step, and right guesses by position.

    python benchmarks/eagle_targets.py --target int4=MODEL.gguf --target bf16=FOLDER --target int8=FOLDER:int8 [--head FOLDER]
        [--tokens 128] [--prompts 80] [--output FILE.json]

A target is a model, or a model and what it is rounded to while loading. Each answers the questions of `prompts/chat.jsonl`
greedily, sixteen at a time, and the head (without --head: the package's) drafts four tokens for every step. Nothing is timed. Knows
no head from inside: what is counted is what becomes of the engine's drafts.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from cpu import commit

from triblade import __version__
from triblade.engine.engine import Engine
from triblade.engine.probe import LENGTH, probe
from triblade.llm import LLM
from triblade.sampling_params import SamplingParams

CHAT = Path(__file__).parent / "prompts" / "chat.jsonl"
AT_ONCE = 16


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", required=True, metavar="NAME=MODEL[:QUANTIZATION]")
    parser.add_argument("--head", help="folder that `triblade align` wrote")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--prompts", type=int, default=80, help="of the file, spread over it")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, _, stated in (target.partition("=") for target in args.target):
        model, _, quantization = stated.partition(":")
        rows[name] = guesses(engine(args, model, quantization or None), args)
        print(name, json.dumps(rows[name]), flush=True)
    figures = {
        "what": "greedy answers to the chat questions, a head's guesses for every step, by target; nothing is timed",
        "head": Path(args.head).name if args.head else "the package's",
        "drafted tokens": LENGTH,
        "prompts": args.prompts,
        "tokens per prompt": args.tokens,
        "targets": rows,
        "commit": commit(),
        "versions": {"triblade": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n")


def engine(args: argparse.Namespace, model: str, quantization: str | None) -> Engine:
    """The target with the head."""
    options = {"quantization": quantization, "draft_model": args.head}
    return LLM(model, drafter="eagle", max_num_seqs=AT_ONCE, max_model_len=2048, **options).engine


def guesses(target: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """What became of the drafts."""
    lines = CHAT.read_text(encoding="utf-8").splitlines()
    number = min(args.prompts, len(lines))
    turns = [json.loads(lines[i * len(lines) // number])["turns"][0] for i in range(number)]
    prompts = [target.tokenizer.render_chat([{"role": "user", "content": turn}]) for turn in turns]
    found = probe(target, prompts, SamplingParams(temperature=0, max_tokens=args.tokens))
    rates = [round(a / d, 3) for a, d in zip(found.accepted, found.drafted, strict=True)]
    conditional = [round(a / d, 3) for a, d in zip(found.accepted, (found.num_drafts, *found.accepted), strict=False)]
    return {
        "tokens per step": round(found.mean_length, 3),
        "accepted by position": rates,
        "right where those before were": conditional,
        "drafts": found.num_drafts,
    }


if __name__ == "__main__":
    main()

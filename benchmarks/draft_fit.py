#!/usr/bin/env python3
"""What a wrong rope setting costs a draft and what the repair gives back; what smoothing does to drafts of quantized weights.

    python benchmarks/draft_fit.py --model FOLDER [--draft NAME=MODEL ...] [--tokens 64] [--output FILE.json]

FOLDER is a checkpoint in bfloat16, target and draft alike. For the first table its config.json is copied into a temporary folder
with another rope setting; that copy drafts as it is, then as `fit_of_draft` repaired it. For the second, requests sample at
temperature 1 and the drafts are the model's own weights in int4 (rounded while loading) and the models named by --draft, with
certain proposals (0) and with draws at several smoothing factors. Greedy and sampled acceptance are counted on the native kernels,
by prompts of chat; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from triblade import __version__
from triblade.config import EngineConfig
from triblade.engine.build import build_engine, kv_layout, native_executor, native_weights
from triblade.engine.engine import Engine
from triblade.engine.native import NativeExecutor
from triblade.engine.native_program import make_team
from triblade.engine.probe import probe
from triblade.engine.speculation import Speculator
from triblade.kv.cache import KVCache
from triblade.models.loader import OpenModel, open_model
from triblade.sampling_params import SamplingParams
from triblade.spec.draft_model import DraftLimits, ModelDrafter
from triblade.spec.policy import FixedPolicy
from triblade.spec.rope_trial import fit_of_draft

LENGTH, CONTEXT = 4, 1024
WRONG: Mapping[str, Mapping[str, Any]] = {
    "theta 10,000": {"rope_theta": 1e4},
    "theta 1,000,000": {"rope_theta": 1e6},
    "linear scaling by 4": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}
SMOOTHING = (0.0, 0.8, 1.0, 1.2, 1.4)
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain what a neural network is to a child.",
    "How do I bake bread without an oven?",
    "List five exercises for a healthy back.",
    "What were the causes of the First World War?",
    "Write a Python function that reverses a list.",
    "Give me three names for a bookshop and explain each.",
    "How does a refrigerator work?",
    "Write an email to a colleague who missed a deadline.",
    "What is the difference between weather and climate?",
    "Describe a day in the life of a lighthouse keeper.",
    "How can I learn a language faster?",
    "What should I see in Rome in two days?",
    "Explain compound interest with an example.",
    "Tell me a story about a fox and a clock.",
)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=MODEL")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    config = EngineConfig(model=str(args.model), backend="native", max_model_len=CONTEXT, num_kv_blocks=512)
    engine = build_engine(config)
    figures = {
        "what": "drafts with wrong rope settings before and after the repair (greedy), smoothing of quantized drafts (sampled)",
        "model": str(args.model),
        "drafted tokens": LENGTH,
        "prompts": len(QUESTIONS),
        "tokens per prompt": args.tokens,
        "versions": {"triblade": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "rope": ropes(engine, config, args),
        "smoothing": smoothing(engine, config, args),
    }
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n")


def ropes(engine: Engine, config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Acceptance of drafts with wrong rope settings before and after the repair, greedily, and that of the right one."""
    greedy = SamplingParams(temperature=0, max_tokens=args.tokens)

    def measure(draft: OpenModel) -> dict[str, Any]:
        return accepted(engine, executor_of(engine, config, draft), greedy)

    found: dict[str, Any] = {"right": measure(engine.model)}
    for name, changes in WRONG.items():
        with tempfile.TemporaryDirectory() as folder:
            draft = open_model(replace(config, model=str(copy_with(args.model, Path(folder), changes))))
            report = fit_of_draft(engine.model, draft)
            found[name] = {
                "found": [str(finding) for finding in report.findings if finding.subject == "rope"],
                "before": measure(draft),
                "after": measure(report.repaired),
            }
        print(name, json.dumps(found[name]), flush=True)
    return found


def smoothing(engine: Engine, config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Acceptance of quantized drafts by requests that sample, for each smoothing factor."""
    sampled = SamplingParams(temperature=1.0, max_tokens=args.tokens)
    drafts = {"int4": replace(config, quantization="int4")}
    drafts |= {name: replace(config, model=model) for name, _, model in (d.partition("=") for d in args.draft)}
    found: dict[str, Any] = {}
    for name, own in drafts.items():
        executor = executor_of(engine, own, open_model(own))
        found[name] = {f"{factor:g}": accepted(engine, executor, sampled, factor) for factor in SMOOTHING}
        print(name, json.dumps(found[name]), flush=True)
    return found


def copy_with(model: Path, folder: Path, changes: Mapping[str, Any]) -> Path:
    """The model folder with other entries in its config.json."""
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    stated = json.loads((model / "config.json").read_text())
    stated.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps({"rope_theta": 1e5, **stated, **changes}))
    return folder


def executor_of(engine: Engine, own: EngineConfig, draft: OpenModel) -> NativeExecutor:
    """The draft as it is, whatever the comparison says, with a cache of its own."""
    cache = KVCache(kv_layout(own, draft, True), engine.pool.num_blocks, draft.dtype)
    return native_executor(own, draft, native_weights(own, draft), cache, CONTEXT, make_team(1, 0))


def accepted(
    engine: Engine, executor: NativeExecutor, params: SamplingParams, temperature: float = 0.0
) -> dict[str, Any]:
    """What becomes of its proposals."""
    scheduler = engine.scheduler
    limits = DraftLimits(context_length=CONTEXT, max_tokens=scheduler.max_num_batched_tokens, temperature=temperature)
    drafter = ModelDrafter(executor, scheduler.block_size, limits)
    engine.speculator = Speculator(drafter, scheduler, FixedPolicy(LENGTH))
    prompts = [engine.tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    found = probe(engine, prompts, params)
    rates = [round(a / d, 3) for a, d in zip(found.accepted, found.drafted, strict=True)]
    return {"tokens per step": round(found.mean_length, 3), "by position": rates, "drafts": found.num_drafts}


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Speculation for long: 5,000 requests through two engines.

    python benchmarks/speculation_soak.py [--number N] [--output FILE.json]

On tiny models with random weights, through `Engine.step` and everything behind it: two engines in one process, the one with a draft
model whose context is shorter than its target's, the other with a head; every third request is aborted, some in the middle of a
draft. In the end the pools must be at their baseline and the memory where it was after the first tenth.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from drafters import model_drafter, speculate
from eagle_heads import WINDOW, random_weights
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.engine.engine import Engine
from triblade.llm import LLM
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams
from triblade.spec.eagle_files import save_eagle, target_facts

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def main() -> None:
    """Run and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=5_000, help="requests")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = json.dumps({"requests": requests(args.number)}, indent=1) + "\n"
    if args.output:
        args.output.write_text(text)
    sys.stdout.write(text)


def target(context: int) -> OpenModel:
    """A tiny model with random weights."""
    return open_tiny("llama", seed=1, max_position_embeddings=context, **SIZES)


def with_drafter(name: str, model: OpenModel, length: int, **options: Any) -> LLM:
    """An engine whose drafter proposes `length` tokens in every step."""
    if name == "eagle":
        settings = {"draft_policy": "fixed", "num_speculative_tokens": length, "draft_confidence": 0.0, **options}
        with TemporaryDirectory() as folder:
            facts = {"window": WINDOW, "inner_layers": [0]}
            save_eagle(Path(folder), target_facts(model), random_weights(model, bits=4, num_inner=1), facts)
            return tiny_llm(model, drafter="eagle", draft_model=folder, **settings)
    llm = tiny_llm(model, **options)
    other = open_tiny("llama", seed=0, max_position_embeddings=24, **SIZES)
    return speculate(llm, model_drafter(llm, other), length)


def requests(number: int) -> dict[str, Any]:
    """Many requests through two engines, a third of them aborted."""
    model = target(48)
    engines = [with_drafter(name, model, 3, num_kv_blocks=40).engine for name in ("short draft", "eagle")]
    process, randomness = psutil.Process(), random.Random(0)
    aborted = in_draft = 0
    memory: list[int] = []
    for done in range(number):
        params = SamplingParams(temperature=randomness.choice([0.0, 0.9]), max_tokens=12, ignore_eos=True)
        ids = prompt(randomness.randint(1, 30), seed=randomness.randrange(50))
        engine = engines[done % 2]
        (request,) = engine.prepare(ids, params)
        engine.add([request])
        for _ in range(randomness.randint(1, 5)):
            engine.step()
        if done % 3 == 0 and not request.is_finished:
            aborted += 1
            in_draft += bool(request.draft_token_ids)
            engine.abort([request])
        if done % max(1, number // 20) == 0:
            memory.append(process.memory_info().rss)
    for engine in engines:
        drain(engine)
    memory.append(process.memory_info().rss)
    settled = memory[2]
    checks = {
        "pools at baseline": all(engine.pool.num_free == engine.pool.num_blocks for engine in engines),
        "memory flat": memory[-1] < settled + 2**24,
        "drafts were aborted": in_draft > 0,
    }
    if not all(checks.values()):
        raise SystemExit(f"the soak found a difference: {checks}, {memory}")
    return {
        "requests": number,
        "aborted": aborted,
        "aborted_in_a_draft": in_draft,
        "memory_mb": [round(rss / 1e6, 1) for rss in memory],
        "checks": checks,
        "remembered_requests": [engine.speculator.drafter.num_requests for engine in engines],  # type: ignore[union-attr]
    }


def drain(engine: Engine) -> None:
    """To the end of all requests."""
    while engine.has_work:
        engine.step()
    engine.check_idle()


if __name__ == "__main__":
    main()

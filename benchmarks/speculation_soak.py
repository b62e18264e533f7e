#!/usr/bin/env python3
"""Speculation for long: 200,000 sampled tokens per drafter against exact probabilities, and 5,000 requests through two engines.

    python benchmarks/speculation_soak.py draws|requests [--number N] [--output FILE.json]

Both on tiny models with random weights, through `Engine.step` and everything behind it. `draws`: after one prompt many choices are
sampled, each with its own seed; the pairs of their first two tokens, the second of which a verified draft gave, are compared with
the exact probabilities of all pairs, computed from the model's logits in float64 (chi-square, p > 0.001), plainly and with
penalties and top_p. `requests`: two engines in one process, the one with a draft model whose context is shorter than its target's,
the other with a head or the suffix index; every third request is aborted, some in the middle of a draft. In the end the pools must
be at their baseline and the memory where it was after the first tenth.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from drafters import model_drafter, speculate
from eagle_heads import WINDOW, random_weights
from tiny import prompt
from tiny_engine import open_tiny, plain_decoder, plain_logits, tiny_llm
from toy import chi_square_p, reference_distribution

from triblade.engine.engine import Engine
from triblade.llm import LLM
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams
from triblade.spec.eagle_files import save_eagle, target_facts
from triblade.spec.sampler import Sampler, SamplerRow
from triblade.spec.suffix import SuffixDrafter

SIZES = {"hidden_size": 64, "intermediate_size": 96}
PROMPT = prompt(12, seed=5)
OPTIONS: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 1.5, "top_k": 4},
    "penalties, top_p": {
        "temperature": 1.2,
        "top_k": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    },
}
CHOICES = 128
Pair = tuple[int, int]


def main() -> None:
    """Run one of the two and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["draws", "requests"])
    parser.add_argument("--number", type=int, help="draws per drafter (200,000), or requests (5,000)")
    parser.add_argument("--drafters", nargs="+", default=["suffix", "draft", "drawn draft", "eagle"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = (
        {name: draws(name, args.number or 200_000) for name in args.drafters}
        if args.what == "draws"
        else requests(args.number or 5_000)
    )
    text = json.dumps(figures, indent=1)
    if args.output:
        known = json.loads(args.output.read_text()) if args.output.exists() else {}
        args.output.write_text(
            json.dumps({**known, args.what: {**known.get(args.what, {}), **figures}}, indent=1) + "\n"
        )
    sys.stdout.write(text + "\n")


def target(context: int = 64) -> OpenModel:
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
    if name == "suffix":
        return speculate(llm, SuffixDrafter(), length)
    other = open_tiny("llama", seed=0, max_position_embeddings=24 if name == "short draft" else 64, **SIZES)
    return speculate(llm, model_drafter(llm, other, 1.3 if name == "drawn draft" else 0.0), length)


def draws(name: str, number: int) -> dict[str, Any]:
    """Pairs of tokens with one drafter, for each set of options."""
    figures: dict[str, Any] = {}
    for label, options in OPTIONS.items():
        params = SamplingParams(n=CHOICES, max_tokens=4, ignore_eos=True, **options)
        llm = with_drafter(name, target(), 2, num_kv_blocks=1024, max_num_seqs=CHOICES)
        expected, counts = pair_probabilities(params), Counter[Pair]()
        start = time.monotonic()
        for seed in range(-(-number // CHOICES)):
            (choices,) = llm.generate([PROMPT], replace(params, seed=seed))
            counts.update((choice.token_ids[0], choice.token_ids[1]) for choice in choices)
        total = counts.total()
        load = llm.engine.load().speculation
        wanted = torch.tensor(list(expected.values()), dtype=torch.float64) * total
        seen = torch.tensor([counts[pair] for pair in expected], dtype=torch.float64)
        impossible = total - int(seen.sum())
        figures[label] = {
            "draws": total,
            "pairs": len(expected),
            "impossible": impossible,
            "p": chi_square_p(seen, wanted),
            "drafted": load.num_draft_tokens,
            "accepted": load.num_accepted_tokens,
            "seconds": round(time.monotonic() - start, 1),
        }
        llm.engine.check_idle()
        sys.stderr.write(f"{name}, {label}: {figures[label]}\n")
    return figures


def pair_probabilities(params: SamplingParams) -> dict[Pair, float]:
    """Of each pair of tokens that may follow the prompt."""
    pairs: dict[Pair, float] = {}
    for first, p in next_probabilities([], params).items():
        for second, q in next_probabilities([first], params).items():
            pairs[first, second] = p * q
    return pairs


def next_probabilities(output: list[int], params: SamplingParams) -> dict[int, float]:
    """The distribution after some output: penalties by the sampler's own processing, filters by the plainest way."""
    logits = plain_logits(plain_decoder(target()), [*PROMPT, *output])[-1:]
    row = SamplerRow(params, 0, len(output), PROMPT, output, frozenset())
    processed = Sampler(logits.shape[-1]).process(logits.float(), [row])[0].tolist()
    return {token: p for token, p in enumerate(reference_distribution(processed, params)) if p > 0}


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

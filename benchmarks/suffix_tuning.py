#!/usr/bin/env python3
"""The constants of the suffix drafter: answers of a model replayed through the index, without computing them again.

    python benchmarks/suffix_tuning.py --model FOLDER [MORE ...] [--quantization int4] [--lengths 4 8]

Every model answers the prompts of `prompts/tuning.jsonl` greedily; no other measurement uses these prompts. An answer ends before
it falls into a loop. Then each setting drafts for every answer as an engine would, with what the steps of the native backend
cost (`results/cpu-native.json`), and the speed against plain decoding is printed by batch size. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from speculation import PROMPTS
from speculation_runs import Task, Tokens, before_loop, run

from triblade.llm import LLM
from triblade.spec.suffix import make_index
from triblade.spec.suffix_index import SuffixOptions

# Milliseconds, SmolLM2-135M in int4 on two cores: a plain step divided by its requests, and each further token of a request. Up to
# five tokens in a step cost less than those that follow.
COSTS = {1: (2.83, 0.25), 2: (1.6, 0.4), 4: (1.04, 0.65), 8: (0.86, 0.65), 16: (0.78, 0.65)}
FEW_TOKENS, DEAR_TOKEN_MS = 5, 0.45
Answer = tuple[str, Tokens, Tokens]  # workload, prompt, answer


def main() -> None:
    """Write answers, replay them, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--quantization")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--least", type=float, nargs="+", default=[0.2, 0.3, 0.45, 0.55, 0.65, 0.75, 0.85])
    args = parser.parse_args()
    written = [answer for model in args.model for answer in answers(model, args.quantization, args.new_tokens)]
    base = SuffixOptions()
    settings = [base, replace(base, own_minimum_match=2), replace(base, own_minimum_match=3)]
    settings += [replace(base, own_doubt=0.7), replace(base, own_doubt=2.0), replace(base, max_candidates=16)]
    for batch in COSTS:
        for length in args.lengths:
            for least in args.least:
                print(f"batch {batch} length {length} least {least}: {speeds(written, base, (batch, length, least))}")
    for options in settings:
        print(f"{options}: {speeds(written, options, (1, 8, 0.3))}")


def answers(model: str, quantization: str | None, new_tokens: int) -> Iterator[Answer]:
    """What a model answers to the prompts for tuning."""
    llm = LLM(model, quantization=quantization, max_model_len=2048, max_num_seqs=8)
    items = [json.loads(line) for line in (PROMPTS / "tuning.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": item["turns"][0]}]) for item in items]
    found = run(llm, [Task(prompt, new_tokens) for prompt in prompts], 8).answers
    for number, (item, prompt) in enumerate(zip(items, prompts, strict=True)):
        yield item["id"].partition("-")[0], prompt, found[number][: before_loop(found[number])]


def speeds(written: Sequence[Answer], options: SuffixOptions, how: tuple[int, int, float]) -> dict[str, float]:
    """Speed against plain decoding of each workload, for (batch, length, least probability)."""
    batch, _, _ = how
    result = {}
    for workload in dict.fromkeys(name for name, _, _ in written):
        counts = [replay(prompt, answer, options, how) for name, prompt, answer in written if name == workload]
        tokens, cost = (sum(values) for values in zip(*counts, strict=True))
        result[workload] = round(tokens * COSTS[batch][0] / cost, 3)
    return result


def replay(prompt: Tokens, answer: Tokens, options: SuffixOptions, how: tuple[int, int, float]) -> tuple[int, float]:
    """Tokens after the first, and the milliseconds of a request's share of the steps that they took."""
    batch, length, least = how
    index, new, done, cost = make_index(options), [*prompt, *answer[:1]], 1, 0.0
    while done < len(answer):
        draft = index.propose(0, new, min(length, len(answer) - done - 1), least)
        accepted = next((i for i, token in enumerate(draft) if token != answer[done + i]), len(draft))
        new = answer[done : done + accepted + 1]
        done += len(new)
        cost += step_ms(batch, len(draft))
    return len(answer) - 1, cost


def step_ms(batch: int, drafted: int) -> float:
    """A request's share of a step."""
    base, each = COSTS[batch]
    cheap = min(drafted, FEW_TOKENS - 1)
    return base + each * cheap + max(each, DEAR_TOKEN_MS) * (drafted - cheap)


if __name__ == "__main__":
    main()

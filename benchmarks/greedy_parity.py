#!/usr/bin/env python3
"""Greedy tokens against transformers on a real model in float32, and the engine's equivalence matrix on the same prompts.

    python benchmarks/greedy_parity.py [--model smollm2-135m] [--prompts 50] [--text FILE] [--output FILE.json]

Prompts are slices of `--text` (default: this repository's own documentation) of 1 to 512 tokens. The default engine in float32
must produce transformers' tokens; where it does not, the difference of the two best logits there is reported (a near tie).
In deterministic mode alone = batched with 7 others = chunks of 1, 7, 64 = warm prefix = forced preemption, token for token.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from triblade.config import EngineConfig
from triblade.engine.build import assemble
from triblade.llm import LLM
from triblade.models.loader import open_model
from triblade.models.source import resolve
from triblade.sampling_params import SamplingParams

REPOSITORY = Path(__file__).resolve().parent.parent
Tokens = list[int]


def main() -> None:
    """Run both comparisons and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--matrix-prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--text", type=Path, nargs="*", default=sorted((REPOSITORY / "docs").rglob("*.md")))
    parser.add_argument("--only", choices=["parity", "matrix"], help="one of the two comparisons")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    prompts = make_prompts(args.model, args.text, args.prompts)
    figures: dict[str, Any] = {
        "model": args.model,
        "prompts": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "new_tokens": args.new_tokens,
        "torch": torch.__version__,
    }
    if args.only != "matrix":
        figures["parity"] = parity(args.model, prompts, args.new_tokens)
        sys.stderr.write(f"{figures['parity']}\n")
    if args.only != "parity":
        figures["matrix"] = matrix(args.model, prompts[: args.matrix_prompts], args.new_tokens)
    text = json.dumps(figures, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    if figures.get("parity", {}).get("real_differences") or not all(figures.get("matrix", {}).values()):
        raise SystemExit("tokens differ")


def make_prompts(model: str, files: Sequence[Path], count: int) -> list[Tokens]:
    """Slices of the texts, of 1 to 512 tokens."""
    tokenizer = open_model(EngineConfig(model=model)).tokenizer
    ids = tokenizer.encode("\n".join(path.read_text(encoding="utf-8") for path in files), add_special_tokens=False)
    rng = random.Random(0)
    lengths = [1, 2, 15, 16, 17, 511, 512, *(rng.randint(1, 512) for _ in range(count))][:count]
    return [ids[start : start + n] for n in lengths for start in [rng.randrange(len(ids) - n)]]


def parity(model: str, prompts: list[Tokens], new_tokens: int) -> dict[str, Any]:
    """Compare with transformers, prompt by prompt."""
    import transformers

    path = resolve(model)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
    ours = run(LLM(model, dtype="float32"), prompts, new_tokens)
    started, equal, differences = time.monotonic(), 0, []
    for prompt, tokens in zip(prompts, ours, strict=True):
        expected, gaps = oracle_greedy(oracle, prompt, new_tokens)
        if tokens == expected:
            equal += 1
        else:
            at = next(i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1])
            differences.append({"prompt_tokens": len(prompt), "at": at, "logit_gap": gaps[at]})
    real = [d for d in differences if d["logit_gap"] > 1e-3]
    seconds = round(time.monotonic() - started, 1)
    return {"equal": equal, "differences": differences, "real_differences": len(real), "oracle_seconds": seconds}


@torch.inference_mode()
def oracle_greedy(oracle: Any, prompt: Tokens, new_tokens: int) -> tuple[Tokens, list[float]]:
    """Greedy tokens and the gap between the two best logits at each, by a plain loop with a key-value cache."""
    ids, cache, tokens, gaps = torch.tensor([prompt]), None, [], []
    for _ in range(new_tokens):
        out = oracle(ids, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1]
        best = logits.topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        ids = best.indices[:1][None]
    return tokens, gaps


def matrix(model: str, prompts: list[Tokens], new_tokens: int) -> dict[str, bool]:
    """Deterministic mode: the same tokens in every way of computing them."""
    opened = open_model(EngineConfig(model=model, deterministic=True))

    def engine(**options: Any) -> LLM:
        config = EngineConfig(**{"model": model, "deterministic": True, "max_model_len": 1024, **options})
        return LLM.from_engine(assemble(config, opened, torch.device("cpu")))

    alone = [run(engine(), [prompt], new_tokens)[0] for prompt in prompts]
    result = {"batched": run(engine(), prompts, new_tokens) == alone}
    for chunk in (64, 7, 1):
        result[f"chunk {chunk}"] = run(engine(max_num_batched_tokens=chunk), prompts, new_tokens) == alone
        sys.stderr.write(f"{result}\n")
    warm = engine()
    run(warm, prompts, new_tokens)
    result["warm prefix"] = run(warm, prompts, new_tokens) == alone
    result["warm prefix was used"] = warm.engine.load().num_cached_prompt_tokens > 0
    blocks = max(-(-(len(prompt) + new_tokens) // 16) for prompt in prompts) + 8
    tight = engine(num_kv_blocks=blocks, max_model_len=blocks * 16)
    result["preempted"] = run(tight, prompts, new_tokens) == alone
    result["preemption happened"] = tight.engine.load().num_preemptions > 0
    return result


def run(llm: LLM, prompts: list[Tokens], new_tokens: int) -> list[Tokens]:
    """Greedy tokens of all prompts together."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    return [choices[0].token_ids for choices in llm.generate(prompts, params)]


if __name__ == "__main__":
    main()

"""One engine on one GPU with each way to attend that is installed: Qwen2-7B shapes, random int4 weights.

Prints tokens per second of prompts of 1,024 tokens and of decoding. With `--model`, a folder or file of a real model, also counts
the prompts of which a way gives the greedy tokens of our kernels, and how many nats behind the best its first other token is.
Packages that compile their kernels do so when they are first called. Needs CUDA.
Run: python benchmarks/gpu_attention.py [--batches 1 16 64] [--ways triblade flashinfer] [--model FOLDER] [--out FILE].
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_models import shape
from speculation_runs import first_difference, nats_behind

from gpu import Model, generate
from triblade.engine.attend import AttentionNeeds
from triblade.engine.attention_choice import OWN, choose_attention
from triblade.llm import LLM
from triblade.registry import ATTENTION_BACKENDS
from triblade.sampling_params import SamplingParams

PROMPT, NEW = 1024, 48
PROMPTS = Path(__file__).parent / "prompts" / "chat.jsonl"
ANSWER_TOKENS = 64
DISTRIBUTIONS = ("flash-attn", "flash-attn-4", "flashinfer-python", "torch", "triton")


def attend_by(model: Model, name: str) -> bool:
    """Have a model attend so; False where that is not possible here."""
    if name == OWN:
        return True
    needs = AttentionNeeds(
        model=model.config, dtype=torch.bfloat16, codec="bfloat16", capability=torch.cuda.get_device_capability()
    )
    attention = choose_attention(name, (OWN, "fastest"), needs, model.cache)
    if attention is None:
        return False
    model.executor.attend_by(attention)
    return True


def speeds(ways: Sequence[str], batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row per way and batch size."""
    model = Model(shape("qwen2-7b"), "w4", max(batches), PROMPT + NEW + 16)
    for name in ways:
        begun = time.perf_counter()
        if not attend_by(model, name):
            continue
        first_s = time.perf_counter() - begun
        for batch in batches:
            figures = [generate(model, batch, PROMPT, NEW) for _ in range(2)][1]
            print(
                f"{name:10} B={batch:3}: prompts {figures['prefill_tokens_per_s']:9,.0f} tok/s, "
                f"decoding {figures['decode_tokens_per_s']:8,.0f} tok/s; ready after {first_s:.1f} s",
                flush=True,
            )
            yield {"attention": name, "batch": batch, "first_s": first_s, **figures}


def agreement(model: str, ways: Sequence[str], count: int) -> Iterator[dict[str, Any]]:
    """A row per way: answers to chat prompts beside those of our kernels, which judge how near a tie was."""
    ours = LLM(model, attention_backend=OWN, max_model_len=2048, max_num_seqs=count)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:count]
    turns = [json.loads(line)["turns"][0] for line in lines]
    prompts = [ours.tokenizer.encode_chat([{"role": "user", "content": turn}]) for turn in turns]
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    expected = [choices[0].token_ids for choices in ours.generate(prompts, params)]
    for name in ways:
        llm = LLM(model, attention_backend=name, max_model_len=2048, max_num_seqs=count)
        nats = []
        for prompt, choices, answer in zip(prompts, llm.generate(prompts, params), expected, strict=True):
            tokens = choices[0].token_ids
            at = first_difference(tokens, answer)
            if at is not None:
                nats.append(round(nats_behind(ours, prompt, answer[:at], tokens[at]), 4))
        print(f"{name:10} {count - len(nats)} of {count} answers equal, others nats behind: {nats}", flush=True)
        yield {"attention": name, "answers": count, "equal": count - len(nats), "nats": nats}


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = dict[str, str]()
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--ways", nargs="+", default=[OWN, *ATTENTION_BACKENDS])
    parser.add_argument("--model", help="also compare answers of this model")
    parser.add_argument("--prompts", type=int, default=16, help="of the comparison")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "versions": versions()}
    if options.model:
        results["model"] = Path(options.model).name
        results["agreement"] = list(agreement(options.model, options.ways, options.prompts))
    results["rows"] = list(speeds(options.ways, options.batches)) if options.batches else []
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

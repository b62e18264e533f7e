#!/usr/bin/env python3
"""Throughput of the reference backend against transformers `generate` in bfloat16, interleaved in one run.

    python benchmarks/cpu_reference.py [--model smollm2-135m] [--threads 2] [--repeat 5] [--output FILE.json]

Each round runs transformers at batch 1, ours at batch 1 and ours at batch 8: a prompt of 128 random tokens per sequence, 64 new
tokens, greedy, end token ignored; tokens per second are new tokens over the whole time. Medians of the rounds and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from triblade import __version__
from triblade.llm import LLM
from triblade.models.source import resolve
from triblade.sampling_params import SamplingParams


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    options = {"dtype": "bfloat16", "backend": "reference", "threads": args.threads, "max_model_len": 2048}
    ours = LLM(args.model, enable_prefix_caching=False, **options)
    runs = {
        "transformers batch 1": transformers_run(args.model, args.prompt_tokens, args.new_tokens),
        "triblade batch 1": triblade_run(ours, 1, args.prompt_tokens, args.new_tokens),
        "triblade batch 8": triblade_run(ours, 8, args.prompt_tokens, args.new_tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for measured in range(-1, args.repeat):  # the first round warms up
        for name, function in runs.items():
            start = time.perf_counter()
            tokens = function()
            if measured >= 0:
                rates[name].append(tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    peer = medians["transformers batch 1"]
    figures = {
        "what": f"{args.new_tokens} new tokens after a prompt of {args.prompt_tokens}, tokens per second, bfloat16",
        "ratio": {name: medians[name] / peer for name in list(runs)[1:]},
        "medians": medians,
        "all": rates,
        "threads": args.threads,
        "versions": {"triblade": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
    }
    text = json.dumps(figures, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    sys.stdout.write(text + "\n")


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids that no cache has seen."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40000, (length,), generator=generator).tolist()


def triblade_run(llm: LLM, batch: int, prompt_tokens: int, new_tokens: int) -> Callable[[], int]:
    """A function that generates and returns the number of new tokens."""
    prompts = [random_prompt(seed, prompt_tokens) for seed in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)

    def run() -> int:
        return sum(len(choices[0].token_ids) for choices in llm.generate(prompts, params))

    return run


def transformers_run(model: str, prompt_tokens: int, new_tokens: int) -> Callable[[], int]:
    """The same with transformers."""
    import transformers

    path = resolve(model)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **where).eval()
    ids = torch.tensor([random_prompt(0, prompt_tokens)])

    @torch.inference_mode()
    def run() -> int:
        out = oracle.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
        return int(out.shape[1]) - prompt_tokens

    return run


def cpu_name() -> str:
    """The processor, where Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()

"""One engine on one GPU with each way to attend that comes with torch or with us: Qwen2-7B shapes, random int4 weights.

Prints tokens per second of prompts of 1,024 tokens and of decoding. Needs CUDA.
Run: python benchmarks/gpu_attention.py [--batches 1 16] [--out FILE].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from gpu_models import shape

from gpu import Model, generate
from triblade.engine.attend import EagerAttention, SdpaAttention
from triblade.engine.attention_packages import TritonAttention

PROMPT, NEW = 1024, 48
WAYS = (("triblade", None), ("triton", TritonAttention), ("sdpa", SdpaAttention), ("eager", EagerAttention))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    model = Model(shape("qwen2-7b"), "w4", max(options.batches), PROMPT + NEW + 16)
    for name, kind in WAYS:
        if kind is not None:
            model.executor.attend_by(kind(model.cache, model.config))
        for batch in options.batches:
            figures = [generate(model, batch, PROMPT, NEW) for _ in range(2)][1]
            rows.append({"attention": name, "batch": batch, **figures})
            print(
                f"{name:8} B={batch:3}: prompts {figures['prefill_tokens_per_s']:9,.0f} tok/s, "
                f"decoding {figures['decode_tokens_per_s']:8,.0f} tok/s",
                flush=True,
            )
    if options.out is not None:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

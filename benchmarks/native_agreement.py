#!/usr/bin/env python3
"""How far the native kernels are from the reference backend: top-1 agreement and KL divergence on a real text.

    python benchmarks/native_agreement.py --model FOLDER --text FILE [--tokens 8192] [--output FILE.json]

FOLDER holds bfloat16 weights (of a GGUF file the native kernels would multiply the blocks). Every position of the text is predicted
by both. A native engine is compared with the reference engine that reads the model as it is stored (for `int8` and `int4`: rounding
to nearest and 8-bit activations together), and, where weights are rounded, also with the reference engine on the same rounded
weights (what the 8-bit activations alone do). The reference in float32 tells which of two bfloat16 results is nearer to the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triblade.config import EngineConfig
from triblade.engine.build import assemble
from triblade.engine.engine import Engine
from triblade.models.loader import open_model
from triblade.quant.rounded_checkpoint import RoundedCheckpoint
from triblade.sampling_params import SamplingParams

CONTEXT, ROWS = 1024, 32


@dataclass
class Distance:
    """Sums over positions."""

    agreed: float = 0.0
    kl: float = 0.0
    count: int = 0

    def add(self, logits: Tensor, original: Tensor) -> None:
        """Rows [R, V] of both."""
        p, q = original.log_softmax(-1), logits.log_softmax(-1)
        self.agreed += (logits.argmax(-1) == original.argmax(-1)).sum().item()
        self.kl += (p.exp() * (p - q)).sum().item()
        self.count += len(logits)

    def figures(self) -> dict[str, float]:
        """Means."""
        return {"top1": self.agreed / self.count, "kl": self.kl / self.count, "tokens": self.count}


def main() -> None:
    """Compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    base = EngineConfig(
        model=args.model, max_model_len=CONTEXT, max_num_seqs=1, enable_prefix_caching=False, backend="reference"
    )
    reference = engine_of(base)
    ids = reference.tokenizer.encode(args.text.read_text(), add_special_tokens=False)[: args.tokens]
    figures: dict[str, Any] = {"model": args.model, "tokens": len(ids), "context": CONTEXT}
    native_base = replace(base, backend="native")
    for name, bits, config in (
        ("bf16", None, native_base),
        ("bf16, int8 KV", None, replace(native_base, kv_cache_dtype="int8")),
        ("int8", 8, replace(native_base, quantization="int8")),
        ("int4", 4, replace(native_base, quantization="int4")),
    ):
        native = engine_of(config)
        found = {"against the stored weights": distance(native, reference, ids)}
        if bits is not None:
            found["against the same rounded weights"] = distance(native, engine_of(base, bits), ids)
        if name == "bf16":
            exact = engine_of(replace(base, dtype="float32"))
            found["against float32"] = distance(native, exact, ids)
            found["the reference in bfloat16 against float32"] = distance(reference, exact, ids)
        figures[name] = found
        print(name, json.dumps(found), flush=True)
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n")


def engine_of(config: EngineConfig, bits: int | None = None) -> Engine:
    """An engine, on weights rounded to `bits` if asked for."""
    model = open_model(config)
    if bits is not None:
        model = replace(model, checkpoint=RoundedCheckpoint(model.checkpoint, bits))
    return assemble(config, model, torch.device("cpu"))


def distance(engine: Engine, original: Engine, ids: Sequence[int]) -> dict[str, float]:
    """Between the predictions of both at every position."""
    total = Distance()
    for start in range(0, len(ids), CONTEXT):
        window = ids[start : start + CONTEXT - 1]
        for ours, theirs in zip(all_logits(engine, window), all_logits(original, window), strict=True):
            total.add(ours, theirs)
    return total.figures()


def all_logits(engine: Engine, ids: Sequence[int]) -> Iterator[Tensor]:
    """Logits [R, V] of some positions at a time."""
    requests = engine.prepare(ids, SamplingParams(temperature=0, max_tokens=1))
    engine.add(requests)
    executor = engine.runner.executor
    while True:
        items = engine.scheduler.schedule()
        executor.forward(items.scheduled)
        tokens = items.scheduled[0].num_tokens
        for row in range(0, tokens, ROWS):
            logits = executor.score(range(row, min(row + ROWS, tokens)), with_logits=True).logits
            assert logits is not None
            yield logits.clone()
        engine.scheduler.update(items.scheduled[0])
        if items.scheduled[0].samples:
            break
    engine.abort(requests)


if __name__ == "__main__":
    main()

"""Products of 4-bit weights and 16-bit inputs: our kernels beside those of `humming-kernels`, Qwen2-7B shapes, on one GPU.

Both multiply the same codes and scales; results are compared with float32. Times are of CUDA graphs over rotating copies of the
weights. Ours hold what spelling the weights out for the library takes, and the gate's activation, which the others lack.
Needs CUDA and humming-kernels. Run: python benchmarks/gpu_humming.py [--tokens 1 16 64 256] [--only qkv] [--out FILE].
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_kernels import CACHE_BYTES, PRODUCTS, Bench, Product, time_us
from gpu_models import shape
from torch import Tensor

from gpu import Model, compute, generate, request
from triblade.engine.linear_choice import OWN, choose_products
from triblade.ops.cuda.humming import HummingProducts
from triblade.ops.cuda.packing import DeviceMatrix, pack_codes, unpack
from triblade.ops.packing import QuantizedMatrix

GROUP = 128
PROMPT, NEW, CHUNK = 512, 48, 200


def random_codes(product: Product, memory: torch.device) -> QuantizedMatrix:
    """A matrix of unit gain."""
    codes = torch.randint(1, 16, (product.rows, product.inputs), dtype=torch.uint8, device=memory)
    spread = 4.3 * product.inputs**0.5
    scales = (0.5 + torch.rand(product.rows, product.inputs // GROUP, device=memory)).div_(spread)
    # In both types, so that theirs (of the inputs) and ours (float16) are the same numbers.
    return QuantizedMatrix(codes=codes, scales=scales.bfloat16().half(), offsets=None, bits=4)


def ours_us(bench: Bench, copies: list[DeviceMatrix], x: Tensor, out: Tensor) -> float:
    """Of our product, as the engine computes it."""
    inputs = bench.linear.inputs(len(x), x.shape[1])
    bench.vectors.arrange(x, inputs)
    return time_us(lambda n: bench.linear.multiply(inputs, copies[n % len(copies)], out))


def row(
    bench: Bench, product: Product, ours: list[DeviceMatrix], theirs: HummingProducts, tokens: int
) -> dict[str, Any]:
    """Times and errors of one size."""
    memory = bench.memory
    x = torch.randn(tokens, product.inputs, device=memory).bfloat16()
    out = torch.empty(tokens, product.rows // (2 if product.is_gated else 1), device=memory, dtype=x.dtype)
    begun = time.perf_counter()
    full = theirs.multiply(x, ours[0])
    torch.cuda.synchronize()
    first_s = time.perf_counter() - begun
    expected = F.linear(x.float(), unpack(ours[0]))
    error = float((full.float() - expected).norm() / expected.norm())
    us = ours_us(bench, ours, x, out), time_us(lambda n: theirs.multiply(x, ours[n % len(ours)]))
    print(
        f"{product.name:8} M={tokens:5}: ours {us[0]:8.2f} us, humming {us[1]:8.2f} us ({us[0] / us[1]:.2f}x), "
        f"its error {error:.1e}, first call {first_s:.1f} s",
        flush=True,
    )
    return {
        "product": product.name,
        "tokens": tokens,
        "ours_us": us[0],
        "humming_us": us[1],
        "humming_error": error,
        "humming_first_s": first_s,
    }


def engine(batches: list[int]) -> list[dict[str, Any]]:
    """Decoding by the whole engine, and logits of a chunk, with and without the package."""
    rows, logits = list[dict[str, Any]](), list[Tensor]()
    for name in (OWN, "humming"):
        torch.manual_seed(0)
        model = Model(shape("qwen2-7b"), "w4", max(batches), PROMPT + NEW)
        choose_products(name, model.executor)
        logits.append(compute(model.executor, [request(0, list(range(10, 10 + CHUNK)), 40)], CHUNK))
        error = float((logits[-1] - logits[0]).norm() / logits[0].norm())
        for batch in batches:
            figures = [generate(model, batch, PROMPT, NEW) for _ in range(2)][1]
            rows.append({"linear": name, "batch": batch, "logits_error": error, **figures})
            print(
                f"{name:8} B={batch:3}: decoding {figures['decode_tokens_per_s']:8,.0f} tok/s, "
                f"prompts {figures['prefill_tokens_per_s']:8,.0f}; logits off by {error:.1e}",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 128, 256, 512, 2048])
    parser.add_argument("--only", nargs="*", default=["qkv", "output", "gate_up", "down"])
    parser.add_argument("--batches", nargs="*", type=int, default=[128], help="of the whole engine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    bench, rows = Bench(), list[dict[str, Any]]()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "humming": version("humming-kernels"), "rows": rows}
    for product in (p for p in PRODUCTS if p.name in options.only):
        ours = list[DeviceMatrix]()
        while sum(m.nbytes for m in ours) < CACHE_BYTES:
            codes = random_codes(product, bench.memory)
            ours.append(pack_codes(codes, torch.bfloat16, is_gated=product.is_gated))
        theirs = HummingProducts(ours, torch.bfloat16)
        bench.linear.reserve(ours[:1])
        for tokens in options.tokens:
            rows.append(row(bench, product, ours, theirs, tokens))
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    results["engine"] = engine(options.batches) if options.batches else []
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Products of 4-bit weights and 16-bit inputs: our kernels beside those of `humming-kernels`, Qwen2-7B shapes, on one GPU.

Both multiply the same codes and scales; results are compared with float32. Times are of CUDA graphs over rotating copies of the
weights. Ours hold what spelling the weights out for the library takes, and the gate's activation, which the others lack.
Needs CUDA and humming-kernels. Run: python benchmarks/gpu_humming.py [--tokens 1 16 64 256] [--only qkv] [--out FILE].
"""

from __future__ import annotations

import argparse
import json
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_kernels import CACHE_BYTES, PRODUCTS, Bench, Product, time_us
from torch import Tensor

from triblade.ops.cuda.packing import DeviceMatrix, pack_codes, unpack
from triblade.ops.packing import QuantizedMatrix

GROUP = 128
NIBBLES = 8  # of a 32-bit number


def random_codes(product: Product, memory: torch.device) -> QuantizedMatrix:
    """A matrix of unit gain."""
    codes = torch.randint(1, 16, (product.rows, product.inputs), dtype=torch.uint8, device=memory)
    spread = 4.3 * product.inputs**0.5
    scales = (0.5 + torch.rand(product.rows, product.inputs // GROUP, device=memory)).div_(spread)
    # In both types, so that theirs (of the inputs) and ours (float16) are the same numbers.
    return QuantizedMatrix(codes=codes, scales=scales.bfloat16().half(), offsets=None, bits=4)


def their_layer(matrix: QuantizedMatrix) -> Any:
    """The same matrix for humming, which keeps eight codes in a number, the first one lowest."""
    rows, inputs = matrix.codes.shape
    layer = (
        import_module("humming.layer")
        .HummingLayer(
            shape_n=rows,
            shape_k=inputs,
            weight_config={"dtype": "int4", "group_size": GROUP},
            torch_dtype=torch.bfloat16,
        )
        .cuda()
    )
    shifts = 4 * torch.arange(NIBBLES, device=matrix.codes.device)
    numbers = (matrix.codes.view(rows, -1, NIBBLES).long() << shifts).sum(-1)
    packed = torch.where(numbers >= 2**31, numbers - 2**32, numbers).int()
    layer.load_from_tensors({"weight": packed, "weight_scale": matrix.scales.bfloat16()})
    layer.transform()
    return layer


def ours_us(bench: Bench, copies: list[DeviceMatrix], x: Tensor, out: Tensor) -> float:
    """Of our product, as the engine computes it."""
    inputs = bench.linear.inputs(len(x), x.shape[1])
    bench.vectors.arrange(x, inputs)
    return time_us(lambda n: bench.linear.multiply(inputs, copies[n % len(copies)], out))


def row(bench: Bench, product: Product, ours: list[DeviceMatrix], theirs: list[Any], tokens: int) -> dict[str, Any]:
    """Times and errors of one size."""
    memory = bench.memory
    x = torch.randn(tokens, product.inputs, device=memory).bfloat16()
    out = torch.empty(tokens, product.rows // (2 if product.is_gated else 1), device=memory, dtype=x.dtype)
    full = torch.empty(tokens, product.rows, device=memory, dtype=x.dtype)
    begun = time.perf_counter()
    theirs[0](x, outputs=full)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - begun
    expected = F.linear(x.float(), unpack(ours[0]))
    error = float((full.float() - expected).norm() / expected.norm())
    found = {
        "product": product.name,
        "tokens": tokens,
        "ours_us": ours_us(bench, ours, x, out),
        "humming_us": time_us(lambda n: theirs[n % len(theirs)](x, outputs=full)),
        "humming_error": error,
        "humming_first_s": first_s,
    }
    print(
        f"{product.name:8} M={tokens:5}: ours {found['ours_us']:8.2f} us, humming {found['humming_us']:8.2f} us "
        f"({found['ours_us'] / found['humming_us']:.2f}x), its error {error:.1e}, first call {first_s:.1f} s",
        flush=True,
    )
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 128, 256, 512, 2048])
    parser.add_argument("--only", nargs="+", default=["qkv", "output", "gate_up", "down"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    bench, rows = Bench(), []
    results = {"gpu": torch.cuda.get_device_name(), "humming": version("humming-kernels"), "rows": rows}
    for product in (p for p in PRODUCTS if p.name in options.only):
        ours, theirs = list[DeviceMatrix](), list[Any]()
        while sum(m.nbytes for m in ours) < CACHE_BYTES:
            matrix = random_codes(product, bench.memory)
            ours.append(pack_codes(matrix, torch.bfloat16, is_gated=product.is_gated))
            theirs.append(their_layer(matrix))
        bench.linear.reserve(ours[:1])
        for tokens in options.tokens:
            rows.append(row(bench, product, ours, theirs, tokens))
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

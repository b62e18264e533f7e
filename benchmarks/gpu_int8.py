"""Products of one Qwen2-7B layer on one GPU with weights of 8 bits, one scale per row, beside weights of 16 bits.

Milliseconds of all four matrices for several numbers of tokens; `streamed`: by the streaming kernels up to 256 tokens.
Needs CUDA. Run: python benchmarks/gpu_int8.py [--tokens 1 16 512 2048 4096] [--out FILE].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from gpu_models import shape

from triblade.ops.backend import Linear
from triblade.ops.cuda.device import CudaDevice
from triblade.ops.cuda.linear import LinearKernels
from triblade.ops.cuda.packing import DeviceMatrix, finer_groups, pack_codes, pack_dense
from triblade.ops.packing import QuantizedMatrix

ROUNDS = 20
CUDA = torch.device("cuda")


def matrices(kind: str) -> list[tuple[DeviceMatrix, int]]:
    """The four of a layer, and how wide their results are."""
    config = shape("qwen2-7b")
    sizes = [
        (config.q_size + 2 * config.kv_size, config.hidden_size, False),
        (config.hidden_size, config.q_size, False),
    ]
    sizes += [
        (2 * config.intermediate_size, config.hidden_size, True),
        (config.hidden_size, config.intermediate_size, False),
    ]
    found = []
    for rows, inputs, is_gated in sizes:
        out = rows // 2 if is_gated else rows
        if kind == "bf16":
            weight = torch.randn(rows, inputs, device=CUDA, dtype=torch.bfloat16).mul_(inputs**-0.5)
            found.append((pack_dense(Linear(weight), is_gated=is_gated), out))
            continue
        codes = torch.randint(1, 256, (rows, inputs), dtype=torch.uint8, device=CUDA)
        scales = torch.full((rows, 1), 0.0135 * inputs**-0.5, device=CUDA, dtype=torch.float16)
        whole = QuantizedMatrix(codes=codes, scales=scales, offsets=None, bits=8)
        packed = pack_codes(finer_groups(whole), torch.bfloat16, is_gated=is_gated)
        found.append((packed, out))
    return found


def milliseconds(kind: str, tokens: int, device: CudaDevice) -> float:
    """Of the four products, one after the other."""
    kernels, parts = LinearKernels(device, torch.bfloat16, CUDA), matrices(kind)
    kernels.reserve([matrix for matrix, _ in parts])
    kernels.streamed_tokens = 256 if kind == "streamed" else kernels.streamed_tokens
    inputs = [kernels.inputs(tokens, matrix.inputs) for matrix, _ in parts]
    for x in inputs:
        x.values.normal_()
    outs = [torch.empty(tokens, out, dtype=torch.bfloat16, device=CUDA) for _, out in parts]

    def run() -> None:
        for x, (matrix, _), out in zip(inputs, parts, outs, strict=True):
            kernels.multiply(x, matrix, out)

    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(ROUNDS):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / ROUNDS


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 16, 17, 32, 64, 128, 256, 512, 4096])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, rows = CudaDevice(CUDA), []
    for tokens in options.tokens:
        row = {kind: milliseconds(kind, tokens, device) for kind in ("bf16", "w8", "streamed")}
        rows.append({"tokens": tokens, **row})
        print(f"{tokens:5} tokens: " + ", ".join(f"{kind} {ms:.3f} ms" for kind, ms in row.items()), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "layer_ms": rows}, indent=1))


if __name__ == "__main__":
    main()

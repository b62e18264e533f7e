"""From the start of a process to its first token, on one GPU: a quantized checkpoint on disk, opened, loaded and asked.

`make FOLDER` writes a checkpoint of a well-known shape with random weights (4 bits, groups of 128, compressed-tensors), in the
order in which convert writes. `run FOLDER` starts processes: with no compiled kernels and nothing of the files in memory, with
kernels only, and with both; `child` is such a process. Needs CUDA; dropping the page cache needs root, else the files are asked to
leave it. Run: python benchmarks/gpu_start.py make /tmp/qwen && python benchmarks/gpu_start.py run /tmp/qwen --out FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROUNDS = 3
PROMPT = list(range(100, 116))


def make(folder: Path, name: str) -> None:
    """Write the checkpoint."""
    import tokenizers
    import torch
    from gpu_models import SHAPES

    from triblade.models.config import model_config
    from triblade.quant.formats.compressed_tensors import CompressedTensors
    from triblade.quant.shard_writer import ShardWriter

    folder.mkdir(parents=True)
    config = model_config(SHAPES[name])
    writer, layout = ShardWriter(folder), CompressedTensors()
    schemes = dict[str, Any]()
    for tensor_name, part in parts(config):
        if isinstance(part, torch.Tensor):
            writer.add(tensor_name, part.cpu())
            continue
        schemes[tensor_name] = part.scheme
        for suffix, tensor in layout.tensors(part).items():
            writer.add(f"{tensor_name}.{suffix}", tensor.cpu())
    writer.close()
    quantization = layout.quantization_config(schemes, ["lm_head"])
    whole = {**SHAPES[name], "torch_dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(whole, indent=1))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e9:.2f} GB", flush=True)


def parts(config: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and matrices by name, as a layer-by-layer conversion writes them."""
    import torch

    from triblade.models.weights import layer_modules, layer_prefix, mlp_norm_name
    from triblade.quant.scheme import IntegerMatrix, QuantScheme

    device, scheme = torch.device("cuda"), QuantScheme(bits=4, group_size=128, symmetric=True)
    inputs = {"qkv": config.hidden_size, "output": config.q_size, "gate_up": config.hidden_size}
    inputs["down"] = config.intermediate_size

    def table() -> Any:
        return (
            torch.randn(config.vocab_size, config.hidden_size, device=device).mul_(config.hidden_size**-0.5).bfloat16()
        )

    yield "model.embed_tokens.weight", table()
    for index in range(config.num_layers):
        yield f"{layer_prefix(index)}input_layernorm.weight", torch.ones(config.hidden_size).bfloat16()
        for field, modules in layer_modules(config, index).items():
            for name, rows in modules:
                width = inputs[field]
                codes = torch.randint(1, 16, (rows, width), dtype=torch.uint8, device=device)
                scales = torch.full((rows, width // 128), 0.23 * width**-0.5, device=device).bfloat16()
                yield name, IntegerMatrix(codes=codes, scales=scales, zero_points=None, scheme=scheme)
                if field == "qkv" and config.qkv_bias:
                    yield f"{name}.bias", torch.randn(rows).mul_(0.1).bfloat16()
        yield mlp_norm_name(config, index), torch.ones(config.hidden_size).bfloat16()
    yield "model.norm.weight", torch.ones(config.hidden_size).bfloat16()
    yield "lm_head.weight", table()


def child(folder: Path, started: float) -> None:
    """One process: what was reached after how many seconds, as a line of JSON."""
    reached = dict[str, float]()

    def note(what: str) -> None:
        reached[what] = round(time.time() - started, 3)

    note("interpreter")
    import logging

    import torch

    note("torch imported")
    from triblade.llm import LLM
    from triblade.sampling_params import SamplingParams

    note("triblade imported")
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s", stream=sys.stderr)
    llm = LLM(str(folder), max_num_batched_tokens=4096, max_model_len=8192)
    note("ready")
    (choices,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0))
    torch.cuda.synchronize()
    note("first token")
    llm.generate([PROMPT], SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
    note("64 more")
    print(json.dumps({"reached_s": reached, "tokens": choices[0].token_ids}))


def forget_files(folder: Path) -> str:
    """Drop the files from the page cache; how it was done."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "whole page cache dropped"
    except OSError:
        for path in folder.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return "files dropped"


def run(folder: Path, out: Path | None) -> None:
    """Start processes and print what they reached."""
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for kind in ["nothing kept", *["kernels kept, files not in memory"] * 2, *["all kept"] * ROUNDS]:
            how = forget_files(folder) if kind != "all kept" else ""
            command = [sys.executable, __file__, "child", str(folder), "--started", str(time.time())]
            environment = {**os.environ, "TRIBLADE_CACHE": cache}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
            if done.returncode:
                print(done.stderr[-4000:], flush=True)
                raise SystemExit(done.returncode)
            row = {"kind": kind, "how": how, **json.loads(done.stdout.splitlines()[-1])}
            row["log"] = [line for line in done.stderr.splitlines() if " ms " in line]
            results.append(row)
            print(kind, row["reached_s"], *row["log"], sep="\n  ", flush=True)
    if out is not None:
        out.write_text(json.dumps({"folder": folder.name, "runs": results}, indent=1))


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "run", "child"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="qwen2-7b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--started", type=float, default=0.0)
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder, options.shape)
    elif options.what == "child":
        child(options.folder, options.started)
    else:
        run(options.folder, options.out)


if __name__ == "__main__":
    main()

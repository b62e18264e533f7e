"""The peer of quantization: llm-compressor 0.14, which writes compressed-tensors checkpoints. Runs in an environment of its own.

    python llm_compressor.py MODEL OUTPUT --calibration FILE --bits 4 --group-size 64 --method awq+gptq

Prints one JSON object with seconds and peak memory. Everything is the tool's default but the scheme and the calibration text, which
is cut as `triblade convert` does: the whole file as one stream of tokens, sequences of one length from its start. Knows nothing of
triblade; what it wrote is evaluated by `quantization.py`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHARACTERS_PER_TOKEN = 16  # more than any text needs


def main() -> None:
    """Quantize and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--method", choices=("rtn", "awq", "gptq", "awq+gptq"), default="awq+gptq")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch-size", type=int, default=1)
    args = parser.parse_args()
    if args.device == "cpu":  # its scale search pins memory, which needs a CUDA device
        cast(Any, torch.Tensor).pin_memory = lambda tensor, device=None: tensor
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto", device_map=args.device)
    import_module("llmcompressor").oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=sequences(tokenizer, args.calibration, args.samples, args.length),
        recipe=recipe(args),
        num_calibration_samples=args.samples,
        max_seq_length=args.length,
        shuffle_calibration_samples=False,
        batch_size=args.batch_size,
        output_dir=str(args.output),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device_peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    seconds = time.monotonic() - started
    print(json.dumps({"seconds": seconds, "peak_memory_bytes": peak, "peak_device_bytes": device_peak}))


def sequences(tokenizer: Any, path: Path, samples: int, length: int) -> Any:
    """The first `samples` x `length` tokens of a text."""
    text = path.read_text(encoding="utf-8")[: samples * length * CHARACTERS_PER_TOKEN]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = [ids[start : start + length] for start in range(0, samples * length, length)]
    return import_module("datasets").Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * length] * samples})


def recipe(args: argparse.Namespace) -> list[Any]:
    """AWQ moves scales, whoever follows rounds."""
    weights = {
        "num_bits": args.bits,
        "type": "int",
        "symmetric": args.symmetric,
        "strategy": "group",
        "group_size": args.group_size,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    modifiers = "llmcompressor.modifiers"
    if "gptq" in args.method:
        rounding = import_module(f"{modifiers}.gptq").GPTQModifier
    else:
        rounding = import_module(f"{modifiers}.quantization").QuantizationModifier
    rounded = rounding(config_groups=groups, ignore=["lm_head"])
    return [import_module(f"{modifiers}.transform.awq").AWQModifier(), rounded] if "awq" in args.method else [rounded]


if __name__ == "__main__":
    main()

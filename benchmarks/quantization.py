#!/usr/bin/env python3
"""Quality and cost of the quantization methods: perplexity, KL divergence, top-1 agreement, seconds, memory, one process per row.

    python benchmarks/quantization.py --model FOLDER --calibration FILE --evaluation FILE --output FILE.json
        [--rows 'W4g64asym/*' ...] [--device cpu|cuda] [--cores 0,1 2,3] [--other-calibration FILE --other-evaluation FILE]
    python benchmarks/quantization.py --model FOLDER --evaluation FILE --output FILE.json --checkpoint NAME=FOLDER ...

A row is a whole `triblade convert`, which measures and writes: its seconds are those of the call, its memory is the peak of its
process. Calibration is the first 128 x 512 tokens of a text, perplexity is over the first 40,960 tokens of another, in windows
of 2048, KL and agreement are over the first 8,192 of them. Head and embedding stay as they are. With the other two texts some
rows are calibrated on another kind of text and evaluated on both. `--checkpoint` evaluates what another tool made. Rows go into
the output as they end, so several calls may fill one file, one after the other; `--cores` runs one row at a time on each set.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from cpu_reference import cpu_name
from torch import Tensor

from triblade import host
from triblade.config import ConvertConfig, EngineConfig
from triblade.models.decoder import Decoder
from triblade.models.loader import open_model
from triblade.ops.backend import Backend
from triblade.ops.select import select_backend, select_device
from triblade.quant.calibration import load_calibration
from triblade.quant.convert import convert
from triblade.quant.measure import TokenActivations
from triblade.quant.quality import Perplexity, compare, perplexity

CONTEXT, TOKENS, KL_TOKENS = 2048, 40_960, 8_192
METHODS = ("best", "awq+gptq", "gptq", "awq", "range", "rtn")
INT8 = {"bits": 8, "group_size": -1, "symmetric": True, "activation_bits": 8}
SCHEMES: dict[str, dict[str, Any]] = {
    "W4g64asym": {"bits": 4, "group_size": 64},
    "W4g64sym": {"bits": 4, "group_size": 64, "symmetric": True},
    "W3g64asym": {"bits": 3, "group_size": 64},
    "W8A8": INT8,
    "W2g32asym": {"bits": 2, "group_size": 32},
}
BUDGETS = (4.5, 4.625)  # bits: what W4 g32 takes without and with zero points
OTHER = "other text"  # calibrated on the other kind


@dataclass(frozen=True, slots=True)
class Row:
    """One conversion; `options` are fields of ConvertConfig."""

    name: str
    options: dict[str, Any]
    on_other: bool = False  # calibrated on the other text
    both: bool = False  # evaluated on both


def rows() -> Iterator[Row]:
    """The table."""
    for scheme, options in SCHEMES.items():
        for method in METHODS:
            both = method == "best" and scheme in ("W4g64asym", "W3g64asym")
            yield Row(f"{scheme}/{method}", {**options, "quantization": method}, both=both)
    yield Row("W4g64asym/balance+gptq+refine", {**SCHEMES["W4g64asym"], "quantization": "balance+gptq+refine"})
    for method in ("smooth", "smooth+gptq", "smooth+correct+gptq+refine", "balance+correct+gptq+refine"):
        yield Row(f"W8A8/{method}", {**INT8, "quantization": method})
    for symmetric, name in ((False, "W4g32asym"), (True, "W4g32sym")):
        yield Row(f"{name}/best", {"bits": 4, "group_size": 32, "symmetric": symmetric, "quantization": "best"})
    for budget in BUDGETS:
        yield Row(f"mixed{budget}/best", {"group_size": 64, "average_bits": budget, "quantization": "best"})
    for scheme in ("W4g64asym", "W3g64asym"):
        yield Row(f"{scheme}/best, {OTHER}", {**SCHEMES[scheme], "quantization": "best"}, on_other=True, both=True)


def main() -> None:
    """One row in this process, or all that were asked for in processes of their own."""
    args = arguments()
    if args.one is not None:
        print(json.dumps(run(args, args.one)))
        return
    names = [
        name for pattern in args.rows for name in (row.name for row in rows()) if fnmatch.fnmatchcase(name, pattern)
    ]
    if args.checkpoint:
        names = args.checkpoint
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in dict.fromkeys(names):
        todo.put(name)
    lock = threading.Lock()
    threads = [threading.Thread(target=work, args=(args, cores, todo, lock)) for cores in args.cores or [None]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--other-calibration", type=Path)
    parser.add_argument("--other-evaluation", type=Path)
    parser.add_argument("--rows", nargs="*", default=["*"], help="patterns of names, in the order to run")
    parser.add_argument("--checkpoint", nargs="*", default=[], help="NAME=FOLDER: evaluate only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cores", nargs="*", help="sets of cores, as taskset takes them")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "triblade-quantization")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints in --work")
    parser.add_argument("--commit", default=None, help="what to note as the commit where git cannot say")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args: argparse.Namespace, cores: str | None, todo: queue.SimpleQueue[str], lock: threading.Lock) -> None:
    """Run rows on one set of cores until none are left."""
    while not todo.empty():
        name = todo.get()
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        if cores is not None:
            command = ["taskset", "-c", cores, *command]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        result = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.returncode}
        with lock:
            append(args, {"row": name.partition("=")[0], **circumstances(args, cores), **result})


def append(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Put a record into the output, in place of an older one of the same row and device."""
    content = json.loads(args.output.read_text()) if args.output.is_file() else {"runs": []}
    same = (record["row"], record["device"])
    kept = [run for run in content["runs"] if (run["row"], run["device"]) != same]
    content = {**heading(args), "runs": [*kept, record]}
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(record), flush=True)


def heading(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures are."""
    return {
        "what": "perplexity, KL in nats per token and top-1 agreement with the original, of quantized checkpoints",
        "model": Path(args.model).name,
        "evaluation": args.evaluation.name,
        "tokens": {"perplexity": TOKENS, "kl": KL_TOKENS, "context": CONTEXT, "calibration": "128 x 512"},
    }


def circumstances(args: argparse.Namespace, cores: str | None) -> dict[str, Any]:
    """Where a record comes from."""
    told = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "device": args.device,
        "cores": cores or f"{host.usable_cores()} of them",
        "commit": args.commit or told.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The figures of one row."""
    if "=" in name:
        folder = Path(name.partition("=")[2])
        return evaluate(args, folder, args.evaluation, rounds_inputs="W8A8" in name) | {
            "hardware": hardware(args.device)
        }
    (row,) = (row for row in rows() if row.name == name)
    output = args.work / name.replace("/", "-").replace(", ", "-").replace(" ", "-")
    needs_text = row.options["quantization"] != "rtn"
    calibration = args.other_calibration if row.on_other else args.calibration
    config = ConvertConfig(
        model=args.model,
        output=output,
        calibration=str(calibration) if needs_text else None,
        eval_text=args.evaluation,
        eval_tokens=KL_TOKENS,
        device=args.device,
        overwrite=True,
        **row.options,
    )
    started = time.monotonic()
    report = convert(config)
    figures: dict[str, Any] = {"seconds": time.monotonic() - started, "peak_memory_bytes": host.peak_rss_bytes()}
    figures["layers_seconds"] = sum(layer["seconds"] for layer in report.layers)
    if args.device == "cuda":
        figures["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    figures |= {"bits": report.average_bits, "bytes": report.bytes_after, "hardware": hardware(args.device)}
    figures |= evaluate(args, output, args.evaluation, rounds_inputs="W8A8" in name)
    if row.both:
        figures["other"] = evaluate(args, output, args.other_evaluation)
    if not args.keep:
        subprocess.run(["rm", "-r", str(output)], check=True)
    return figures


def hardware(device: str) -> str:
    """The processor or the accelerator."""
    return torch.cuda.get_device_name() if device == "cuda" else cpu_name()


def evaluate(args: argparse.Namespace, folder: Path, text: Path, *, rounds_inputs: bool = False) -> dict[str, Any]:
    """A checkpoint beside the original on a text."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ids = token_ids(args.model, text)
    original, model = decoder(args, args.model), decoder(args, str(folder), rounds_inputs=rounds_inputs)
    both = compare(model, original, ids[:KL_TOKENS], CONTEXT)
    parts = [both.model]
    if len(ids) > KL_TOKENS + 1:
        parts.append(perplexity(model, ids[KL_TOKENS:], CONTEXT))
    return {
        "perplexity": joined(parts),
        "kl": both.kl,
        "top1": both.top1_agreement,
        "perplexity_8k": both.model.value,
        "original_perplexity_8k": both.original.value,
        "tokens": len(ids),
    }


def token_ids(model: str, text: Path) -> Tensor:
    """The first TOKENS tokens of a text, or all."""
    tokenizer = open_model(EngineConfig(model=model)).tokenizer
    return load_calibration(text, tokenizer, sequences=1, length=TOKENS).ids[0]


def decoder(args: argparse.Namespace, folder: str, *, rounds_inputs: bool = False) -> Decoder:
    """A checkpoint ready to predict."""
    model = open_model(EngineConfig(model=folder))
    backend, _ = select_backend("auto", deterministic=False, softcap=model.config.attention_softcap is not None)
    if rounds_inputs:
        backend = cast(Backend, TokenActivations(backend))
    return model.load(CONTEXT, backend, select_device(args.device)[0])


def joined(parts: list[Perplexity]) -> float:
    """Perplexity over the tokens of all parts."""
    count = sum(part.num_tokens for part in parts)
    return math.exp(sum(math.log(part.value) * part.num_tokens for part in parts) / count)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The native CPU backend (int4, groups of 64) against llama.cpp (Q4_0) and against what the processor allows.

    python benchmarks/cpu.py [--model smollm2-135m] [--rounds 5] [--parts decode server start memory] [--output FILE.json]

Every engine stays loaded in a process of its own and works only while it is asked: in each round each measurement runs once
with each of them, one after the other. Figures are medians of the rounds; the first round warms up and is dropped. What
another process of the machine disturbed is measured again, a few times at most; every finished round is written. llama.cpp
is built in an environment of its own under --peers-dir the first time (about five minutes). With matplotlib there is also a
plot beside the JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from cpu_reference import cpu_name
from cpu_rows import compare, table
from cpu_server import serving, throughput
from peers import llama_cpp
from quiet import Watch
from worker import HERE, Figures, Worker

from triblade.config import cache_dir
from triblade.models.source import resolve

PARTS = ("decode", "server", "start", "memory")
DECODES = (
    (1, 128, 48),
    (1, 512, 96),
    (4, 128, 32),
    (8, 128, 32),
    (16, 128, 32),
    (1, 4096, 32),
)  # batch, context, steps
CHUNK = {"context": 512, "tokens": [1, 5], "repeat": 21}
CLIENTS = 16
LOAD = (2 * CLIENTS, 128, 128)  # requests, prompt tokens, new tokens
OTHERS_SHARE = 0.1  # of one core, above which a measurement is repeated
TRIES = 3
LONG_CONTEXT = 4096 + 256

Samples = dict[str, list[float]]


@dataclass
class Run:
    """One run of the benchmark: what was asked for and what was found."""

    args: argparse.Namespace
    watch: Watch
    samples: Samples = field(default_factory=lambda: defaultdict(list))
    versions: dict[str, Any] = field(default_factory=lambda: {"python": platform.python_version()})

    def rounds(self) -> Iterator[Samples]:
        """Where each round's figures go: the first into nothing, the others into `samples`."""
        for number in range(self.args.rounds + 1):
            print(f"round {number} of {self.args.rounds}", file=sys.stderr)
            yield self.samples if number else defaultdict(list)
            self.save()

    def save(self, *, complete: bool = False) -> list[dict[str, Any]]:
        """Write what is known by now, so that a run that is stopped leaves its rounds; the comparisons."""
        figures = {**report(self), "complete": complete}
        if self.args.output:
            self.args.output.write_text(json.dumps(figures, indent=1) + "\n")
        comparisons: list[dict[str, Any]] = figures["comparisons"]
        return comparisons

    def ask(self, worker: Worker, name: str, **arguments: Any) -> Figures:
        """One measurement of a worker."""
        return self.watch.undisturbed(lambda: worker.ask(name, **arguments))

    def engine(self, context: int, sequences: int, kv: str = "auto") -> Worker:
        """Our engine in a process of its own."""
        args = self.args
        options = {"context": context, "sequences": sequences, "kv": kv, "threads": args.threads, "seed": args.seed}
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return Worker(sys.executable, "cpu_engine", [args.model, *flags])


def main() -> None:
    """Measure, compare, report."""
    args = arguments()
    args.peers_dir.mkdir(parents=True, exist_ok=True)
    run = Run(args, Watch(OTHERS_SHARE, args.quiet_s, TRIES))
    measures = {"decode": decoding, "server": server, "start": starting, "memory": memory}
    for part in args.parts:
        measures[part](run)
    comparisons = run.save(complete=True)
    if args.output:
        plot(comparisons, args.output.with_suffix(".svg"))
    print(table(comparisons))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, GGUF file or alias; what our engine loads")
    parser.add_argument(
        "--gguf", help="GGUF file or alias for llama.cpp; default: the model, or smollm2-135m for a folder"
    )
    parser.add_argument("--packed", help="a checkpoint that `triblade convert` made, for the time to start")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quiet-s", type=float, default=10, help="longest wait for a quiet machine before a measurement"
    )
    parser.add_argument("--peers-dir", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def decoding(run: Run) -> None:
    """Decode, prefill, chunks and host time: ours with both caches, llama.cpp, the limit."""
    args = run.args
    with ExitStack() as stack:
        ours = stack.enter_context(run.engine(LONG_CONTEXT, CLIENTS))
        small = stack.enter_context(run.engine(LONG_CONTEXT, 1, kv="int8"))
        peer = stack.enter_context(llama_cpp.start(args.peers_dir, gguf(args), args.threads))
        probe = [str(build_probe(args.peers_dir)), str(args.threads), *ours.versions.pop("probe").split()]
        run.versions |= {**ours.versions, **peer.versions}
        for kept in run.rounds():
            for shape in DECODES:
                decode(run, kept, {"triblade": ours, "llama.cpp": peer}, shape)
            for shape in (DECODES[0], DECODES[-1]):
                decode(run, kept, {"int8 KV": small}, shape)
            prompts(run, kept, {"triblade": ours, "llama.cpp": peer})
            for batch in (1, 16):
                figures = run.ask(ours, "host", batch=batch, context=128, steps=40)
                kept[f"triblade host {batch}"].append(figures["outside_ms"])
                kept[f"triblade native {batch}"].append(figures["inside_ms"])
            limits(run, kept, probe)


def decode(run: Run, kept: Samples, workers: dict[str, Worker], shape: tuple[int, int, int]) -> None:
    """One decode measurement of `shape` = (batch, context, steps) with each worker."""
    batch, context, steps = shape
    for name, worker in workers.items():
        rate = run.ask(worker, "decode", batch=batch, context=context, steps=steps)["rate"]
        kept[f"{name} decode {batch}x{context}"].append(rate)
        kept[f"{name} ms {batch}x{context}"].append(batch / rate * 1e3)


def prompts(run: Run, kept: Samples, workers: dict[str, Worker]) -> None:
    """A prompt, and steps of one and of several tokens of one sequence, with each worker."""
    for name, worker in workers.items():
        kept[f"{name} prefill 512"].append(run.ask(worker, "prefill", tokens=512)["rate"])
        for number, value in run.ask(worker, "chunk", **CHUNK).items():
            kept[f"{name} chunk {number}"].append(value)


def limits(run: Run, kept: Samples, command: list[str]) -> None:
    """Run the limit probe once."""
    line = run.watch.undisturbed(lambda: subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    figures = json.loads(line)
    kept["limit bandwidth_gb_s"].append(figures.pop("bandwidth_gb_s"))
    for head, rates in figures.items():
        for tokens, rate in rates.items():
            kept[f"limit {head} {tokens}"].append(rate)


def server(run: Run) -> None:
    """Throughput through HTTP against the engine's own, on the same load."""
    args = run.args
    options = [
        "--quantization",
        "int4",
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        str(CLIENTS),
        "--backend",
        "native",
    ]
    options += ["--threads", str(args.threads), "--no-enable-prefix-caching"]
    rng = random.Random(args.seed)
    requests, prompt, new = LOAD
    with run.engine(2048, CLIENTS) as ours, serving(args.model, options) as (port, _, _):
        for kept in run.rounds():
            kept["triblade generate"].append(
                run.ask(ours, "generate", requests=requests, prompt=prompt, new=new)["rate"]
            )
            for name, stream in (("streaming", True), ("whole", False)):
                load = partial(throughput, port, rng, LOAD, concurrency=CLIENTS, stream=stream)
                kept[f"server {name}"].append(run.watch.undisturbed(load))


def starting(run: Run) -> None:
    """From the start of a process to /health: of a quantized checkpoint, and with weights rounded while loading."""
    options = ["--max-model-len", "2048", "--threads", str(run.args.threads), "--backend", "native"]

    def start(model: str, more: list[str]) -> float:
        with serving(model, options + more) as (_, _, seconds):
            return seconds

    rounded = partial(start, run.args.model, ["--quantization", "int4"])
    for kept in run.rounds():
        kept["server start, rounding"].append(run.watch.undisturbed(rounded))
        if run.args.packed:
            kept["server start"].append(run.watch.undisturbed(partial(start, run.args.packed, [])))


def memory(run: Run) -> None:
    """Peak of a fresh process with eight full contexts of 2048 tokens."""
    for kv, prefix in (("auto", "memory"), ("int8", "memory int8")):
        with run.engine(2048, 8, kv=kv) as ours:
            for name, value in ours.ask("memory").items():
                run.samples[f"{prefix} {name.removesuffix('_mib')}"].append(value)


def gguf(args: argparse.Namespace) -> Path:
    """The file for llama.cpp."""
    path = resolve(args.gguf or args.model).resolve()
    return path if path.suffix == ".gguf" else resolve("smollm2-135m").resolve()


def build_probe(folder: Path) -> Path:
    """The compiled limit probe."""
    source, target = HERE / "limit_probe.cpp", folder / "limit_probe"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp"]
        subprocess.run(["g++", *flags, str(source), "-o", str(target)], check=True)
    return target


def report(run: Run) -> dict[str, Any]:
    """Everything about the run."""
    args = run.args
    return {
        "what": "native backend, int4 groups of 64 and int8 head, rounded to nearest while loading, against llama.cpp Q4_0",
        "model": Path(args.model).name,
        "comparisons": compare(run.samples),
        "rounds": args.rounds,
        "seed": args.seed,
        "threads": args.threads,
        "commit": commit(),
        "versions": run.versions,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "others": {"mean_share_of_a_core": statistics.mean(run.watch.shares or [0.0]), "repeated": run.watch.repeated},
        "all": run.samples,
    }


def commit() -> str:
    """The commit measured, marked when the code differs from it."""
    git = ["git", "-C", str(HERE.parent)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], check=False, capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "csrc", "benchmarks/*.py"], check=False)
    return (head.stdout.strip() or "unknown") + ("-dirty" if changed.returncode else "")


def plot(comparisons: list[dict[str, Any]], path: Path) -> None:
    """Ratios with their bounds and aims as an SVG file, where matplotlib is installed."""
    try:
        pyplot: Any = import_module("matplotlib.pyplot")
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    rows = [row for row in comparisons if row["bound"] and row["want"] != "within"][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(rows) + 1.2), layout="constrained")
    axes.barh(
        [row["name"] for row in rows], [row["ratio"] for row in rows], color=[_color(row) for row in rows], height=0.6
    )
    for number, row in enumerate(rows):
        axes.plot([row["bound"]] * 2, [number - 0.4, number + 0.4], color="black")
        if row["aim"]:
            axes.plot([row["aim"]] * 2, [number - 0.4, number + 0.4], color="black", linestyle=":")
        axes.text(row["ratio"], number, f" {row['ratio']:.2f}", va="center")
    axes.set_xlabel("ratio; line: bound, dotted: aim; blue: higher is better, orange: lower is better")
    figure.savefig(path)


def _color(row: dict[str, Any]) -> str:
    return "tab:blue" if row["want"] == "at least" else "tab:orange"


if __name__ == "__main__":
    main()

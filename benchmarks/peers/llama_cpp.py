"""llama.cpp through its Python package: built in an environment of its own, measured in a process of its own.

`install` builds the package from source for this processor (about five minutes on two cores), once. Run as a module by that
environment's interpreter it answers the commands of `worker`: the library's own batches and nothing on top, no sampling and
no text, so that what is measured flatters the peer. Weights are requantized to Q4_0, the 4-bit format that its kernels repack.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from worker import Figures, Worker, answer

VERSION = "0.3.36"
FORMAT = "Q4_0"
CONTEXT = 8192  # tokens of all sequences together
SEQUENCES = 32
MICRO_BATCH = 512
BUILD_JOBS = 2


def install(peers: Path, jobs: int = BUILD_JOBS) -> Path:
    """The interpreter of an environment with llama-cpp-python under `peers`, built now if it is not there."""
    folder = peers / f"llama-cpp-{VERSION}"
    python, done = folder / "bin/python", folder / "installed"
    if not done.exists():
        print(f"building llama-cpp-python {VERSION} in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        parallel = {"CMAKE_BUILD_PARALLEL_LEVEL": str(jobs), "MAKEFLAGS": f"-j{jobs}"}
        command = [str(python), "-m", "pip", "install", "--quiet", f"llama-cpp-python=={VERSION}"]
        subprocess.run(command, check=True, env={**os.environ, **parallel})
        done.touch()
    return python


def start(peers: Path, model: Path, threads: int) -> Worker:
    """A worker for a GGUF file, requantized once."""
    target = peers / f"{model.stem}.{FORMAT.lower()}.gguf"
    return Worker(install(peers), "peers.llama_cpp", [str(model), str(target), "--threads", str(threads)])


class LlamaCpp:
    """A loaded model.

    Args:
        library: the package.
        path: GGUF file.
        threads: for decoding and for prompts.
    """

    def __init__(self, library: Any, path: Path, threads: int) -> None:
        self._library = library
        model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        params = library.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = CONTEXT, SEQUENCES, True
        params.n_batch, params.n_ubatch = CONTEXT, MICRO_BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = library.llama_init_from_model(model, params)
        self._memory = library.llama_get_memory(self._context)
        self._prompt = [random.Random(0).randrange(100, 40000) for _ in range(CONTEXT)]

    def prefill(self, tokens: int) -> Figures:
        """Tokens per second of one prompt, logits of its last token."""
        self._library.llama_memory_clear(self._memory, True)
        return {"rate": tokens / self._read_prompt(0, tokens)}

    def decode(self, batch: int, context: int, steps: int) -> Figures:
        """Tokens per second of `batch` sequences after `context` tokens each."""
        self._library.llama_memory_clear(self._memory, True)
        for sequence in range(batch):
            self._read_prompt(sequence, context)
        seconds = sum(self._step([(5, context + step, s, True) for s in range(batch)]) for step in range(steps))
        return {"rate": batch * steps / seconds}

    def chunk(self, context: int, tokens: Sequence[int], repeat: int) -> Figures:
        """Milliseconds of a step with so many tokens of one sequence, logits of each, by number of tokens; medians."""
        self._library.llama_memory_clear(self._memory, True)
        self._read_prompt(0, context)
        times: dict[int, list[float]] = {number: [] for number in tokens}
        for _ in range(repeat):
            for number in tokens:
                times[number].append(self._step([(5, context + i, 0, True) for i in range(number)]))
                self._library.llama_memory_seq_rm(self._memory, 0, context, -1)
        return {str(number): sorted(values)[repeat // 2] * 1e3 for number, values in times.items()}

    def _read_prompt(self, sequence: int, tokens: int) -> float:
        return self._step([(self._prompt[i], i, sequence, i == tokens - 1) for i in range(tokens)])

    def _step(self, rows: Iterable[tuple[int, int, int, bool]]) -> float:
        """Seconds to compute rows of (token, position, sequence, whether its logits are wanted)."""
        rows = list(rows)
        batch = self._library.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        start = time.perf_counter()
        failed = self._library.llama_decode(self._context, batch)
        self._library.llama_synchronize(self._context)
        seconds = time.perf_counter() - start
        self._library.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode failed: {failed}")
        return seconds


def requantize(library: Any, source: Path, target: Path, threads: int) -> None:
    """Write a Q4_0 file."""
    params = library.llama_model_quantize_default_params()
    params.allow_requantize, params.nthread, params.ftype = True, threads, library.LLAMA_FTYPE_MOSTLY_Q4_0
    partial = target.with_suffix(".part")
    if library.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params)):
        raise RuntimeError(f"cannot requantize: {source}")
    partial.rename(target)


def main() -> None:
    """Load and answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    library = import_module("llama_cpp")
    silence = library.llama_log_callback(lambda level, text, data: None)
    library.llama_log_set(silence, ctypes.c_void_p(0))
    library.llama_backend_init()
    if not args.target.exists():
        requantize(library, args.source, args.target, args.threads)
    peer = LlamaCpp(library, args.target, args.threads)
    versions = {
        "llama-cpp-python": library.__version__,
        "format": FORMAT,
        "file_mb": f"{args.target.stat().st_size / 1e6:.0f}",
    }
    answer(versions, {"prefill": peer.prefill, "decode": peer.decode, "chunk": peer.chunk})


if __name__ == "__main__":
    main()

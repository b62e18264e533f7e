"""One GPU, two roles: what streams see while prompts of 8,192 tokens arrive, in one engine or in two on one card.

  colocated C     one engine, steps of C tokens
  processes       a prefill and a decode worker as processes, as `triblade serve` starts them on one device; the driver cuts time
  threads         both in one process, each with a thread and a stream, no priorities
  priority        the same, but everything of the decode engine, its recorded graphs included, has the higher priority

Each way runs in a process of its own with a limit, so that one that fails or hangs costs only itself. Run in benchmarks/:
    python gpu_one_device.py [--ways ...] [--seconds 4] [--limit 45] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpu_pd
import torch
from gpu_pd import FIRST, LONG, NEW, SHORT, Setting, first_tokens, prefill_worker, streams

from triblade.disagg.cuda_ipc import CudaIpc, CudaIpcConnector
from triblade.disagg.prefill import PrefillService
from triblade.disagg.remote import connect_prefill
from triblade.engine.local import LocalClient

WAYS = ("colocated 512", "colocated 2048", "processes", "threads", "priority")
SWITCH_S = 0.0005  # two engines share the interpreter: who waits for it gets it soon


class ThreadGraph(torch.cuda.graph):
    """Another thread may allocate while this one records."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"capture_error_mode": "thread_local", **options})


def engine(setting: Setting, stream: torch.cuda.Stream | None, sequences: int, tokens: int) -> Any:
    """An engine whose graphs are recorded in a stream, whose priority their kernels keep."""
    ThreadGraph.default_capture_stream = stream
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        made = gpu_pd._engine(setting, sequences, tokens)
    torch.cuda.synchronize()
    return made


def decode_engine(setting: Setting, stream: torch.cuda.Stream | None = None) -> tuple[Any, LocalClient]:
    made = engine(setting, stream, setting.streams + 4, setting.streams * (SHORT + NEW) + 6 * LONG)
    client = LocalClient(made)
    if stream is not None:
        client.call_between_steps(partial(torch.cuda.set_stream, stream))
    return made, client


def measured(setting: Setting, client: LocalClient, options: argparse.Namespace, chunk: int) -> dict[str, Any]:
    asyncio.run(streams(client, setting.streams, 0.5, 0.0))  # steps of these sizes are recorded
    alone = asyncio.run(streams(client, setting.streams, 1.5, 0.0))
    first = first_tokens(client, FIRST, None, chunk)
    loaded = asyncio.run(streams(client, setting.streams, options.seconds, options.every))
    memory = torch.cuda.mem_get_info()
    return {
        "no long prompts": alone,
        "one prompt of 4096": first,
        "with long prompts": loaded,
        "device_gib": round((memory[1] - memory[0]) / 2**30, 1),
    }


def connected(setting: Setting, made: Any, client: LocalClient) -> Any:
    remote, fetcher = connect_prefill(
        made, client.call_between_steps, setting.transfer, CudaIpcConnector(), [setting.address]
    )
    deadline = time.monotonic() + 30
    while not fetcher.num_ready:
        assert not fetcher.refusals, fetcher.refusals
        assert time.monotonic() < deadline, "the prefill worker does not answer"
        time.sleep(0.02)
    return remote, fetcher


def run_way(way: str, options: argparse.Namespace) -> dict[str, Any]:
    chunk = int(way.split()[1]) if way.startswith("colocated") else options.chunk
    with TemporaryDirectory() as folder:
        setting = Setting(options.model, options.weights, "int8", options.streams, chunk, str(Path(folder, "p")))
        if way.startswith("colocated"):
            _, client = decode_engine(setting)
            found = measured(setting, client, options, chunk)
            client.close()
            return found
        if way == "processes":
            with process_beside(setting) as pipe:
                made, client = decode_engine(setting)
                assert pipe.recv() == "ready"
                return finished(setting, made, client, options, chunk)
        sys.setswitchinterval(SWITCH_S)
        torch.cuda.graph = ThreadGraph  # type: ignore[misc]
        low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1 if way == "priority" else 0)
        prefill = engine(setting, low, 4, 4 * LONG + 2 * FIRST)
        made, client = decode_engine(setting, high)
        service = PrefillService(prefill, setting.transfer, None, CudaIpc(prefill.runner.executor.cache.pool.device))
        listener = CudaIpcConnector().listen(setting.address, service.accept)
        found = finished(setting, made, client, options, chunk)
        listener.close()
        service.close()
        return found


def finished(
    setting: Setting, made: Any, client: LocalClient, options: argparse.Namespace, chunk: int
) -> dict[str, Any]:
    remote, fetcher = connected(setting, made, client)
    found = measured(setting, client, options, chunk)
    counts = remote.counts
    found["transfers"] = {"complete": counts.num_complete, "failed": counts.num_failed, "declined": counts.num_declined}
    fetcher.close()
    client.close()
    return found


@contextmanager
def process_beside(setting: Setting) -> Iterator[Connection]:
    """The prefill worker as a process on this device."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill_worker, args=(setting, theirs))
    process.start()
    try:
        yield ours
        ours.send(None)
        process.join(10)
    finally:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--model", default="qwen2-7b")
    parser.add_argument("--weights", default="bf16", choices=["w4", "bf16"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=512, help="of the prefill worker, where there is one")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--limit", type=float, default=45.0, help="seconds of each way, loading included")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("one-gpu.json"))
    options = parser.parse_args()
    if options.way:
        found = run_way(options.way, options)
        options.out.write_text(json.dumps(found))
        os._exit(0)  # whatever threads are left
    results: dict[str, Any] = {"torch": torch.__version__, "ways": {}}
    for way in options.ways:
        part, start = options.out.with_suffix(".part"), time.monotonic()
        part.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--way", way, "--out", str(part)]
        for name in ("model", "weights", "streams", "chunk", "seconds", "every"):
            command += [f"--{name}", str(getattr(options, name))]
        try:
            code: Any = subprocess.run(command, check=False, timeout=options.limit).returncode
        except subprocess.TimeoutExpired:
            code = "too long"
        found = json.loads(part.read_text()) if part.exists() else {"failed": code}
        results["ways"][way] = found | {"seconds": round(time.monotonic() - start, 1)}
        options.out.write_text(json.dumps(results, indent=1))
        print(way, json.dumps(results["ways"][way]), flush=True)


if __name__ == "__main__":
    main()

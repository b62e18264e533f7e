"""Prefill and decode on two GPUs: what moving rows costs, how much of it is hidden, and what streams gain while long prompts come.

Two processes, a GPU each, joined by the connector `cuda-ipc`; shapes of a well-known model, random weights. Three questions:
  rows      a prompt's rows in one go, by the kernel alone: milliseconds and GB/s
  first     one prompt at a time: time to the first token, of it the writes, and what of them remains when the prompt is computed
  streams   time between the tokens of running streams while prompts of 8,192 tokens arrive, against the decode GPU alone
Needs two GPUs. Run: python benchmarks/gpu_pd.py [--model qwen2-7b] [--codecs int8 bfloat16] [--chunks 512 2048] [--out FILE].
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu_models import SHAPES, Weights, shape

from gpu import BLOCK, Model, engine_around
from triblade.config import TransferConfig
from triblade.disagg.cuda_ipc import CudaIpc, CudaIpcConnector
from triblade.disagg.placed_rows import quantization
from triblade.disagg.prefill import PrefillService
from triblade.disagg.remote import connect_prefill
from triblade.engine.engine import Engine
from triblade.engine.local import LocalClient
from triblade.sampling_params import SamplingParams

LONG, FIRST, SHORT, NEW = (
    8192,
    4096,
    128,
    1024,
)  # tokens: of long prompts, of the one prompt, of streams' prompts and answers
REMOTE_FROM = 1024  # tokens: streams' prompts are computed where they are answered
TRIES = 5


@dataclass(frozen=True)
class Setting:
    """What both processes build."""

    model: str
    weights: Weights
    codec: str
    streams: int
    chunk: int
    address: str

    @property
    def transfer(self) -> TransferConfig:
        return TransferConfig(
            connector="cuda-ipc", remote_prefill_tokens=REMOTE_FROM, max_prefill_backlog=1 << 20, remote_kv_share=0.9
        )


@dataclass
class Timed:
    """Of one prompt's writes, on the host's clock."""

    computed_s: list[float] = field(default_factory=list)  # when what was to be written was there
    placed_s: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        busy = sum(after - before for before, after in zip(self.computed_s, self.placed_s, strict=True))
        left = self.placed_s[-1] - self.computed_s[-1]
        return {"write_ms": 1e3 * busy, "left_ms": 1e3 * left, "hidden": 1 - left / busy, "writes": len(self.placed_s)}


class TimedMemory(CudaIpc):
    """Notes when steps are done and rows are written."""

    timed = Timed()

    def wait(self, mark: torch.cuda.Event) -> None:
        super().wait(mark)
        self.timed.computed_s.append(time.monotonic())

    @contextmanager
    def queue(self) -> Iterator[None]:
        with super().queue():
            yield
        self.timed.placed_s.append(time.monotonic())


def prefill_worker(setting: Setting, pipe: Connection) -> None:
    """Serve until told to end; answer with the times of the writes since the last question."""
    engine = _engine(setting, 4, 4 * LONG + 2 * FIRST)
    memory = TimedMemory(engine.runner.executor.cache.pool.device)
    service = PrefillService(engine, setting.transfer, None, memory)
    listener = CudaIpcConnector().listen(setting.address, service.accept)
    pipe.send("ready")
    while (question := pipe.recv()) is not None:
        if isinstance(question, int):
            engine.scheduler.max_num_batched_tokens = question
        timed, memory.timed = memory.timed, Timed()
        pipe.send(timed)
    listener.close()
    service.close()


def _engine(setting: Setting, sequences: int, tokens: int) -> Engine:
    torch.manual_seed(0)
    context = LONG + 2 * BLOCK
    model = Model(shape(setting.model), setting.weights, max(sequences, -(-tokens // context)), context, setting.codec)
    model.executor.warm_up(setting.streams, setting.chunk)
    return engine_around(model, setting.streams + 8, setting.chunk)


@contextmanager
def prefiller(setting: Setting) -> Iterator[Connection]:
    """The prefill worker on the second GPU; the decode worker's is visible to it as well."""
    ours, theirs = multiprocessing.Pipe()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "1,0"
    process = multiprocessing.get_context("spawn").Process(target=prefill_worker, args=(setting, theirs))
    process.start()
    theirs.close()
    os.environ.pop("CUDA_VISIBLE_DEVICES") if before is None else os.environ.update(CUDA_VISIBLE_DEVICES=before)
    try:
        yield ours
        ours.send(None)
        process.join(30)
    finally:
        process.kill()


def rows_alone(engine: Engine, tokens: int, codec: str) -> dict[str, Any]:
    """The rows of a prompt to the other GPU in one go, in random order of blocks; `codec` is that of the rows there."""
    cache = engine.runner.executor.cache
    theirs = replace(cache.layout, codec=codec)
    conversion = quantization(cache.layout, theirs, "int8")
    memory, count = CudaIpc(cache.pool.device), cache.layout.blocks_for(tokens)
    cache.pool.random_(0, 120)  # no number in any codec that is not finite
    other = torch.empty(cache.num_blocks, theirs.row_bytes, dtype=torch.uint8, device="cuda:1")
    other.copy_(cache.pool[:, : theirs.row_bytes])  # opens the way between the two within this process
    kernels, times = memory.kernels(cache.pool), []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(20):  # other blocks each time: those of before are known to caches
        blocks, there = (torch.randperm(cache.num_blocks)[:count].tolist() for _ in range(2))
        with memory.queue():
            begin.record()
            if conversion is None:
                kernels.copy(blocks, other.data_ptr(), there)
            else:
                kernels.quantize(blocks, other.data_ptr(), there, conversion)
            end.record()
        times.append(begin.elapsed_time(end))
    if conversion is None:
        assert torch.equal(other[torch.tensor(there).cuda(1)].to("cuda:0"), cache.pool[torch.tensor(blocks).cuda()])
    cache.pool.zero_()
    size, milliseconds = count * theirs.row_bytes, median(times[1:])
    return {
        "tokens": tokens,
        "there": codec,
        "bytes": size,
        "ms": milliseconds,
        "gb_per_s": size / milliseconds / 1e6,
    }


async def answer(client: LocalClient, tokens: Sequence[int], new: int, until_s: float = math.inf) -> list[float]:
    """When each token of an answer came; nobody listens after `until_s`."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    times = list[float]()
    request_id = f"request-{id(times)}"
    async for output in client.generate(tokens, params, request_id=request_id):
        times += [time.perf_counter()] * len(output.token_ids)
        if times and times[-1] > until_s:
            await client.abort(request_id)
    return times


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(10, 10000) for _ in range(tokens)]


def first_tokens(client: LocalClient, tokens: int, pipe: Connection | None, chunk: int) -> dict[str, Any]:
    """One prompt at a time."""
    rng, firsts, lines = random.Random(chunk), [], []
    for number in range(TRIES + 1):
        if pipe is not None:
            pipe.send(chunk)
            pipe.recv()
        start = time.perf_counter()
        times = asyncio.run(answer(client, prompt(rng, tokens), 1))
        if number == 0:
            continue  # kernels are loaded
        firsts.append(times[0] - start)
        if pipe is not None:
            pipe.send("times")
            timed = pipe.recv()
            lines.append(timed.figures())
    found: dict[str, Any] = {"tokens": tokens, "chunk": chunk, "first_token_ms": 1e3 * median(firsts)}
    return found | {name: median(line[name] for line in lines) for name in (lines[0] if lines else {})}


async def streams(client: LocalClient, number: int, seconds: float, every: float) -> dict[str, Any]:
    """`number` streams, one after the other each, and a long prompt every so often."""
    rng, gaps, firsts = random.Random(5), list[float](), list[float]()
    begin = time.perf_counter() + 1.5
    stop = begin + seconds

    async def stream() -> int:
        count = 0
        while time.perf_counter() < stop:
            times = [at for at in await answer(client, prompt(rng, SHORT), NEW, stop) if begin <= at <= stop]
            gaps.extend(after - before for before, after in pairwise(times))
            count += len(times)
        return count

    async def long() -> None:
        start = time.perf_counter()
        firsts.append((await answer(client, prompt(rng, LONG), 1))[0] - start)

    tasks = [asyncio.create_task(stream()) for _ in range(number)]
    due, prompts = begin, []
    if every:
        await answer(client, prompt(rng, LONG), 1)  # kernels are loaded, and steps of this size recorded
    while due < stop - every and every:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        prompts.append(asyncio.create_task(long()))
        due += every
    counts = await asyncio.gather(*tasks)
    await asyncio.gather(*prompts)
    ordered = sorted(gaps)
    found = {f"p{share}_ms": 1e3 * ordered[int(share / 100 * (len(ordered) - 1))] for share in (50, 90, 99, 100)}
    found |= {"stream_tokens_per_s": sum(counts) / seconds, "prompts": len(firsts)}
    return found | ({"long_first_token_ms": 1e3 * median(firsts)} if firsts else {})


def measure(setting: Setting, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All lines of one codec."""
    lines = list[dict[str, Any]]()

    def note(kind: str, **figures: Any) -> None:
        lines.append({"kind": kind, "codec": setting.codec, **figures})
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
        print(f"{setting.codec:8} {kind:8} {rounded}", flush=True)

    with prefiller(setting) as pipe:
        start = time.perf_counter()
        engine = _engine(setting, setting.streams + 4, setting.streams * (SHORT + NEW) + 8 * LONG)
        client = LocalClient(engine)
        for codec in dict.fromkeys((setting.codec, "int8")):
            note("rows", **rows_alone(engine, FIRST, codec))
        assert pipe.recv() == "ready"
        print(f"ready after {time.perf_counter() - start:.1f} s", flush=True)
        for chunk in options.chunks:
            engine.scheduler.max_num_batched_tokens = chunk
            note("first", way="decode GPU alone", **first_tokens(client, FIRST, None, chunk))
        if options.seconds:
            for chunk in options.chunks:
                engine.scheduler.max_num_batched_tokens = chunk
                load = (client, setting.streams, options.seconds, options.every)
                note("streams", way="decode GPU alone", chunk=chunk, **asyncio.run(streams(*load)))
            note("streams", way="no long prompts", **asyncio.run(streams(client, setting.streams, 2.0, 0.0)))
        remote, fetcher = connect_prefill(
            engine, client.call_between_steps, setting.transfer, CudaIpcConnector(), [setting.address]
        )
        while not fetcher.num_ready:
            assert not fetcher.refusals, fetcher.refusals
            time.sleep(0.05)
        for chunk in options.chunks:
            note("first", way="two GPUs", **first_tokens(client, FIRST, pipe, chunk))
        if options.seconds:
            load = (client, setting.streams, options.seconds, options.every)
            note("streams", way="two GPUs", chunk=options.chunks[-1], **asyncio.run(streams(*load)))
        counts = remote.counts
        note("counts", fetches=counts.num_fetches, complete=counts.num_complete, failed=counts.num_failed,
             declined=counts.num_declined, store_ms=1e3 * counts.store_s / max(1, counts.num_fetches))  # fmt: skip
        fetcher.close()
        client.close()
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen2-7b", choices=list(SHAPES))
    parser.add_argument("--weights", default="bf16", choices=["w4", "bf16"])
    parser.add_argument("--codecs", nargs="*", default=["int8", "bfloat16"], choices=["int8", "bfloat16"])
    parser.add_argument("--chunks", nargs="*", type=int, default=[512, 2048], help="tokens of a step with prompts")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement of streams; 0: none")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between long prompts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "lines": []}
    results |= {name: getattr(options, name) for name in ("model", "weights", "streams", "seconds", "every")}
    for codec in options.codecs:
        with TemporaryDirectory() as folder:
            setting = Setting(
                options.model, options.weights, codec, options.streams, max(options.chunks), str(Path(folder, "p"))
            )
            results["lines"] += measure(setting, options)
        gc.collect()
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

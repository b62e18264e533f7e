"""Decoding and prefill on one GPU: shapes of well-known models, random weights, prompts of 512 tokens, 128 new ones, greedy.

Prints tokens per second of the whole engine (scheduler, sampling and text included) beside the time of a recorded step alone and
the share of the memory limit; writes JSON. First checks two layers of each model against the reference backend. Needs CUDA. Run:
python benchmarks/gpu.py [--models qwen2-7b] [--weights w4 bf16] [--batches 1 8 64] [--out FILE].
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from gpu_models import SHAPES, Weights, random_weights, shape, step_bytes
from torch import Tensor

from triblade.engine.block_pool import BlockPool
from triblade.engine.cuda import CudaExecutor
from triblade.engine.cuda_steps import Shape
from triblade.engine.engine import Engine
from triblade.engine.executor import StepExecutor, TorchExecutor
from triblade.engine.request import Request
from triblade.engine.runner import ModelRunner
from triblade.engine.scheduler import ScheduledRequest, Scheduler
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.config import ModelConfig
from triblade.models.decoder import Decoder, DecoderWeights
from triblade.models.loader import OpenModel
from triblade.models.tokenizer import Tokenizer
from triblade.models.tokenizer_parts import TokenizerParts
from triblade.ops.backend import Linear
from triblade.ops.cuda.device import CudaDevice
from triblade.ops.cuda.packing import DeviceMatrix, unpack
from triblade.ops.reference import ReferenceBackend
from triblade.sampling_params import SamplingParams
from triblade.spec.sampler import Sampler

BLOCK = 16
COPY_BYTES_PER_S = 4.3e12  # what a device-to-device copy reaches on an H200


class Model:
    """A model on the device with a cache for `num_sequences` sequences."""

    def __init__(
        self, config: ModelConfig, weights: Weights, num_sequences: int, context: int, codec: str = "bfloat16"
    ) -> None:
        self.config = config
        self.context = context
        memory = torch.device("cuda")
        self.layout = KVLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK,
            codec=codec,
        )
        self.weights = random_weights(config, weights, memory)
        # One block more for each: what the scheduler keeps free for everybody else before it looks ahead.
        blocks = (self.layout.blocks_for(context) + 1) * num_sequences
        self.cache = KVCache(self.layout, blocks, torch.bfloat16, memory)
        self.executor = CudaExecutor(
            config,
            self.weights,
            self.cache,
            context_length=context,
            vocab_size=config.vocab_size,
            device=CudaDevice(memory),
        )


def request(number: int, tokens: Sequence[int], width: int) -> Request:
    """A sequence with blocks of its own."""
    made = Request(
        request_id="", number=number, prompt_token_ids=list(tokens), params=SamplingParams(), seed=0, max_tokens=1
    )
    made.block_table = array("i", range(number * width, (number + 1) * width))
    return made


def compute(executor: StepExecutor, requests: Sequence[Request], size: int) -> Tensor:
    """Logits of every token of one step that computes `size` tokens of each request."""
    executor.forward([ScheduledRequest.next(r, size) for r in requests])
    most, parts = executor.max_rows or size * len(requests), []
    for start in range(0, size * len(requests), most):
        rows = range(start, min(start + most, size * len(requests)))
        logits = executor.score(rows, with_logits=True).logits
        assert logits is not None
        parts.append(logits.clone())
    for r in requests:
        r.num_computed_tokens += size
    return torch.cat(parts)


def verify(name: str, weights: Weights, codec: str, count: int = 3) -> float:
    """Relative difference of logits from the reference backend, over two layers: chunks, then steps of `count` sequences."""
    config = replace(shape(name), num_layers=2, layers=shape(name).layers[:2])
    model = Model(config, weights, count + 1, 640, codec)
    dense = dense_weights(model.weights)
    cache = KVCache(model.layout, model.cache.num_blocks, torch.bfloat16, torch.device("cuda"))
    reference = TorchExecutor(Decoder(config, dense, ReferenceBackend(), 640), cache, config.vocab_size)
    generator = random.Random(0)
    tokens = [[generator.randrange(config.vocab_size) for _ in range(400)] for _ in range(count)]
    width, errors = model.layout.blocks_for(640), []
    for executor in (model.executor, reference):
        requests = [request(number, ids, width) for number, ids in enumerate(tokens)]
        parts = [compute(executor, requests, size) for size in (130, 200, 1, 1, 3, 20)]
        errors.append(torch.cat(parts))
    ours, expected = errors
    sections = [count * size for size in (130, 200, 1, 1, 3, 20)]
    each = [
        float((a - b).norm() / b.norm()) for a, b in zip(ours.split(sections), expected.split(sections), strict=True)
    ]
    worst = float(((ours - expected).norm(dim=1) / expected.norm(dim=1)).max())  # of a row
    best = float((ours.argmax(-1) == expected.argmax(-1)).float().mean())
    print(
        f"verify {name} {weights} {codec} {count}: {' '.join(f'{e:.2e}' for e in each)}; "
        f"worst row {worst:.1e}, same best token {best:.3f}",
        flush=True,
    )
    return max(each)


def dense_weights(weights: DecoderWeights[DeviceMatrix]) -> DecoderWeights[Linear]:
    """The same weights for the reference backend."""

    def dense(matrix: DeviceMatrix) -> Linear:
        return Linear(unpack(matrix).bfloat16(), matrix.bias)

    layers = [
        replace(w, qkv=dense(w.qkv), output=dense(w.output), gate_up=dense(w.gate_up), down=dense(w.down))  # type: ignore[arg-type]
        for w in weights.layers
    ]
    head = dense(weights.head)
    return DecoderWeights(
        embedding=Linear(weights.embedding.codes), layers=layers, final_norm=weights.final_norm, head=head  # type: ignore[arg-type]
    )  # fmt: skip


def replay_ms(model: Model, batch: int, context: int, steps: int = 24) -> tuple[float, float]:
    """Milliseconds of a recorded step alone, and of a whole `forward` and `best`, with `context` keys per sequence."""
    width = model.layout.blocks_for(model.context)
    requests = [request(number, [5] * context, width) for number in range(batch)]
    for r in requests:
        r.num_computed_tokens = context - 1
    items = [ScheduledRequest.next(r, 1) for r in requests]
    whole = []
    for _ in range(steps):
        start = time.perf_counter()
        model.executor.forward(items)
        model.executor.score(range(batch), with_logits=True)
        whole.append(time.perf_counter() - start)
    recorded = model.executor._steps.recorded
    sizes = sorted(shape.size for shape, draws in recorded if shape.queries == 1 and shape.size >= batch and not draws)
    graph = recorded[Shape(sizes[0], 1), False].graph
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / steps, statistics.median(whole) * 1000


def engine_around(model: Model, batch: int, budget: int = 8192) -> Engine:
    """An engine without a checkpoint; tokens are words."""
    size = model.config.vocab_size
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    opened = OpenModel(
        name="random",
        config=model.config,
        checkpoint=None,  # type: ignore[arg-type]
        tokenizer=Tokenizer(TokenizerParts(backend=backend, eos_token_ids=frozenset())),
        dtype=torch.bfloat16,
        eos_token_ids=frozenset(),
        generation_config={},
    )
    scheduler = Scheduler(
        BlockPool(model.cache.num_blocks),
        block_size=BLOCK,
        max_num_seqs=batch,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
        num_lookahead_tokens=1,
    )
    return Engine(opened, ModelRunner(model.executor, Sampler(size)), scheduler, context_length=model.context)


def generate(model: Model, batch: int, prompt: int, new: int) -> dict[str, float]:
    """One run of the engine: `batch` prompts together; time to the first tokens and of the rest."""
    engine = engine_around(model, batch)
    generator = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    ids = [[generator.randrange(10, 10000) for _ in range(prompt)] for _ in range(batch)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.add([r for tokens in ids for r in engine.prepare(tokens, params)])
    count, first, first_count = 0, 0.0, 0
    answered: set[int] = set()
    step_s: list[float] = []
    while engine.has_work:
        begun = time.perf_counter()
        outputs = engine.step()
        if first:
            step_s.append(time.perf_counter() - begun)
        count += sum(len(output.token_ids) for _, output in outputs)
        answered |= {asked.number for asked, output in outputs if output.token_ids}
        if not first and len(answered) == batch:  # every prompt is computed
            first, first_count = time.perf_counter() - start, count
    rest = time.perf_counter() - start - first
    steps = (count - first_count) / batch
    return {
        "first_s": first,
        "prefill_tokens_per_s": batch * prompt / first,
        "decode_tokens_per_s": (count - first_count) / rest,
        "ms_per_token": rest / steps * 1000,
        "median_step_ms": statistics.median(step_s) * 1000,
        "tokens_per_s": count / (first + rest),
    }


def mix(name: str, weights: Weights, temperature: float) -> dict[str, Any]:
    """256 requests at once, prompts and answers of 100 to 1,024 tokens: what nano-vllm measures. Counts new tokens only."""
    model = Model(shape(name), weights, 256, 2064)
    generator = random.Random(0)
    prompts = [[generator.randint(0, 10000) for _ in range(generator.randint(100, 1024))] for _ in range(256)]
    lengths = [generator.randint(100, 1024) for _ in prompts]
    seconds = []
    for _ in range(2):
        engine = engine_around(model, 256, 16384)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tokens, length in zip(prompts, lengths, strict=True):
            params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
            engine.add(engine.prepare(tokens, params))
        while engine.has_work:
            engine.step()
        seconds.append(time.perf_counter() - start)
    line = {"model": name, "weights": weights, "temperature": temperature, "seconds": seconds}
    line["output_tokens_per_s"] = sum(lengths) / min(seconds)
    print(f"mix {line}", flush=True)
    return line


def measure(
    name: str, weights: Weights, batches: Sequence[int], codec: str, prompt: int, new: int
) -> list[dict[str, Any]]:
    """A line per batch."""
    config, lines = shape(name), []
    context = -(-(prompt + new) // BLOCK) * BLOCK
    start = time.perf_counter()
    model = Model(config, weights, max(batches), context, codec)
    torch.cuda.synchronize()
    print(f"{name} {weights} made in {time.perf_counter() - start:.1f} s", flush=True)
    for batch in batches:
        start = time.perf_counter()
        step_ms, whole_ms = replay_ms(model, batch, prompt + new // 2)
        record_s = time.perf_counter() - start
        runs = [generate(model, batch, prompt, new) for _ in range(3)]
        figures = {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
        limit_ms = step_bytes(config, model.weights, batch, prompt + new // 2) / COPY_BYTES_PER_S * 1000
        line = {"model": name, "weights": weights, "codec": codec, "batch": batch, "prompt": prompt, "new": new}
        line |= {"step_ms": step_ms, "forward_ms": whole_ms, "limit_ms": limit_ms, "record_s": record_s, **figures}
        lines.append(line)
        print(
            f"{name} {weights} B={batch:3}: {figures['decode_tokens_per_s']:9,.0f} tok/s ({figures['ms_per_token']:.3f} ms/token), "
            f"median {figures['median_step_ms']:.3f}, step {step_ms:.3f} ms, with host {whole_ms:.3f}, "
            f"limit {limit_ms:.3f} ({limit_ms / figures['ms_per_token']:.0%}); "
            f"prefill {figures['prefill_tokens_per_s']:,.0f} tok/s, first {figures['first_s'] * 1000:.0f} ms; "
            f"recorded in {record_s:.1f} s",
            flush=True,
        )
    return lines


def main() -> None:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=["qwen2-7b"], choices=list(SHAPES))
    parser.add_argument("--weights", nargs="*", default=["w4", "bf16"], choices=["w4", "bf16"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--codec", default="bfloat16", choices=["bfloat16", "int8"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--mix", nargs="*", type=float, default=[], help="temperatures of a mix of 256 requests")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "lines": []}
    results["versions"] = versions()
    for name in options.models:
        for weights in options.weights:
            if not options.no_verify:
                for count in (3, 40):
                    line = (name, weights, count, verify(name, weights, options.codec, count))
                    results.setdefault("verify", []).append(line)
            arguments = (options.batches, options.codec, options.prompt, options.new)
            results["lines"] += measure(name, weights, *arguments)
            torch.cuda.empty_cache()
            results.setdefault("mix", []).extend(mix(name, weights, t) for t in options.mix)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))


def versions() -> Mapping[str, str]:
    """Of what the figures depend on."""
    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": str(torch.cuda.get_device_properties(0).name),
    }


if __name__ == "__main__":
    main()

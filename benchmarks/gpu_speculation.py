"""What drafts cost and gain on one GPU: a well-known model's shapes, weights that count, drafts of a chosen quality.

The model answers every token with the next number, so strongly that roundings change nothing: the right continuation is known, and
an answer that is not that one is wrong. A drafted token is the right one with the given chance, else another.
With `eagle` the head's own kernels run beforehand and their guesses are thrown away. Prints tokens per second of the whole engine
with drafts and without, tokens per step, and whether the answers are equal. An adaptive policy goes on learning from run to run, as
it does in an engine; figures are of the last ones. Needs CUDA. Run: python benchmarks/gpu_speculation.py [--model qwen2-7b]
[--batches 1 4 16] [--length 4] [--chance 0.6 0.85] [--policy fixed] [--runs 3] [--out FILE].
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_models import SHAPES, random_weights, shape

from gpu import BLOCK, engine_around
from triblade.engine.cuda import CudaExecutor
from triblade.engine.cuda_eagle import CudaEagle
from triblade.engine.drafters import TargetParts, kv_layers
from triblade.engine.speculation import Speculator
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights
from triblade.ops.cuda.device import CudaDevice
from triblade.ops.cuda.packing import DeviceMatrix
from triblade.ops.packing import QuantizedMatrix
from triblade.sampling_params import SamplingParams
from triblade.spec.drafter import Draft, Drafter, DraftItem, DraftState, WarmsUp
from triblade.spec.eagle import INNER_NORMS, NORMS, EagleWeights, head_config, matrix_shapes
from triblade.spec.eagle_drafter import EagleDrafter, HeadLimits
from triblade.spec.eagle_files import EagleCheckpoint
from triblade.spec.policy import AdaptivePolicy, DraftPolicy, FixedPolicy, PolicySettings

PROMPT, NEW, DRAFT_VOCABULARY, GROUP = 512, 128, 32768, 128
LOUD = 100.0  # times what an embedding is beside the layers' results


class Model:
    """As `gpu.Model`, with room for a head's keys."""

    def __init__(self, name: str, num_sequences: int) -> None:
        self.config = shape(name)
        self.context = PROMPT + NEW + 32
        memory, config = torch.device("cuda"), self.config
        self.layout = KVLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK,
            codec="bfloat16",
            draft=kv_layers(head_config(config, None), "random"),
        )
        self.cache = KVCache(
            self.layout, self.layout.blocks_for(self.context) * num_sequences + 1, torch.bfloat16, memory
        )
        self.executor = CudaExecutor(
            config,
            counting(random_weights(config, "w4", memory)),
            self.cache,
            context_length=self.context,
            vocab_size=config.vocab_size,
            device=CudaDevice(memory),
        )


def counting(weights: DecoderWeights[DeviceMatrix]) -> DecoderWeights[DeviceMatrix]:
    """Embeddings that outweigh what layers add, and a head whose row t + 1 is the embedding of t."""
    table = torch.randn_like(weights.embedding.codes).mul_(LOUD)
    head = table.roll(1, 0).mul_(1 / LOUD)
    return replace(weights, embedding=replace(weights.embedding, codes=table), head=replace(weights.head, codes=head))


def random_head(config: ModelConfig) -> EagleCheckpoint:
    """A head in 4 bits that reads one inner layer."""
    own = head_config(config, None)
    group = GROUP if config.hidden_size % GROUP == 0 else 64

    def matrix(rows: int, inputs: int) -> QuantizedMatrix:
        codes = torch.randint(1, 16, (rows, inputs), dtype=torch.uint8)
        scales = torch.full((rows, inputs // group), 0.23 * inputs**-0.5, dtype=torch.float16)
        return QuantizedMatrix(codes=codes, scales=scales, offsets=None, bits=4)

    matrices = {name: matrix(*size) for name, size in matrix_shapes(own, DRAFT_VOCABULARY, 1).items()}
    norms = {name: torch.ones(config.hidden_size) for name in NORMS} | {INNER_NORMS: torch.ones(1, config.hidden_size)}
    weights = EagleWeights.from_parts(matrices, norms, torch.arange(DRAFT_VOCABULARY))
    return EagleCheckpoint(config=own, weights=weights, inner_layers=(config.num_layers // 2,), facts={}, digest="")


class Chosen:
    """Implements `Drafter`: right tokens with a chance, after what another drafter takes of time."""

    def __init__(self, answers: Sequence[Sequence[int]], chance: float, other: Drafter | None) -> None:
        self._answers = {tuple(tokens[:PROMPT]): tokens for tokens in answers}
        self._chance = chance
        self._other = other
        self._random = random.Random(3)
        self.warm_up_steps = other.warm_up_steps if isinstance(other, WarmsUp) else 0
        self.other_s: list[float] = []  # of each call

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        """See `Drafter`."""
        begun = time.perf_counter()
        if self._other is not None:
            self._other.propose(items)
        self.other_s.append(time.perf_counter() - begun)
        return [Draft(self._tokens(item)) for item in items]

    def forget(self, request: DraftState) -> None:
        """See `Drafter`."""
        if self._other is not None:
            self._other.forget(request)

    def _tokens(self, item: DraftItem) -> list[int]:
        known = len(item.request.token_ids)
        right = self._answers[tuple(item.request.token_ids[:PROMPT])][known : known + item.length]
        return [token if self._random.random() < self._chance else token + 1 for token in right]


def run(model: Any, prompts: Sequence[list[int]], drafter: Drafter | None, policy: DraftPolicy) -> dict[str, Any]:
    """One batch to its end; figures of decoding."""
    engine = engine_around(model, len(prompts))
    if drafter is not None:
        engine.speculator = Speculator(drafter, engine.scheduler, policy)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    requests = [r for tokens in prompts for r in engine.prepare(tokens, params)]
    engine.add(requests)
    while any(not r.output_token_ids for r in requests):
        engine.step()
    torch.cuda.synchronize()
    begun, first, steps = time.perf_counter(), sum(len(r.output_token_ids) for r in requests), 0
    while engine.has_work:
        engine.step()
        steps += 1
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    count = sum(len(r.output_token_ids) for r in requests) - first
    answers = [list(r.token_ids) for r in requests]
    found = {"answers": answers, "tokens_per_s": count / seconds, "ms_per_step": seconds / steps * 1000, "steps": steps}
    return found | {"drafted": engine.load().speculation.num_draft_tokens}


def measure(model: Any, head: EagleDrafter, batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one batch size."""
    generator = random.Random(1)
    prompts = [[generator.randrange(10, 10000) for _ in range(PROMPT)] for _ in range(batch)]
    plain = [run(model, prompts, None, FixedPolicy(0)) for _ in range(options.runs)]
    answers, rows = [[*tokens, *range(tokens[-1] + 1, tokens[-1] + 1 + NEW)] for tokens in prompts], []
    assert plain[0]["answers"] == answers, "the model does not count"
    rate = statistics.median(r["tokens_per_s"] for r in plain[1:])
    print(f"B={batch:3} plain {rate:9,.0f} tok/s, {plain[1]['ms_per_step']:.3f} ms a step", flush=True)
    for chance in options.chance:
        for kind, other in (("certain drafts", None), ("eagle", head)):
            drafters = [Chosen(answers, chance, other) for _ in range(options.runs)]
            policy = policy_of(options)
            runs = [run(model, prompts, drafter, policy) for drafter in drafters]
            same = min(sum(a == b for a, b in zip(r["answers"], answers, strict=True)) for r in runs)
            row = {
                "batch": batch,
                "drafter": kind,
                "chance": chance,
                "length": options.length,
                "policy": options.policy,
                "plain_tokens_per_s": rate,
                "drafted": [r["drafted"] for r in runs],
                "tokens_per_s_by_run": [r["tokens_per_s"] for r in runs],
            }
            row["tokens_per_s"] = statistics.median(r["tokens_per_s"] for r in runs[1:])
            row["ms_per_step"], row["tokens_per_step"] = runs[-1]["ms_per_step"], (NEW - 1) / runs[-1]["steps"]
            row["draft_ms"] = statistics.median(drafters[-1].other_s) * 1000 if drafters[-1].other_s else 0.0
            row |= {"ratio": row["tokens_per_s"] / rate, "plain_ms_per_step": plain[1]["ms_per_step"], "equal": same}
            rows.append(row)
            print(
                f"B={batch:3} {kind:14} right {chance}: {row['tokens_per_s']:9,.0f} tok/s, {row['ratio']:.2f}x, "
                f"{row['ms_per_step']:.3f} ms a step ({row['draft_ms']:.3f} to draft), "
                f"{row['tokens_per_step']:.2f} tokens a step, {same} of {batch} equal",
                flush=True,
            )
    return rows


def policy_of(options: argparse.Namespace) -> DraftPolicy:
    """A fresh one."""
    if options.policy == "fixed":
        return FixedPolicy(options.length)
    return AdaptivePolicy(PolicySettings(max_length=options.length))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2-7b", choices=list(SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--chance", nargs="*", type=float, default=[0.6, 0.85])
    parser.add_argument("--policy", choices=["fixed", "adaptive"], default="fixed")
    parser.add_argument("--runs", type=int, default=3, help="of each row; the first one warms up")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model(options.model, max(options.batches))
    checkpoint = random_head(model.config)
    model.executor.keep_layers(checkpoint.inner_layers)
    parts = TargetParts(executor=model.executor, cache=model.cache, context_length=model.context, team=None)
    limits = HeadLimits(max_tokens=8192, window=model.context, context_length=model.context)
    rows = []
    for batch in options.batches:
        head = EagleDrafter(CudaEagle(replace(checkpoint), parts), BLOCK, limits)
        rows += measure(model, head, batch, options)
    if options.out is not None:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "model": options.model, "rows": rows}))


if __name__ == "__main__":
    main()

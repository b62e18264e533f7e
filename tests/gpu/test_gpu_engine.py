"""Whole tiny models on the GPU: against float32, the same tokens in every way of running them, and no memory that grows."""

from __future__ import annotations

import gc
from array import array
from typing import Any

import pytest
import torch
from cuda_models import config_of, cuda_tiny
from gpu_answers import LENGTHS, NEAR_TIE, begun, greedy, outputs, preference
from gpu_support import gpu_executor, gpu_reference
from native_models import all_logits, sequence
from tiny import prompt

from triblade.engine.attend import AttentionNeeds, EagerAttention, SdpaAttention
from triblade.engine.attention_choice import choose_attention
from triblade.engine.attention_packages import TritonAttention
from triblade.engine.cuda import CudaExecutor
from triblade.engine.executor import StepExecutor
from triblade.engine.scheduler import ScheduledRequest
from triblade.errors import MemoryBudgetError

pytestmark = pytest.mark.gpu
IDS = prompt(60)


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("family", ["llama-bias", "qwen2-window", "qwen3", "gemma2", "gemma3", "phi3-partial"])
@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_every_family(family: str, codec: str) -> None:
    """No further from float32 than the reference in bfloat16 by much, in one chunk and in several."""
    model = cuda_tiny(family)
    expected = all_logits(gpu_reference(model, torch.float32), IDS)
    rounded = error(all_logits(gpu_reference(model, torch.bfloat16), IDS), expected)
    for chunk in (None, 11):
        ours = error(all_logits(gpu_executor(model, codec), IDS, chunk), expected)
        assert ours < 1.25 * rounded + (1e-2 if codec == "int8" else 0)


def test_float16() -> None:
    model = cuda_tiny("qwen2")
    expected = all_logits(gpu_reference(model, torch.float32), IDS)
    executor = gpu_executor(model, "float16", dtype=torch.float16)
    for chunk in (None, 11):
        assert error(all_logits(executor, IDS, chunk), expected) < 6e-3


def test_no_memory_left_is_said_with_what_to_change() -> None:
    """The step of a prompt that is too long for what is left, after which others still run."""
    model = cuda_tiny("qwen2")
    executor = gpu_executor(model, num_blocks=6000)
    executor.warm_up(1, 64)
    request = sequence(0, prompt(90_000))
    request.block_table = array("i", range(6000))
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 16 * 2**20) / total)
    try:
        with pytest.raises(
            MemoryBudgetError, match=r"(?s)computing a step of 90000 tokens.*lower --max-num-batched-tokens"
        ):
            executor.forward([ScheduledRequest.next(request, 90_000)])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    executor.forward([ScheduledRequest.next(sequence(1, prompt(9)), 9)])
    assert executor.score([8], with_logits=False).best[0] >= 0


WAYS = [("qwen2-window", SdpaAttention, codec) for codec in ("bfloat16", "int8")]
WAYS += [("gemma2", EagerAttention, codec) for codec in ("bfloat16", "int8")]
WAYS += [(family, TritonAttention, "bfloat16") for family in ("qwen2-window", "gemma2")]


@pytest.mark.parametrize(("family", "kind", "codec"), WAYS)
def test_another_attention(family: str, kind: Any, codec: str) -> None:
    """Prompts in chunks and single tokens, beside the kernels' products."""
    model = cuda_tiny(family)
    expected = all_logits(gpu_reference(model, torch.float32), IDS)
    rounded = error(all_logits(gpu_reference(model, torch.bfloat16), IDS), expected)
    executor = gpu_executor(model, codec)
    executor.attend_by(kind(executor.cache, config_of(model)))
    for chunk in (11, 1):
        ours = error(all_logits(executor, IDS, chunk), expected)
        assert ours < 1.25 * rounded + (1e-2 if codec == "int8" else 0)


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_prompts_of_many_lengths_in_one_step(codec: str) -> None:
    """Long ones, which the library attends together, between short ones, and what follows a chunk."""
    model = cuda_tiny("qwen3", max_position_embeddings=320)
    sizes = ((70, 130, 20, 64, 200), (80, 1, 66, 100, 3))
    logits = []
    references = [gpu_reference(model, dtype) for dtype in (torch.float32, torch.bfloat16)]
    executors: list[StepExecutor] = [gpu_executor(model, codec), *references]
    for executor in executors:
        requests = [sequence(n, prompt(300, seed=n)) for n in range(5)]
        for number, request in enumerate(requests):
            request.block_table = type(request.block_table)("i", range(number * 20, (number + 1) * 20))
        parts = []
        for step in sizes:
            executor.forward([ScheduledRequest.next(r, n) for r, n in zip(requests, step, strict=True)])
            found = executor.score([sum(step[: n + 1]) - 1 for n in range(5)], with_logits=True).logits
            assert found is not None
            parts.append(found.clone())
            for request, size in zip(requests, step, strict=True):
                request.num_computed_tokens += size
        logits.append(torch.cat(parts))
    ours, expected, rounded = logits
    assert error(ours, expected) < 1.25 * error(rounded, expected) + (1e-2 if codec == "int8" else 0)


def test_triton_is_tried_and_taken() -> None:
    model = cuda_tiny("qwen2")
    executor = gpu_executor(model)
    needs = AttentionNeeds(
        model=config_of(model), dtype=torch.bfloat16, codec="bfloat16", capability=torch.cuda.get_device_capability()
    )
    taken = choose_attention("triton", ("triblade", "own"), needs, executor.cache)
    assert isinstance(taken, TritonAttention)


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("scheme", [None, "int4"])
def test_recorded_launched_and_reference_agree(count: int, scheme: str | None) -> None:
    """Up to the first near tie: where answers part, neither token is better by more than roundings come to."""
    model = cuda_tiny("qwen2", hidden_size=256, intermediate_size=512, max_position_embeddings=320)
    recorded, launched = gpu_executor(model, scheme=scheme), gpu_executor(model, scheme=scheme)
    launched._records = False
    ours, theirs = outputs(recorded, count), outputs(launched, count)
    prompts = [prompt(length, seed=n) for n, length in enumerate(LENGTHS[:count])]
    assert all(len(tokens) >= 5 for tokens in ours)
    judge = gpu_reference(model, torch.float32) if scheme is None else gpu_executor(model, scheme=scheme)
    others = [theirs] if scheme else [theirs, outputs(gpu_reference(model, torch.bfloat16), count)]
    for other in others:
        preferences = [preference(judge, a, b, ids) for a, b, ids in zip(ours, other, prompts, strict=True)]
        assert max(preferences) < NEAR_TIE


def test_ten_thousand_steps_keep_no_memory() -> None:
    """Of the device and of Python, in steps of changing sizes."""
    model = cuda_tiny("qwen2", num_hidden_layers=1, max_position_embeddings=320)
    executor = gpu_executor(model)
    before = 0
    for turn in range(42):
        requests = begun(executor, 1 + turn % 3 * 9)
        greedy(executor, requests, 240)
        if turn == 2:  # every size was recorded
            gc.collect()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
    assert isinstance(executor, CudaExecutor)

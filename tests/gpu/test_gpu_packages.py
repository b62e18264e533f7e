"""Attention by packages that are installed here, on the GPU itself: against float32, and the tokens of our own kernels."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from cuda_models import config_of, cuda_tiny
from gpu_answers import LENGTHS, outputs, preference
from gpu_support import gpu_executor, gpu_reference
from native_models import all_logits
from tiny import TinyModel, prompt

from triblade.engine.attend import AttentionNeeds, StepAttention
from triblade.engine.attention_choice import choose_attention
from triblade.engine.cuda import CudaExecutor
from triblade.registry import ATTENTION_BACKENDS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the packages' own
PACKAGES = [name for name in ("flash_attn", "flashinfer") if find_spec(name)]
ROUNDINGS = 6  # that two tokens' difference may be off: four deviations of a difference of two numbers
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "max_position_embeddings": 320}


def taken(name: str, executor: CudaExecutor, model: TinyModel) -> StepAttention | None:
    """What is chosen where it is asked for, after its trial."""
    capability = torch.cuda.get_device_capability()
    needs = AttentionNeeds(model=config_of(model), dtype=torch.bfloat16, codec="bfloat16", capability=capability)
    return choose_attention(name, ("triblade", "own"), needs, executor.cache)


def with_package(name: str, model: TinyModel) -> CudaExecutor:
    executor = gpu_executor(model)
    attention = taken(name, executor, model)
    assert isinstance(attention, ATTENTION_BACKENDS[name])
    executor.attend_by(attention)
    return executor


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(("family", "length"), [("qwen2", 150), ("qwen2-window", 60), ("gemma2", 60)])
def test_every_family(name: str, family: str, length: int) -> None:
    """One chunk, several, and single tokens; windows and soft caps."""
    model, ids = cuda_tiny(family, **SIZES), prompt(length)
    expected, rounded = (all_logits(gpu_reference(model, dtype), ids) for dtype in (torch.float32, torch.bfloat16))
    bound = 1.25 * float((rounded - expected).norm())
    executor = with_package(name, model)
    for chunk in (None, 11, 1):
        assert float((all_logits(executor, ids, chunk) - expected).norm()) < bound, chunk


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("count", [1, 20])
def test_tokens_are_those_of_our_kernels(name: str, count: int) -> None:
    """Up to the first near tie, as wide as roundings of this model make it."""
    model = cuda_tiny("qwen2", **SIZES)
    judge, ids = gpu_reference(model, torch.float32), prompt(60)
    expected, rounded = (all_logits(executor, ids) for executor in (judge, gpu_reference(model, torch.bfloat16)))
    tie = ROUNDINGS * float((rounded - expected).std() / expected.std(-1).mean())
    ours, theirs = outputs(gpu_executor(model), count), outputs(with_package(name, model), count)
    prompts = [prompt(length, seed=n) for n, length in enumerate(LENGTHS[:count])]
    apart = [preference(judge, a, b, tokens) for a, b, tokens in zip(ours, theirs, prompts, strict=True)]
    assert max(apart) < tie

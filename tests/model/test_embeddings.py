"""Vectors of prompts: those of the oracle, the same whatever is computed beside them and however they are cut into chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import SIZES, WINDOW, random_weights, target
from tiny import prompt, prompts_of, tiny_model
from tiny_engine import open_tiny, tiny_llm
from torch import Tensor

from triblade.errors import NumericalError, RequestError
from triblade.llm import LLM
from triblade.models.loader import OpenModel
from triblade.sampling_params import Pooling, SamplingParams
from triblade.spec.eagle_files import save_eagle, target_facts

POOLINGS: tuple[Pooling, ...] = ("last", "mean")
LENGTHS = (1, 3, 4, 5, 8, 17, 21, 30)
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "two at a time": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 512},
    "drafts": {"drafter": "suffix"},
}
NATIVE: dict[str, Any] = {"deterministic": False, "backend": "native", "block_size": 16, "threads": 2}
NATIVE |= {"kv_cache_dtype": "bfloat16"}


@cache
def model(name: str = "llama") -> OpenModel:
    return open_tiny(name)


def prompts() -> list[list[int]]:
    return prompts_of(LENGTHS)


@cache
def alone(pooling: Pooling) -> list[list[float]]:
    """Each prompt in an engine of its own."""
    return [tiny_llm(model()).embed([ids], pooling)[0] for ids in prompts()]


@torch.inference_mode()
def oracle(name: str, ids: list[int], pooling: Pooling, **sizes: Any) -> Tensor:
    """What transformers' own model leaves behind its last norm, pooled."""
    found = tiny_model(name, **sizes).oracle.model(torch.tensor([ids])).last_hidden_state[0]  # [T, C]
    pooled = found[-1] if pooling == "last" else found.mean(0)
    return pooled / pooled.norm()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "phi3"])
def test_the_oracle_agrees(name: str, pooling: Pooling) -> None:
    ids = prompt(21)
    for options in ({}, {"deterministic": False, "backend": "reference"}):
        (vector,) = tiny_llm(model(name), **options).embed([ids], pooling)
        torch.testing.assert_close(torch.tensor(vector), oracle(name, ids, pooling), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("way", WAYS)
def test_alone_equals_together(way: str, pooling: Pooling) -> None:  # E14, E15
    llm = tiny_llm(model(), **WAYS[way])
    assert llm.embed(prompts(), pooling) == alone(pooling)
    assert llm.embed(prompts(), pooling) == alone(pooling)  # once more, with what the prefix cache has now
    llm.engine.check_idle()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_preempted_prompts_begin_again(pooling: Pooling) -> None:  # E06, E07
    # Those that generate come first and grow, and take the blocks of what comes behind them.
    llm = tiny_llm(model(), num_kv_blocks=14, max_num_batched_tokens=6)
    speaking = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    params = [speaking] * 3 + [SamplingParams(max_tokens=0, pooling=pooling)] * len(LENGTHS)
    found = llm.generate([prompts()[4]] * 3 + prompts(), params)
    assert llm.engine.load().num_preemptions > 0
    assert [choice.embedding for (choice,) in found[3:]] == alone(pooling)
    assert all(choice.embedding is None and len(choice.token_ids) == 16 for (choice,) in found[:3])
    llm.engine.check_idle()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a drafter that has inner layers kept, which lie beside the final states."""
    path, opened = tmp_path_factory.mktemp("head"), target()
    save_eagle(path, target_facts(opened), random_weights(opened, bits=4), {"window": WINDOW, "inner_layers": [0]})
    return path


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("has_drafter", [False, True])
def test_native_kernels(pooling: Pooling, has_drafter: bool, head: Path) -> None:
    options = {**NATIVE, "drafter": "eagle", "draft_model": str(head)} if has_drafter else NATIVE
    together = tiny_llm(target(), **options).embed(prompts(), pooling)
    by_itself = [tiny_llm(target(), **options).embed([ids], pooling)[0] for ids in prompts()]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(by_itself), atol=1e-5, rtol=0)
    expected = torch.stack([oracle("llama", ids, pooling, **SIZES) for ids in prompts()])
    assert (torch.tensor(together) * expected).sum(-1).min() > 0.999  # keys and values are rounded to bfloat16


def test_numbers_that_are_not_finite_are_told() -> None:  # A22
    opened = open_tiny("llama")
    opened.checkpoint.tensor("model.embed_tokens.weight")[77] = torch.inf
    llm = tiny_llm(opened, max_num_batched_tokens=4)
    for pooling in POOLINGS:
        with pytest.raises(NumericalError, match="number 1"):
            llm.embed([prompt(9), [3, 77, *range(4, 12)]], pooling)
    llm.engine.check_idle()


@pytest.mark.parametrize("wrong", [{"max_tokens": 1}, {"max_tokens": None}, {"n": 2}])
def test_a_vector_is_all_that_such_a_request_gets(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="max_tokens 0 and n 1"):
        replace(SamplingParams(max_tokens=0, pooling="last"), **wrong)


def test_a_prompt_may_fill_the_context() -> None:
    llm: LLM = tiny_llm(model(), max_model_len=30)
    assert llm.embed(prompts()[-1:]) == alone("last")[-1:]
    with pytest.raises(RequestError, match="30"):
        llm.embed([prompt(31)])

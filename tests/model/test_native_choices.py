"""Tokens that native programs choose themselves: the sampler's own, whatever stands beside them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from constrained import answers, engine, form
from native_kernels import ISAS
from native_models import all_logits, native_executor, native_tiny
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm
from torch import Tensor

from triblade.engine.executor import Choice
from triblade.llm import LLM
from triblade.sampling_params import SamplingParams, StructuredOutputs
from triblade.spec.sampler import Sampler, SamplerRow, uniform
from triblade.spec.token_mask import packed

ROWS = 24
IDS = prompt(ROWS)


def masks(size: int) -> list[Tensor | None]:
    """For each row none, or about half of the tokens, or one."""
    generator = torch.Generator().manual_seed(5)
    some = [torch.rand(size, generator=generator) > 0.5 for _ in range(ROWS)]
    one = [torch.arange(size) == 7 * row % size for row in range(ROWS)]
    return [[None, packed(some[row]), packed(one[row])][row % 3] for row in range(ROWS)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_choices_are_those_of_the_sampler(isa: str, threads: int) -> None:
    executor = native_executor(native_tiny("gemma2"), isa=isa, threads=threads)
    logits = all_logits(executor, IDS)
    size = logits.shape[1]
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, min_p=0.2),
        SamplingParams(temperature=1e-3),
    ]
    wanted = [
        SamplerRow(params[row // 3 % 4], 1000 + row, row, IDS, (), frozenset(), allowed=mask)
        for row, mask in enumerate(masks(size))
    ]
    choices = [
        Choice(uniform(row.seed, row.position), row.params.temperature, row.params.min_p, row.allowed) for row in wanted
    ]
    found = executor.choose(range(ROWS), choices).best
    assert found == Sampler(size).sample(logits, wanted).token_ids
    for number in range(ROWS):  # alone, too
        assert executor.choose([number], [choices[number]]).best == [found[number]]
    assert executor.choose(range(ROWS), [None] * ROWS).best == logits.argmax(-1).tolist()


def test_draws_follow_the_distribution() -> None:
    executor = native_executor(native_tiny("llama"))
    logits = all_logits(executor, IDS[:1])[0]
    allowed = torch.arange(len(logits)) % 3 > 0
    draws = 20_000
    tokens = torch.zeros(len(logits))
    for start in range(0, draws, 200):
        choices = [Choice(uniform(9, number), 0.7, 0.0, packed(allowed)) for number in range(start, start + 200)]
        for token in executor.choose([0] * 200, choices).best:
            tokens[token] += 1
    expected = (logits / 0.7).masked_fill(~allowed, -torch.inf).softmax(-1) * draws
    assert tokens[~allowed].sum() == 0
    often = expected > 20
    spread = (tokens[often] - expected[often]).square() / expected[often]
    assert spread.sum() < often.sum() + 5 * (2 * often.sum()).sqrt()  # five standard deviations of chi-square


def test_a_fault_is_one_though_it_is_barred() -> None:  # A22
    model = native_tiny("llama")
    model.source.tensor("model.embed_tokens.weight")[5] = torch.nan
    executor = native_executor(model)
    all_logits(executor, [5])
    allowed = torch.ones(executor._vocab_size, dtype=torch.bool)
    allowed[5] = False
    assert executor.choose([0], [Choice(0.5, 1.0, 0.0, packed(allowed))]).best == [-1]


def native_llm(**options: Any) -> LLM:
    opened = open_tiny("llama", hidden_size=64, intermediate_size=96)
    fixed = {"deterministic": False, "backend": "native", "kv_cache_dtype": "bfloat16", "block_size": 16}
    return tiny_llm(opened, **{**fixed, "num_kv_blocks": 64, "threads": 2, **options})


MIXED = [
    SamplingParams(temperature=0.9, seed=1, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.8, seed=2, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=14, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, min_p=0.1, seed=4, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=14, ignore_eos=True, presence_penalty=0.5),
]


def test_neighbours_do_not_change_a_draw() -> None:  # E14
    """Alone, together with requests that need the sampler, with drafts, preempted: the same tokens, seed for seed."""
    prompts = [prompt(9 + number, seed=number) for number in range(len(MIXED))]
    alone = [native_llm().generate([ids], [params])[0] for ids, params in zip(prompts, MIXED, strict=True)]
    drafts = {"drafter": "suffix", "draft_policy": "fixed", "num_speculative_tokens": 3}
    for options in ({}, drafts, {"num_kv_blocks": 6, "max_num_batched_tokens": 7}):
        together = native_llm(**options).generate(prompts, MIXED)
        assert [choice[0].token_ids for choice in together] == [choice[0].token_ids for choice in alone]
    assert len(alone[3][0].logprobs or ()) == 14


FORMS = [form("json_object"), form("regex", "[a-f]{3,9}"), None, form("choice", ["yes", "no"])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forms_are_kept_and_do_not_change_a_neighbour(temperature: float) -> None:
    fixed: dict[str, Any] = {"backend": "native", "kv_cache_dtype": "bfloat16", "block_size": 16}
    together = answers(engine(**fixed), FORMS, temperature=temperature)
    for wanted, answer in zip(FORMS, together, strict=True):
        if wanted is not None and answer.finish_reason == "stop":
            assert re.fullmatch(wanted_pattern(wanted), answer.text, re.DOTALL)
    sampled = answers(engine(**fixed), FORMS, temperature=temperature, logprobs=0)  # chosen by the sampler
    assert [answer.token_ids for answer in sampled] == [answer.token_ids for answer in together]


def wanted_pattern(wanted: StructuredOutputs) -> str:
    return {"json_object": r"\{.*\}", "regex": wanted.text, "choice": "yes|no"}[wanted.kind]

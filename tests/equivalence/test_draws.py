"""Sampled tokens through the engine are draws from the target's distribution with every drafter, at every position of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from markov import DRAFTERS, PROMPT, VOCABULARY, distributions, markov_llm, markov_model, sampled, table
from tiny_engine import plain_decoder, plain_logits
from toy import reference_distribution

from triblade.sampling_params import SamplingParams

ALL = {
    "temperature": 1.3,
    "top_k": 8,
    "top_p": 0.92,
    "min_p": 0.02,
    "repetition_penalty": 1.15,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.05,
}
LENGTH = 3


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "penalties and filters"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_token_is_a_draw_from_the_target(drafter: str, options: dict[str, Any]) -> None:  # F02, F03, F04, F12
    sizes = {"n": 1, "max_tokens": 200} if drafter == "suffix" else {"n": 64, "max_tokens": 32}
    params = SamplingParams(ignore_eos=True, **sizes, **options)
    llm = markov_llm(drafter, LENGTH, num_kv_blocks=1024, max_num_seqs=64, deterministic=False)
    draws = sampled(llm, params, 4_000)
    _, freedom, p = draws.chi_square()
    assert draws.num_impossible == 0
    assert freedom > 30
    assert p > 1e-4
    counts = llm.engine.load().speculation
    assert all(accepted > 20 for accepted in counts.accepted_per_position)
    assert len(counts.accepted_per_position) == LENGTH
    llm.engine.check_idle()


def test_a_wrong_distribution_is_noticed() -> None:
    """The same draws, compared with those of another temperature."""
    params = SamplingParams(ignore_eos=True, n=64, max_tokens=32)
    llm = markov_llm("eagle", LENGTH, num_kv_blocks=1024, max_num_seqs=64, deterministic=False)
    draws = sampled(llm, params, 4_000)
    warmer = distributions(draws.last, torch.zeros(len(draws.last), VOCABULARY), SamplingParams(temperature=1.3))
    _, _, p = type(draws)(draws.tokens, draws.last, draws.positions, warmer).chi_square()
    assert p < 1e-6


def test_the_expected_distribution_is_the_models() -> None:
    logits = plain_logits(plain_decoder(markov_model(table())), PROMPT)  # [T, V]
    assert torch.allclose(logits, table()[PROMPT], atol=1e-4)
    params = SamplingParams(temperature=1.3, top_k=8, top_p=0.92, min_p=0.02)
    expected = distributions(torch.tensor(PROMPT), torch.zeros(len(PROMPT), VOCABULARY), params)
    plainest = [reference_distribution(row.tolist(), params) for row in table()[PROMPT]]
    assert torch.allclose(expected, torch.tensor(plainest, dtype=torch.float64), atol=1e-6)

"""Drawn proposals: the result follows the target's distribution, whatever they were drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import COMBINATIONS, TOY, chi_square_p, reference_distribution

from triblade.sampling_params import SamplingParams
from triblade.spec.distribution import draw, weights_of
from triblade.spec.random_numbers import uniform
from triblade.spec.rejection import PROPOSAL_STREAM
from triblade.spec.sampler import Proposal, Sampler, SamplerRow

DRAWS = 6_000
DRAFTS = {
    "other": [0.1, 2.0, 1.0, -1.0, 0.3, 2.2, -0.5, 1.0],
    "equal": TOY,
    "flat": [0.0] * 8,
    "certain": [-200.0] * 7 + [0.0],
}


def verified(logits: list[float], draft: list[float], **params: Any) -> tuple[torch.Tensor, float]:
    """Counts of the verified tokens, and the share of kept proposals."""
    weights = weights_of(torch.tensor([draft]))
    seeds = range(DRAWS)
    numbers = torch.tensor([uniform(seed, 0, PROPOSAL_STREAM) for seed in seeds], dtype=torch.float64)
    proposed = draw(weights.expand(DRAWS, -1), numbers).tolist()
    settings = SamplingParams(**params)
    rows = [
        SamplerRow(settings, seed, 0, [1], [3, 3], frozenset(), proposal=Proposal(token, weights[0]))
        for seed, token in zip(seeds, proposed, strict=True)
    ]
    sampled = Sampler(len(logits)).sample(torch.tensor([logits]).repeat(DRAWS, 1), rows).token_ids
    kept = sum(a == b for a, b in zip(sampled, proposed, strict=True))
    return torch.tensor(sampled).bincount(minlength=len(logits)), kept / DRAWS


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_the_target_decides(options: dict[str, Any], draft: str) -> None:  # F02, F03, F04
    counts, kept = verified(TOY, DRAFTS[draft], **options)
    expected = torch.tensor(reference_distribution(TOY, SamplingParams(**options)), dtype=torch.float64)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        assert chi_square_p(counts[possible], expected[possible] * DRAWS) > 1e-4
    # No verification keeps more than what both distributions share, and this one keeps all of it.
    q = torch.tensor(DRAFTS[draft], dtype=torch.float64).softmax(-1)
    assert kept >= float(torch.minimum(expected, q).sum()) - 0.02


def test_penalties_and_bias_reach_the_target_only() -> None:  # F12
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {0: 1.0}, "top_p": 0.9}
    counts, _ = verified(TOY, DRAFTS["other"], **params)
    logits = list(TOY)
    logits[0] += 1.0
    logits[1] /= 1.3  # in the prompt
    logits[3] = logits[3] / 1.3 - 2 * 0.5  # twice in the output
    expected = torch.tensor(reference_distribution(logits, SamplingParams(top_p=0.9)), dtype=torch.float64)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert chi_square_p(counts[possible], expected[possible] * DRAWS) > 1e-4


def test_a_greedy_row_ignores_how_its_proposal_was_drawn() -> None:
    row = SamplerRow(SamplingParams(temperature=0), 0, 0, [], [], frozenset(), proposal=Proposal(2, torch.ones(8)))
    assert Sampler(8).sample(torch.tensor([TOY]), [row]).token_ids == [4]

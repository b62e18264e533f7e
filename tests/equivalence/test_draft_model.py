"""A draft model changes nothing but the number of steps, whatever it says and whatever happens to its KV."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from drafters import model_drafter, speculate
from tiny import prompts_of
from tiny_engine import open_tiny, plain_decoder, plain_logits, tiny_llm
from toy import chi_square_p, reference_distribution

from triblade.llm import LLM
from triblade.models.decoder import Decoder
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams
from triblade.spec.draft_model import ModelDrafter

LENGTHS = [1, 4, 5, 17, 30]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "two at a time": {"max_num_seqs": 2},
    "preempted": {"num_kv_blocks": 22},
    "no prefix cache": {"enable_prefix_caching": False},
}


@cache
def model(seed: int = 0, context: int = 64, layers: int = 3) -> OpenModel:
    return open_tiny("llama", seed=seed, max_position_embeddings=context, num_hidden_layers=layers)


def prompts() -> list[list[int]]:
    return prompts_of(LENGTHS)


@cache
def plain(seed: int | None = None) -> list[list[int]]:
    params = GREEDY if seed is None else sampled(seed)
    return [tiny_llm(model()).generate([ids], params)[0][0].token_ids for ids in prompts()]


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True)


def with_draft(draft: OpenModel, length: int = 4, temperature: float = 0.0, **options: Any) -> LLM:
    llm = tiny_llm(model(), **options)
    return speculate(llm, model_drafter(llm, draft, temperature), length)


def drafter_of(llm: LLM) -> ModelDrafter:
    assert llm.engine.speculator is not None
    assert isinstance(llm.engine.speculator.drafter, ModelDrafter)
    return llm.engine.speculator.drafter


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draft", ["itself", "another", "short context"])
def test_greedy_output_is_that_of_the_target(draft: str, way: str) -> None:  # F01, F16, F17, F21, F22
    models = {"itself": model(), "another": model(seed=1, layers=1), "short context": model(context=20)}
    llm = with_draft(models[draft], **WAYS[way])
    for _ in range(2):  # cold and warm
        assert [choices[0].token_ids for choices in llm.generate(prompts(), GREEDY)] == plain()
    if way == "preempted":
        assert llm.engine.load().num_preemptions > 0
    llm.engine.check_idle()
    assert drafter_of(llm).num_requests == 0


def test_certain_proposals_keep_seeded_output() -> None:  # F11
    llm = with_draft(model())
    assert [choices[0].token_ids for choices in llm.generate(prompts(), sampled(3))] == plain(3)


@pytest.mark.parametrize("length", [1, 4, 7])
def test_a_draft_that_is_its_target_is_accepted_to_the_last_token(length: int) -> None:  # F17
    target = model(context=700)
    llm = tiny_llm(target, num_kv_blocks=200)
    speculate(llm, model_drafter(llm, target), length)
    params = SamplingParams(temperature=0, max_tokens=1 + 500, ignore_eos=True)
    llm.generate([prompts()[3]], params)
    assert llm.engine.load().num_steps == 1 + -(-500 // (length + 1))  # the prompt's step gives the first token


@pytest.mark.parametrize("way", ["batched", "chunks of 7", "preempted"])
def test_every_request_of_a_batch_is_accepted(
    way: str,
) -> None:  # F11, F17, F22: twice the same steps, cold and from the cache
    llm = with_draft(model(), **WAYS[way])
    draft, accepted = 0, 0
    for _ in range(2):
        for request in prompts():
            llm.engine.add(llm.engine.prepare(request, GREEDY))
        while llm.engine.has_work:
            proposed = {
                r.number: (r, list(r.draft_token_ids), len(r.output_token_ids)) for r in llm.engine.scheduler.running
            }
            llm.engine.step()
            for request, tokens, before in proposed.values():
                new = request.output_token_ids[before:]
                if tokens and new:
                    draft += len(tokens)
                    accepted += len(new) - 1
                    assert new[: len(tokens)] == tokens[: len(new)]
    assert draft == accepted > 100


def test_drawn_proposals_keep_the_distribution() -> None:  # F03
    """The first two tokens of many choices, against the exact probabilities of all pairs; the second is a verified draft's."""
    params = SamplingParams(n=128, temperature=1.5, top_k=4, max_tokens=4, ignore_eos=True)
    llm = with_draft(model(seed=1), 2, temperature=1.3, num_kv_blocks=512)
    expected = pair_probabilities(prompts()[2], params)
    counts = dict.fromkeys(expected, 0)
    for seed in range(8):
        (choices,) = llm.generate([prompts()[2]], replace(params, seed=seed))
        for choice in choices:
            counts[choice.token_ids[0], choice.token_ids[1]] += 1
    wanted = torch.tensor(list(expected.values())) * sum(counts.values())
    assert chi_square_p(torch.tensor(list(counts.values())), wanted) > 0.001


def pair_probabilities(ids: list[int], params: SamplingParams) -> dict[tuple[int, int], float]:
    """Of each pair of tokens that may follow `ids`."""
    decoder, pairs = plain_decoder(model()), {}
    for first, p in probabilities(decoder, ids, params).items():
        for second, q in probabilities(decoder, [*ids, first], params).items():
            pairs[first, second] = p * q
    return pairs


def probabilities(decoder: Decoder, ids: list[int], params: SamplingParams) -> dict[int, float]:
    p = reference_distribution(plain_logits(decoder, ids)[-1].tolist(), params)
    return {token: probability for token, probability in enumerate(p) if probability > 0}


def test_greedy_and_sampling_requests_in_one_batch() -> None:  # F11
    """Draws for those that sample leave the others' proposals certain."""
    llm = with_draft(model(seed=1), temperature=1.2)
    engine = llm.engine
    greedy = [engine.prepare(ids, GREEDY)[0] for ids in prompts()]
    drawn = [engine.prepare(ids, sampled(5))[0] for ids in prompts()]
    engine.add([request for both in zip(greedy, drawn, strict=True) for request in both])
    while engine.has_work:
        engine.step()
        assert all(r.draft_weights is None for r in greedy)
    assert [r.output_token_ids for r in greedy] == plain()
    assert all(len(r.output_token_ids) == 24 for r in drawn)


def test_requests_that_leave_in_the_middle_of_a_draft_leave_nothing() -> None:
    """Two engines side by side, a draft with a shorter context than its target's, every third request aborted."""
    engines = [with_draft(model(seed=1, context=24), num_kv_blocks=40).engine for _ in range(2)]
    aborted = 0
    for turn in range(30):
        requests = [engine.prepare(prompts()[turn % 5], GREEDY)[0] for engine in engines]
        for engine, request in zip(engines, requests, strict=True):
            engine.add([request])
            engine.step()
            engine.step()
            if turn % 3 == 0:
                aborted += bool(request.draft_token_ids)
                engine.abort([request])
    assert aborted
    for engine in engines:
        while engine.has_work:
            engine.step()
        engine.check_idle()
        assert engine.speculator is not None
        assert isinstance(engine.speculator.drafter, ModelDrafter)
        assert engine.speculator.drafter.num_requests == 0

"""The drafter eagle: greedy and seeded output as without it, its guesses those of the plainest chain, its states never lost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import WINDOW, Spy, chain, random_weights
from tiny import prompts_of
from tiny_engine import open_tiny, tiny_llm

from triblade.llm import LLM, Completion
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams
from triblade.spec.eagle_drafter import EagleDrafter
from triblade.spec.eagle_files import save_eagle, target_facts
from triblade.spec.policy import FixedPolicy

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=5, max_tokens=14, ignore_eos=True)
SIZES = {"hidden_size": 64, "intermediate_size": 96}
LENGTHS = [1, 3, 4, 9, 17, 30]
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "two at a time": {"max_num_seqs": 2},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_kv_blocks": 16},
}


@cache
def model() -> OpenModel:
    return open_tiny("llama", **SIZES)


def prompts() -> list[list[int]]:
    return prompts_of(LENGTHS)


@cache
def plain(sampled: bool = False) -> list[Completion]:
    return [tiny_llm(model()).generate([ids], SAMPLED if sampled else GREEDY)[0][0] for ids in prompts()]


@pytest.fixture(scope="module", params=[[], [0]], ids=["final state", "inner state, too"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path, inner = tmp_path_factory.mktemp("head"), request.param
    weights = random_weights(model(), bits=4, num_inner=len(inner))
    save_eagle(path, target_facts(model()), weights, {"window": WINDOW, "inner_layers": inner})
    return path


def with_head(folder: Path, length: int = 3, **options: Any) -> LLM:
    settings = {"draft_policy": "fixed", "num_speculative_tokens": length, "draft_confidence": 0.0, **options}
    return tiny_llm(model(), drafter="eagle", draft_model=str(folder), **settings)


def test_drafts_that_end_early_change_nothing(folder: Path) -> None:
    llm = with_head(folder, 5, draft_confidence=0.05)
    found = [choices[0] for choices in llm.generate(prompts(), GREEDY)]
    assert [choice.token_ids for choice in found] == [completion.token_ids for completion in plain()]
    drafted = {
        count for choice in found for count, _ in choice.speculation.trace[:-5]
    }  # there as many as asked for still fit
    assert drafted & {1, 2, 3, 4}


@pytest.mark.parametrize("way", WAYS)
def test_output_is_that_of_plain_decoding(folder: Path, way: str) -> None:  # F01, F22
    llm = with_head(folder, **WAYS[way])
    for _ in range(2):  # cold and warm
        found = [choices[0].token_ids for choices in llm.generate(prompts(), GREEDY)]
        assert found == [completion.token_ids for completion in plain()]
    assert (llm.engine.load().num_preemptions > 0) == (way == "preempted")
    llm.engine.check_idle()
    assert drafter_of(llm).num_requests == 0


def test_seeded_sampling_is_that_of_plain_decoding(folder: Path) -> None:  # F11, F12
    found = [choices[0].token_ids for choices in with_head(folder).generate(prompts(), SAMPLED)]
    assert found == [completion.token_ids for completion in plain(sampled=True)]


def drafter_of(llm: LLM) -> EagleDrafter:
    assert llm.engine.speculator is not None
    assert isinstance(llm.engine.speculator.drafter, EagleDrafter)
    return llm.engine.speculator.drafter


@pytest.mark.parametrize("way", ["batched", "chunks of 5", "no prefix cache"])
def test_guesses_are_those_of_a_chain_from_scratch(folder: Path, way: str) -> None:  # F17
    llm = with_head(folder, **WAYS[way])
    spy = Spy(drafter_of(llm))
    llm.engine.speculator.drafter = spy  # type: ignore[union-attr]
    for ids in prompts()[2:4]:
        llm.generate([ids], GREEDY)
    assert len(spy.seen) > 10
    for tokens, guesses in spy.seen:
        assert guesses == chain(model(), folder, tokens, len(guesses))


class Sometimes(FixedPolicy):
    """No drafts for a while, then drafts again."""

    def __init__(self) -> None:
        super().__init__(3)
        self._calls = 0

    def lengths(self, candidates: Any) -> list[int]:
        self._calls += 1
        return super().lengths(candidates) if self._calls % 6 == 0 else [0] * len(candidates)


def test_the_head_catches_up_after_a_pause(folder: Path) -> None:
    llm = with_head(folder)
    assert llm.engine.speculator is not None
    spy = Spy(drafter_of(llm))
    llm.engine.speculator.drafter, llm.engine.speculator.policy = spy, Sometimes()
    params = replace(GREEDY, max_tokens=30)
    llm.generate([prompts()[3]], params)
    assert len(spy.seen) >= 4
    for tokens, guesses in spy.seen:
        assert guesses == chain(model(), folder, tokens, len(guesses))


def test_requests_that_leave_early_leave_nothing(folder: Path) -> None:
    engine = with_head(folder, num_kv_blocks=40).engine
    for turn in range(30):
        requests = engine.prepare(prompts()[turn % 5], GREEDY)
        engine.add(requests)
        for _ in range(turn % 4):
            engine.step()
        if turn % 3:
            engine.abort(requests)
    while engine.has_work:
        engine.step()
    engine.check_idle()
    assert engine.speculator is not None
    assert engine.speculator.drafter.num_requests == 0  # type: ignore[attr-defined]

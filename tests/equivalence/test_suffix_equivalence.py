"""The suffix drafter inside the engine: plain answers, token for token, in fewer steps where text repeats itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.llm import LLM, Completion
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams

FAMILIES = ["llama", "gemma3"]
NEW_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(
    temperature=0.6, top_p=0.9, repetition_penalty=1.05, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2
)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "two at a time": {"max_num_seqs": 2},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_kv_blocks": 40},
}


@cache
def model(name: str) -> OpenModel:
    return open_tiny(name, max_position_embeddings=128)


@cache
def prompts() -> list[list[int]]:
    """One word said 48 times (F01), a phrase said often, a text that ends as it began, and one without any repetition."""
    phrase = prompt(5, seed=1)
    text = prompt(24, seed=2)
    return [[7] * 48, phrase * 8, text + text[:6], list(range(40, 60))]


def suffix_llm(name: str, length: int = 4, **options: Any) -> LLM:
    return tiny_llm(model(name), drafter="suffix", num_speculative_tokens=length, **options)


@cache
def plain(name: str, kind: str = "greedy") -> list[Completion]:
    return [tiny_llm(model(name)).generate([ids], PARAMS[kind])[0][0] for ids in prompts()]


def answers(llm: LLM, kind: str = "greedy") -> list[Completion]:
    found = [choices[0] for choices in llm.generate(prompts(), PARAMS[kind])]
    llm.engine.check_idle()
    return found


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_are_the_plain_ones_in_fewer_steps(name: str, length: int) -> None:  # F01
    llm = suffix_llm(name, length)
    assert answers(llm) == plain(name)
    assert llm.engine.load().num_steps < NEW_TOKENS + 1


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_plain_answers(way: str, kind: str) -> None:  # F01, F11, F12
    llm = suffix_llm("llama", **WAYS[way])
    assert answers(llm, kind) == plain("llama", kind)
    assert way != "preempted" or llm.engine.load().num_preemptions > 0


def test_the_same_questions_again_take_fewer_steps() -> None:  # F22
    llm = suffix_llm("llama", draft_policy="fixed")  # adaptive lengths depend on what else the machine does
    first = answers(llm, "sampled")
    steps = llm.engine.load().num_steps
    assert [c.token_ids for c in answers(llm, "sampled")] == [c.token_ids for c in first]
    assert llm.engine.load().num_steps - steps < steps / 2


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_answers_end_at_the_limit_of_the_context(room: int) -> None:  # F15
    llm = suffix_llm("llama", 8, max_model_len=64)
    ids = [7] * (64 - room)
    (choice,) = llm.generate([ids], SamplingParams(temperature=0, ignore_eos=True))[0]
    expected = tiny_llm(model("llama"), max_model_len=64).generate(
        [ids], SamplingParams(temperature=0, ignore_eos=True)
    )
    assert choice == expected[0][0]
    assert (len(choice.token_ids), choice.finish_reason) == (room, "length")


def test_an_accepted_stop_token_ends_the_answer() -> None:  # F07
    """Each token of a drafted run in turn is the stop token."""
    expected = plain("llama")[0].token_ids
    for stop in set(expected):
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, stop_token_ids=[stop])
        (choice,) = suffix_llm("llama", 8).generate([prompts()[0]], params)[0]
        assert choice.token_ids == expected[: expected.index(stop) + 1]
        assert choice.finish_reason == "stop"


def test_aborts_with_drafts_pending_leave_nothing() -> None:
    llm = suffix_llm("llama")
    requests = [request for ids in prompts() for request in llm.engine.prepare(ids, GREEDY)]
    llm.engine.add(requests)
    while not any(request.draft_token_ids for request in requests):
        llm.engine.step()
    assert not any(request.is_finished for request in requests)
    llm.engine.abort(requests)
    llm.engine.check_idle()
    assert [c.token_ids for c in answers(llm)] == [c.token_ids for c in plain("llama")]

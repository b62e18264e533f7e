"""Alone = batched = chunked = preempted = cached = speculative, token for token and bit for bit, in deterministic float32.

Every column is one way of computing the same requests; the oracle computes each token from scratch without a cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from drafters import RandomDrafter, ScriptedDrafter, speculate
from tiny import prompt, prompts_of
from tiny_engine import open_tiny, plain_decoder, plain_greedy, plain_logits, tiny_llm

from triblade.llm import Completion
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams

FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3-longrope-short"]
LENGTHS = [1, 3, 4, 5, 8, 17, 21, 30]
NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3)
# Seeded sampling with every kind of filter must be as stable as greedy.
SAMPLED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    seed=11,
    max_tokens=NEW_TOKENS,
    ignore_eos=True,
    logprobs=2,
)
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "two at a time": {"max_num_seqs": 2},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 31": {"max_num_batched_tokens": 31},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_kv_blocks": 14},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 512},
    "blocks of 64": {"block_size": 64, "num_kv_blocks": 16},
}


@cache
def model(name: str) -> OpenModel:
    return open_tiny(name)


def prompts() -> list[list[int]]:
    return prompts_of(LENGTHS)


@cache
def alone(name: str, sampled: bool = False) -> list[Completion]:
    """Each request in an engine of its own."""
    params = SAMPLED if sampled else GREEDY
    return [tiny_llm(model(name)).generate([ids], params)[0][0] for ids in prompts()]


def together(name: str, params: SamplingParams, options: dict[str, Any]) -> list[Completion]:
    llm = tiny_llm(model(name), **options)
    completions = [choices[0] for choices in llm.generate(prompts(), params)]
    if options == WAYS["preempted"]:
        assert llm.engine.load().num_preemptions > 0
    llm.engine.check_idle()
    return completions


@pytest.mark.parametrize("name", FAMILIES)
def test_alone_equals_the_oracle(name: str) -> None:
    decoder = plain_decoder(model(name))
    for ids, completion in zip(prompts(), alone(name), strict=True):
        assert completion.token_ids == plain_greedy(decoder, ids, NEW_TOKENS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_way_equals_alone(name: str, way: str) -> None:  # E06, E07, E14, E15
    assert together(name, GREEDY, WAYS[way]) == alone(name)


@pytest.mark.parametrize("way", ["batched", "chunks of 7", "preempted"])
def test_seeded_sampling_too(way: str) -> None:  # C01
    assert together("llama", SAMPLED, WAYS[way]) == alone("llama", sampled=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_warm_prefix_equals_cold(name: str) -> None:  # E13, E20
    llm = tiny_llm(model(name))
    cold = llm.generate(prompts(), GREEDY)
    warm = llm.generate(prompts(), GREEDY)
    assert [w[0].token_ids for w in warm] == [c[0].token_ids for c in cold]
    assert [w[0].logprobs for w in warm] == [c[0].logprobs for c in cold]
    # everything but the last token's block was found
    assert [w[0].num_cached_tokens for w in warm] == [(length - 1) // 4 * 4 for length in LENGTHS]


def test_equal_prompts_in_one_batch() -> None:  # E04
    llm = tiny_llm(model("llama"))
    ids = prompts()[-1]
    together_ = llm.generate([ids] * 3, GREEDY)
    assert [choices[0].token_ids for choices in together_] == [alone("llama")[-1].token_ids] * 3


def test_constant_hash_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:  # E01
    llm = tiny_llm(model("llama"))
    monkeypatch.setattr(llm.engine.pool, "_hash", lambda parent, tokens: b"same")
    for _ in range(2):
        assert [c[0].token_ids for c in llm.generate(prompts(), GREEDY)] == [c.token_ids for c in alone("llama")]


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_logits_do_not_depend_on_the_batch(size: int) -> None:  # E14
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, ignore_eos=True)
    ids = prompts()[4]
    llm = tiny_llm(model("llama"), enable_prefix_caching=False)
    batch = llm.generate([ids, *([[5, 6, 7, 8, 9]] * (size - 1))], params)
    assert batch[0][0].logprobs == tiny_llm(model("llama")).generate([ids], params)[0][0].logprobs


@pytest.mark.parametrize("chunk", [1, 31, 32, 33, 512])
def test_prompt_logprobs_do_not_depend_on_chunks(chunk: int) -> None:  # E15
    ids = prompt(50, seed=3)
    llm = tiny_llm(model("llama"), max_num_batched_tokens=chunk)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scored = llm.generate([ids], params)[0][0].prompt_logprobs
    expected = plain_logits(plain_decoder(model("llama")), ids).log_softmax(-1)
    assert scored is not None
    assert scored[0] is None
    for position in range(1, 50):
        entry = scored[position]
        assert entry is not None
        assert entry.token_id == ids[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, ids[position]]), abs=1e-5)


@pytest.mark.parametrize("codec", ["bfloat16", "float16", "int8"])
def test_compressed_caches_do_not_depend_on_the_batch(codec: str) -> None:
    llm = tiny_llm(model("llama"), kv_cache_dtype=codec)
    batched = [c[0].token_ids for c in llm.generate(prompts(), GREEDY)]
    single = [
        tiny_llm(model("llama"), kv_cache_dtype=codec).generate([ids], GREEDY)[0][0].token_ids for ids in prompts()
    ]
    assert batched == single


def test_default_mode_differs_at_near_ties_only() -> None:  # E13: the ordinary backend, same requests
    llm = tiny_llm(model("llama"), deterministic=False)
    for choices, reference in zip(llm.generate(prompts(), GREEDY), alone("llama"), strict=True):
        ours, expected = choices[0].token_ids, reference.token_ids
        if ours == expected:
            continue
        at = next(i for i, pair in enumerate(zip(ours, expected, strict=True)) if pair[0] != pair[1])
        assert reference.logprobs is not None
        top = reference.logprobs[at].top
        assert top[0][1] - top[1][1] < 1e-3


def test_two_engines_in_one_process_do_not_feel_each_other() -> None:
    first, second = tiny_llm(model("llama")), tiny_llm(model("qwen3"))
    streams = [first.stream(prompts()[5], GREEDY), second.stream(prompts()[5], GREEDY)]
    tokens: list[list[int]] = [[], []]
    for outputs in zip(*streams, strict=True):
        for kept, output in zip(tokens, outputs, strict=True):
            kept += output.token_ids
    assert tokens == [alone("llama")[5].token_ids, alone("qwen3")[5].token_ids]
    assert torch.is_inference_mode_enabled() is False


def answers(name: str, sampled: bool = False) -> dict[tuple[int, ...], list[int]]:
    return {tuple(ids): c.token_ids for ids, c in zip(prompts(), alone(name, sampled), strict=True)}


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_change_nothing(name: str, length: int, wrong: float) -> None:  # F01, F21
    drafter = ScriptedDrafter(answers(name), model(name).config.vocab_size, wrong)
    llm = speculate(tiny_llm(model(name)), drafter, length)
    assert [choices[0] for choices in llm.generate(prompts(), GREEDY)] == alone(name)
    llm.engine.check_idle()
    assert sorted(drafter.forgotten) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_nothing_in_any_way(way: str) -> None:  # F01, F22
    drafter = ScriptedDrafter(answers("llama"), model("llama").config.vocab_size, wrong=0.3)
    llm = speculate(tiny_llm(model("llama"), **WAYS[way]), drafter, 4)
    for _ in range(2):  # cold and warm
        assert [c[0].token_ids for c in llm.generate(prompts(), GREEDY)] == [c.token_ids for c in alone("llama")]
    llm.engine.check_idle()


@pytest.mark.parametrize("wrong", [0.0, 0.4])
@pytest.mark.parametrize("way", ["batched", "chunks of 7", "preempted"])
def test_seeded_sampling_is_the_same_with_certain_drafts(way: str, wrong: float) -> None:  # F11, F12
    drafter = ScriptedDrafter(answers("llama", sampled=True), model("llama").config.vocab_size, wrong)
    llm = speculate(tiny_llm(model("llama"), **WAYS[way]), drafter, 3)
    assert [choices[0] for choices in llm.generate(prompts(), SAMPLED)] == alone("llama", sampled=True)


def test_right_drafts_are_all_accepted() -> None:  # F17
    name = "llama"
    drafter = ScriptedDrafter(answers(name), model(name).config.vocab_size, wrong=0.0)
    llm = speculate(tiny_llm(model(name)), drafter, 3)
    llm.generate([prompts()[4]], GREEDY)
    assert llm.engine.load().num_steps == 1 + 2  # the prompt's step gives one token, two more give 4 and 3


def test_drawn_drafts_do_not_change_greedy_requests() -> None:  # F11
    llm = speculate(tiny_llm(model("llama")), RandomDrafter(model("llama").config.vocab_size), 3)
    assert [choices[0] for choices in llm.generate(prompts(), GREEDY)] == alone("llama")

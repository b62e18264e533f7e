"""Prefill on one worker, decode on another = one engine, token for token, in deterministic float32 (issue F, cases of kind g)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from disaggregated import pair
from drafters import ScriptedDrafter, speculate
from tiny import prompt, prompts_of
from tiny_engine import open_tiny, tiny_llm
from wire_tables import table_for

from triblade.engine.engine import Engine
from triblade.llm import LLM, Completion
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams

LENGTHS = [1, 2, 3, 4, 5, 8, 9, 17, 21, 30, 48]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=8, ignore_eos=True, logprobs=2)
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "other chunks on P": {"prefill": {"max_num_batched_tokens": 5}},
    "two at a time": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "few blocks on D": {"num_kv_blocks": 16, "prefill": {"num_kv_blocks": 64}},
    "few blocks on P": {"prefill": {"num_kv_blocks": 14}},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 512},
    "blocks of 16": {"block_size": 16, "num_kv_blocks": 64},
    "D reserves little": {"transfer": {"remote_kv_share": 0.15}},
    "P soon busy": {"transfer": {"max_prefill_backlog": 40}},
}


@cache
def model(name: str = "llama") -> OpenModel:
    return open_tiny(name)


def prompts() -> list[list[int]]:
    return prompts_of(LENGTHS)


@cache
def alone(name: str = "llama", params: str = "greedy") -> list[Completion]:
    chosen = GREEDY if params == "greedy" else SAMPLED
    return [tiny_llm(model(name)).generate([ids], chosen)[0][0] for ids in prompts()]


def same(choices: list[list[Completion]], expected: list[Completion]) -> None:
    """Everything but how many prompt tokens were cached."""
    for (choice, *_), reference in zip(choices, expected, strict=True):
        assert choice.token_ids == reference.token_ids
        assert choice.logprobs == reference.logprobs
        assert (choice.text, choice.finish_reason) == (reference.text, reference.finish_reason)


@pytest.mark.parametrize("connector", ["local", "tcp", "shm"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_two_workers_equal_one_engine(name: str, connector: str) -> None:  # G11, G13, G15
    with pair(model(name), connector) as workers:
        same(workers.generate(prompts(), GREEDY), alone(name))
        assert workers.remote.counts.num_fetches > 0
        assert workers.remote.counts.num_failed == 0


@pytest.mark.parametrize("way", WAYS)
def test_in_every_way(way: str) -> None:  # G16: prefix hits on P; G17: on D
    with pair(model(), **WAYS[way]) as workers:
        for _ in range(2):
            same(workers.generate(prompts(), GREEDY), alone())
        assert workers.remote.counts.num_fetches > 0


def test_seeded_sampling_with_logprobs() -> None:
    with pair(model()) as workers:
        same(workers.generate(prompts(), SAMPLED), alone(params="sampled"))


@pytest.mark.parametrize("missing", [3, 12, 30])
def test_prefix_hits_on_either_side(missing: int) -> None:  # G16, G17
    ids = prompt(40, seed=4)
    with pair(model()) as workers:
        workers.prefill.engine.add(workers.prefill.engine.prepare(ids[:24], SamplingParams(max_tokens=0)))
        workers.generate([ids[: 40 - missing]], GREEDY)
        (completions,) = workers.generate([ids], GREEDY)
        assert completions[0].token_ids == tiny_llm(model()).generate([ids], GREEDY)[0][0].token_ids
        again = workers.generate([ids], GREEDY)  # everything but the last block's tokens is here
        assert again[0][0].num_cached_tokens == 36
        assert again[0][0].token_ids == completions[0].token_ids


def test_several_choices_share_one_transfer() -> None:  # G14
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=6, ignore_eos=True)
    ids = prompt(30, seed=8)
    expected = [c.token_ids for c in tiny_llm(model()).generate([ids], params)[0]]
    with pair(model(), transfer={"remote_prefill_tokens": 4}) as workers:
        assert [c.token_ids for c in workers.generate([ids], params)[0]] == expected
        assert workers.remote.counts.num_fetches == 1


@pytest.mark.parametrize("length", [1, 4, 5, 21])
def test_one_token_and_a_stop_at_token_one(length: int) -> None:  # G15
    ids = prompts()[LENGTHS.index(length)]
    first = alone()[LENGTHS.index(length)].token_ids[0]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    stop = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, stop_token_ids=(first,))
    with pair(model()) as workers:
        assert workers.generate([ids], one)[0][0].token_ids == [first]
        stopped = workers.generate([ids], stop)[0][0]
        assert (stopped.token_ids, stopped.stop_reason) == ([first], first)
        scored = workers.generate([ids], SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1))[0][0]
        expected = tiny_llm(model()).generate([ids], SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1))
        assert scored.prompt_logprobs == expected[0][0].prompt_logprobs


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_speculation_on_the_decode_worker(wrong: float) -> None:
    answers = {tuple(ids): c.token_ids for ids, c in zip(prompts(), alone(), strict=True)}

    def prepare(engine: Engine) -> object:
        return speculate(LLM.from_engine(engine), ScriptedDrafter(answers, model().config.vocab_size, wrong), 3)

    with pair(model(), prepare=prepare) as workers:
        for _ in range(2):
            same(workers.generate(prompts(), GREEDY), alone())


def test_preemption_on_the_decode_worker() -> None:
    with pair(model(), num_kv_blocks=20, prefill={"num_kv_blocks": 64}) as workers:
        same(workers.generate(prompts() * 2, GREEDY), alone() * 2)
        assert workers.client.load().num_preemptions > 0


def test_a_busy_label_twice() -> None:  # G18: two requests with one client id
    with pair(model()) as workers:
        first, second = prompts()[-1], prompts()[-2]
        found = workers.generate([first, second, first], GREEDY)
        assert [c[0].token_ids for c in found] == [alone()[i].token_ids for i in (-1, -2, -1)]


@pytest.mark.parametrize("connector", ["local", "tcp", "shm"])
def test_int8_rows_in_the_int8_codec_lose_nothing(connector: str) -> None:
    expected = tiny_llm(model(), kv_cache_dtype="int8").generate(prompts(), GREEDY)
    with pair(model(), connector, kv_cache_dtype="int8", transfer={"wire_codec": "int8"}) as workers:
        same(workers.generate(prompts(), GREEDY), [choices[0] for choices in expected])
        assert workers.remote.counts.num_failed == 0


def test_float_rows_in_the_int8_codec_fill_an_int8_cache() -> None:
    """The workers' caches differ in dtype; what arrives is about as large as what is stored."""
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "prefill": {"kv_cache_dtype": "float32"}}
    with pair(model(), "tcp", transfer={"wire_codec": "int8"}, **options) as workers:
        for choices, reference in zip(workers.generate(prompts(), GREEDY), alone(), strict=True):
            assert choices[0].token_ids[0] == reference.token_ids[0]
        counts = workers.remote.counts
        assert counts.num_complete == counts.num_fetches > 0


@pytest.mark.parametrize("connector", ["local", "tcp", "shm"])
def test_rows_in_a_calibrated_codec(connector: str, tmp_path: Path) -> None:
    """The decode worker gets the table from its prefill worker; exact tokens make short prompts exact."""
    layout = tiny_llm(model()).engine.runner.executor.cache.layout
    path = tmp_path / "table.safetensors"
    replace(table_for(layout, bits=8.0, exact_first=4, exact_last=128), figures={"nats": 0.1}).save(path)
    transfer = {"wire_codec": "pca-lut", "wire_table": path}
    with pair(model(), connector, transfer=transfer) as workers:
        same(workers.generate(prompts(), GREEDY), alone())
        counts = workers.remote.counts
        assert counts.num_complete == counts.num_fetches > 0


def test_requests_that_a_table_would_harm_are_sent_raw(tmp_path: Path) -> None:
    layout = tiny_llm(model()).engine.runner.executor.cache.layout
    path = tmp_path / "table.safetensors"
    replace(table_for(layout, bits=2.0), figures={"nats": 1e-9}).save(path)
    with pair(model(), "tcp", transfer={"wire_codec": "pca-lut", "wire_table": path}) as workers:
        same(workers.generate(prompts()[-2:], GREEDY), alone()[-2:])
        assert workers.remote.counts.key_error.counts == []  # none was sent with loss
        workers.eventually(lambda: [state.num_fallbacks for state in workers.fetcher.states] == [2])


def test_what_a_transfer_took_is_counted(tmp_path: Path) -> None:
    layout = tiny_llm(model()).engine.runner.executor.cache.layout
    path = tmp_path / "table.safetensors"
    replace(table_for(layout, bits=4.0), figures={"nats": 1e9}).save(path)
    with pair(model(), "tcp", transfer={"wire_codec": "pca-lut", "wire_table": path}) as workers:
        workers.generate(prompts()[-2:], GREEDY)
        counts = workers.remote.counts
        for spread in (counts.seconds, counts.size_bytes, counts.queue_s, counts.key_error, counts.value_error):
            assert sum(spread.counts) == counts.num_complete == 2
        assert counts.size_bytes.total == counts.wire_bytes
        assert counts.key_error.total > 0

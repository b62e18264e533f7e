"""Prefill and decode workers = one engine, token for token, under every condition at once that changes what either side does.

The conditions are those of benchmarks/pd_equality.py, which asks them of a real model; here in deterministic float32, with the raw
codec, over both ways between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from disaggregated import Pair, pair
from eagle_heads import Spy, chain
from role_conditions import ENGINES, GREEDY, LENGTHS, NATIVE, model, prompts, saved_head
from tiny import prompt
from tiny_engine import tiny_llm

from triblade.llm import Completion
from triblade.sampling_params import SamplingParams
from triblade.spec.drafter import Draft, DraftItem, FillsRows

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 3},
    "three choices": {"n": 3, "temperature": 0.9, "seed": 5, "logprobs": 2},
    "one token": {"max_tokens": 1},
}
CONNECTORS = ["shm", "tcp"]


@cache
def alone(params: str = "greedy", weights: str = "as stored") -> list[list[Completion]]:
    return [tiny_llm(model(weights)).generate([ids], replace(GREEDY, **PARAMS[params]))[0] for ids in prompts()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_head(tmp_path_factory.mktemp("head"))


def engine(name: str, folder: Path) -> dict[str, Any]:
    """Options of both engines."""
    options = ENGINES[name]
    return {**options, "draft_model": str(folder)} if options.get("drafter") == "eagle" else options


def same(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    """Everything but how many prompt tokens were cached and how many steps it took."""
    for choices, references in zip(found, expected, strict=True):
        for choice, reference in zip(choices, references, strict=True):
            assert choice.token_ids == reference.token_ids
            assert choice.logprobs == reference.logprobs
            assert (choice.text, choice.finish_reason) == (reference.text, reference.finish_reason)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("connector", CONNECTORS)
def test_cold_and_warm_on_both_sides(connector: str, params: str, name: str, folder: Path) -> None:  # G11, G13-G17, F22
    with pair(model(), connector, **engine(name, folder)) as workers:
        prompts_on_prefill = [ids for ids in prompts() if len(ids) > 9][:1]
        for ids in prompts_on_prefill:  # rows of other prompts' beginning wait there
            workers.prefill.engine.add(workers.prefill.engine.prepare(ids[:12], SamplingParams(max_tokens=0)))
        for _ in range(2):
            same(workers.generate(prompts(), replace(GREEDY, **PARAMS[params])), alone(params))
        counts = workers.remote.counts
        assert counts.num_complete == counts.num_fetches > 0


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_stop_at_token_one(connector: str) -> None:  # G15
    with pair(model(), connector) as workers:
        for ids, (reference, *_) in zip(prompts(), alone(), strict=True):
            first = reference.token_ids[0]
            ((stopped,),) = workers.generate([ids], replace(GREEDY, stop_token_ids=(first,)))
            assert (stopped.token_ids, stopped.stop_reason) == ([first], first)


@pytest.mark.parametrize("name", ["plain", "self"])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_quantized_weights_on_both_sides(connector: str, name: str, folder: Path) -> None:
    with pair(model("4 bits"), connector, **engine(name, folder)) as workers:
        same(workers.generate(prompts(), GREEDY), alone(weights="4 bits"))
        assert workers.remote.counts.num_complete == workers.remote.counts.num_fetches > 0
    assert [c[0].token_ids for c in alone(weights="4 bits")] != [c[0].token_ids for c in alone()]


@pytest.mark.parametrize(("codec", "prefill"), [("raw", "int4"), ("int8", "int4"), ("int8", "int8")])
def test_native_workers_with_packed_weights(codec: str, prefill: str) -> None:
    with pair(model(), "shm", prefill={"quantization": prefill}, transfer={"wire_codec": codec}, **NATIVE) as workers:
        workers.generate(prompts(), GREEDY)
        assert workers.remote.counts.num_complete == workers.remote.counts.num_fetches > 0


def test_rows_of_other_weights_do_not_go_raw() -> None:  # G08
    """Raw rows promise the tokens of one engine; other codecs promise to be close."""
    with pair(model(), "shm", refused=True, prefill={"quantization": "int8"}, **NATIVE) as workers:
        assert "weights: 'int8, float32', 'int4, float32'" in workers.fetcher.refusals[0]
        workers.generate(prompts(), GREEDY)
        assert workers.remote.counts.num_fetches == 0


class FilledSpy(Spy):
    """Also remembers how far the rows of each request were filled when it was first asked."""

    def __init__(self, drafter: Any) -> None:
        assert isinstance(drafter, FillsRows)
        super().__init__(drafter)
        self.num_filled, self.received = drafter.num_filled, drafter.received
        self.filled: dict[int, int] = {}  # prompt length -> tokens

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        for item in items:
            self.filled.setdefault(len(item.request.prompt_token_ids), self.num_filled(item.request))
        return super().propose(items)


def spied(workers: Pair) -> FilledSpy:
    speculator = workers.engine.speculator
    assert speculator is not None
    speculator.drafter = spy = FilledSpy(speculator.drafter)
    return spy


@pytest.mark.parametrize("chunks", [{}, {"prefill": {"max_num_batched_tokens": 7}}], ids=["", "chunks"])
@pytest.mark.parametrize("name", ["self", "eagle"])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_drafters_part_comes_with_the_rows(connector: str, name: str, chunks: Any, folder: Path) -> None:
    """So the decode worker computes nothing of a prompt, but the last token, for its drafter either."""
    with pair(model(), connector, **engine(name, folder), **chunks, enable_prefix_caching=False) as workers:
        spy = spied(workers)
        same(workers.generate(prompts(), GREEDY), alone())
        assert spy.filled == {length: length - 1 for length in LENGTHS}


@pytest.mark.parametrize("name", ["self", "eagle"])
def test_behind_a_prefix_of_its_own_the_drafters_part_counts_too(name: str, folder: Path) -> None:  # G17
    ids = prompt(41, seed=4)
    with pair(model(), **engine(name, folder)) as workers:
        workers.generate([ids[:20]], GREEDY)
        spy = spied(workers)
        ((found,),) = workers.generate([ids], GREEDY)
        assert found.num_cached_tokens == 20
        assert spy.filled == {41: 40}
        assert found.token_ids == tiny_llm(model()).generate([ids], GREEDY)[0][0].token_ids


def test_a_draft_guesses_what_it_guesses_in_one_engine(folder: Path) -> None:  # F17
    """Rows of a draft model are those that it would have computed here, so as many guesses are right, step by step."""
    one = tiny_llm(model(), **ENGINES["self"])
    with pair(model(), **ENGINES["self"]) as workers:
        for ids in prompts():
            ((found,),), ((reference,),) = workers.generate([ids], GREEDY), one.generate([ids], GREEDY)
            assert found.speculation is not None
            assert reference.speculation is not None
            assert found.speculation.trace == reference.speculation.trace


def test_a_head_guesses_as_with_one_unknown_state(folder: Path) -> None:
    """That of the last token whose rows came: the worker that computed it has it, and sends none."""
    ids = prompts()[-1]
    with pair(model(), **engine("eagle", folder)) as workers:
        spy = spied(workers)
        workers.generate([ids], GREEDY)
        assert len(spy.seen) > 3
        for tokens, guesses in spy.seen:
            assert guesses == chain(model(), folder, tokens, len(guesses), unknown=[len(ids) - 1])


def test_rows_of_another_drafter_are_computed_again(folder: Path, tmp_path: Path) -> None:
    """A codec that encodes for itself takes them: the target's part is right."""
    options: dict[str, Any] = {**engine("eagle", folder), "kv_cache_dtype": "int8", "transfer": {"wire_codec": "int8"}}
    others = {"draft_model": str(saved_head(tmp_path, bits=8))}
    expected = tiny_llm(model(), kv_cache_dtype="int8").generate(prompts(), GREEDY)
    with pair(model(), "tcp", prefill=others, **options) as workers:
        spy = spied(workers)
        same(workers.generate(prompts(), GREEDY), expected)
        assert set(spy.filled.values()) == {0}
        assert workers.remote.counts.num_complete == workers.remote.counts.num_fetches > 0


def test_rows_without_a_drafters_part_fill_the_targets(folder: Path) -> None:
    """P7: speculation on one side only; a prefill worker without a drafter computes less."""
    options: dict[str, Any] = {**engine("eagle", folder), "kv_cache_dtype": "int8", "transfer": {"wire_codec": "int8"}}
    expected = tiny_llm(model(), kv_cache_dtype="int8").generate(prompts(), GREEDY)
    with pair(model(), "tcp", prefill={"drafter": None, "draft_model": None}, **options) as workers:
        same(workers.generate(prompts(), GREEDY), expected)
        assert workers.remote.counts.num_complete == workers.remote.counts.num_fetches > 0


def test_prefill_workers_forget_what_they_filled(folder: Path) -> None:
    with pair(model(), **engine("eagle", folder)) as workers:
        workers.generate(prompts(), GREEDY)
        workers.check_idle()
        speculator = workers.prefill_engine.speculator
        assert speculator is not None
        assert speculator.drafter.num_requests == 0  # type: ignore[attr-defined]

"""Drafters on the emulated CUDA kernels: output as without them, the head's guesses those of the head in float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cuda_engines import cuda_llm, cuda_open
from cuda_models import kernel_folder
from eagle_heads import WINDOW, Spy, chain, random_weights
from tiny import prompt

from triblade.engine.cuda_eagle import CudaEagle
from triblade.llm import LLM
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams
from triblade.spec.eagle_files import save_eagle, target_facts

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WAYS = {"greedy": GREEDY, "drawn": SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)}


@cache
def model() -> OpenModel:
    return cuda_open(num_hidden_layers=2)


@cache
def prompts() -> list[list[int]]:
    repeated = prompt(6, seed=3)
    return [repeated * 3, prompt(21, seed=1), prompt(5, seed=2)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernel_folder(tmp_path_factory)


@pytest.fixture(scope="module", params=[[], [0]], ids=["final state", "inner state, too"])
def head(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path, inner = tmp_path_factory.mktemp("head"), request.param
    weights = random_weights(model(), bits=8, num_inner=len(inner))
    save_eagle(path, target_facts(model()), weights, {"window": WINDOW, "inner_layers": inner})
    return path


def answers(llm: LLM, params: SamplingParams) -> list[list[int]]:
    found = [choices[0].token_ids for choices in llm.generate(prompts(), params)]
    llm.engine.check_idle()
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[list[int]]]:
    with pytest.MonkeyPatch.context() as patch:
        llm = cuda_llm(model(), folder, patch)
        return {name: answers(llm, params) for name, params in WAYS.items()}


FIXED: dict[str, Any] = {"draft_policy": "fixed", "num_speculative_tokens": 3, "draft_confidence": 0.0}


@pytest.mark.parametrize("way", WAYS)
def test_suffix(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # F01, F11
    """So few words that they come back."""
    small = cuda_open(num_hidden_layers=1, vocab_size=6)
    tokens = [prompt(length, seed=length, vocab_size=6) for length in (18, 21, 5)]
    found = []
    for drafter in (None, "suffix"):
        llm = cuda_llm(small, folder, monkeypatch, drafter=drafter, **FIXED)
        found.append([choices[0].token_ids for choices in llm.generate(tokens, WAYS[way])])
    assert found[0] == found[1]
    assert llm.engine.load().speculation.num_draft_tokens > 0


def test_self_draft_runs_on_the_kernels(
    folder: Path, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = cuda_llm(model(), folder, monkeypatch, drafter="self", draft_layers=1, **FIXED)
    assert answers(llm, GREEDY) == plain["greedy"]
    assert llm.engine.load().speculation.num_draft_tokens > 0


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 20}], ids=["whole prompts", "chunks"])
def test_eagle(
    options: dict[str, Any],
    head: Path,
    folder: Path,
    plain: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # F01, F17
    """Roundings to bfloat16 may turn a guess, seldom more."""
    llm = cuda_llm(model(), folder, monkeypatch, drafter="eagle", draft_model=str(head), **FIXED, **options)
    assert llm.engine.speculator is not None
    spy = Spy(llm.engine.speculator.drafter)
    assert isinstance(spy._drafter._head, CudaEagle)
    llm.engine.speculator.drafter = spy
    assert answers(llm, GREEDY) == plain["greedy"]
    assert spy._drafter.num_requests == 0
    assert len(spy.seen) >= 15
    equal = [guesses == chain(model(), head, tokens, len(guesses)) for tokens, guesses in spy.seen]
    assert sum(equal) >= 0.8 * len(equal)


def test_eagle_guesses_end_where_they_are_unlikely(
    head: Path, folder: Path, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**FIXED, "draft_confidence": 0.03}
    llm = cuda_llm(model(), folder, monkeypatch, drafter="eagle", draft_model=str(head), **options)
    assert llm.engine.speculator is not None
    spy = llm.engine.speculator.drafter = Spy(llm.engine.speculator.drafter)
    assert answers(llm, GREEDY) == plain["greedy"]
    assert {len(guesses) for _, guesses in spy.seen} & {1, 2}

"""How often a drafter is right is counted without leaving a trace in the engine."""

from __future__ import annotations

import logging

import pytest
from drafters import model_drafter, speculate
from tiny_engine import open_tiny, tiny_llm

from triblade.engine.probe import PROMPTS, Acceptance, probe, warn_if_never_right
from triblade.sampling_params import SamplingParams


def test_a_draft_that_is_its_target_is_always_right() -> None:  # F09, F17
    llm = tiny_llm(open_tiny("llama"))
    acceptance = probe(speculate(llm, model_drafter(llm, open_tiny("llama")), 4).engine)
    assert acceptance.share == 1.0
    # 24 tokens for each prompt: the first is the prompt's, then steps of 5, 5, 5, 5 and 3
    assert acceptance.drafted == acceptance.accepted == (20, 20, 16, 16)
    assert acceptance.mean_length == 1 + 72 / 20
    assert str(acceptance).startswith(
        "4.60 tokens per step of up to 5, 72 of 72 drafted tokens accepted (by position: 100%"
    )


def test_a_draft_that_is_never_right_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny_llm(open_tiny("llama"))
    speculate(llm, model_drafter(llm, open_tiny("llama", seed=1)), 4)
    with caplog.at_level(logging.WARNING):
        warn_if_never_right(llm.engine)
    assert "drafts are almost never right" in caplog.text


def test_nothing_is_left_behind() -> None:
    params = SamplingParams(
        temperature=1.0, max_tokens=8, ignore_eos=True
    )  # unseeded: seeds follow the order of arrival
    texts = []
    for probes in (False, True):
        llm = tiny_llm(open_tiny("llama"), seed=3)
        speculate(llm, model_drafter(llm, open_tiny("llama")), 4)
        if probes:
            probe(llm.engine)
            assert llm.engine.load().num_steps == llm.engine.load().num_prompt_tokens == 0
        texts.append(llm.generate(list(PROMPTS), params)[0][0].token_ids)
        llm.engine.check_idle()
    assert texts[0] == texts[1]


def test_short_contexts_are_respected() -> None:
    llm = tiny_llm(open_tiny("llama"), max_model_len=6)
    acceptance = probe(speculate(llm, model_drafter(llm, open_tiny("llama")), 4).engine)
    assert acceptance.share == 1.0


def test_no_draft_is_no_acceptance() -> None:
    assert (Acceptance((), ()).mean_length, Acceptance((), ()).is_near_zero) == (1.0, True)

"""What a request may ask for: ranges, and ids against the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest

from triblade.errors import RequestError
from triblade.sampling_params import MAX_BAD_WORDS, MAX_STOP_STRINGS, SamplingParams, check_token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),  # C11
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: math.nan}),
        ("allowed_token_ids", ()),
        ("stop", ("",)),
        ("stop", ("x" * 5000,)),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        ("bad_words", ("",)),
        ("bad_words", ("x",) * (MAX_BAD_WORDS + 1)),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{name} must be ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"n": 128, "max_tokens": 0, "temperature": 0.0},
        {"temperature": 100.0, "top_p": 1.0, "top_k": -1, "min_p": 1.0},
        {"repetition_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: -100.0, 7: 100}, "allowed_token_ids": (0,), "seed": -(2**63)},
        {"min_tokens": 5, "max_tokens": 5, "stop": ("a",) * MAX_STOP_STRINGS, "logprobs": 0},
    ],
)
def test_edges_of_the_ranges_are_accepted(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens \(3\), got: 4"):
        SamplingParams(min_tokens=4, max_tokens=3)


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, True), (1e-6, True), (1e-4, False), (1.0, False)])
def test_a_vanishing_temperature_is_greedy(temperature: float, expected: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is expected


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("token", [-1, 49152, 151645, 2**32])
def test_ids_outside_the_vocabulary_are_refused_with_both_numbers(name: str, token: int) -> None:
    params = SamplingParams(**{name: (5, token)})
    with pytest.raises(
        RequestError, match=rf"{name} must be a token id between 0 and 49151, got: {token}$"
    ):  # C20, C22
        params.check_vocabulary(49152, max_logprobs=20)


def test_logit_bias_ids_are_checked_too() -> None:
    with pytest.raises(RequestError, match="logit_bias"):  # C22
        SamplingParams(logit_bias={-1: 1.0}).check_vocabulary(10, max_logprobs=20)


def test_added_tokens_count_as_vocabulary() -> None:
    base, length = 100, 103  # three added tokens
    SamplingParams(allowed_token_ids=(base, length - 1)).check_vocabulary(length, max_logprobs=20)  # A24
    with pytest.raises(RequestError, match="between 0 and 102, got: 103"):
        SamplingParams(allowed_token_ids=(length,)).check_vocabulary(length, max_logprobs=20)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_alternatives_than_the_server_gives_are_refused(name: str) -> None:
    SamplingParams(**{name: 20}).check_vocabulary(100, max_logprobs=20)
    with pytest.raises(RequestError, match=f"{name} must be at most 20, got: 21"):
        SamplingParams(**{name: 21}).check_vocabulary(100, max_logprobs=20)


def test_prompt_ids_are_checked() -> None:
    check_token_ids("prompt", [0, 9], 10)
    with pytest.raises(RequestError, match="prompt must be a token id between 0 and 9, got: -1"):  # C22
        check_token_ids("prompt", [0, -1], 10)

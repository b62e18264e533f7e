"""Drafts as clients and dashboards see them: counts of committed tokens, in answers that ask for them and in the metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_client import FakeClient
from live_server import Live, live_server

from triblade.spec.record import Speculation, SpeculationCounts

TRACE = [(0, 0), (4, 4), (4, 1), (2, 0)]  # (drafted, accepted) by step; 9 tokens
EXPECTED = {
    "num_steps": 4,
    "num_drafts": 3,
    "num_draft_tokens": 10,
    "num_accepted_tokens": 5,
    "draft_tokens_per_position": [3, 3, 2, 2],
    "accepted_tokens_per_position": [2, 1, 1, 1],
    "mean_accepted_length": 1 + 5 / 3,
    "estimated_speedup": 1.6,
    "trace": [[0, 0], [4, 4], [4, 1], [2, 0]],
}
ROUTES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
}


def record() -> Speculation:
    speculation = Speculation(spent_s=0.5, plain_s=0.8)
    for drafted, accepted in TRACE:
        speculation.add(drafted, accepted)
    return speculation


@pytest.fixture
def live() -> Iterator[Live]:
    with live_server(FakeClient(speculation=record())) as server:
        yield server


def test_counts_are_those_of_the_trace() -> None:  # F09
    speculation = record()
    assert speculation.as_json() == EXPECTED
    counts = speculation.counts
    assert counts.num_steps + counts.num_accepted_tokens == sum(1 + accepted for _, accepted in TRACE)
    drafted_steps = sum(1 + accepted for drafted, accepted in TRACE if drafted)
    assert counts.mean_accepted_length == pytest.approx(drafted_steps / counts.num_drafts)


def test_nothing_drafted_is_no_division_by_zero() -> None:
    assert SpeculationCounts().mean_accepted_length is None
    speculation = Speculation()
    speculation.add(0, 0)
    assert (speculation.speedup, speculation.counts.mean_accepted_length) == (None, None)
    assert json.dumps(speculation.as_json())


def test_a_snapshot_stays_as_it_is() -> None:
    counts = SpeculationCounts()
    counts.add(2, 1)
    before = counts.snapshot()
    counts.add(3, 3)
    assert (before.num_accepted_tokens, before.accepted_per_position) == (1, [1, 0])


@pytest.mark.parametrize("route", ROUTES)
def test_answers_tell_when_asked(live: Live, route: str) -> None:  # S8
    asked: dict[str, Any] = live.post(route, {**ROUTES[route], "n": 2, "return_speculation": True}).json()
    assert [choice["speculation"] for choice in asked["choices"]] == [EXPECTED, EXPECTED]
    for body in ({}, {"return_speculation": False}):
        assert "speculation" not in live.post(route, {**ROUTES[route], **body}).json()["choices"][0]


@pytest.mark.parametrize("route", ROUTES)
def test_the_last_event_of_a_choice_tells(live: Live, route: str) -> None:
    text = live.post(route, {**ROUTES[route], "stream": True, "return_speculation": True}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    *before, last = [choice for chunk in chunks for choice in chunk["choices"]]
    assert last["speculation"] == EXPECTED
    assert not any("speculation" in choice for choice in before)


def test_without_a_drafter_there_is_nothing_to_tell(live: Live) -> None:
    live.engine.speculation = None
    answer = live.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "return_speculation": True}).json()
    assert answer["choices"][0]["speculation"] is None
    assert live.metric("spec_decode_num_steps_total") == 0


def test_the_official_client_reads_such_answers(live: Live) -> None:
    messages: Any = ROUTES["/v1/chat/completions"]["messages"]
    options: dict[str, Any] = {"model": "fake", "max_tokens": 3, "extra_body": {"return_speculation": True}}
    with live.client() as client:
        answer = client.chat.completions.create(messages=messages, **options)
        assert (answer.choices[0].model_extra or {})["speculation"] == EXPECTED
        *_, last = client.completions.create(prompt="abc", stream=True, **options)
    assert (last.choices[0].model_extra or {})["speculation"] == EXPECTED


def test_metrics_under_the_names_of_vllm(live: Live) -> None:  # S8, F09
    assert live.metric("spec_decode_num_steps_total") == 4
    assert live.metric("spec_decode_num_drafts_total") == 3
    assert live.metric("spec_decode_num_draft_tokens_total") == 10
    assert live.metric("spec_decode_num_accepted_tokens_total") == 5
    for position, (drafted, accepted) in enumerate([(3, 2), (3, 1), (2, 1), (2, 1)]):
        assert live.metric("spec_decode_num_draft_tokens_per_pos_total", position=str(position)) == drafted
        assert live.metric("spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == accepted

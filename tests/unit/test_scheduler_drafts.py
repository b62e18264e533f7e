"""Drafts in the scheduler: whatever is proposed, every request gets its own tokens, and nobody loses a block to a draft."""

from __future__ import annotations

import random

from fake_engine import FakeEngine, expected_output, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from triblade.engine.request import Request, Status


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 50 for i in range(length)]


def right(request: Request) -> list[int]:
    """What the model will say."""
    tokens = list(request.token_ids)
    for _ in range(8):
        tokens.append(next_token(tokens))
    return tokens[request.num_tokens :]


def wrong(request: Request) -> list[int]:
    return [(token + 1) % 1000 for token in right(request)]


def test_a_right_draft_is_accepted_whole() -> None:
    engine = FakeEngine(16, draft=right)
    request = engine.request(prompt(5), max_tokens=9)
    engine.run()
    assert request.output_token_ids == expected_output(prompt(5), 9)
    assert [[item.num_draft_tokens for item in step] for step in engine.steps] == [[0], [3], [3]]


def test_a_wrong_draft_costs_nothing_but_its_step() -> None:  # F21
    engine = FakeEngine(16, draft=wrong)
    request = engine.request(prompt(5), max_tokens=5)
    engine.run()
    assert request.output_token_ids == expected_output(prompt(5), 5)
    assert len(engine.steps) == 5


def test_rejected_tokens_are_never_cached() -> None:  # F22
    engine = FakeEngine(32, draft=wrong)
    first = engine.request(prompt(6), max_tokens=10)
    engine.run()
    again = engine.request(first.token_ids[:-1], max_tokens=3)
    engine.run()
    assert again.num_cached_tokens == 12  # whole blocks of what was committed
    assert again.output_token_ids == expected_output(first.token_ids[:-1], 3)


def test_a_draft_never_preempts() -> None:
    engine = FakeEngine(4, draft=right)  # two blocks each
    first, second = engine.request(prompt(6), max_tokens=3), engine.request(prompt(7, 9), max_tokens=2)
    engine.run()
    assert first.num_preemptions == second.num_preemptions == 0
    assert first.output_token_ids == expected_output(prompt(6), 3)
    assert second.output_token_ids == expected_output(prompt(7, 9), 2)


def test_reserving_stops_where_blocks_end() -> None:
    engine = FakeEngine(2)
    request = engine.request(prompt(6), max_tokens=9)
    engine.step()
    assert request.status is Status.RUNNING
    assert request.num_tokens == 7
    assert engine.scheduler.reserve(request, 5) == 1  # the pool's last slot
    assert engine.scheduler.reserve(request, 0) == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_mixture_of_right_and_wrong_drafts(data: st.DataObject) -> None:  # E10, E11, F01
    rng = random.Random(data.draw(st.integers(0, 2**32)))

    def sometimes_right(request: Request) -> list[int]:
        return [token if rng.random() < 0.7 else 0 for token in right(request)][: rng.randrange(9)]

    engine = FakeEngine(
        data.draw(st.integers(14, 40)),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.integers(1, 20)),
        enable_prefix_caching=data.draw(st.booleans()),
        draft=sometimes_right,
        draft_length=data.draw(st.integers(0, 8)),
    )
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=6))
    requests = [engine.request(prompt(length, length % 3), max_tokens=count) for length, count in sizes]
    engine.run()
    for request, (length, count) in zip(requests, sizes, strict=True):
        assert request.output_token_ids == expected_output(prompt(length, length % 3), count)

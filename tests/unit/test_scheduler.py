"""The scheduler on a runner without a model: every request gets its own tokens, whatever happens around it."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, expected_output
from hypothesis import given, settings
from hypothesis import strategies as st

from triblade.engine.request import Status


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 50 for i in range(length)]


def test_one_request_is_computed_in_chunks_then_token_by_token() -> None:
    engine = FakeEngine(16, max_num_batched_tokens=4)
    request = engine.request(prompt(10), max_tokens=3)
    engine.run()
    assert [[item.num_tokens for item in step] for step in engine.steps] == [[4], [4], [2], [1], [1]]
    assert [item.samples for step in engine.steps for item in step] == [False, False, True, True, True]  # E16
    assert request.output_token_ids == expected_output(prompt(10), 3)


def test_a_long_prompt_does_not_stall_a_stream() -> None:
    engine = FakeEngine(32, max_num_batched_tokens=8)
    long = engine.request(prompt(60), max_tokens=1)
    engine.step()
    short = engine.request([1, 2, 3], max_tokens=4)
    long_priority = engine.request(prompt(40, 9), max_tokens=1)
    while not short.is_finished:
        before = len(short.output_token_ids)
        engine.step()
        if short.status is Status.RUNNING and before:
            assert len(short.output_token_ids) == before + 1
    engine.run()
    assert long.output_token_ids == expected_output(prompt(60), 1)
    assert long_priority.output_token_ids == expected_output(prompt(40, 9), 1)


def test_priority_before_arrival() -> None:
    engine = FakeEngine(32, max_num_seqs=1)
    late, urgent = engine.request([1], max_tokens=1), engine.request([2], max_tokens=1, priority=-1)
    engine.step()
    assert urgent.is_finished
    assert not late.is_finished


def test_equal_prompts_in_one_step_do_not_hit_each_other() -> None:  # E04
    engine = FakeEngine(32, max_num_batched_tokens=64)
    requests = [engine.request(prompt(9), max_tokens=2) for _ in range(3)]
    engine.step()
    assert [r.num_cached_tokens for r in requests] == [0, 0, 0]
    engine.run()
    assert {tuple(r.output_token_ids) for r in requests} == {tuple(expected_output(prompt(9), 2))}


def test_a_later_equal_prompt_hits_all_full_blocks_but_the_last_token() -> None:  # E20
    engine = FakeEngine(32)
    engine.request(prompt(8), max_tokens=1)
    engine.run()
    again = engine.request(prompt(8), max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 4  # 8 would leave nothing to compute logits from
    assert again.output_token_ids == expected_output(prompt(8), 1)


def test_generated_tokens_are_cached_too() -> None:
    engine = FakeEngine(32)
    first = engine.request(prompt(4), max_tokens=9)
    engine.run()
    follow = engine.request([*first.token_ids, 5], max_tokens=1)
    engine.run()
    assert follow.num_cached_tokens == 12


def test_without_prefix_caching_nothing_is_shared() -> None:
    engine = FakeEngine(32, enable_prefix_caching=False)
    for _ in range(2):
        request = engine.request(prompt(8), max_tokens=1)
        engine.run()
    assert request.num_cached_tokens == 0
    assert not engine.pool.match(prompt(8), engine.scheduler.block_size, most=1)


def test_blocks_come_one_token_ahead_while_plenty_are_free() -> None:
    """Before the step that needs them, but not where another running request would have to do without."""
    ahead = FakeEngine(3, num_lookahead_tokens=1)
    request = ahead.request(list(range(6)), max_tokens=6)
    lengths = []
    while not request.is_finished:
        ahead.step()
        lengths.append((request.num_computed_tokens, len(request.block_table)))
    assert lengths[:3] == [(6, 2), (7, 2), (8, 2)]  # the last block of the pool stays for whoever runs
    roomy = FakeEngine(8, num_lookahead_tokens=1)
    request = roomy.request(list(range(6)), max_tokens=6)
    lengths = []
    while not request.is_finished:
        roomy.step()
        lengths.append((request.num_computed_tokens, len(request.block_table)))
    assert lengths[:3] == [(6, 2), (7, 2), (8, 3)]
    roomy.pool.check()


def test_choices_wait_for_their_leader_and_share_its_prompt() -> None:
    engine = FakeEngine(64, max_num_batched_tokens=8)
    leader = engine.request(prompt(17), max_tokens=3)
    followers = [engine.request(prompt(17), max_tokens=3, leader=leader) for _ in range(3)]
    other = engine.request([1, 2], max_tokens=1)
    engine.run()
    assert [f.num_cached_tokens for f in followers] == [16, 16, 16]
    assert other.output_token_ids == expected_output([1, 2], 1)


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 7, 8, 9])
def test_preempted_at_every_boundary(num_prompt: int) -> None:  # E06, E07
    engine = FakeEngine(6, max_num_batched_tokens=32)
    requests = [engine.request(prompt(num_prompt, i), max_tokens=12) for i in range(3)]
    engine.run()
    assert sum(r.num_preemptions for r in requests) > 0
    for i, request in enumerate(requests):
        assert request.output_token_ids == expected_output(prompt(num_prompt, i), 12)


def test_256_requests_on_a_tiny_pool() -> None:  # E06
    engine = FakeEngine(12, max_num_seqs=16, max_num_batched_tokens=24)
    prompts = [prompt(5 + i % 13, i % 7) for i in range(256)]
    requests = [engine.request(p, max_tokens=6) for p in prompts]
    engine.run()
    assert [r.output_token_ids for r in requests] == [expected_output(p, 6) for p in prompts]
    assert engine.pool.num_free == 12


def test_the_first_in_order_is_never_preempted() -> None:
    engine = FakeEngine(6)
    first = engine.request(prompt(4), max_tokens=16)
    for i in range(4):
        engine.request(prompt(6, i + 1), max_tokens=10)
    engine.run()
    assert first.num_preemptions == 0


def test_a_request_that_outgrows_the_pool_alone_is_reported() -> None:  # E09
    engine = FakeEngine(3)
    big = engine.request(prompt(6), max_tokens=50)
    small = engine.request([1], max_tokens=2)
    engine.run()
    assert engine.starved == [big]
    assert big.num_tokens == 13  # 12 tokens fill the pool, and one more was sampled from them
    assert small.output_token_ids == expected_output([1], 2)


def test_finish_in_every_state_returns_the_blocks() -> None:  # E12
    engine = FakeEngine(32, max_num_batched_tokens=4, max_num_seqs=2)
    waiting, chunked, decoding = engine.request([1]), engine.request(prompt(20)), engine.request([2])
    engine.scheduler.finish(waiting)
    engine.step()
    assert chunked.status is Status.RUNNING
    engine.scheduler.finish(chunked)
    engine.step()
    assert decoding.output_token_ids
    engine.scheduler.finish(decoding)
    engine.scheduler.finish(decoding)
    assert engine.pool.num_free == 32
    engine.pool.check()


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    num_blocks=st.integers(5, 14),
    budget=st.integers(1, 20),
    seats=st.integers(1, 6),
    caching=st.booleans(),
    constant_hash=st.booleans(),
)
def test_any_traffic_gets_its_own_tokens(
    data: st.DataObject, num_blocks: int, budget: int, seats: int, caching: bool, constant_hash: bool
) -> None:  # E01, E03, E12, E19
    engine = FakeEngine(
        num_blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        num_lookahead_tokens=data.draw(st.integers(0, 2)),
        **({"hash_function": lambda parent, tokens: b"same"} if constant_hash else {}),
    )
    live = []
    for _ in range(data.draw(st.integers(1, 12))):
        length = data.draw(st.integers(1, 12))
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        live.append(engine.request(tokens, data.draw(st.integers(1, 8)), priority=data.draw(st.integers(0, 1))))
        for _ in range(data.draw(st.integers(0, 3))):
            if engine.scheduler.has_work:
                engine.step()
        if data.draw(st.booleans()):
            engine.scheduler.finish(live.pop(data.draw(st.integers(0, len(live) - 1))))
            engine.check()
    engine.run()
    for request in live:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, request.max_tokens)
    assert engine.pool.num_free == num_blocks

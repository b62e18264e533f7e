"""Requests whose rows come from elsewhere: reserved, filled, late, lost or taken back, every request gets its own tokens."""

from __future__ import annotations

import random

from fake_engine import FakeEngine, expected_output
from hypothesis import given, settings
from hypothesis import strategies as st

from triblade.engine.request import Request, Status


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 50 for i in range(length)]


class FakeRemote:
    """Computes rows by hand: fills the slots of a request when the test says so."""

    def __init__(self, engine: FakeEngine, least: int = 1) -> None:
        self._engine, self.least = engine, least
        self.open: list[Request] = []
        self.dropped: list[Request] = []
        engine.scheduler.remote = self

    def wants(self, request: Request, num_tokens: int) -> bool:
        return num_tokens >= self.least

    def begin(self, request: Request) -> None:
        self.open.append(request)

    def drop(self, request: Request) -> None:
        self.open.remove(request)
        self.dropped.append(request)

    def deliver(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the request are there; no more will come."""
        self.open.remove(request)
        for position in range(request.num_computed_tokens, num_tokens):
            slot = request.block_table[position // 4] * 4 + position % 4
            self._engine.slots[slot] = tuple(request.token_ids[: position + 1])
        self._engine.scheduler.arrived(request, num_tokens)


def test_a_request_waits_for_its_rows_and_computes_the_last_token_itself() -> None:  # G13, G15
    engine = FakeEngine(16)
    remote = FakeRemote(engine)
    request = engine.request(prompt(10), max_tokens=3)
    assert engine.step() == []
    assert request.status is Status.WAITING_FOR_KV
    assert len(request.block_table) == 3
    assert not engine.scheduler.has_work
    remote.deliver(request, 9)
    engine.run()
    assert [item.num_tokens for step in engine.steps for item in step] == [1, 1, 1]
    assert request.output_token_ids == expected_output(prompt(10), 3)
    assert request.num_cached_tokens == 0


def test_what_did_not_come_is_computed_here() -> None:  # G06
    engine = FakeEngine(16)
    remote = FakeRemote(engine)
    request = engine.request(prompt(10), max_tokens=3)
    engine.step()
    remote.deliver(request, 4)
    engine.run()
    assert [item.num_tokens for step in engine.steps for item in step] == [6, 1, 1]
    assert request.output_token_ids == expected_output(prompt(10), 3)


def test_received_rows_are_a_prefix_for_others() -> None:  # G17
    engine = FakeEngine(16)
    remote = FakeRemote(engine, least=4)
    first = engine.request(prompt(9), max_tokens=1)
    engine.step()
    remote.deliver(first, 8)
    engine.run()
    again = engine.request(prompt(9), max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 8
    assert remote.open == []
    assert again.output_token_ids == expected_output(prompt(9), 1)


def test_choices_wait_for_the_rows_of_the_first() -> None:  # G14
    engine = FakeEngine(32)
    remote = FakeRemote(engine, least=4)
    leader = engine.request(prompt(10), max_tokens=2)
    followers = [engine.request(prompt(10), max_tokens=2, leader=leader) for _ in range(2)]
    engine.step()
    assert remote.open == [leader]
    remote.deliver(leader, 9)
    engine.run()
    assert [f.num_cached_tokens for f in followers] == [8, 8]
    assert {tuple(r.output_token_ids) for r in (leader, *followers)} == {tuple(expected_output(prompt(10), 2))}


def test_an_abort_while_waiting_gives_the_blocks_back() -> None:  # G02
    engine = FakeEngine(8)
    remote = FakeRemote(engine)
    request = engine.request(prompt(10))
    engine.step()
    engine.scheduler.finish(request)
    assert remote.dropped == [request]
    engine.pool.check()


def test_who_runs_takes_reserved_blocks_back() -> None:
    engine = FakeEngine(6)
    remote = FakeRemote(engine, least=8)
    runs = engine.request(prompt(8), max_tokens=10)  # 7 tokens to fetch: computed here
    engine.step()
    waits = engine.request(prompt(12, 20), max_tokens=3)
    engine.step()
    assert waits.status is Status.WAITING_FOR_KV
    while not runs.is_finished:
        engine.step()
    assert remote.dropped == [waits]
    assert waits.num_preemptions == 1
    assert runs.num_preemptions == 0
    engine.step()
    remote.deliver(waits, 11)
    engine.run()
    assert runs.output_token_ids == expected_output(prompt(8), 10)
    assert waits.output_token_ids == expected_output(prompt(12, 20), 3)


def test_a_seatless_request_with_rows_does_not_block_the_first_in_order() -> None:
    """All blocks belong to requests whose rows came; the first in order has none: they run, then it does."""
    engine = FakeEngine(4)
    remote = FakeRemote(engine, least=4)
    later = engine.request(prompt(14), max_tokens=1)
    engine.step()
    remote.least = 99
    urgent = engine.request(prompt(9, 30), max_tokens=1, priority=-1)
    assert engine.step() == []
    remote.deliver(later, 13)
    engine.run()
    assert [item.request for step in engine.steps for item in step] == [later, urgent]
    assert urgent.output_token_ids == expected_output(prompt(9, 30), 1)


def test_blocks_that_are_kept_are_released_by_their_keeper() -> None:
    engine = FakeEngine(8)
    request = engine.request(prompt(9), max_tokens=1, keeps_blocks=True)
    (item,) = engine.scheduler.schedule().scheduled
    engine.scheduler.update(item)
    engine.scheduler.finish(request)
    engine.pool.check(request.block_table)
    assert len(request.block_table) == 3
    engine.scheduler.release(request)
    engine.pool.check()


def test_blocks_that_come_back_in_a_moment_are_waited_for() -> None:
    """Nobody loses blocks, or ends, for want of those that a peer of a dropped request may still be writing into."""
    engine = FakeEngine(4)
    request = engine.request(prompt(4), max_tokens=6)
    engine.step()
    dropped = engine.pool.allocate(3)
    engine.scheduler.num_returning_blocks = 3
    for _ in range(3):
        output = engine.scheduler.schedule()
        assert (output.scheduled, output.preempted, output.starved) == ([], [], [])
    assert request.status is Status.RUNNING
    assert len(request.output_token_ids) == 1
    engine.pool.release(dropped)
    engine.scheduler.num_returning_blocks = 0
    engine.run()
    assert request.output_token_ids == expected_output(prompt(4), 6)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), num_blocks=st.integers(8, 24))
def test_whatever_happens_every_request_gets_its_own_tokens(seed: int, num_blocks: int) -> None:
    """Rows arrive whole, in part or late, requests are aborted, blocks are short."""
    rng = random.Random(seed)
    engine = FakeEngine(num_blocks, max_num_seqs=3)
    remote = FakeRemote(engine, least=3)
    shared = prompt(8, 5)
    requests = []
    for number in range(8):
        ids = (shared if number % 2 else []) + prompt(rng.randrange(1, 18), number * 7)
        requests.append((ids, engine.request(ids, max_tokens=rng.randrange(1, 6), priority=rng.randrange(2))))
    for _ in range(400):
        if engine.scheduler.has_work:
            engine.step()
        for request in remote.open[:]:
            if rng.random() < 0.4 or not engine.scheduler.has_work:
                whole = request.num_tokens - 1
                blocks = range(request.num_computed_tokens, whole, 4)
                remote.deliver(request, rng.choice([whole, *blocks]))
        if rng.random() < 0.02:
            engine.scheduler.finish(rng.choice(requests)[1])
        engine.check()
    for ids, request in requests:
        assert request.is_finished
        assert request.output_token_ids == expected_output(ids, request.max_tokens)[: len(request.output_token_ids)]
    engine.pool.check()

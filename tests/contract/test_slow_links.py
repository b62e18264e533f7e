"""Links that are slow, not broken: time-outs count progress, nobody waits for what is hopeless, and people are told (issue F)."""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any

import pytest
from disaggregated import Pair, pair
from relays import Throttle
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.disagg import fetcher
from triblade.disagg.links import Link, Traffic
from triblade.disagg.pace import FIRST_UNSENT_BYTES, FORGET_S, MAX_UNSENT_BYTES, Pace, Window
from triblade.disagg.sockets import TcpConnector
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
IDS = prompt(57, seed=21)


@cache
def model() -> OpenModel:
    return open_tiny("llama", hidden_size=64, num_attention_heads=4)


@cache
def expected(seed: int = 21) -> list[int]:
    return tiny_llm(model()).generate([prompt(57, seed=seed)], GREEDY)[0][0].token_ids


class Throttled(TcpConnector):
    """Leads everybody who connects through a throttle."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.throttles: list[Throttle] = []

    def connect(self, address: str) -> Link:
        self.throttles.append(Throttle(address, self._bytes_per_s))
        return super().connect(self.throttles[-1].address)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "SILENCE_S", 0.5)


def row_bytes(workers: Pair) -> int:
    layout = workers.engine.runner.executor.cache.layout
    return layout.row_bytes // layout.block_size


def slow_pair(bytes_per_s: float, **options: Any) -> Any:
    return pair(model(), "tcp", way=Throttled(bytes_per_s), **options)


@pytest.mark.usefixtures("impatient")
def test_a_message_that_takes_longer_than_all_time_outs_arrives(caplog: pytest.LogCaptureFixture) -> None:
    """As rows of a real model do below 150 KB/s: more than 10 s each."""
    options = {"transfer_timeout_s": 0.6, "lease_s": 0.3}
    with caplog.at_level(logging.WARNING), slow_pair(30_000, transfer=options) as workers:
        start = time.monotonic()
        (completions,) = workers.generate([IDS], GREEDY)
        took_s = time.monotonic() - start
        assert completions[0].token_ids == expected()
        counts = workers.remote.counts
        assert (counts.num_complete, counts.num_failed) == (1, 0)
        assert took_s > 56 * row_bytes(workers) / 30_000 * 0.9 > 1.0
        assert workers.fetcher.num_slow == 1
        assert "slow link to prefill worker" in caplog.text
        (again,) = workers.generate([prompt(57, seed=22)], GREEDY)
        assert again[0].token_ids == expected(22)
        assert (counts.num_fetches, counts.num_declined) == (1, 1)  # by now it is known that it would take too long


def test_a_transfer_whose_rest_would_take_too_long_is_ended() -> None:
    options = {"prefill": {"max_num_batched_tokens": 4}, "transfer": {"transfer_timeout_s": 0.3}}
    with slow_pair(20_000, **options) as workers:
        start = time.monotonic()
        (completions,) = workers.generate([IDS], GREEDY)
        assert completions[0].token_ids == expected()
        counts = workers.remote.counts
        assert counts.num_failed == 1
        assert 4 <= counts.num_tokens < 56
        assert time.monotonic() - start < 5


@pytest.mark.usefixtures("impatient")
def test_a_link_that_stands_still_within_a_message_is_left() -> None:
    way = Throttled(30_000)
    with pair(model(), "tcp", way=way, transfer={"transfer_timeout_s": 0.3}) as workers:
        way.throttles[-1].bytes_per_s = 0
        (completions,) = workers.generate([IDS], GREEDY)
        assert completions[0].token_ids == expected()
        assert workers.remote.counts.num_failed == 1
        way.throttles[-1].bytes_per_s = 10_000_000
        workers.eventually(lambda: workers.fetcher.num_ready == 1)


def test_the_window_holds_what_a_link_takes_in_a_second() -> None:
    window, traffic = Window(0.0), Traffic()
    window.look(traffic, 1.0)
    assert (window.limit_bytes, window.moved_s) == (FIRST_UNSENT_BYTES, 0.0)  # nothing was sent
    traffic.sent_bytes, traffic.sending_s = 1 << 20, 10.0
    window.look(traffic, 2.0)
    assert (window.limit_bytes, window.moved_s) == ((1 << 20) // 10, 2.0)
    for second in range(20):  # it opens slowly: buffers swallow anything at first
        before = window.limit_bytes
        traffic.sent_bytes += 1 << 30
        traffic.sending_s += 0.1
        window.look(traffic, 3.0 + second)
        assert window.limit_bytes in (2 * before, MAX_UNSENT_BYTES)
    assert window.limit_bytes == MAX_UNSENT_BYTES


def test_the_pace_is_that_of_rows_and_is_forgotten() -> None:
    pace, traffic = Pace(0.0), Traffic()
    assert pace.expected_s(1000, 1.0) == 0.0
    traffic.received_bytes, traffic.receiving_s = 500, 3.0
    pace.look(traffic, 3.0)
    assert pace.moved_s == 3.0
    pace.came(traffic, 0, 3.0)  # a table, say
    traffic.receiving_s = 5.0
    pace.came(traffic, 10, 5.0)
    assert pace.expected_s(100, 6.0) == pytest.approx(20.0)
    assert pace.expected_s(100, 5.0 + FORGET_S) == 0.0
    pace.look(traffic, 9.0)
    assert pace.moved_s == 3.0

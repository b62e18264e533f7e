"""Links that are slow, not broken: time-outs count progress, nobody waits for what is hopeless, and people are told (issue F)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from disaggregated import Pair, pair
from relays import Throttle
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.config import TransferConfig
from triblade.disagg import pace, peer, prefill, prefill_transfers
from triblade.disagg.frames import Message
from triblade.disagg.identity import described
from triblade.disagg.links import Link, Traffic
from triblade.disagg.pace import FIRST_UNSENT_BYTES, FORGET_S, MAX_UNSENT_BYTES, Pace, Window
from triblade.disagg.prefill import PrefillService
from triblade.disagg.sockets import TcpConnector
from triblade.disagg.wire import End, Fetch, Hello, Rows, token_payload
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
    monkeypatch.setattr(peer, "SILENCE_S", 0.5)


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


class HeldLink:
    """A decode worker's link that takes nothing until it is told to, and remembers what came."""

    peer, file = "held", None

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.unsent_bytes = 1 << 40
        self.messages: list[Message] = []

    def start(self, receiver: object) -> None: ...

    def send(self, message: Message, *, file: int | None = None) -> None:
        self.messages.append(message)

    def close(self) -> None: ...

    def join(self) -> None: ...


@contextmanager
def held_service(
    num_prompts: int, num_fitting: int | None = None, num_blocks: int = 128, **options: Any
) -> Iterator[tuple[PrefillService, HeldLink]]:
    """A prefill worker that has computed prompts, those that fit, for a link that takes none of their rows."""
    engine, link = tiny_llm(model(), num_kv_blocks=num_blocks).engine, HeldLink()
    service = PrefillService(engine, TransferConfig(**options))
    layout = engine.runner.executor.cache.layout
    service.received(link, Hello(role="decode", layout=described(layout), codec="raw"))
    for number in range(num_prompts):
        service.received(link, Fetch(transfer=number, first_token=0, payload=token_payload(prompt(57, seed=number))))
    num_computed = num_prompts if num_fitting is None else num_fitting
    Pair.eventually(
        lambda: service.num_jobs == num_prompts and len(service._transfers.requests) <= num_prompts - num_computed
    )
    assert not any(isinstance(message, Rows) for message in link.messages)
    yield service, link
    service.close()
    assert engine.pool.num_free == engine.pool.num_blocks


def test_transfers_take_turns_in_small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = tiny_llm(model()).engine.runner.executor.cache.layout
    monkeypatch.setattr(pace, "FIRST_UNSENT_BYTES", 2 * layout.row_bytes)
    with held_service(2) as (service, link):
        link.unsent_bytes = 0
        service.writable(link)  # type: ignore[arg-type]
        Pair.eventually(lambda: service.num_jobs == 0)
        rows = [message for message in link.messages if isinstance(message, Rows)]
        assert {message.num_tokens for message in rows} == {2 * layout.block_size}
        first, second = rows[0].transfer, rows[1].transfer
        assert [message.transfer for message in rows] == [first, second] * (56 // (2 * layout.block_size))


def test_who_waits_for_blocks_that_a_link_holds_does_not_run_in_circles(monkeypatch: pytest.MonkeyPatch) -> None:  # P6
    with held_service(3, num_fitting=1, num_blocks=20) as (service, link):
        steps: list[None] = []
        step = service.engine.step
        monkeypatch.setattr(service.engine, "step", lambda: steps.append(None) or step())
        time.sleep(4 * prefill.STATE_INTERVAL_S)
        assert 1 <= len(steps) <= 6
        assert len(service._transfers.requests) == 2
        link.unsent_bytes = 0
        service.writable(link)  # type: ignore[arg-type]
        Pair.eventually(lambda: service.num_jobs == 0)
        ends = [message for message in link.messages if isinstance(message, End)]
        assert [end.error for end in ends] == [None] * 3


def test_a_lease_lasts_as_long_as_the_link_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_transfers, "GRACE_S", 0.0)
    monkeypatch.setattr(prefill, "STATE_INTERVAL_S", 0.02)
    with held_service(1, lease_s=0.2) as (service, link):
        for _ in range(30):
            link.traffic.sent_bytes += 1
            time.sleep(0.02)
        assert service.num_jobs == 1
        Pair.eventually(lambda: service.num_jobs == 0)  # nothing moves any more
        (end,) = (message for message in link.messages if isinstance(message, End))
        assert "not taken for 0.2 s" in str(end.error)


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

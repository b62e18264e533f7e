"""The load driver against a target without a model: who is sent when, with what before it, and what becomes of failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psutil
import pytest

from triblade.bench.cores import Cores
from triblade.bench.dataset import Conversation, Turn
from triblade.bench.driver import Driver
from triblade.bench.metrics import Usage
from triblade.bench.prelude import MEASURED_WORDS, tokens_per_word, warm_up
from triblade.bench.target import Ask, Piece, TargetError
from triblade.bench.watch import Watch
from triblade.bench.workload import WordText
from triblade.config import BenchConfig
from triblade.errors import BenchError


@dataclass
class FakeTarget:
    """Answers with "r0", "r1", ... in two pieces; two tokens per word of the prompt and three for its template."""

    name: str = "fake"
    pause_s: float = 0.0
    fail_on: str | None = None
    asked: list[Ask] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    closed_early: int = 0
    counters: dict[str, float] = field(default_factory=dict)

    async def answer(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        number = len(self.asked)
        self.asked.append(ask)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        ended = False
        try:
            await asyncio.sleep(self.pause_s)
            if self.fail_on is not None and self.fail_on in ask.messages[-1]["content"]:
                raise TargetError("status 500: broken")
            words = sum(len(message["content"].split()) for message in ask.messages)
            yield Piece("", False)
            yield Piece("r", True)
            yield Piece(str(number), True, Usage(2 * words + 3, 1, ask.max_tokens), "length")
            ended = True
        finally:
            self.running -= 1
            self.closed_early += not ended

    async def readings(self) -> Mapping[str, float]:
        return dict(self.counters)

    async def close(self) -> None:
        return


def singles() -> Iterator[Conversation]:
    return (Conversation((Turn(f"p{number}", 4),)) for number in count())


def drive(
    target: FakeTarget, requests: int, conversations: Iterator[Conversation] | None = None, **options: Any
) -> Driver:
    driver = Driver(target, BenchConfig(num_requests=requests, **options))
    asyncio.run(driver.run(singles() if conversations is None else conversations, requests))
    return driver


def test_a_closed_loop_keeps_its_users_busy() -> None:
    target = FakeTarget(pause_s=0.001)
    records = drive(target, 20, concurrency=3).records
    assert len(records) == len(target.asked) == 20
    assert {ask.messages[0]["content"] for ask in target.asked} == {f"p{n}" for n in range(20)}
    assert target.most_running == 3
    assert all(r.is_good and len(r.piece_s) == 2 and r.output_tokens == 4 and r.prompt_tokens == 5 for r in records)
    assert all(r.sent_s <= r.piece_s[0] <= r.end_s == r.piece_s[-1] for r in records)


def test_users_come_one_by_one() -> None:
    target = FakeTarget(pause_s=5.0)
    records = drive(target, 3, concurrency=3, spawn_rate=50.0, request_timeout_s=0.1).records
    begun = sorted(r.sent_s for r in records)
    assert [n for n in range(3) if begun[n] >= n / 50] == [0, 1, 2]


def test_an_open_loop_does_not_wait() -> None:
    target = FakeTarget(pause_s=0.05)
    records = drive(target, 12, request_rate=2000.0, arrivals="fixed").records
    assert target.most_running > 8
    assert sorted(r.sent_s for r in records) == pytest.approx([n / 2000 for n in range(12)])  # when due, not when sent


def test_a_limit_in_flight_makes_others_wait_and_counts_it() -> None:
    target = FakeTarget(pause_s=0.01)
    records = drive(target, 6, request_rate=5000.0, arrivals="fixed", max_in_flight=2).records
    assert target.most_running == 2
    assert max(r.ttft_s for r in records) >= 0.03  # the third pair waited for two others


def test_a_trace_is_played_at_its_times() -> None:
    trace = [Conversation((Turn("a", 1),), arrival_s=0.0), Conversation((Turn("b", 1),), arrival_s=0.04)]
    options = {"workload": "replay", "dataset": "-", "arrivals": "trace", "trace_speed": 2.0}
    records = drive(FakeTarget(), 9, iter(trace), **options).records
    assert [r.sent_s for r in records] == [0.0, 0.02]


def test_a_conversation_carries_what_was_said() -> None:
    target = FakeTarget()
    talk = Conversation((Turn("one", 2), Turn("two", 3)), system="be kind")
    records = drive(target, 9, iter([talk]), concurrency=1, think_time_s=0.002).records
    assert [(r.turn, r.output_tokens) for r in records] == [(0, 2), (1, 3)]
    assert [dict(m) for m in target.asked[1].messages] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "r0"},
        {"role": "user", "content": "two"},
    ]
    assert records[1].sent_s >= records[0].end_s + 0.002


def test_the_number_of_requests_counts_turns() -> None:
    talks = (Conversation((Turn("a", 1), Turn("b", 1), Turn("c", 1))) for _ in count())
    assert len(drive(FakeTarget(), 7, talks, concurrency=2).records) == 7


def test_failures_are_records_and_end_their_conversation() -> None:
    talks = iter([Conversation((Turn("bad", 1), Turn("never", 1))), Conversation((Turn("good", 1),))])
    target = FakeTarget(fail_on="bad")
    records = drive(target, 9, talks, concurrency=1).records
    assert [(r.error, r.is_good) for r in records] == [("status 500: broken", False), (None, True)]
    assert len(target.asked) == 2


def test_a_request_times_out_and_is_dropped() -> None:
    target = FakeTarget(pause_s=30.0)
    (record,) = drive(target, 1, concurrency=1, request_timeout_s=0.02).records
    assert record.error == "no answer within 0.02 s"
    assert (target.running, target.closed_early) == (0, 1)


def test_time_ends_a_run() -> None:
    records = drive(FakeTarget(pause_s=0.005), 100_000, concurrency=2, duration_s=0.05).records
    assert 2 <= len(records) < 100_000


def test_an_interruption_keeps_what_ended() -> None:
    async def interrupted() -> Driver:
        target = FakeTarget(pause_s=0.002)
        driver = Driver(target, BenchConfig(num_requests=10**6, concurrency=2))
        task = asyncio.create_task(driver.run(singles(), 10**6))
        while len(driver.records) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert target.running == 0
        return driver

    assert all(record.is_good for record in asyncio.run(interrupted()).records)


def test_tokens_of_a_word_are_measured() -> None:
    target = FakeTarget()
    assert asyncio.run(tokens_per_word(target, BenchConfig(request_rate=1.0))) == 2.0
    assert [len(ask.messages[0]["content"].split()) for ask in target.asked] == [1, 1 + MEASURED_WORDS]
    with pytest.raises(BenchError, match="does not answer: status 500: broken"):
        asyncio.run(tokens_per_word(FakeTarget(fail_on=""), BenchConfig()))


@pytest.mark.parametrize("workload", ["random", "replay"])
def test_warming_up_uses_other_prompts(workload: str) -> None:
    dataset = {"dataset": "-"} if workload == "replay" else {}
    target = FakeTarget(pause_s=0.001)
    config = BenchConfig(workload=workload, warmup_requests=3, request_rate=0.001, **dataset)  # type: ignore[arg-type]
    asyncio.run(warm_up(target, config, WordText()))
    assert len({ask.messages[0]["content"] for ask in target.asked}) == 3
    assert target.most_running == 3


def test_a_watch_reports_increase_and_peaks() -> None:
    async def watched() -> dict[str, float]:
        target = FakeTarget(counters={"num_preemptions_total": 5.0, "spec_decode_num_drafts_total": 10.0})
        watch = Watch(target)
        await watch.begin()
        for usage in (0.25, 0.75, 0.5):
            target.counters["kv_cache_usage_perc"] = usage
            await watch.read([])
        target.counters |= {
            "num_preemptions_total": 7.0,
            "spec_decode_num_drafts_total": 30.0,
            "spec_decode_num_draft_tokens_total": 80.0,
            "spec_decode_num_accepted_tokens_total": 20.0,
        }
        await watch.end()
        return watch.figures()

    figures = asyncio.run(watched())
    assert figures["num_preemptions"] == 2.0
    assert figures["peak_kv_cache_usage_perc"] == 0.75
    assert (figures["acceptance_rate"], figures["mean_accepted_length"]) == (0.25, 2.0)


@pytest.mark.parametrize(("is_own", "others"), [(True, 1.0), (False, 0.5)])
def test_what_else_is_busy_is_told(is_own: bool, others: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 busy cores the process has 2, and the load half a one where it is another process."""
    monkeypatch.setattr(Cores, "own", 0.5)
    monkeypatch.setattr(Cores, "others", lambda _, known: 3.0 - known)
    process = psutil.Process() if is_own else psutil.Process(psutil.Process().ppid())

    async def watched() -> dict[str, float]:
        watch = Watch(FakeTarget(), process, sums={"cpu_cores": (4.0, 2)})
        await watch.begin()
        await watch.end()
        return watch.figures()

    assert asyncio.run(watched())["mean_other_cores"] == others


def test_a_test_shorter_than_a_period_still_has_its_memory() -> None:
    async def watched() -> dict[str, float]:
        watch = Watch(FakeTarget(counters={"num_requests_running": 3.0}), psutil.Process())
        await watch.begin()
        await watch.end()
        return watch.figures()

    figures = asyncio.run(watched())
    assert "mean_other_cores" not in figures  # nothing was read of the process's use
    assert figures["peak_memory_mib"] * 2**20 >= psutil.Process().memory_info().rss * 0.5
    assert figures["peak_num_requests_running"] == 3.0

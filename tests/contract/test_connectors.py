"""Every connector, disturbed in every way: no wrong token, no stuck request, and both pools as they were (cases of kind g)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from shutil import which
from typing import Any

import pytest
import torch
from disaggregated import PLACED, pair
from tiny import prompt, tiny_model
from tiny_engine import DictionaryCheckpoint, open_tiny, tiny_llm

from triblade.disagg.frames import Message
from triblade.disagg.links import Link
from triblade.disagg.wire import End, Hello, Rows
from triblade.models.loader import OpenModel
from triblade.registry import CONNECTORS
from triblade.sampling_params import SamplingParams

ALL = [*sorted(CONNECTORS), *([PLACED] if which("g++") else [])]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
IDS = prompt(57, seed=21)
# Small messages: a prompt of 57 tokens is fourteen chunks, so there is a middle to break.
OPTIONS: dict[str, Any] = {"prefill": {"max_num_batched_tokens": 4}}

Change = Callable[[Link, Message], Iterable[Message]]


@cache
def model(name: str = "llama", **overrides: int) -> OpenModel:
    return open_tiny(name, **overrides)


@cache
def alone(ids: tuple[int, ...]) -> list[int]:
    return tiny_llm(model()).generate([list(ids)], GREEDY)[0][0].token_ids


def expected() -> list[int]:
    return alone(tuple(IDS))


class Fault:
    """Does something with the n-th rows that come, and nothing else."""

    def __init__(self, number: int, act: Callable[[Link, Rows], Iterable[Message]]) -> None:
        self._number, self._act, self._count = number, act, 0

    def __call__(self, link: Link, message: Message) -> Iterable[Message]:
        if not isinstance(message, Rows):
            return [message]
        self._count += 1
        return self._act(link, message) if self._count == self._number else [message]


def damaged(_: Link, rows: Rows) -> list[Message]:
    """One bit is wrong."""
    if rows.blocks or rows.is_placed:
        return [replace(rows, checksum=rows.checksum ^ 1)]
    payload = bytearray(rows.payload)
    payload[len(payload) // 2] ^= 4
    return [replace(rows, payload=bytes(payload))]


def cut(link: Link, rows: Rows) -> list[Message]:
    link.close()
    return []


FAULTS: dict[str, tuple[Callable[[Link, Rows], Iterable[Message]], bool]] = {  # -> whether rows are missing then
    "lost": (lambda _, rows: [], True),
    "damaged": (damaged, True),
    "cut": (cut, True),
    "early end": (lambda _, rows: [End(transfer=rows.transfer, error="no")], True),
    "shifted": (lambda _, rows: [replace(rows, first_token=rows.first_token + 4)], True),
    "beyond the end": (lambda _, rows: [replace(rows, num_tokens=999)], True),
    "half a block": (lambda _, rows: [replace(rows, num_tokens=rows.num_tokens - 1)], True),
    "twice": (lambda _, rows: [rows, rows], False),
    "of an old attempt": (lambda _, rows: [replace(rows, attempt=7), rows], False),
    "of a stranger": (lambda _, rows: [replace(rows, transfer=rows.transfer + 99), rows], False),
    "end twice": (
        lambda _, rows: [rows, End(transfer=rows.transfer + 1), End(transfer=rows.transfer, attempt=3)],
        False,
    ),
}


@pytest.mark.parametrize("number", [2, 7, 13])  # at 10, 50 and 90 %
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("connector", ALL)
def test_a_fault_in_the_middle_costs_time_and_no_token(connector: str, fault: str, number: int) -> None:  # G05, G06
    act, is_loss = FAULTS[fault]
    with pair(model(), connector, change=Fault(number, act), **OPTIONS) as workers:
        (completions,) = workers.generate([IDS], GREEDY)
        assert completions[0].token_ids == expected()
        counts = workers.remote.counts
        assert (counts.num_fetches, counts.num_failed) == (1, int(is_loss))
        if is_loss:
            assert counts.num_tokens <= 4 * number
            assert counts.num_tokens >= 4 * (number - 1)


@pytest.mark.parametrize("connector", ALL)
def test_after_a_cut_the_link_comes_back(connector: str) -> None:
    with pair(model(), connector, change=Fault(3, cut), **OPTIONS) as workers:
        workers.generate([IDS], GREEDY)
        workers.eventually(lambda: workers.fetcher.num_ready == 1)
        other = prompt(50, seed=3)
        (completions,) = workers.generate([other], GREEDY)
        assert completions[0].token_ids == tiny_llm(model()).generate([other], GREEDY)[0][0].token_ids
        assert workers.remote.counts.num_complete == 1


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_a_fault_of_our_own_ends_the_link_and_not_only_its_thread(connector: str) -> None:
    def fail(_: Link, rows: Rows) -> list[Message]:
        raise RuntimeError(f"cannot handle {rows.first_token}")

    with pair(model(), connector, change=Fault(3, fail), **OPTIONS) as workers:
        (completions,) = workers.generate([IDS], GREEDY)
        assert completions[0].token_ids == expected()
        assert workers.remote.counts.num_failed == 1
        workers.eventually(lambda: workers.fetcher.num_ready == 1)


@pytest.mark.parametrize("connector", ALL)
def test_a_slow_peer_is_waited_for_and_others_run_meanwhile(connector: str) -> None:
    def slow(_: Link, message: Message) -> list[Message]:
        if isinstance(message, Rows):
            time.sleep(0.02)
        return [message]

    with pair(model(), connector, change=slow, transfer={"remote_prefill_tokens": 20}, **OPTIONS) as workers:
        short = prompt(5, seed=2)
        found = workers.generate([IDS, short], GREEDY)
        assert found[0][0].token_ids == expected()
        assert found[1][0].token_ids == tiny_llm(model()).generate([short], GREEDY)[0][0].token_ids
        assert workers.remote.counts.num_complete == 1


@pytest.mark.parametrize("connector", ALL)
def test_silence_ends_with_the_time_out(connector: str) -> None:  # G05
    change = Silence(after=5)
    with pair(model(), connector, change=change, transfer={"transfer_timeout_s": 0.3}, **OPTIONS) as workers:
        start = time.monotonic()
        (completions,) = workers.generate([IDS], GREEDY)
        assert completions[0].token_ids == expected()
        assert time.monotonic() - start < 5
        assert workers.remote.counts.num_failed == 1
        assert workers.remote.counts.num_tokens == 20


class Silence:
    """Nothing of a transfer comes after so many rows."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, _: Link, message: Message) -> list[Message]:
        if isinstance(message, Rows):
            self._left -= 1
        return [] if isinstance(message, Rows | End) and self._left < 0 else [message]


class Late:
    """Keeps everything behind so many rows to itself until it is told to let it go, behind the next message."""

    def __init__(self, after: int) -> None:
        self._left = after
        self._held: list[Message] = []
        self.is_over = False

    def __call__(self, _: Link, message: Message) -> list[Message]:
        if not isinstance(message, Rows | End):
            return [message]
        self._left -= 1
        if self._left < 0 and not self.is_over:
            self._held.append(message)
            return []
        held, self._held = self._held, []
        return [message, *held]


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("connector", ALL)
def test_an_abort_while_rows_come_frees_both_sides(connector: str, after: int) -> None:  # G01, G02
    """And what is still on its way touches nobody: the blocks go to the next request at once."""
    change = Late(after)
    options = {**OPTIONS, "num_kv_blocks": 20, "transfer": {"remote_kv_share": 1.0}}
    with pair(model(), connector, change=change, **options) as workers:

        async def first_output() -> None:
            await anext(workers.client.generate(IDS, GREEDY))

        async def scenario() -> None:
            task = asyncio.create_task(first_output())
            while workers.remote.counts.num_tokens < 4 * after or workers.remote.counts.num_fetches == 0:
                await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(scenario())
        workers.eventually(lambda: workers.remote.counts.num_dropped == 1)
        change.is_over = True
        other = prompt(56, seed=5)
        (completions,) = workers.generate([other], GREEDY)
        assert completions[0].token_ids == tiny_llm(model()).generate([other], GREEDY)[0][0].token_ids
        assert workers.remote.counts.num_complete == 1


class HeldBack:
    """Keeps everything behind so many rows until the transfer is over, and lets it go before the next sign of life."""

    def __init__(self, after: int) -> None:
        self._left = after
        self._held: list[Message] = []
        self.is_over: Callable[[], bool] = lambda: False

    def __call__(self, _: Link, message: Message) -> list[Message]:
        if isinstance(message, Rows | End) and not self.is_over():
            self._left -= 1
            if self._left < 0:
                self._held.append(message)
                return []
        if self._held and self.is_over():
            held, self._held = self._held, []
            return [*held, message]
        return [message]

    @property
    def is_empty(self) -> bool:
        return not self._held


@pytest.mark.parametrize("connector", ALL)
def test_rows_and_an_end_that_come_after_the_time_out_touch_nobody(connector: str) -> None:  # G02
    change = HeldBack(after=5)
    options = {**OPTIONS, "num_kv_blocks": 20, "transfer": {"transfer_timeout_s": 0.3, "remote_kv_share": 1.0}}
    with pair(model(), connector, change=change, **options) as workers:
        change.is_over = lambda: workers.remote.counts.num_failed == 1
        assert workers.generate([IDS], GREEDY)[0][0].token_ids == expected()
        workers.eventually(lambda: change.is_empty)
        other = prompt(56, seed=5)
        (completions,) = workers.generate([other], GREEDY)
        assert completions[0].token_ids == tiny_llm(model()).generate([other], GREEDY)[0][0].token_ids
        assert (workers.remote.counts.num_tokens, workers.remote.counts.num_complete) == (20 + 55, 1)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("connector", ALL)
def test_an_abort_behind_the_rows_frees_both_sides(connector: str, tokens: int) -> None:  # G01
    with pair(model(), connector, **OPTIONS) as workers:

        async def some() -> None:
            outputs = workers.client.generate(IDS, GREEDY)
            for _ in range(tokens):
                await anext(outputs)
            await outputs.aclose()  # type: ignore[attr-defined]

        asyncio.run(some())
        workers.eventually(lambda: workers.client.load().num_running == 0)
        assert workers.generate([IDS], GREEDY)[0][0].token_ids == expected()


def another_model() -> OpenModel:
    """Of the same shapes."""

    class Another(DictionaryCheckpoint):
        def fingerprint(self) -> str:
            return "another"

    return replace(model(), checkpoint=Another(tiny_model("llama", seed=5)))


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"prefill": {"kv_cache_dtype": "bfloat16"}}, "codec: 'bfloat16', 'float32'"),  # G08
    "block size": ({"prefill": {"block_size": 8}}, "block_size: 8, 4"),  # G09
    "layers": ({"prefill_model": model(num_hidden_layers=2)}, "num_layers: 2, 3"),
    "heads": ({"prefill_model": model("llama-mha")}, "num_kv_heads: 4, 2"),  # G10
    "model": ({"prefill_model": another_model()}, "model_hash: "),
    "rope": ({"prefill_model": model("llama-linear")}, "rope: "),
    "weights": (
        {"prefill_model": replace(model(), dtype=torch.bfloat16), "kv_cache_dtype": "float32"},
        "weights: 'as stored, bfloat16', 'as stored, float32'",
    ),
    "drafter": ({"prefill": {"draft_layers": 2}, "drafter": "self", "draft_layers": 1}, "draft: "),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
@pytest.mark.parametrize("connector", ALL)
def test_workers_that_do_not_fit_refuse_and_name_the_field(connector: str, mismatch: str) -> None:
    options, field = MISMATCHES[mismatch]
    with pair(model(), connector, refused=True, **options) as workers:
        assert field in workers.fetcher.refusals[0]
        assert workers.generate([IDS], GREEDY)[0][0].token_ids == expected()
        assert workers.remote.counts.num_fetches == 0
        assert workers.remote.counts.num_declined == 1


@pytest.mark.parametrize("connector", ALL)
def test_a_wrong_canary_refuses(connector: str) -> None:  # G10
    """Layouts agree, bytes do not."""

    def swap(_: Link, message: Message) -> list[Message]:
        return [replace(message, payload=b"\0" * len(message.payload))] if isinstance(message, Hello) else [message]

    with pair(model(), connector, change=swap, refused=True) as workers:
        assert workers.generate([IDS], GREEDY)[0][0].token_ids == expected()
        assert workers.fetcher.num_ready == 0


@pytest.mark.parametrize("connector", ALL)
def test_a_prompt_that_the_prefill_worker_cannot_hold_comes_as_far_as_it_does(connector: str) -> None:  # G03
    with pair(model(), connector, prefill={"num_kv_blocks": 8, "max_num_batched_tokens": 12}) as workers:
        for ids, num_tokens in ((IDS, 32), ([*IDS[:40], 7], 32)):  # the second one's first 40 tokens are here already
            assert workers.generate([ids], GREEDY)[0][0].token_ids == alone(tuple(ids))
            assert (workers.remote.counts.num_failed, workers.remote.counts.num_tokens) == (1, num_tokens)


@pytest.mark.parametrize("connector", ALL)
def test_prompts_wait_until_those_before_them_are_taken(connector: str) -> None:  # G03, row P6
    """The pool holds one at a time; its rows are out of the way as soon as the other side has them."""
    prompts = [prompt(57, seed=seed) for seed in range(5)]
    options: dict[str, Any] = {"prefill": {"num_kv_blocks": 16, "max_num_batched_tokens": 12}}
    with pair(model(), connector, transfer={"remote_kv_share": 1.0}, **options) as workers:
        found = workers.generate(prompts, GREEDY)
        assert [choices[0].token_ids for choices in found] == [alone(tuple(ids)) for ids in prompts]
        assert (workers.remote.counts.num_complete, workers.remote.counts.num_failed) == (5, 0)
        assert workers.prefill_engine.scheduler.num_preemptions == 0


def test_rows_that_nobody_takes_are_released_when_the_lease_ends() -> None:
    """By reference, lost on their way together with the end: each side stops waiting by its own clock."""

    def from_the_third(_: Link, message: Message) -> Iterable[Message]:
        is_lost = isinstance(message, End) or (isinstance(message, Rows) and message.first_token >= 8)
        return [] if is_lost else [message]

    settings = {"lease_s": 0.1, "transfer_timeout_s": 1.8}
    with pair(model(), "shm", change=from_the_third, transfer=settings, **OPTIONS) as workers:
        (completions,) = workers.generate([IDS], GREEDY)
        assert completions[0].token_ids == expected()
        assert workers.remote.counts.num_tokens == 8
        assert [state.num_expired for state in workers.fetcher.states] == [1]

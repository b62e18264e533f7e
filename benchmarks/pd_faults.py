#!/usr/bin/env python3
"""Everything that can go wrong between a prefill and a decode worker, many times over.

    python benchmarks/pd_faults.py [--connector shm tcp] [--only WORDS ...] [--times 20] [--output FILE.json]

Both workers are processes of their own, supervised and routed to as by `triblade serve`; a relay between them kills, cuts, delays,
damages, repeats and holds back. Every answer must be that of one engine, tokens and logprobs, in time, and afterwards both pools
must be empty. The last kind is a check of the check: rows damaged so that no checksum shows it must lead to other answers. Rows of
kinds that were not run are kept in the output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pd_pair import (
    LEASE_S,
    PARAMS,
    PROMPT_TOKENS,
    SIZES,
    STUCK_S,
    TIMEOUT_S,
    Answer,
    Expected,
    Pair,
    answer,
    prompt_of,
    running,
    tiny_engine,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from disaggregated import pair as pair_in_process
from relays import Throttle
from tiny_folders import tiny_folder

from triblade.config import EngineConfig
from triblade.disagg.frames import Message
from triblade.disagg.wire import Cancel, End, Fetch, Rows
from triblade.engine.transfers import TransferCounts
from triblade.kv.wire_frame import HEADER_BYTES
from triblade.models.loader import OpenModel, open_model

Change = Callable[[Message], Iterable[Message]]
SHARES = (0.1, 0.5, 0.9)
SLOW = {"slow link: 200 kB/s, all rows come": 200_000.0, "slow link: 25 kB/s, rows are given up": 25_000.0}
MISMATCHES: dict[str, dict[str, Any]] = {
    "mismatched KV dtype": {"prefill": {"kv_cache_dtype": "bfloat16"}},
    "mismatched block size": {"prefill": {"block_size": 8}},
    "mismatched model": {},  # of the same shapes
}
ABOUT = {
    "what": "per fault and connector: answers that are not one engine's, requests without an answer, the longest answer, the "
    "longest time until both pools were empty, what became of the transfers; of aborted requests the next one's answer",
    "model": "tiny llama, random weights, float32, deterministic",
    "prompt_tokens": PROMPT_TOKENS,
    "transfer_timeout_s": TIMEOUT_S,
    "lease_s": LEASE_S,
    "stuck_after_s": STUCK_S,
}
CONTROL = "control: damage without a trace"
BASELINE_S = 5.0
GREETING_S = 0.5  # after a connection, until both workers say that they know each other


@dataclass
class Row:
    """What became of one kind of fault over one connector."""

    fault: str
    connector: str
    times: int = 0
    wrong_answers: int = 0
    stuck_requests: int = 0
    longest_answer_s: float = 0.0
    longest_to_baseline_s: float = 0.0
    transfers: dict[str, int] = field(default_factory=dict)  # the decode worker's counts

    def add(self, found: Answer | None, expected: Answer, answer_s: float, baseline_s: float) -> None:
        self.times += 1
        self.stuck_requests += found is None
        self.wrong_answers += found is not None and found != expected
        self.longest_answer_s = round(max(self.longest_answer_s, answer_s), 2)
        self.longest_to_baseline_s = round(max(self.longest_to_baseline_s, baseline_s), 2)

    def count(self, before: TransferCounts, after: TransferCounts) -> None:
        for name in ("complete", "failed", "dropped", "damaged", "declined"):
            # A decode worker that was killed begins anew.
            grown = getattr(after, f"num_{name}") - getattr(before, f"num_{name}")
            self.transfers[name] = self.transfers.get(name, 0) + max(0, grown)


class At:
    """Does something with the first rows that reach a share of the prompt; others pass."""

    def __init__(self, share: float, act: Callable[[Rows], Iterable[Message]]) -> None:
        self._stop, self._act, self._is_done = share * (PROMPT_TOKENS - 1), act, False

    def __call__(self, message: Message) -> Iterable[Message]:
        if self._is_done or not isinstance(message, Rows) or message.stop < self._stop:
            return [message]
        self._is_done = True
        return self._act(message)


def nothing_more(pair: Pair, do: Callable[[], None]) -> Iterable[Message]:
    """Nothing of this transfer comes through any more, also what was sent before `do`."""
    pair.relay.change = lambda message: [] if isinstance(message, Rows | End) else [message]
    do()
    return []


def damaged(rows: Rows) -> list[Message]:
    """By value one bit is wrong, by reference the rows are others by now."""
    if rows.blocks:
        return [replace(rows, blocks=tuple((block + 1) % 100 for block in rows.blocks))]
    payload = bytearray(rows.payload)
    payload[len(payload) // 2] ^= 4
    return [replace(rows, payload=bytes(payload))]


def damaged_without_trace(rows: Rows) -> list[Message]:
    """The checksum is that of the damage."""
    payload = bytearray(rows.payload)
    for at in range(HEADER_BYTES, len(payload)):
        payload[at] ^= at % 32
    start = HEADER_BYTES - 4
    checksum = zlib.crc32(payload[HEADER_BYTES:], zlib.crc32(payload[:start]))
    payload[start:HEADER_BYTES] = checksum.to_bytes(4, "little")
    return [replace(rows, payload=bytes(payload))]


class Late:
    """Holds what comes from a share on, until the decode worker has given the transfer up; then lets it go."""

    def __init__(self, pair: Pair) -> None:
        self._pair, self._held, self._is_holding = pair, list[Message](), False
        pair.relay.heard = self._heard

    def __call__(self, message: Message) -> Iterable[Message]:
        if isinstance(message, Rows) and message.stop > PROMPT_TOKENS // 2:
            self._is_holding = True
        if self._is_holding and isinstance(message, Rows | End):
            self._held.append(message)
            return []
        return [message]

    def _heard(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self._is_holding = False
            for held in self._held:
                self._pair.relay.send(held)
            self._held.clear()


def twice(message: Message) -> list[Message]:
    return [message, message] if isinstance(message, Rows | End) else [message]


def slowly(message: Message) -> list[Message]:
    if isinstance(message, Rows):
        time.sleep(0.02)
    return [message]


# Name -> what the relay does in round `number`.
MESSAGE_FAULTS: dict[str, Callable[[Pair, int], Change]] = {
    **{
        f"prefill worker killed at {share:.0%}": lambda pair, _, share=share: At(  # type: ignore[misc]
            share, lambda rows: nothing_more(pair, lambda: pair.kill(0))
        )
        for share in SHARES
    },
    "decode worker killed at 50%": lambda pair, _: At(0.5, lambda rows: nothing_more(pair, lambda: pair.kill(1))),
    "connection cut at 10, 50, 90%": lambda pair, number: At(
        SHARES[number % 3], lambda rows: nothing_more(pair, pair.relay.cut)
    ),
    "every message 20 ms late": lambda pair, _: slowly,
    "corrupted row at 10, 50, 90%": lambda pair, number: At(SHARES[number % 3], damaged),
    "rows and end twice": lambda pair, _: twice,
    "rows and end late": lambda pair, _: Late(pair),
    CONTROL: lambda pair, _: At(0.5, damaged_without_trace),
}
ABORT_FAULTS = tuple(
    f"abort: {state}"
    for state in ("just sent", "asked for", "10%", "50%", "90%", "all rows sent", "first token", "half an answer")
)


def message_fault(pair: Pair, expected: Expected, row: Row, times: int) -> None:
    """A request meets the fault, and must be answered all the same."""
    for number in range(times):
        pair.wait_ready()
        ids = prompt_of(seed_of(row.fault, number))
        right, before = expected(ids), pair.counts
        pair.relay.change = MESSAGE_FAULTS[row.fault](pair, number)
        start = time.monotonic()
        found = pair.answer(ids)
        took_s = time.monotonic() - start
        pair.relay.undisturbed()
        row.add(found, right, took_s, pair.baseline())
        row.count(before, pair.counts)


def slow_link(pair: Pair, expected: Expected, row: Row, times: int) -> None:
    """A new connection each time: on one that is known to be slow nobody asks."""
    throttle = pair.throttle
    assert throttle is not None
    for number in range(times):
        throttle.cut()
        pair.wait(partial(has_more_connections, throttle, throttle.num_connections), STUCK_S)
        time.sleep(GREETING_S)
        pair.wait_ready()
        ids = prompt_of(seed_of(row.fault, number))
        right, before, start = expected(ids), pair.counts, time.monotonic()
        found = pair.answer(ids)
        row.add(found, right, time.monotonic() - start, pair.baseline())
        row.count(before, pair.counts)


def abort(pair: Pair, expected: Expected, row: Row, times: int) -> None:
    """One request leaves in a certain state; another one comes at once and gets its blocks."""
    state = row.fault.removeprefix("abort: ")
    for number in range(times):
        pair.wait_ready()
        left, ids = prompt_of(seed_of(row.fault, number)), prompt_of(seed_of(row.fault, -1 - number))
        right, before = expected(ids), pair.counts
        asyncio.run(leave(pair, left, state))
        start = time.monotonic()
        found = pair.answer(ids)
        row.add(found, right, time.monotonic() - start, pair.baseline())
        row.count(before, pair.counts)


def has_more_connections(throttle: Throttle, than: int) -> bool:
    return throttle.num_connections > than


async def leave(pair: Pair, ids: list[int], state: str) -> None:
    """Ask, and stop listening when the request is so far."""
    loop, reached = asyncio.get_running_loop(), asyncio.Event()

    def reach() -> None:
        loop.call_soon_threadsafe(reached.set)

    def seen(rows: Rows) -> Iterable[Message]:
        reach()
        return [rows]

    shares = {"10%": 0.1, "50%": 0.5, "90%": 0.9, "all rows sent": 1.0}
    pair.relay.heard = lambda message: reach() if isinstance(message, Fetch) and state == "asked for" else None
    pair.relay.change = At(shares[state], seen) if state in shares else lambda message: [message]
    tokens = {"first token": 1, "half an answer": 4}.get(state)
    if state == "just sent":
        reached.set()
    task = asyncio.create_task(listen(pair, ids, tokens, reach))
    await asyncio.sleep(0)  # the request is on its way
    await asyncio.wait_for(reached.wait(), STUCK_S)
    pair.relay.undisturbed()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def listen(pair: Pair, ids: list[int], tokens: int | None, reach: Callable[[], None]) -> None:
    count = 0
    async for output in pair.router.generate(ids, PARAMS):
        count += len(output.token_ids)
        if tokens is not None and count >= tokens:
            reach()


def mismatch(config: EngineConfig, row: Row, times: int) -> None:
    """Workers that must refuse each other, in one process over a real connector: the decode worker computes everything."""
    model, ids = open_model(config), prompt_of(7)
    other = another_model(config) if row.fault == "mismatched model" else None
    right, _ = in_process(model, row.connector, ids)
    for _ in range(times):
        found, seconds = in_process(
            model, row.connector, ids, refused=True, prefill_model=other, **MISMATCHES[row.fault]
        )
        row.add(found, right, *seconds)


def another_model(config: EngineConfig) -> OpenModel:
    """With other weights."""
    return open_model(replace(config, model=str(tiny_folder(Path(config.model).parent / "other", seed=5, **SIZES))))


def in_process(model: OpenModel, connector: str, ids: list[int], **options: Any) -> tuple[Answer, tuple[float, float]]:
    """An answer of two workers, and the seconds until it was there and until both pools were empty behind it."""
    with pair_in_process(model, connector, num_kv_blocks=200, **options) as workers:
        start = time.monotonic()
        found = asyncio.run(answer(workers.client, ids))
        answered = time.monotonic()
        workers.check_idle()
        return found, (answered - start, time.monotonic() - answered)


def seed_of(fault: str, number: int) -> int:
    """Of a prompt that no other round has."""
    return zlib.crc32(f"{fault} {number}".encode())


def run(config: EngineConfig, connector: str, faults: list[str], times: int) -> list[Row]:
    """Rows of these kinds of faults that exist over a connector."""
    expected = Expected(config)
    rows = {fault: Row(fault, connector) for fault in faults}
    between = [(fault, row) for fault, row in rows.items() if fault in MESSAGE_FAULTS or fault in ABORT_FAULTS]
    if between:
        with running(config, connector) as pair:
            for fault, row in between:
                (message_fault if fault in MESSAGE_FAULTS else abort)(pair, expected, row, times)
                report(row)
    for fault in [fault for fault in faults if fault in SLOW]:
        with running(config, connector, SLOW[fault]) as pair:
            slow_link(pair, expected, rows[fault], times)
            report(rows[fault])
    for fault in [fault for fault in faults if fault in MISMATCHES]:
        mismatch(config, rows[fault], times)
        report(rows[fault])
    expected.close()
    return list(rows.values())


def report(row: Row) -> None:
    print(json.dumps(asdict(row)), file=sys.stderr, flush=True)


def kinds(connector: str) -> list[str]:
    """Faults that a connector can have: rows by reference are few bytes, and their checksum is not in the message alone."""
    found = [*MESSAGE_FAULTS, *ABORT_FAULTS, *MISMATCHES]
    return [*found, *SLOW] if connector == "tcp" else [fault for fault in found if fault != CONTROL]


def main() -> int:
    """Run the kinds that were asked for; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connector", choices=("shm", "tcp"), nargs="+", default=["shm", "tcp"])
    parser.add_argument("--only", nargs="+", default=[""], help="faults whose names have one of these words in them")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with tiny_engine() as config:
        for connector in options.connector:
            chosen = [fault for fault in kinds(connector) if any(word in fault for word in options.only)]
            rows += run(config, connector, chosen, options.times)
    text = json.dumps({**ABOUT, "rows": merged(options.output, rows)}, indent=1) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    return int(not all(is_right(row) for row in rows))


def merged(output: Path | None, rows: list[Row]) -> list[dict[str, Any]]:
    """These rows, and those of a former output that are not among them."""
    known = json.loads(output.read_text())["rows"] if output and output.exists() else []
    found = {(row["fault"], row["connector"]): row for row in [*known, *map(asdict, rows)]}
    order = {fault: place for place, fault in enumerate(kinds("tcp"))}
    return sorted(found.values(), key=lambda row: (order[row["fault"]], row["connector"]))


def is_right(row: Row) -> bool:
    """No wrong answer and nobody stuck; damage that nobody can notice must show in every answer."""
    wrong = row.times if row.fault == CONTROL else 0
    return row.wrong_answers == wrong and row.stuck_requests == 0 and row.longest_to_baseline_s < BASELINE_S


if __name__ == "__main__":
    sys.exit(main())

"""The decode worker's end: prefill workers by address, who of them is asked, and what comes back. Knows no engine and no cache.

Life of a transfer: `fetch` -> rows in order -> an end, which is told exactly once, whatever happens: the peer's word, its loss,
silence for `timeout_s`, or a link so slow that the rest would take longer than that; a cancelled one ends without a word, but for
`Settled` where it named blocks that the peer may have been writing into. Of peers see `disagg.peer`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triblade.disagg.kv_connector import Arrival, Settled
from triblade.disagg.links import Connector, Link
from triblade.disagg.peer import Peer, Terms
from triblade.disagg.wire import Cancel, End, Fetch, Rows, State

TICK_S = 0.1
TURNS = 2  # messages that everybody else may have before the next one of a transfer that is late
SLOW_S, SLOW_SHARE = 1.0, 0.8  # a transfer that took so long, and in most of that time waited for the link, was slow
SETTLE_S = 1.0  # after the loss of a prefill worker, until none of its writes can be under way; the last one takes milliseconds


@dataclass(slots=True)
class _Open:
    """A transfer that the engine has not left yet."""

    peer: Peer
    attempt: int
    left_tokens: int
    begin_s: float
    last_s: float  # when its last row came
    begin_receiving_s: float  # the link's, then
    seen_messages: int  # the peer's, when its last row came
    names_blocks: bool
    is_over: bool = False  # its end was told
    settles_s: float = math.inf  # when nobody can be writing any more


class Fetcher:
    """Implements `KVConnector` over links to prefill workers.

    Args:
        connector: the way.
        addresses: of the prefill workers.
        terms: checks them.
        notify: called from any thread when `poll` has something.
        max_backlog: tokens that may wait at a peer.
        timeout_s: of transfers, since their last row.

    Attributes:
        num_slow: transfers that took long because of the link.
    """

    def __init__(
        self,
        connector: Connector,
        addresses: Sequence[str],
        terms: Terms,
        notify: Callable[[], None],
        *,
        max_backlog: int,
        timeout_s: float,
    ) -> None:
        self._connector = connector
        self._notify = notify
        self._max_backlog, self._timeout_s = max_backlog, timeout_s
        self._lock = threading.RLock()
        self._peers = [Peer(address, terms, self) for address in addresses]
        self._open: dict[int, _Open] = {}
        self._settling: dict[int, _Open] = {}  # cancelled, but perhaps being written
        self._arrivals: deque[Arrival] = deque()
        self.num_slow = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tend, name="triblade-fetcher", daemon=True)
        self._thread.start()

    @property
    def num_ready(self) -> int:
        """Peers that can be asked."""
        return sum(peer.is_ready for peer in self._peers)

    @property
    def states(self) -> list[State]:
        """What the peers that are there said of themselves last."""
        return [peer.state for peer in self._peers if peer.is_ready]

    @property
    def refusals(self) -> list[str]:
        """Why peers are of no use."""
        return [peer.refusal for peer in self._peers if peer.refusal is not None]

    def accepts(self, num_tokens: int) -> bool:
        """See `KVConnector`. On a link so slow that the rows would be given up, nobody waits for them."""
        peer = self._least_busy()
        if peer is None or peer.backlog_tokens + num_tokens > self._max_backlog:
            return False
        return peer.pace.expected_s(peer.own_tokens + num_tokens, time.monotonic()) <= self._timeout_s

    def fetch(self, request: Fetch) -> None:
        """See `KVConnector`."""
        tokens = len(request.payload) // 4 - 1 - request.first_token
        with self._lock:
            peer = self._least_busy()
            if peer is None:
                self._tell(Arrival(End(transfer=request.transfer, attempt=request.attempt, error="no prefill worker")))
                return
            peer.own_tokens += tokens
            now = time.monotonic()
            self._open[request.transfer] = _Open(
                peer=peer,
                attempt=request.attempt,
                left_tokens=tokens,
                begin_s=now,
                last_s=now,
                begin_receiving_s=peer.receiving_s,
                seen_messages=peer.num_messages,
                names_blocks=bool(request.blocks),
            )
        peer.send(request)

    def cancel(self, transfer: int) -> None:
        """See `KVConnector`."""
        with self._lock:
            found = self._forget(transfer)
            if found is not None and found.names_blocks:
                self._settling[transfer] = found
                found.last_s = time.monotonic()
                if not found.peer.places:
                    found.settles_s = 0.0
            elif found is None and transfer not in self._settling:
                self._tell(Arrival(Settled(transfer)))  # nobody was asked
            self._settle(time.monotonic())
        if found is not None:
            self._note_slowness(found)
            found.peer.send(Cancel(transfer=transfer, attempt=found.attempt))

    def poll(self) -> Arrival | None:
        """See `KVConnector`."""
        try:
            return self._arrivals.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """See `KVConnector`."""
        self._closed.set()
        self._thread.join()
        for peer in self._peers:
            peer.leave()

    def arrived(self, peer: Peer, link: Link, message: Rows | End) -> None:
        """A peer sent rows or an end."""
        with self._lock:
            settling = self._settling.get(message.transfer)
            if settling is not None and isinstance(message, End) and settling.peer is peer:
                settling.settles_s = 0.0
                self._settle(time.monotonic())
            found = self._open.get(message.transfer)
            if found is None or found.is_over or found.peer is not peer or found.attempt != message.attempt:
                return  # late, or twice
            if isinstance(message, End):
                found.is_over, found.settles_s = True, 0.0
            else:
                count = min(found.left_tokens, message.num_tokens)
                found.left_tokens -= count
                peer.own_tokens -= count
                found.last_s, found.seen_messages = time.monotonic(), peer.num_messages
            self._tell(Arrival(message, link))
            if (
                not found.is_over
                and (rest_s := peer.pace.expected_s(found.left_tokens, found.last_s)) > self._timeout_s
            ):
                self._end(message.transfer, found, f"a slow link: the rest would take {rest_s:.0f} s")

    def lost(self, peer: Peer, reason: str) -> None:
        """A peer is gone: so are its transfers."""
        with self._lock:
            settles_s = time.monotonic() + SETTLE_S
            for found in (*self._open.values(), *self._settling.values()):
                if found.peer is peer:
                    found.settles_s = min(found.settles_s, settles_s)
            self._end_where(lambda found: found.peer is peer, f"prefill worker lost: {reason}")

    def _least_busy(self) -> Peer | None:
        """Of the peers that can be asked; one whose step takes longer than a transfer may is none."""
        useful = (peer for peer in self._peers if peer.is_ready and peer.state.step_s <= self._timeout_s)
        return min(useful, key=lambda peer: peer.backlog_tokens, default=None)

    def _forget(self, transfer: int) -> _Open | None:
        found = self._open.pop(transfer, None)
        if found is not None:
            found.peer.own_tokens -= found.left_tokens
        return found

    def _settle(self, now: float) -> None:
        for transfer in [number for number, found in self._settling.items() if found.settles_s <= now]:
            del self._settling[transfer]
            self._tell(Arrival(Settled(transfer)))

    def _end_where(self, is_over: Callable[[_Open], bool], reason: str) -> None:
        for transfer, found in self._open.items():
            if not found.is_over and is_over(found):
                self._end(transfer, found, reason)

    def _end(self, transfer: int, found: _Open, reason: str) -> None:
        found.is_over = True
        self._tell(Arrival(End(transfer=transfer, attempt=found.attempt, error=reason)))

    def _is_late(self, found: _Open, now: float) -> bool:
        """No row for too long. While a message is on its way it may be the next one, unless all others had their turns since."""
        if now <= found.last_s + self._timeout_s:
            return False
        num_open = sum(other.peer is found.peer for other in self._open.values())
        is_moving = now <= found.peer.pace.moved_s + self._timeout_s
        return not is_moving or found.peer.num_messages - found.seen_messages > TURNS * num_open

    def _note_slowness(self, found: _Open) -> None:
        """A whole transfer that mostly waited for the link."""
        took_s, waited_s = time.monotonic() - found.begin_s, found.peer.receiving_s - found.begin_receiving_s
        if found.left_tokens == 0 and took_s > SLOW_S and waited_s > SLOW_SHARE * took_s:
            self.num_slow += 1
            found.peer.warn_of_slowness(took_s, waited_s)

    def _tell(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._notify()

    def _tend(self) -> None:
        """Dial, and end what takes too long."""
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            for peer in self._peers:
                peer.tend(self._connector, now)
            with self._lock:
                self._end_where(lambda found: self._is_late(found, now), f"no rows for {self._timeout_s:g} s")  # noqa: B023
                self._settle(now)
                silent = {
                    f.peer
                    for f in self._settling.values()
                    if f.last_s + self._timeout_s < now and f.settles_s == math.inf
                }
            for peer in silent:
                peer.hang_up(f"it has not said for {self._timeout_s:g} s whether it still writes rows")

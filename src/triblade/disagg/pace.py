"""How fast rows move over a link, as each of its ends sees it. Knows no message and no transfer.

A time-out says that nothing moves, not that something takes long: bytes of a message that is on its way count. What is slow is kept
small instead: `Window` lets about a second's worth of rows wait, `Pace` tells how long rows will take before they are asked for.
`Silence` tells who says nothing from who was not heard.
"""

from __future__ import annotations

from triblade.disagg.links import Traffic

MAX_UNSENT_BYTES = 16 << 20
FIRST_UNSENT_BYTES = 1 << 20  # while nothing is known of a link
AHEAD_S = 1.0
FORGET_S = 60.0  # a link that was slow so long ago is tried again
NEWEST = 0.25  # weight of the last rows in the average
MOST_ABSENCE_S = 2.5


class Window:
    """At the end where rows are made: how many of their bytes may wait to be sent.

    Attributes:
        limit_bytes: with more than these waiting, no more are made.
        moved_s: when the other end took some last, on the monotonic clock.
    """

    def __init__(self, now_s: float) -> None:
        self.limit_bytes = FIRST_UNSENT_BYTES
        self.moved_s = now_s
        self._sent_bytes, self._sending_s = 0, 0.0

    def look(self, traffic: Traffic, now_s: float) -> None:
        """Take note of what was sent since the last look. Buffers on the way hide how slow it is, so the window opens slowly."""
        sent, took_s = traffic.sent_bytes - self._sent_bytes, traffic.sending_s - self._sending_s
        if sent <= 0:
            return
        self._sent_bytes, self._sending_s, self.moved_s = traffic.sent_bytes, traffic.sending_s, now_s
        most = min(MAX_UNSENT_BYTES, 2 * self.limit_bytes)
        self.limit_bytes = max(1, min(most, int(AHEAD_S * sent / max(took_s, 1e-6))))


class Pace:
    """At the end where rows are stored: how long they take on their way.

    Attributes:
        moved_s: when bytes came last, on the monotonic clock.
    """

    def __init__(self, now_s: float) -> None:
        self.moved_s = self._measured_s = now_s
        self._received_bytes, self._receiving_s = 0, 0.0
        self._token_s = 0.0

    def look(self, traffic: Traffic, now_s: float) -> None:
        """Take note of whether something came."""
        if traffic.received_bytes != self._received_bytes:
            self._received_bytes, self.moved_s = traffic.received_bytes, now_s

    def came(self, traffic: Traffic, num_tokens: int, now_s: float) -> None:
        """Rows of so many tokens are there; 0 for a payload that is no rows."""
        took_s, self._receiving_s = traffic.receiving_s - self._receiving_s, traffic.receiving_s
        if num_tokens:
            weight = NEWEST if self._token_s else 1.0
            self._token_s += weight * (took_s / num_tokens - self._token_s)
            self._measured_s = now_s

    def expected_s(self, num_tokens: int, now_s: float) -> float:
        """Seconds that so many rows will be on their way; 0 while nothing is known."""
        return num_tokens * self._token_s if now_s - self._measured_s < FORGET_S else 0.0


class Silence:
    """At either end: for how long the other one has said nothing, in time that this one was there to hear it.

    Who comes late to look was kept from running, and so may have been the thread that reads: of such an absence only
    `MOST_ABSENCE_S` count.
    """

    def __init__(self, now_s: float) -> None:
        self._looked_s, self._silent_s = now_s, 0.0
        self._sign: object = None

    def look(self, sign: object, now_s: float) -> float:
        """Seconds of silence; `sign` is anything that changes with every word. Call it often."""
        absence_s = min(now_s - self._looked_s, MOST_ABSENCE_S)
        self._silent_s = self._silent_s + absence_s if sign == self._sign else 0.0
        self._looked_s, self._sign = now_s, sign
        return self._silent_s

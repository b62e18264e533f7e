"""One prefill worker as its decode worker sees it: dialled, greeted, checked, asked, lost. Knows no transfer.

Life: dialled -> Hello both ways -> checked -> ready -> lost (dialled again after a while) or refused (dialled again much later,
since it will say the same until somebody changes it). What it sends of transfers goes to an `Audience`, and so does its loss,
which ends every connection and is told once.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Protocol

from triblade.disagg.frames import Message
from triblade.disagg.links import Connector, Link
from triblade.disagg.pace import Pace, Silence
from triblade.disagg.wire import End, Hello, Refusal, Rows, State, Table
from triblade.errors import WireError

log = logging.getLogger(__name__)

REDIAL_S = 1.0
REDIAL_REFUSED_S = 60.0
SILENCE_S = 10.0  # prefill workers say how busy they are much more often, also while they compute


class Terms(Protocol):
    """What a decode worker asks of its peers."""

    def hello(self, link: Link) -> Hello:
        """What it says of itself over a link."""
        ...

    def check(self, link: Link, hello: Hello) -> None:
        """Raises:
        WireError: a peer that says this of itself is of no use.
        """
        ...

    def use(self, link: Link, table: Table) -> None:
        """Raises:
        WireError: a peer that encodes with this is of no use.
        """
        ...


class Audience(Protocol):
    """Who listens to peers; called from threads of their links."""

    def arrived(self, peer: Peer, link: Link, message: Rows | End) -> None:
        """A peer sent rows or an end."""
        ...

    def lost(self, peer: Peer, reason: str) -> None:
        """A peer is gone: so are its transfers."""
        ...


class Peer:
    """The receiver of its link.

    Args:
        address: where it listens.
        terms: check it.
        audience: hears of transfers.

    Attributes:
        state: what it said of itself last.
        own_tokens: asked for and not come.
        is_ready: whether it can be asked.
        places: whether it writes rows where they belong.
        refusal: why it is of no use.
        num_messages: with rows.
    """

    def __init__(self, address: str, terms: Terms, audience: Audience) -> None:
        self.address = address
        self.state = State(backlog_tokens=0)
        self.own_tokens = 0
        self.is_ready = False
        self.places = False
        self.refusal: str | None = None
        self.pace = Pace(time.monotonic())
        self.num_messages = 0
        self._warned_of_slowness = False
        self._terms, self._audience = terms, audience
        self._link: Link | None = None
        self._next_dial_s = 0.0
        self._num_words = 0
        self._silence = Silence(0.0)

    @property
    def backlog_tokens(self) -> int:
        """Tokens that wait there, as far as known: its own word is a little old."""
        return max(self.state.backlog_tokens, self.own_tokens)

    @property
    def receiving_s(self) -> float:
        """Seconds that rows which came were on their way, since the link began."""
        link = self._link
        return 0.0 if link is None else link.traffic.receiving_s

    def warn_of_slowness(self, took_s: float, waited_s: float) -> None:
        """Once for each link."""
        if not self._warned_of_slowness:
            self._warned_of_slowness = True
            log.warning(
                "slow link to prefill worker %s: %.1f of a transfer's %.1f s went by waiting for bytes; "
                "a smaller wire codec, a nearer worker or a larger --remote-prefill-tokens would help",
                self.address,
                waited_s,
                took_s,
            )

    def send(self, message: Message) -> None:
        """To a peer that is gone, nothing is sent."""
        link = self._link
        if link is not None:
            link.send(message)

    def leave(self) -> None:
        """Break the link, on purpose."""
        link = self._link
        if link is not None:
            self.is_ready = False  # so that its end is no loss
            link.close()
            link.join()

    def hang_up(self, reason: str) -> None:
        """Break the link, to dial again."""
        link = self._link
        if link is not None:
            log.warning("prefill worker %s: %s", self.address, reason)
            link.close()

    def tend(self, connector: Connector, now: float) -> None:
        """Dial when it is time; hang up on who is silent."""
        if self._link is not None:
            self.pace.look(self._link.traffic, now)
            if self._silence.look((self._num_words, self.pace.moved_s), now) > SILENCE_S:
                self.hang_up(f"silent for {SILENCE_S:g} s")
            return
        if now < self._next_dial_s:
            return
        self._next_dial_s = now + REDIAL_S
        try:
            self._dial(connector, now)
        except Exception as error:  # who tends peers has others
            log.exception("prefill worker %s could not be greeted", self.address)
            self._next_dial_s = now + REDIAL_REFUSED_S
            self.hang_up(f"internal error: {type(error).__name__}")

    def _dial(self, connector: Connector, now: float) -> None:
        try:
            link = connector.connect(self.address)
        except OSError as error:
            log.debug("prefill worker %s: %s", self.address, error)
            return
        self._link, self._silence = link, Silence(now)
        self.pace, self._warned_of_slowness = Pace(now), False
        link.start(self)
        link.send(self._terms.hello(link))

    def received(self, link: Link, message: Message) -> None:
        """See `links.Receiver`."""
        now = time.monotonic()
        self._num_words += 1
        if message.payload:
            self.pace.came(link.traffic, message.num_tokens if isinstance(message, Rows) else 0, now)
        if isinstance(message, Rows):
            self.num_messages += 1
        if isinstance(message, Rows | End):
            self._audience.arrived(self, link, message)
        elif isinstance(message, State):
            self.state = message
        elif isinstance(message, Hello | Table):
            self._greeted(link, message)
        elif isinstance(message, Refusal):
            self._refused(link, message.reason)

    def writable(self, link: Link) -> None:
        """See `links.Receiver`."""

    def lost(self, link: Link, reason: str) -> None:
        """See `links.Receiver`."""
        was_ready, self.is_ready, self._link = self.is_ready, False, None
        if link.file is not None:
            os.close(link.file)
        if was_ready:
            log.warning("prefill worker %s lost: %s", self.address, reason)
        self._audience.lost(self, reason)

    def _greeted(self, link: Link, message: Hello | Table) -> None:
        try:
            if isinstance(message, Table):
                self._terms.use(link, message)
                return
            self._terms.check(link, message)
        except WireError as error:
            link.send(Refusal(reason=error.message))
            self._refused(link, error.message)
            return
        if message.places_not:
            log.warning(
                "prefill worker %s sends its rows instead of placing them: %s", self.address, message.places_not
            )
        self.refusal, self.places, self.is_ready = None, message.places, True
        log.info("prefill worker %s is ready", self.address)

    def _refused(self, link: Link, reason: str) -> None:
        if self.refusal != reason:
            log.error("prefill worker %s cannot be used: %s", self.address, reason)
        self.refusal = reason
        self._next_dial_s = time.monotonic() + REDIAL_REFUSED_S
        link.close()

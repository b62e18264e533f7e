"""A link carries messages between two workers, in order, or breaks. Knows no message by name.

Life of a link: opened by a connector -> `start` with what receives -> messages, until either side closes or the way breaks, which
is told once, also to the side that closed. Sending never blocks: what the peer does not take is kept and counted in
`unsent_bytes`, and whoever sends a lot looks there first. `traffic` grows within a message, too, so that a slow link is not taken
for a broken one. `LocalLink` joins two workers of one process; sockets are in `disagg.sockets`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from triblade.disagg.frames import Message

if TYPE_CHECKING:
    from torch import Tensor

    from triblade.disagg.cuda_ipc import RowMemory


class Receiver(Protocol):
    """What a link tells; called from threads of its own, or of the peer."""

    def received(self, link: Link, message: Message) -> None:
        """The next message."""
        ...

    def writable(self, link: Link) -> None:
        """What was unsent is sent."""
        ...

    def lost(self, link: Link, reason: str) -> None:
        """The last thing a link says."""
        ...


@dataclass(slots=True)
class Traffic:
    """Payloads of a link since its start, also those that are on their way."""

    sent_bytes: int = 0
    sending_s: float = 0.0  # that the way took for these
    received_bytes: int = 0
    receiving_s: float = 0.0  # that payloads which came were on their way; waiting for one to begin is not counted


class Link(Protocol):
    """One end."""

    peer: str  # for messages to people
    traffic: Traffic
    file: int | None  # descriptor of the memory that the peer's rows lie in, where it was given; the receiver closes it

    def start(self, receiver: Receiver) -> None:
        """Begin to receive; called once."""
        ...

    def send(self, message: Message, *, file: int | None = None) -> None:
        """Send in order; on a broken link, do nothing. A file descriptor goes along where the way can carry it."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Payloads that are not on their way yet."""
        ...

    def close(self) -> None:
        """Break the link; what is unsent may be lost."""
        ...

    def join(self) -> None:
        """Wait until a closed link has told everything; not from within its receiver."""
        ...


class Listener(Protocol):
    """Where links begin."""

    address: str

    def close(self) -> None:
        """Accept no more; open links stay."""
        ...


class Connector(Protocol):
    """A way between workers."""

    carries_files: bool  # whether descriptors can be sent, so that rows need not be

    def listen(self, address: str, accept: Callable[[Link], None]) -> Listener:
        """Call `accept` with every link that begins; it starts the link.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        ...

    def connect(self, address: str) -> Link:
        """A new link.

        Raises:
            OSError: nobody is there.
        """
        ...

    def row_memory(self, pool: Tensor) -> RowMemory | None:
        """How rows get from device to device, where they do not go over the links.

        Raises:
            UnsupportedError: this machine lacks something for it.
        """
        ...


class LocalLink:
    """One end of a pair within a process. A message is received in the sender's thread."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.traffic = Traffic()  # stays as it is: nothing is ever on its way
        self.file: int | None = None
        self._lock = threading.RLock()
        self._other: LocalLink | None = None
        self._receiver: Receiver | None = None
        self._early: list[Message] = []
        self._closed = False

    @classmethod
    def pair(cls, first: str = "local", second: str = "local") -> tuple[LocalLink, LocalLink]:
        """Both ends."""
        one, two = cls(first), cls(second)
        one._other, two._other = two, one
        return one, two

    def start(self, receiver: Receiver) -> None:
        """See `Link`."""
        with self._lock:
            self._receiver = receiver
            early, self._early = self._early, []
            for message in early:
                receiver.received(self, message)
            closed = self._closed
        if closed:
            receiver.lost(self, "closed")

    def send(self, message: Message, *, file: int | None = None) -> None:
        """See `Link`."""
        if self._other is not None:
            self._other._take(message, file)

    @property
    def unsent_bytes(self) -> int:
        """See `Link`."""
        return 0

    def close(self) -> None:
        """See `Link`."""
        for end in (self, self._other):
            if end is not None:
                end._end()

    def join(self) -> None:
        """See `Link`."""

    def _take(self, message: Message, file: int | None) -> None:
        with self._lock:
            if self._closed:
                return
            if file is not None:
                self.file = os.dup(file)
            if self._receiver is None:
                self._early.append(message)
            else:
                self._receiver.received(self, message)

    def _end(self) -> None:
        with self._lock:
            receiver = None if self._closed else self._receiver
            self._closed = True
        if receiver is not None:
            receiver.lost(self, "closed")


class LocalConnector:
    """Links within a process; an address is any name. One object must serve both sides."""

    carries_files = False

    def __init__(self) -> None:
        self._accepting: dict[str, Callable[[Link], None]] = {}

    def listen(self, address: str, accept: Callable[[Link], None]) -> Listener:
        """See `Connector`."""
        self._accepting[address] = accept
        return _LocalListener(address, self._accepting)

    def connect(self, address: str) -> Link:
        """See `Connector`."""
        accept = self._accepting.get(address)
        if accept is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        ours, theirs = LocalLink.pair(address, "local")
        accept(theirs)
        return ours

    def row_memory(self, pool: Tensor) -> RowMemory | None:
        """See `Connector`."""
        return None


class _LocalListener:
    def __init__(self, address: str, accepting: dict[str, Any]) -> None:
        self.address = address
        self._accepting = accepting

    def close(self) -> None:
        self._accepting.pop(self.address, None)

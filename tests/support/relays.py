"""Ways between two workers that misbehave as real ones do: a relay of bytes at a limited speed, and one of messages.

Workers connect to a relay's address instead of the prefill worker's. Knows no engine; the messages are the workers' own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable

from triblade.disagg.frames import Message
from triblade.disagg.links import Connector, Link
from triblade.disagg.sockets import connected

PIECE_S = 0.01  # of the limited speed at once


class Throttle:
    """A TCP relay that lets so many bytes per second through to who connects, as evenly as it can.

    Attributes:
        address: to connect to.
        bytes_per_s: may change at any time; 0 lets nothing through.
        num_connections: that were made, since the start.
    """

    def __init__(self, target: str, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.num_connections = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break the connections that are open; new ones can be made."""
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = connected(self._target)
                self._sockets += [near, far]
                self.num_connections += 1
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_limited: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(max(1, int(self.bytes_per_s * PIECE_S)) if is_limited else 1 << 16):
                while is_limited and not self.bytes_per_s:
                    time.sleep(PIECE_S)
                if is_limited:
                    time.sleep(len(piece) / self.bytes_per_s)
                target.sendall(piece)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
                end.close()


class Relay:
    """A relay of messages. Each one from the prefill worker is shown to `change`, which returns what to send on.

    Args:
        connector: of both sides.
        address: to listen at.
        target: the prefill worker's address.

    Attributes:
        change: may be replaced at any time.
        heard: called with every message of a decode worker.
    """

    def __init__(self, connector: Connector, address: str, target: str) -> None:
        self.undisturbed()
        self._connector, self._target = connector, target
        self._ways: list[_Way] = []
        self._listener = connector.listen(address, self._accept)
        self.address = self._listener.address

    def undisturbed(self) -> None:
        """Everything goes through as it is."""
        self.change: Callable[[Message], Iterable[Message]] = lambda message: [message]
        self.heard: Callable[[Message], None] = lambda message: None

    def cut(self) -> None:
        """Break the connections that are open; new ones can be made."""
        ways, self._ways = self._ways, []
        for way in ways:
            way.cut()

    def send(self, message: Message) -> None:
        """To the decode workers, as if a prefill worker had sent it."""
        for way in self._ways:
            way.near.send(message)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self, near: Link) -> None:
        try:
            far = self._connector.connect(self._target)
        except OSError:
            near.close()
            return
        way = _Way(self, near, far)
        self._ways.append(way)
        far.start(way)
        near.start(way)


class _Way:
    """Receives on both ends of a relay."""

    def __init__(self, relay: Relay, near: Link, far: Link) -> None:
        self.near, self._far, self._relay = near, far, relay

    def received(self, link: Link, message: Message) -> None:
        if link is self.near:
            self._relay.heard(message)
            self._far.send(message)
            return
        for each in self._relay.change(message):
            file, link.file = link.file, None
            self.near.send(each, file=file)

    def writable(self, link: Link) -> None:
        """Nothing waits here."""

    def lost(self, link: Link, reason: str) -> None:
        self.cut()
        if link.file is not None:
            os.close(link.file)
            link.file = None

    def cut(self) -> None:
        self.near.close()
        self._far.close()

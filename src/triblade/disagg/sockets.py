"""Links over stream sockets: TCP between hosts or processes, Unix sockets within a host, which can carry file descriptors.

Each link has a thread that reads and one that writes; `send` only queues. A payload is read into memory of its own and handed on
without a copy. Whatever goes wrong on the way (a closed or silent socket, bytes that are no frame) ends the link, and its
receiver is told why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from triblade.disagg.frames import PREFIX_BYTES, Message, Vocabulary
from triblade.disagg.links import Link, Listener, Receiver, Traffic
from triblade.disagg.wire import WORKER_PROTOCOL
from triblade.errors import ConfigError, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from triblade.disagg.cuda_ipc import RowMemory

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
# A peer that takes nothing for so long is gone, whatever TCP thinks.
SEND_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 5.0
BACKLOG = 64
ACCEPT_AGAIN_S = 0.2  # where a connection cannot be taken, for instance because all descriptors are in use
SOCKET_BUFFER_BYTES = 4 << 20
PIECE_BYTES = 1 << 16  # of a payload: what is counted as sent at once


class SocketLink:
    """Implements `Link` over a connected socket, which it owns."""

    def __init__(self, sock: socket.socket, peer: str, vocabulary: Vocabulary = WORKER_PROTOCOL) -> None:
        self.peer = peer
        self.traffic = Traffic()
        self.file: int | None = None
        self._socket = sock
        self._vocabulary = vocabulary
        self._outbox: queue.SimpleQueue[tuple[Message, int | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unsent = 0
        self._receiver: Receiver | None = None
        self._closed = False
        # No daemons: a thread that is in torch's code when the interpreter ends, if only to free a tensor, aborts the process.
        self._threads = [
            threading.Thread(target=work, name=f"triblade-link{work.__name__}") for work in (self._read, self._write)
        ]

    def start(self, receiver: Receiver) -> None:
        """See `Link`."""
        self._receiver = receiver
        for thread in self._threads:
            thread.start()

    def send(self, message: Message, *, file: int | None = None) -> None:
        """See `Link`."""
        with self._lock:
            if self._closed:
                return
            self._unsent += len(message.payload)
        self._outbox.put((message, file))

    @property
    def unsent_bytes(self) -> int:
        """See `Link`."""
        return self._unsent

    def close(self) -> None:
        """See `Link`. Messages without payload that were sent before still go out."""
        if self._unsent or self._receiver is None:
            self._end("closed")
        else:
            self._outbox.put(None)

    def join(self) -> None:
        """See `Link`."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_TIMEOUT_S)
                self._end("closed")

    def _read(self) -> None:
        reason = "the peer closed the connection"
        try:
            while True:
                self._deliver()
        except EOFError:
            pass
        except (OSError, WireError) as error:
            reason = str(error)
        except Exception as error:  # of the receiver: a link that nobody reads any more would look alive
            log.exception("a message from %s could not be handled", self.peer)
            reason = f"internal error: {type(error).__name__}"
        self._end(reason)

    def _deliver(self) -> None:
        prefix = self._vocabulary.prefix(self._receive_prefix())
        header = self._receive(prefix.header_bytes)
        payload = self._receive_payload(prefix.payload_bytes)
        message = self._vocabulary.decode(prefix, bytes(header), payload)
        assert self._receiver is not None
        self._receiver.received(self, message)

    def _receive_prefix(self) -> bytes:
        """The next prefix; a descriptor that comes with it is kept."""
        if self._socket.family != socket.AF_UNIX:
            return bytes(self._receive(PREFIX_BYTES))
        data, files, _, _ = socket.recv_fds(self._socket, PREFIX_BYTES, 1)
        if not data:
            raise EOFError
        for file in files:
            if self.file is not None:
                os.close(self.file)
            self.file = file
        return data + bytes(self._receive(PREFIX_BYTES - len(data)))

    def _receive(self, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        at = 0
        while at < size:
            at += self._receive_some(data[at:])
        return data

    def _receive_payload(self, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        at, last_s = 0, time.monotonic()
        while at < size:
            count = self._receive_some(data[at:])
            now_s = time.monotonic()
            at, last_s, taken_s = at + count, now_s, now_s - last_s
            self.traffic.received_bytes += count
            self.traffic.receiving_s += taken_s
        return data

    def _receive_some(self, data: memoryview) -> int:
        count = self._socket.recv_into(data)
        if count == 0:
            raise EOFError
        return count

    def _write(self) -> None:
        while (item := self._outbox.get()) is not None:
            try:
                self._send_next(*item)
            except OSError as error:
                self._end(str(error))
                return
            except Exception as error:  # as of `_read`
                log.exception("a message to %s could not be sent", self.peer)
                self._end(f"internal error: {type(error).__name__}")
                return
        self._end("closed")

    def _send_next(self, message: Message, file: int | None) -> None:
        self._transmit(message, file)
        if message.payload and self._unsent == 0 and self._receiver is not None:
            self._receiver.writable(self)

    def _transmit(self, message: Message, file: int | None) -> None:
        head, payload = self._vocabulary.encode(message)
        if file is not None:
            sent = socket.send_fds(self._socket, [head], [file])
            head = head[sent:]
        self._socket.sendall(head)
        for start in range(0, len(payload), PIECE_BYTES):
            piece, start_s = memoryview(payload)[start : start + PIECE_BYTES], time.monotonic()
            self._socket.sendall(piece)
            with self._lock:
                self._unsent -= len(piece)
            self.traffic.sending_s += time.monotonic() - start_s
            self.traffic.sent_bytes += len(piece)

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):  # wakes the reader; a socket that is broken already needs no waking
            self._socket.shutdown(socket.SHUT_RDWR)
        self._outbox.put(None)
        self._socket.close()
        if self._receiver is not None:
            self._receiver.lost(self, reason)


class SocketListener:
    """Accepts links until it is closed."""

    def __init__(
        self, listener: socket.socket, accept: Callable[[Link], None], vocabulary: Vocabulary = WORKER_PROTOCOL
    ) -> None:
        self.address = name_of(listener)
        self._socket = listener
        self._accept, self._vocabulary = accept, vocabulary
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="triblade-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `Listener`. A socket that was inherited goes on listening for its other owners."""
        self._closing.set()
        with contextlib.suppress(OSError), socket.socket(self._socket.family) as waker:
            waker.settimeout(JOIN_TIMEOUT_S)
            waker.connect(self._socket.getsockname())
        self._thread.join(JOIN_TIMEOUT_S)
        self._socket.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection, name = self._socket.accept()
            except OSError as error:
                if not self._closing.wait(ACCEPT_AGAIN_S):
                    log.warning("a connection to %s was not taken: %s", self.address, error)
                continue
            peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else self.address
            if self._closing.is_set():
                connection.close()
            else:
                self._begin(connection, peer)

    def _begin(self, connection: socket.socket, peer: str) -> None:
        """A link that fails at once costs nobody else one."""
        try:
            self._accept(SocketLink(prepared(connection), peer, self._vocabulary))
        except Exception:
            log.exception("the connection of %s is closed", peer)
            connection.close()


class TcpConnector:
    """Addresses are `host:port`; port 0 takes a free one."""

    carries_files = False

    def listen(self, address: str, accept: Callable[[Link], None]) -> Listener:
        """See `Connector`."""
        return listening(address, accept)

    def connect(self, address: str) -> Link:
        """See `Connector`."""
        return SocketLink(connected(address), address)

    def row_memory(self, pool: Tensor) -> RowMemory | None:
        """See `Connector`."""
        return None


class UnixConnector(TcpConnector):
    """Addresses are paths of sockets. Descriptors go along, so that rows can stay where they are."""

    carries_files = True


def listening(address: str, accept: Callable[[Link], None], vocabulary: Vocabulary = WORKER_PROTOCOL) -> SocketListener:
    """Listen at `host:port`, at a path, or at the socket `fd:N` that this process inherited.

    Raises:
        ConfigError: it cannot be done.
    """
    try:
        listener = bound(address)
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}: {error.strerror or error}", hint="check the address") from error
    return SocketListener(listener, accept, vocabulary)


def bound(address: str) -> socket.socket:
    """A listening socket; see `listening` for addresses."""
    if address.startswith("fd:"):
        return socket.socket(fileno=int(address.removeprefix("fd:")))
    if is_path(address):
        Path(address).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
    else:
        host, _, port = address.rpartition(":")
        listener = socket.create_server((host, int(port)))
    listener.listen(BACKLOG)
    return listener


def connected(address: str) -> socket.socket:
    """A socket connected to `host:port` or to a path."""
    if is_path(address):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(CONNECT_TIMEOUT_S)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            raise
    else:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
    return prepared(sock)


def prepared(sock: socket.socket) -> socket.socket:
    """Blocking, without delays of small messages, with room for rows on their way."""
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_TIMEOUT_S))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    return sock


def name_of(listener: socket.socket) -> str:
    """The address that others connect to."""
    name = listener.getsockname()
    return str(name) if listener.family == socket.AF_UNIX else f"{name[0]}:{name[1]}"


def is_path(address: str) -> bool:
    """Whether an address names a Unix socket."""
    return "/" in address

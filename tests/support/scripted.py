"""An HTTP server that sends set bytes and then breaks, as a server that is killed, cut off or no server at all does.

`/health` is answered well, so that nobody is warned. Knows no HTTP beyond the end of a request. Invariant: its thread ends with
the block.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WELL = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a closed connection is reset
POLL_S = 0.05


@dataclass
class Scripted:
    """A running server.

    Attributes:
        asked: requests but those for its health.
    """

    url: str
    asked: int = 0


@contextmanager
def scripted(sent: bytes, *, resets: bool) -> Iterator[Scripted]:
    """Answers every request with these bytes, then resets the connection, or closes it in good order."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(POLL_S)
        server = Scripted(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=_accept, args=(listener, server, sent, resets, ended))
        thread.start()
        try:
            yield server
        finally:
            ended.set()
            thread.join(10)


def _accept(listener: socket.socket, server: Scripted, sent: bytes, resets: bool, ended: threading.Event) -> None:
    while not ended.is_set():
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(1.0)
            with connection:
                _answer(connection, server, sent, resets)


def _answer(connection: socket.socket, server: Scripted, sent: bytes, resets: bool) -> None:
    """One request; the whole of it is read, since closing over unread bytes would be a reset."""
    request = b""
    while b"\r\n\r\n" not in request:
        received = connection.recv(1 << 16)
        if not received:
            return  # nobody asked
        request += received
    if request.startswith(b"GET /health"):
        connection.sendall(WELL)
        return
    head, _, body = request.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    while len(body) < size:
        body += connection.recv(1 << 16)
    server.asked += 1
    connection.sendall(sent)
    if resets:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that takes no connection and refuses none: its queue is full, so packets are dropped."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"

"""uvicorn with our rules for signals: the first one drains, the second ends at once, and the exit code is 0 in both cases.

Knows no application. Invariant: after `drain_timeout_s` and some seconds of grace no connection is left.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from triblade.serve.http_protocol import EitherProtocol
from triblade.serve.run import BACKLOG

KEEP_ALIVE_S = 65  # longer than the idle time of common load balancers, so that they close first
ABORT_GRACE_S = 5.0  # for error events to reach the clients after the drain time
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GracefulServer(uvicorn.Server):
    """A server that is told to stop by signals, or by `stop`.

    Args:
        app: answers the requests.
        drain_timeout_s: for requests to finish once it was told to stop.
    """

    def __init__(self, app: ASGIApp, drain_timeout_s: float) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._drain_timeout_s = drain_timeout_s
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                http=EitherProtocol,
                ws="none",
                log_level="error",  # its warnings are about what clients sent, and they got an answer
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(drain_timeout_s + 2 * ABORT_GRACE_S),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain: let requests finish, then end them."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_timeout_s, self.drained)
        loop.call_later(self._drain_timeout_s + ABORT_GRACE_S, self.cut)
        await super().shutdown(sockets)

    def drained(self) -> None:
        """The drain time is over: requests that still run are to end."""

    def stop(self) -> None:
        """Begin to shut down."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the block runs, and give them back without raising them again: the exit code is 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        if self.should_exit:
            self.force_exit = True
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self.cut)
        self.should_exit = True

    def cut(self) -> None:
        """Close every connection without a word; their requests end as if the clients had left."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def address(listener: socket.socket) -> str:
    """Of a listening socket, for people."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

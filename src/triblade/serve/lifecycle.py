"""The life of a server process: listen -> load -> ready -> drain -> end.

1. uvicorn accepts connections at once; everything but the probes is answered with 503 while a thread loads the model.
2. The first SIGTERM or SIGINT closes the listener and refuses new requests; those in flight may finish until the drain
   time is over and end with an error then. A second signal cuts every connection.
3. The engine is closed last, in every case, also when loading ends after the server did.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable

from triblade.serve.app import create_app
from triblade.serve.errors import DrainingError
from triblade.serve.graceful import GracefulServer, address
from triblade.serve.run import StartEngine
from triblade.serve.state import ServedEngine, ServerState

logger = logging.getLogger(__name__)


def run_server(listener: socket.socket, state: ServerState, start: StartEngine) -> None:
    """Serve on a listening socket until a signal comes.

    Raises:
        TribladeError: whatever loading the model raises.
    """
    loader = Loader(state, start)
    server = Server(state, loader, listener)
    try:
        server.run(sockets=[listener])
    finally:
        loader.close()
    if loader.error is not None:
        raise loader.error


class Loader:
    """Loads the model in a thread of its own and hands it to the state.

    Attributes:
        error: why loading failed, if it did.
    """

    def __init__(self, state: ServerState, start: StartEngine) -> None:
        self.error: BaseException | None = None
        self._state = state
        self._start = start
        self._lock = threading.Lock()
        self._engine: ServedEngine | None = None
        self._closed = False

    def begin(self, server: Server) -> None:
        """Load without waiting. The thread is a daemon: a server told to stop does not wait for the model."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._load, args=(loop, server), name="triblade-load", daemon=True).start()

    def close(self) -> None:
        """Close the engine, now or as soon as it is loaded."""
        with self._lock:
            self._closed = True
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _load(self, loop: asyncio.AbstractEventLoop, server: Server) -> None:
        try:
            engine = self._start(self._state.engine_config)
        except BaseException as error:
            self.error = error
            _tell(loop, server.stop)
            return
        with self._lock:
            unwanted = self._closed
            self._engine = None if unwanted else engine
        if unwanted:
            engine.close()
        else:
            _tell(loop, server.announce, engine)


class Server(GracefulServer):
    """Loads the model when it listens, and drains by our state."""

    def __init__(self, state: ServerState, loader: Loader, listener: socket.socket) -> None:
        self._state = state
        self._loader = loader
        self._url = address(listener)
        super().__init__(create_app(state), state.config.drain_timeout_s)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, then begin to load."""
        await super().startup(sockets)
        logger.info("listening on %s, loading %s", self._url, self._state.engine_config.model)
        self._loader.begin(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain: let requests finish, then end them with an error."""
        self._state.drain()
        if self._state.num_in_flight:
            seconds, number = self._state.config.drain_timeout_s, self._state.num_in_flight
            logger.info("draining: %g s to finish, requests in flight: %d", seconds, number)
        await super().shutdown(sockets)
        logger.info("stopped")

    def drained(self) -> None:
        """See `GracefulServer`."""
        self._state.stop_all(DrainingError("the server is shutting down"))

    def announce(self, engine: ServedEngine) -> None:
        """The model is loaded."""
        self._state.loaded(engine)
        if not self.should_exit:
            logger.info("serving %s at %s/v1", ", ".join(self._state.names), self._url)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Call in the loop's thread, unless the loop is over."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        logger.debug("the server ended before the model was loaded")

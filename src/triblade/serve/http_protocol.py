"""Chooses the HTTP parser of each connection by its first bytes.

httptools is the quick one, but it drops the body of a request that offers to upgrade the protocol (`Upgrade: h2c`), which
Java's HTTP client does by default. h11 ignores the offer, as RFC 9110 section 7.8 lets a server do, so those connections
get h11. Knows nothing of requests beyond that header.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

OFFERS_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class EitherProtocol(asyncio.Protocol):
    """Stands in for the parser until the first bytes come.

    Invariant: it is among the server's connections until it hands over or the connection ends, so that a shutdown closes
    connections that never said anything.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._arguments = {"config": config, "server_state": server_state, "app_state": app_state, "_loop": _loop}
        self._connections: set[Any] = server_state.connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = transport  # type: ignore[assignment]  # a stream's transport both reads and writes
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It left without a word."""
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Hand the connection to the parser that suits it."""
        self._connections.discard(self)
        head = data.partition(b"\r\n\r\n")[0]
        kind: Any = H11Protocol if OFFERS_UPGRADE.search(head) else AutoHTTPProtocol
        protocol = kind(**self._arguments)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(data)

    def shutdown(self) -> None:
        """The server is going down."""
        self.transport.close()

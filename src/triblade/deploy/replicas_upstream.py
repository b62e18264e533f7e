"""One request to one replica over HTTP, and its answer held back until there is something to give away.

Bytes pass as they come: nothing is decoded, only the headers of the connection are left out (RFC 9110, section 7.6.1). Knows no
other replica. Invariant: while nothing was sent to the client, a failure leaves no trace, so that another replica may be asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from yarl import URL

from triblade.config import RouteConfig

REFUSALS = frozenset({429, 500, 502, 503, 504})  # another replica may do better
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
OURS = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
AUTOMATIC = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")  # the client's are passed, or none
HELD_STREAM_BYTES = 64 * 1024  # so much without a token is no stream of tokens
HELD_BODY_BYTES = 16 * 1024 * 1024
KEEP_ALIVE_S = 3.0  # shorter than what servers keep connections for, so that they close none that is being used
EVENT_STREAM = b"text/event-stream"
SERVER_FAULTS = frozenset(
    {"service_unavailable_error", "internal_error", "InternalServerError", "ServiceUnavailableError"}
)

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a replica is asked."""

    method: str
    target: str  # path and query, as they came
    headers: tuple[tuple[str, str], ...]
    content: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """A whole answer that another replica may do better than."""

    status: int
    headers: Headers
    content: bytes


class Unanswered(Exception):
    """A replica broke off before it gave a token.

    Attributes:
        was_asked: whether it may have begun to compute.
    """

    def __init__(self, reason: str, *, was_asked: bool) -> None:
        super().__init__(reason)
        self.was_asked = was_asked


class Refused(Exception):
    """A replica answered that it cannot; `is_final`: and nobody else could."""

    def __init__(self, refusal: Refusal, *, is_final: bool = False) -> None:
        super().__init__(f"status {refusal.status}")
        self.refusal = refusal
        self.is_final = is_final


class BrokenOff(Exception):
    """A replica was lost in the middle of an answer that the client has a part of."""


class Answer:
    """An answer whose first token, or whole body, is there.

    Attributes:
        status, headers: as the replica sent them.
        first: the bytes up to the first token.
    """

    def __init__(self, response: aiohttp.ClientResponse, first: bytes) -> None:
        self._response = response
        self.status = response.status
        self.headers = end_to_end(response.raw_headers)
        self.first = first

    @property
    def is_stream(self) -> bool:
        """Whether it is made of server-sent events."""
        return _is_stream(self._response)

    async def rest(self) -> AsyncIterator[bytes]:
        """The other bytes.

        Raises:
            BrokenOff: they end too early.
        """
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BrokenOff(_reason(error)) from error


class Upstream:
    """Connections to all replicas, from `open` to `close` in one event loop."""

    _session: aiohttp.ClientSession

    def __init__(self, config: RouteConfig) -> None:
        self._config = config
        self._health_timeout = aiohttp.ClientTimeout(total=config.health_timeout_s)

    def open(self) -> None:
        """Call within the event loop."""
        config = self._config
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=config.connect_timeout_s, sock_read=config.idle_timeout_s or None
            ),
            auto_decompress=False,
            skip_auto_headers=AUTOMATIC,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    @asynccontextmanager
    async def ask(self, url: str, request: Outgoing) -> AsyncIterator[Answer]:
        """The answer of a replica, as soon as there is a token in it; leaving early cancels it there.

        Raises:
            Unanswered: it broke off before.
            Refused: it said that it cannot.
        """
        target = URL(url + request.target, encoded=True)
        was_asked = True
        try:
            response = await self._session.request(
                request.method, target, data=request.content or None, headers=request.headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            was_asked = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise Unanswered(_reason(error), was_asked=was_asked) from error
        async with response:
            yield Answer(response, await _held(response))

    async def fault(self, url: str) -> tuple[str, bool]:
        """Why a replica is not well, empty if it is, and whether it is not even there.

        Servers without /health that answer at all are well.
        """
        try:
            async with self._session.get(f"{url}/health", timeout=self._health_timeout) as response:
                return (f"its health is status {response.status}", False) if response.status >= 500 else ("", False)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _reason(error), isinstance(error, aiohttp.ClientConnectorError)


async def _held(response: aiohttp.ClientResponse) -> bytes:
    """The answer up to its first token; all of it, if it is no stream.

    Raises:
        Unanswered: it ends before; a stream may do so in good order.
        Refused: it is a refusal.
    """
    held, is_stream, is_whole = bytearray(), _is_stream(response), True
    try:
        async for piece in response.content.iter_any():
            held += piece
            if (is_stream and begins(bytes(held))) or len(held) > (HELD_STREAM_BYTES if is_stream else HELD_BODY_BYTES):
                is_whole = False
                break
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unanswered(_reason(error), was_asked=True) from error
    if response.status in REFUSALS or (is_stream and _is_fault(bytes(held))):
        raise Refused(Refusal(response.status, end_to_end(response.raw_headers), bytes(held)))
    if is_stream and is_whole and not begins(bytes(held)):
        raise Unanswered("the stream ended before it began", was_asked=True)
    return bytes(held)


def begins(held: bytes) -> bool:
    """Whether a stream's beginning has an event that says more than whose turn it is."""
    return any(_says_something(event) for event in _events(held))


def _says_something(event: Any) -> bool:
    if not isinstance(event, dict) or not isinstance(event.get("choices"), list):
        return True  # an error, the end, another API
    for choice in event["choices"]:
        delta = choice.get("delta") or {}
        said = {name: value for name, value in delta.items() if name != "role" and value}
        if said or choice.get("text") or choice.get("finish_reason"):
            return True
    return not event["choices"]


def _is_fault(held: bytes) -> bool:
    """Whether a stream begins with an error of the server's own."""
    for event in _events(held):
        error = event.get("error") if isinstance(event, dict) else None
        if isinstance(error, dict):
            code = error.get("code")
            return error.get("type") in SERVER_FAULTS or (isinstance(code, int) and code >= 500)
    return False


def _events(held: bytes) -> Iterable[Any]:
    """The complete events; one that is no JSON, such as the end, is a text."""
    for line in held.splitlines(keepends=True):
        if line.startswith(b"data:") and line.endswith((b"\n", b"\r")):
            data = line[5:].strip()
            try:
                yield orjson.loads(data)
            except orjson.JSONDecodeError:
                yield data


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers of an answer that are not about one connection; the router writes the request's id itself."""
    named = [(name.lower(), value) for name, value in headers]
    listed = {part.strip().lower() for name, value in named if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in named if name not in HOP_BY_HOP | listed | {b"x-request-id"}]


def outgoing_headers(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> tuple[tuple[str, str], ...]:
    """Headers of a request, as a replica gets them."""
    passed = [(name, value) for name, value in end_to_end(headers) if name not in OURS]
    return (
        *((name.decode("latin-1"), value.decode("latin-1")) for name, value in passed),
        ("X-Request-Id", request_id),
    )


def with_body(request: Outgoing, body: Mapping[str, Any], target: str | None = None) -> Outgoing:
    """The same request with another body."""
    return Outgoing(request.method, target or request.target, request.headers, orjson.dumps(body))


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    kind = next((value for name, value in response.raw_headers if name.lower() == b"content-type"), b"")
    return kind.strip().lower().startswith(EVENT_STREAM)


def _reason(error: BaseException) -> str:
    """An exception in words, without addresses of objects."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or error.os_error}"
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    return f"the connection broke ({type(error).__name__})"

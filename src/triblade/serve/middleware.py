"""What happens to every request before the application sees it, and to every response after: plain ASGI, no framework.

Order, outermost first: label and log -> key -> ready? -> rate -> body. Each refuses by raising; the outermost turns
what is raised into an answer. Invariant: every request gets exactly one answer, and its `X-Request-Id` header.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triblade.serve.errors import AuthenticationError, BodyTooLargeError
from triblade.serve.live import PAGE_PATHS
from triblade.serve.problems import log_fault, problem
from triblade.serve.rate_limit import RateLimiter
from triblade.serve.state import ServerState

logger = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ping"})  # the prober of a cluster has no key
OPEN = PROBES | PAGE_PATHS  # no key: the page asks for it and then reads what needs one
ALWAYS = OPEN | {"/metrics", "/plan", "/version", "/openapi.json", "/docs"}  # answered while loading and draining, too
QUIET = OPEN | {"/metrics", "/plan"}  # polled every few seconds: not worth a line
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
MAX_REQUEST_ID_CHARACTERS = 128
NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:/+=-]")
CLIENT_CLOSED = 499  # no such answer is ever sent; it is how the log and the metrics call it


class AnswerCounter(Protocol):
    """Counts answers."""

    def answered(self, method: str, route: str, status: int) -> None:
        """An HTTP request was answered."""
        ...


class RequestLog:
    """Outermost: gives the request its id, answers what the others raise, counts and logs the answer."""

    def __init__(self, app: ASGIApp, metrics: AnswerCounter) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival_s = time.perf_counter()
        request_id = clean_request_id(Headers(scope=scope).get("x-request-id", ""))
        scope.setdefault("state", {}).update(request_id=request_id, arrival_s=arrival_s)
        status = CLIENT_CLOSED

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_labelled)
        except Exception as error:
            log_fault(error, request_id)
            if status == CLIENT_CLOSED:
                await problem(error).response()(scope, receive, send_labelled)
        finally:
            self._metrics.answered(scope["method"], _route(scope), status)
            _log(scope, request_id, status, time.perf_counter() - arrival_s)


class Authentication:
    """Asks for one of the API keys, everywhere but at the probes and the page. Without keys it lets everybody through."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            AuthenticationError: no key, or an unknown one.
        """
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN:
            scope["state"]["key"] = self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> str:
        """The number of the key, which the rate limit counts by."""
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(token.strip().encode("latin-1"))
        # Digests of equal length, all compared: the time tells neither the length nor which key came near.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise AuthenticationError(
                "the API key is missing or not known", hint="send the header Authorization: Bearer KEY"
            )
        return f"key {matches.index(True)}"


class Readiness:
    """Refuses work while the model loads and while the server drains."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            LoadingError, DrainingError: not now.
        """
        if scope["type"] == "http" and scope["path"] not in ALWAYS:
            self._state.require_ready()
        await self._app(scope, receive, send)


class RateLimit:
    """Counts the requests that cost something, by API key, or by client address where there are no keys."""

    def __init__(self, app: ASGIApp, limiter: RateLimiter | None) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            RateLimitError: too many in the last minute.
        """
        if self._limiter is not None and scope["type"] == "http" and scope["method"] in WITH_BODY:
            address = (scope.get("client") or ("unknown", 0))[0]
            self._limiter.take(scope["state"].get("key", address))
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads the body up to a limit, whatever length it announces, and hands it on in one piece."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            BodyTooLargeError: as soon as the limit is passed.
        """
        if scope["type"] != "http" or scope["method"] not in WITH_BODY:
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._limit_bytes:  # 20 digits are more than enough
            raise self._too_large(announced)
        body = await self._read(receive)
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None when the client leaves before its end."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._limit_bytes:
                raise self._too_large("more")
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self, found: str) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body must be at most {self._limit_bytes} bytes, got: {found[:20]}")


def clean_request_id(given: str) -> str:
    """The client's label for its request, safe to log and to send back; a fresh one when nothing usable is given."""
    cleaned = NOT_IN_REQUEST_ID.sub("", given[: 2 * MAX_REQUEST_ID_CHARACTERS])[:MAX_REQUEST_ID_CHARACTERS]
    return cleaned or uuid.uuid4().hex


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, and then what the server has to say, such as that the client left."""
    unread = True

    async def replay() -> Message:
        nonlocal unread
        if not unread:
            return await receive()
        unread = False
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _route(scope: Scope) -> str:
    """The route's pattern, not the path: a scanner's paths would make a series each."""
    return getattr(scope.get("route"), "path", "unknown")


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
    path = scope["path"][:200].encode("ascii", "backslashreplace").decode()
    logger.log(level, "%s %r %s in %.1f ms, id %s", scope["method"], path, status, 1000 * seconds, request_id)

"""JSON as RFC 8259 has it, in both directions, for routes that take a body.

Stricter than Python's own parser: no NaN or Infinity, no number beyond a double, no half surrogate pair, no deep
nesting, and only from `application/json`, so that a web page cannot post to a server on the reader's machine without
asking it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

from triblade.errors import RequestError

MAX_DEPTH = 64  # far below Python's recursion limit; a tool definition needs about ten


class StrictRequest(Request):
    """A request whose JSON is parsed strictly."""

    async def json(self) -> Any:
        """The parsed body, parsed once.

        Raises:
            RequestError: the body is not JSON, or nested too deeply.
        """
        if not hasattr(self, "_json"):
            self._json = parse(await self.body())
        return self._json


class StrictRoute(APIRoute):
    """A route that reads its body through `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of the base class, given a strict request."""
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            request = StrictRequest(request.scope, request.receive)
            if request.method == "POST":
                _require_json(request)
                await request.json()  # here, because the framework would replace our error by its own
            return await handle(request)

        return strictly


def parse(body: bytes) -> Any:
    """Parse one JSON value.

    Raises:
        RequestError: it is not JSON, or nested too deeply.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and deeper_than(MAX_DEPTH, value):
        raise RequestError(f"the body is nested more than {MAX_DEPTH} levels deep")
    return value


def deeper_than(limit: int, value: Any) -> bool:
    """Whether containers lie more than `limit` levels deep; walks level by level, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        inner = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _require_json(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        hint = "send the header Content-Type: application/json"
        raise RequestError(f"the body must be JSON, got content type: {kind[:80]!r}", hint=hint)


def dumps(value: Any) -> bytes:
    """JSON text of a value; a float that is not finite becomes null."""
    return orjson.dumps(value)

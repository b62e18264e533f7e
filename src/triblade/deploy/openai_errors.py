"""Errors of an OpenAI server, as a refusal or within a stream, as those that an engine here raises.

Knows no connection. Invariant: every refusal becomes an error with the server's own words, also one whose body is no JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from triblade.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    ModelNotFoundError,
    QueueFullError,
    RequestError,
    TribladeError,
)

TOO_LONG = ("context_length_exceeded", "maximum context length", "context length is")


def refusal(status: int, content: bytes) -> TribladeError:
    """An answer that is none, as the error that an engine here would raise."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = {}
    error = body.get("error", body) if isinstance(body, dict) else {}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    message = str(
        error.get("message") or error.get("detail") or content[:200].decode(errors="replace") or f"status {status}"
    )
    return _error(status, message, str(error.get("code") or ""), error.get("param"))


def failure(error: Any) -> TribladeError:
    """An error within a stream."""
    told = error if isinstance(error, dict) else {"message": str(error)}
    code = told.get("code")
    return _error(
        code if isinstance(code, int) else 500, str(told.get("message") or "the server failed"), str(code or ""), None
    )


def _error(status: int, message: str, code: str, param: Any) -> TribladeError:
    name = param if isinstance(param, str) else None
    if status in (429, 503) and code != "loading":
        return QueueFullError(message, hint="try again in a moment")
    kinds: dict[int, Callable[..., TribladeError]] = {401: ConfigError, 403: ConfigError, 404: ModelNotFoundError}
    if status in kinds:
        return kinds[status](message)
    if status >= 500:
        return EngineDeadError(message)
    is_long = any(words in f"{code} {message}" for words in TOO_LONG)
    return (ContextLengthError if is_long else RequestError)(message, param=name)

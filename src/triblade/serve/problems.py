"""Every exception as an answer in the OpenAI shape: `{"error": {"message", "type", "param", "code"}}`.

The only place that maps failures to HTTP. A fault of ours is logged with its trace and told to the client without its
details; everything raised on purpose is told in its own words.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from triblade.errors import ContextLengthError, ModelNotFoundError, QueueFullError, TribladeError
from triblade.serve.errors import RETRY_SOON_S, BodyTooLargeError, ServeError
from triblade.serve.strict_json import dumps

logger = logging.getLogger(__name__)

MAX_ISSUES = 3  # of one request, told at once
JSON_TYPE = "application/json"
NO_OBJECT = frozenset({"model_type", "model_attributes_type", "dict_type"})  # pydantic says it in the words of Python
# Codes of errors that are defined outside of this package.
CODES: Mapping[type[TribladeError], str] = {
    ContextLengthError: "context_length_exceeded",
    ModelNotFoundError: "model_not_found",
    QueueFullError: "queue_full",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One failure, ready to be told."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(dumps(self.body()), self.status, self.headers, JSON_TYPE)


def problem(error: BaseException) -> Problem:
    """What to tell the client about `error`. Logs nothing."""
    if isinstance(error, TribladeError):
        return _of_ours(error)
    if isinstance(error, RequestValidationError):
        return _of_fields(error)
    if isinstance(error, HTTPException):
        kind = "not_found_error" if error.status_code == HTTPStatus.NOT_FOUND else "invalid_request_error"
        return Problem(error.status_code, str(error.detail), kind, headers=error.headers)
    return Problem(500, "internal error; the server's log has the details under this request's id", "internal_error")


def log_fault(error: BaseException, request_id: str) -> None:
    """Log what is our fault: every 500 with its trace, a dead engine in one line per request."""
    status = problem(error).status
    if status < HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, ServeError):
        return
    trace = error if status == HTTPStatus.INTERNAL_SERVER_ERROR else None
    logger.error("request %s failed: %s: %s", request_id, type(error).__name__, error, exc_info=trace)


async def answer(request: Request, error: Exception) -> Response:
    """Exception handler of the application, for what it raises on purpose."""
    log_fault(error, request.scope.get("state", {}).get("request_id", "-"))
    if isinstance(error, HTTPException):
        error = _worded(request, error)
    return problem(error).response()


async def answer_bug(request: Request, error: Exception) -> Response:
    """Exception handler for everything else; the framework raises the error again, and whoever catches it logs it."""
    return problem(error).response()


def _worded(request: Request, error: HTTPException) -> HTTPException:
    """The router's own errors, saying which route."""
    words = {
        HTTPStatus.NOT_FOUND: f"no such route: {request.method} {request.url.path[:200]}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"method not allowed: {request.method} {request.url.path[:200]}",
    }
    detail = words.get(HTTPStatus(error.status_code), error.detail)
    return HTTPException(error.status_code, detail, dict(error.headers or {}))


def _of_ours(error: TribladeError) -> Problem:
    message = f"{error.message}; hint: {error.hint}" if error.hint else error.message
    code = error.code if isinstance(error, ServeError) else CODES.get(type(error))
    return Problem(error.http_status, message, error.error_type, error.param, code, _headers(error))


def _headers(error: TribladeError) -> dict[str, str]:
    headers = {}
    retry_after_s = error.retry_after_s if isinstance(error, ServeError) else None
    if isinstance(error, QueueFullError):
        retry_after_s = RETRY_SOON_S
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if error.http_status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTooLargeError):
        headers["Connection"] = "close"  # the rest of the body is not read
    return headers


def _of_fields(error: RequestValidationError) -> Problem:
    """Type errors of fields; several at once when there are several."""
    issues = {_issue(issue): _field(issue) for issue in error.errors()}
    told = "; ".join(list(issues)[:MAX_ISSUES])
    return Problem(400, told, "invalid_request_error", next(iter(issues.values())))


def _issue(issue: Mapping[str, Any]) -> str:
    field = _field(issue)
    words = str(issue["msg"]).removeprefix("Value error, ")
    if issue["type"] == "missing":
        return f"{field or 'the body'} is required"
    if issue["type"] in NO_OBJECT:
        words = "must be an object"
    return f"{field or 'the body'}: {words[:1].lower()}{words[1:]}, got: {_short(issue.get('input'))}"


def _field(issue: Mapping[str, Any]) -> str | None:
    """`body.stream_options.include_usage` -> `stream_options.include_usage`."""
    path = [str(part) for part in issue["loc"][1:]]
    return ".".join(path) or None


def _short(value: Any) -> str:
    """A value as the reader knows it, cut to a line whatever its size and depth."""
    if value is None or isinstance(value, bool):
        return dumps(value).decode()
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = 80
    brief.maxdict = brief.maxlist = brief.maxlevel = 3
    return brief.repr(value)

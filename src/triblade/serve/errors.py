"""What can go wrong between a client and the engine, as exceptions; `problems.py` turns every exception into an answer.

Each class fixes its HTTP status, its type and its code, so that raising it anywhere gives the client the same answer.
Knows no web framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from triblade.errors import RequestError, TribladeError

RETRY_SOON_S = 1
RETRY_WHEN_LOADED_S = 5


class ServeError(TribladeError):
    """Base of the errors of this package that are not about the content of a request.

    Attributes:
        code: machine-readable reason in the answer.
        retry_after_s: seconds after which trying again makes sense; None when it never does.
    """

    code: str | None = None
    retry_after_s: int | None = None


@contextmanager
def called(**names: str) -> Iterator[None]:
    """Errors of the block name the fields of the client's body: `called(prompt="input")`."""
    try:
        yield
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise


class BodyTooLargeError(RequestError):
    """The body is longer than the server accepts."""

    http_status = 413


class AuthenticationError(ServeError):
    """The API key is missing or unknown."""

    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class RateLimitError(ServeError):
    """The client sent more requests per minute than it may."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(ServeError):
    """The server cannot take the request now."""

    http_status = 503
    error_type = "service_unavailable_error"


class LoadingError(UnavailableError):
    """The model is still loading."""

    code = "loading"
    retry_after_s = RETRY_WHEN_LOADED_S


class DrainingError(UnavailableError):
    """The server finishes the requests it has and takes no more."""

    code = "shutting_down"
    retry_after_s = RETRY_WHEN_LOADED_S


class OverloadedError(UnavailableError):
    """Too many requests wait already."""

    code = "queue_full"
    retry_after_s = RETRY_SOON_S


class RequestTimeoutError(UnavailableError):
    """The request took longer than the server allows; it was aborted."""

    code = "request_timeout"


class UnhealthyError(UnavailableError):
    """The engine did not generate a token when asked to."""

    code = "unhealthy"


class EngineFaultError(TribladeError):
    """The engine ended a request with an error, or without a reason."""


class ClientGoneError(ServeError):
    """The client closed the connection; nobody reads an answer any more."""

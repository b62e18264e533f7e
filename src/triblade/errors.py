"""One exception tree for the whole package.

Every message says what happened and the offending value; `hint` says what to do about it. The command line prints both and
exits with `exit_code`; the server turns `http_status` into an OpenAI-shaped error. This file knows neither of them.
"""

from __future__ import annotations


class TribladeError(Exception):
    """Base of everything this package raises on purpose.

    Args:
        message: what happened, with the value that caused it.
        hint: what the reader can do about it.
        param: the name of the option or request field at fault, when there is one.
    """

    exit_code = 1
    http_status = 500
    error_type = "internal_error"

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(TribladeError):
    """An option has an unknown name, an impossible value, or contradicts another one."""

    exit_code = 2
    http_status = 400
    error_type = "invalid_request_error"


class UnsupportedError(ConfigError):
    """Understood, but this build or this machine cannot do it."""


class ModelNotFoundError(TribladeError):
    """The model name resolves to nothing: no folder, no file, no hub repository, no package."""

    http_status = 404
    error_type = "not_found_error"


class CheckpointError(TribladeError):
    """A checkpoint on disk is incomplete, corrupt, or not what its configuration says."""


class MemoryBudgetError(TribladeError):
    """The model, its KV cache or a request does not fit the memory there is."""


class EngineDeadError(TribladeError):
    """The engine stopped on an internal fault and serves no more requests."""

    http_status = 503
    error_type = "service_unavailable_error"


class WorkerLostError(EngineDeadError):
    """The process that served a request is gone or leaving, or cannot be reached; another one may serve it."""


class NumericalError(TribladeError):
    """The model produced logits that are not finite."""


class BenchError(TribladeError):
    """A load test has nothing to report."""


class TuneError(TribladeError):
    """A step of a tuning trial failed; the next trial may do better."""


class QualityError(TribladeError):
    """A quantized model is further from its original than the user allows."""


class WireError(TribladeError):
    """KV rows that arrived are damaged, cut short, or not the ones that were asked for; nothing was stored of them."""


class RequestError(TribladeError):
    """A request is malformed; nothing was computed for it."""

    exit_code = 2
    http_status = 400
    error_type = "invalid_request_error"


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the requested output, exceed the context length."""


class QueueFullError(TribladeError):
    """Too many requests are waiting already; try again later."""

    http_status = 503
    error_type = "service_unavailable_error"

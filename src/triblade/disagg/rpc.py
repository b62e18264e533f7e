"""What a router and a worker that answers requests say to each other: requests, their outputs, and how busy the worker is.

A call is named by a number that its client never uses twice on a link. Outputs of a step travel together. Loads no torch and no
numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from triblade.disagg.frames import Message, Vocabulary
from triblade.engine.client import EngineLoad
from triblade.engine.outputs import RequestOutput
from triblade.errors import TribladeError, WireError
from triblade.sampling_params import SamplingParams

Numbered = tuple[int, RequestOutput]  # (number of the call, its output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The worker's first message, as soon as it can serve."""

    model: str
    model_hash: str  # fingerprint of its checkpoint
    vocab_size: int
    context_length: int
    kv_tokens: int
    max_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Message):
    """Serve a request; payload: the prompt's token ids, 4 bytes little-endian each."""

    call: int
    params: dict[str, Any]
    request_id: str
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """Nobody listens to this call any more."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortLabel(Message):
    """End all requests with this label; their outputs say so."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs(Message):
    """News; payload: JSON of a list of `Numbered`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Message):
    """A call ended with an error instead of outputs."""

    call: int
    error: str  # name of the class
    message: str
    hint: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Message):
    """How busy the worker is, every now and then; payload: JSON of an `EngineLoad`."""

    is_draining: bool = False


CLIENT_PROTOCOL = Vocabulary(
    b"TBRQ", 1, {1: Welcome, 2: Generate, 3: Abort, 4: AbortLabel, 5: Outputs, 6: Fault, 7: Report}
)


def packed_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as JSON types."""
    values: dict[str, Any] = _adapter(SamplingParams).dump_python(params, mode="json")
    return values


def unpacked_params(values: dict[str, Any]) -> SamplingParams:
    """The inverse.

    Raises:
        RequestError: a value out of range.
        WireError: these are none.
    """
    params: SamplingParams = _checked(SamplingParams, values)
    return params


def packed_outputs(outputs: list[Numbered]) -> Outputs:
    """A message out of outputs."""
    return Outputs(payload=_adapter(list[Numbered]).dump_json(outputs))


def unpacked_outputs(message: Outputs) -> list[Numbered]:
    """The inverse.

    Raises:
        WireError: these are none.
    """
    found: list[Numbered] = _checked_json(list[Numbered], message.payload)
    return found


def packed_load(load: EngineLoad, *, is_draining: bool) -> Report:
    """A message out of a load."""
    return Report(is_draining=is_draining, payload=_adapter(EngineLoad).dump_json(load))


def unpacked_load(message: Report) -> EngineLoad:
    """The inverse.

    Raises:
        WireError: this is none.
    """
    load: EngineLoad = _checked_json(EngineLoad, message.payload)
    return load


def packed_error(call: int, error: TribladeError) -> Fault:
    """A message out of an error."""
    name = type(error).__name__
    return Fault(call=call, error=name, message=error.message, hint=error.hint, param=error.param)


def unpacked_error(fault: Fault) -> TribladeError:
    """The error of a fault, of the class that it had."""
    kinds = {kind.__name__: kind for kind in _all_kinds(TribladeError)}
    return kinds.get(fault.error, TribladeError)(fault.message, hint=fault.hint, param=fault.param)


def _all_kinds(kind: type[TribladeError]) -> list[type[TribladeError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _all_kinds(child))]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _checked(kind: Any, values: Any) -> Any:
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        raise WireError(f"a message is malformed: {error}") from error


def _checked_json(kind: Any, data: bytes | memoryview) -> Any:
    try:
        return _adapter(kind).validate_json(bytes(data))
    except ValidationError as error:
        raise WireError(f"a message is malformed: {error}") from error

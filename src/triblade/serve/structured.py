"""The form that a request wants its answer in, under the names of the OpenAI API and of vLLM, as one `StructuredOutputs`.

Knows no grammar: whether a schema or an expression can be used is found out by the engine. A request may name one form only, and
forms that ask for nothing (`response_format: {"type": "text"}`) pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from triblade.errors import RequestError
from triblade.sampling_params import StructuredKind, StructuredOutputs
from triblade.serve.protocol import GenerationBody

MAX_CHOICES = 1024
HINT = "see docs/guides/structured-output.md"


def structured_outputs(body: GenerationBody) -> StructuredOutputs | None:
    """The form a request asks for.

    Raises:
        RequestError: it names several, or one that is not understood.
    """
    found = {"response_format": _response_format(body.response_format), **_guided(body)}
    forms = {name: form for name, form in found.items() if form is not None}
    if len(forms) > 1:
        names = ", ".join(forms)
        raise RequestError(f"only one form can be asked for, got: {names}", hint=HINT, param=list(forms)[1])
    return next(iter(forms.values()), None)


def _response_format(wanted: Mapping[str, Any] | None) -> StructuredOutputs | None:
    kind = None if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs("json_object")
    if kind != "json_schema":
        message = f"response_format.type must be text, json_object or json_schema, got: {kind!r:.80}"
        raise RequestError(message, hint=HINT, param="response_format")
    inner = wanted.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        message = "response_format.json_schema must be an object with a schema"
        raise RequestError(message, hint=HINT, param="response_format")
    return _json(inner["schema"], "response_format")


def _guided(body: GenerationBody) -> dict[str, StructuredOutputs | None]:
    """`guided_*` fields, and those of `structured_outputs`, which bear the same names without the prefix."""
    inner = body.structured_outputs or {}
    unknown = sorted(inner.keys() - MAKERS.keys())
    if unknown:
        names = ", ".join(MAKERS)
        message = f"structured_outputs has {unknown[0]!r:.80}; it knows {names}"
        raise RequestError(message, hint=HINT, param="structured_outputs")
    found: dict[str, StructuredOutputs | None] = {}
    for name, make in MAKERS.items():
        for field, value in (
            (f"guided_{name}", getattr(body, f"guided_{name}", None)),
            (f"structured_outputs.{name}", inner.get(name)),
        ):
            found[field] = None if value is None else make(value, field)
    return found


def _json(schema: Any, field: str) -> StructuredOutputs:
    if not isinstance(schema, str | Mapping):
        raise RequestError(f"{field} must be a JSON schema, got: {schema!r:.80}", hint=HINT, param=field)
    return StructuredOutputs("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _json_object(wanted: Any, field: str) -> StructuredOutputs | None:
    return StructuredOutputs("json_object") if wanted is True else None


def _text(kind: str) -> Callable[[Any, str], StructuredOutputs]:
    def make(text: Any, field: str) -> StructuredOutputs:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{field} must be a string, not empty, got: {text!r:.80}", hint=HINT, param=field)
        return StructuredOutputs(cast(StructuredKind, kind), text)

    return make


def _choice(texts: Any, field: str) -> StructuredOutputs:
    is_list = isinstance(texts, list) and 0 < len(texts) <= MAX_CHOICES
    if not is_list or not all(isinstance(text, str) and text for text in texts):
        message = f"{field} must be a list of 1 to {MAX_CHOICES} strings, none of them empty"
        raise RequestError(message, hint=HINT, param=field)
    return StructuredOutputs("choice", json.dumps(texts, ensure_ascii=False))


MAKERS: Mapping[str, Callable[[Any, str], StructuredOutputs | None]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("grammar"),
}

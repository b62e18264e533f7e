"""Forms of answers as requests name them, and JSON schemas as a grammar can hold them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triblade.errors import RequestError
from triblade.sampling_params import StructuredOutputs
from triblade.serve.protocol import CompletionRequest
from triblade.serve.structured import structured_outputs
from triblade.structured.json_schema import narrowed

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema", SCHEMA),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": "root ::= 'a'"}, "grammar", "root ::= 'a'"),
    ],
)
def test_every_name_of_a_form(fields: dict[str, Any], kind: Any, text: Any) -> None:
    found = structured_outputs(CompletionRequest(prompt="x", **fields))
    assert found == StructuredOutputs(kind, text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_no_form(fields: dict[str, Any]) -> None:
    assert structured_outputs(CompletionRequest(prompt="x", **fields)) is None


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"minimum": 3}, {"minimum": 3, "type": "number"}),
        (
            {"required": ["a"]},
            {"required": ["a"], "type": "object", "additionalProperties": True, "properties": {"a": {}}},
        ),
        ({"type": "array"}, {"type": "array", "items": {}}),
        ({"type": "integer", "enum": [1, "a", True]}, {"enum": [1]}),
        ({"type": ["string", "null"], "enum": ["a", None, 2.5]}, {"enum": ["a", None]}),
        ({"const": "x", "type": "string"}, {"enum": ["x"]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"minLength": 1}}}, None),
        ({"properties": {"not": {"type": "null"}}, "type": "object"}, None),  # a name, not a keyword
    ],
)
def test_what_is_filled_in(schema: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = json.loads(narrowed(json.dumps(schema)))
    assert found == expected or (expected is None and found.keys() == schema.keys())


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"items": {"uniqueItems": True}}, "uniqueItems"),
        ({"anyOf": [{"not": {}}]}, "'not'"),
        ({"if": {}}, "'if'"),
        ({"allOf": [{}, {}]}, "allOf"),
        ({"$ref": "#/a", "minimum": 1}, "stand alone"),
        ({"$ref": "other.json"}, "outside of itself"),
        ({"enum": [1, 2], "minimum": 2}, "enumeration"),
        ({"type": "integer", "enum": ["a"]}, "without a value of its type"),
        ({"pattern": "a", "maxLength": 1}, "more than one of pattern"),
        ({"minimum": 1, "maxLength": 1}, "several types"),
        ({"required": ["a"], "additionalProperties": False}, "requires a property that it forbids"),
        ({"pattern": '^"$'}, "would escape"),
        ({"pattern": "^\\n$"}, "would escape"),
        ([], "must be an object"),
    ],
)
def test_what_a_grammar_cannot_hold(schema: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        narrowed(json.dumps(schema))


def test_depth_and_size_are_limited() -> None:  # D14
    deep: dict[str, Any] = {}
    for _ in range(80):
        deep = {"items": deep}
    wide = {"properties": {str(number): {} for number in range(30_000)}}
    for schema in (deep, wide):
        with pytest.raises(RequestError, match="too large"):
            narrowed(json.dumps(schema))

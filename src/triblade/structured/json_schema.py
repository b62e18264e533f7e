"""JSON schemas that a grammar can hold exactly, written so that the grammar library reads them right.

Knows no grammar and no token. A keyword that a grammar would drop in silence is refused by name, and what a schema leaves unsaid
is filled in on the narrow side: whatever matches the result of `narrowed` matches the schema that came in. The exception is
`oneOf`, which is read as `anyOf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from triblade.errors import RequestError

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_WHITESPACE = 16  # characters in a row between the parts of a value: a small model could fill its context with them
ANY_OBJECT = '{"type": "object", "additionalProperties": true}'

# Keyword -> the type of value it speaks about.
TYPED = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties", "propertyNames"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties", "unevaluatedProperties"), "object"),
}
REFUSED = frozenset(
    {"uniqueItems", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"not", "if", "then", "else", "$dynamicRef", "$recursiveRef", "additionalItems"}
)
_UNESCAPED = re.compile(r'"|\\[nrtfvxuc0\\]')  # what the library puts between the quotes as it is
PLAIN = r" !#-\[\]-" + "\ud7ff\ue000-\U0010ffff"  # what stands in a JSON string as it is, as ranges of a class
COMBINERS = ("anyOf", "oneOf", "allOf", "$ref")
MAPS = ("properties", "patternProperties", "$defs", "definitions")
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def narrowed(text: str) -> str:
    """A schema as JSON text, in the form that the grammar library reads exactly.

    Raises:
        RequestError: it is no schema, too large, or asks for what a grammar cannot promise; names the keyword.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"the JSON schema is not valid JSON: {error}") from error
    return json.dumps(_Walk().schema(schema, 0), ensure_ascii=False)


class _Walk:
    """One pass over a schema, counting what it meets."""

    def __init__(self) -> None:
        self._nodes = 0

    def schema(self, schema: Any, depth: int) -> Any:
        """A subschema, narrowed."""
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise _refusal(f"the JSON schema is too large: at most {MAX_DEPTH} levels and {MAX_NODES} subschemas")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refusal(f"a JSON schema must be an object, got: {schema!r:.80}")
        _check_keywords(schema)
        result = {key: self._part(key, value, depth + 1) for key, value in schema.items()}
        if "enum" in result or "const" in result:
            return _closed(result)
        return result if any(name in result for name in COMBINERS) else _opened(result)

    def _part(self, key: str, value: Any, depth: int) -> Any:
        if key in MAPS and isinstance(value, dict):
            return {name: self.schema(part, depth) for name, part in value.items()}
        if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            return [self.schema(part, depth) for part in value]
        if key in ("items", "additionalProperties", "propertyNames"):
            return self.schema(value, depth)
        return value


def _check_keywords(schema: Mapping[str, Any]) -> None:
    refused = sorted(key for key in schema if key in REFUSED and schema[key] is not False)
    if refused:
        raise _refusal(f"the JSON schema has a keyword that no grammar can promise: {refused[0]!r}")
    combiners = [name for name in COMBINERS if name in schema]
    beside = [key for key in schema if key in TYPED or key in ("type", "enum", "const")]
    if len(combiners) > 1 or (combiners and beside):
        names = ", ".join([*combiners, *beside])
        raise _refusal(f"the JSON schema combines keywords in one place that must stand alone: {names}")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise _refusal("the JSON schema has allOf with several parts; merge them into one")
    ref = schema.get("$ref", "#")
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise _refusal(f"the JSON schema refers to something outside of itself or to an anchor: {ref!r:.80}")
    if _UNESCAPED.search(str(schema.get("pattern", ""))):
        raise _refusal(
            "the JSON schema has a pattern with quotes, backslashes or control characters, which JSON would escape"
        )
    exclusive = {"pattern", "format"} & schema.keys()
    if len(exclusive) > 1 or (exclusive and {"minLength", "maxLength"} & schema.keys()):
        raise _refusal("the JSON schema has more than one of pattern, format, and minLength or maxLength in one place")


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """An enumeration: its values of the right type."""
    others = sorted(key for key in schema if key in TYPED or ("enum" in schema and key == "const"))
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if others or not isinstance(values, list):
        raise _refusal(f"the JSON schema has an enumeration that is no list, or a keyword beside it: {others}")
    kept = [value for value in values if _has_type(value, schema.get("type"))]
    if not kept:
        raise _refusal("the JSON schema has an enumeration without a value of its type")
    return {"enum": kept}


def _has_type(value: Any, wanted: Any) -> bool:
    names = [wanted] if isinstance(wanted, str) else wanted
    if not names:
        return True
    kinds = [kind for name in names for kind in TYPES.get(name, ())]
    return any(isinstance(value, kind) and (isinstance(value, bool) <= (kind is bool)) for kind in kinds)


def _opened(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of a type: the type that its keywords speak about, and everything allowed where nothing is said."""
    kinds = {TYPED[key] for key in schema if key in TYPED}
    if "type" not in schema and len(kinds) > 1:
        raise _refusal(f"the JSON schema has keywords of several types without a type: {', '.join(sorted(kinds))}")
    if "type" not in schema and kinds:
        schema["type"] = kinds.pop()
    if schema.get("type") == "object":
        _open_object(schema)
    if {"minLength", "maxLength"} & schema.keys():
        _spell_length(schema)
    if schema.get("type") == "array" and not {"items", "prefixItems"} & schema.keys():
        schema["items"] = {}
    return schema


def _spell_length(schema: dict[str, Any]) -> None:
    """Lengths as a pattern of plain characters: the library's own form of them lets raw control characters through.

    The characters are listed, since "all but some" would hold halves of surrogate pairs, whose bytes are no text.
    """
    least, most = schema.pop("minLength", 0), schema.pop("maxLength", "")
    schema["pattern"] = f"^[{PLAIN}]{{{least},{most}}}$"


def _open_object(schema: dict[str, Any]) -> None:
    if not {"properties", "patternProperties", "additionalProperties", "propertyNames"} & schema.keys():
        schema["additionalProperties"] = True
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _refusal("the JSON schema has properties that are no object, or required that is no list")
    unlisted = [name for name in required if name not in properties]
    if unlisted:
        rest = schema.get("additionalProperties", {})
        if rest is False:
            raise _refusal(f"the JSON schema requires a property that it forbids: {unlisted[0]!r:.80}")
        schema["properties"] = {**properties, **dict.fromkeys(unlisted, {} if rest is True else rest)}


def _refusal(message: str) -> RequestError:
    return RequestError(message, hint="simplify the schema", param="response_format")

"""Random JSON schemas of a common kind (nested objects, enumerations, patterns, references, arrays with bounds), by seed."""

from __future__ import annotations

from random import Random
from typing import Any

PATTERNS = ("^[a-c]{1,4}$", "^(yes|no)$", "^[0-9]{3}-[A-F]{2}$")
DEEPEST = 2


def random_schema(seed: int) -> dict[str, Any]:
    """An object schema; every value is bounded, so that even a random model comes to an end."""
    chance = Random(seed)
    shared = {"shared": _leaf(chance)}
    return {"$defs": shared, **_object(chance, 0)}


def _object(chance: Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["id", "name", "tags", "size", "kind"], chance.randint(1, 3))
    properties = {name: _value(chance, depth + 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(chance: Random, depth: int) -> dict[str, Any]:
    kind = chance.choice(["leaf", "ref", "array", "object", "any"]) if depth < DEEPEST else "leaf"
    if kind == "object":
        return _object(chance, depth)
    if kind == "array":
        least = chance.randint(0, 2)
        return {"type": "array", "items": _value(chance, depth + 1), "minItems": least, "maxItems": least + 2}
    if kind == "any":
        return {"anyOf": [_leaf(chance), {"type": "null"}]}
    return {"$ref": "#/$defs/shared"} if kind == "ref" else _leaf(chance)


def _leaf(chance: Random) -> dict[str, Any]:
    least = chance.randint(-20, 20)
    return chance.choice(
        [
            {"enum": ["red", "green", 3, None, True]},
            {"type": "string", "pattern": chance.choice(PATTERNS)},
            {"type": "string", "minLength": 1, "maxLength": 5},
            {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 2000)},
            {"type": "boolean"},
            {"const": "fixed"},
        ]
    )

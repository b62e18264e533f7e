"""Whether a value that somebody wrote in a file is of its field's type, and how to say which type that is.

Knows the types that configurations use: plain values, paths, choices (`Literal`), tuples, unions, dataclasses. Any other type
accepts everything.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "nothing",
}


def fits(value: object, wanted: Any) -> bool:
    """Whether a field annotated with `wanted` holds this value; a whole number is a number, true is none."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if origin in (Union, UnionType):
        return any(fits(value, kind) for kind in inner)
    if origin is tuple:
        return isinstance(value, tuple) and _fit_items(value, inner)
    if wanted in (int, float):
        return isinstance(value, int if wanted is int else int | float) and not isinstance(value, bool)
    return isinstance(value, wanted) if isinstance(wanted, type) else True


def describe(wanted: Any) -> str:
    """The type in words, for a message."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (Union, UnionType):
        return " or ".join(describe(kind) for kind in inner if kind is not NoneType)
    if origin is tuple:
        return f"a list, each item {describe(inner[0])}"
    return _NAMES.get(wanted, getattr(wanted, "__name__", str(wanted)))


def _fit_items(items: tuple[object, ...], kinds: tuple[Any, ...]) -> bool:
    if kinds[-1:] == (Ellipsis,):
        return all(fits(item, kinds[0]) for item in items)
    return len(items) == len(kinds) and all(map(fits, items, kinds))

"""Configurations as a TOML document and back: nested dataclasses are tables, tuples of them arrays of tables.

Values at their defaults are left out, so a file says what was decided. Knows no configuration by name.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from triblade.config.mapping import from_mapping
from triblade.errors import ConfigError

_Config = TypeVar("_Config")


def to_toml(config: object) -> str:
    """The document; plain values first, as TOML wants it."""
    return "\n".join(_lines(config, "")) + "\n"


def parse_toml(kind: type[_Config], text: str) -> _Config:
    """What `to_toml` wrote, or a person.

    Raises:
        ConfigError: no TOML, or see `from_mapping`.
    """
    try:
        return _build(kind, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cannot read TOML: {error}") from error


def read_toml(kind: type[_Config], path: Path) -> _Config:
    """A configuration from a file.

    Raises:
        ConfigError: it cannot be read, or see `parse_toml`; the file is named.
    """
    try:
        return parse_toml(kind, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint, param=error.param) from error


def _lines(config: object, table: str) -> Iterator[str]:
    given = {f.name: getattr(config, f.name) for f in fields(config) if _is_said(config, f)}  # type: ignore[arg-type]
    nested = {name: value for name, value in given.items() if is_dataclass(value) or _is_table_array(value)}
    yield from (f"{name} = {_literal(value)}" for name, value in given.items() if name not in nested)
    for name, value in nested.items():
        path = f"{table}.{name}" if table else name
        for item in value if isinstance(value, tuple) else (value,):
            yield f"\n[[{path}]]" if isinstance(value, tuple) else f"\n[{path}]"
            yield from _lines(item, path)


def _is_said(config: object, field: Any) -> bool:
    value = getattr(config, field.name)
    return value is not None and (field.default is MISSING or value != field.default)


def _is_table_array(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(is_dataclass(item) for item in value)


def _literal(value: object) -> str:
    """A plain value. JSON's strings are TOML's basic strings but for the delete character, which JSON does not escape."""
    if isinstance(value, tuple):
        items = list(map(_literal, value))
        if any(isinstance(item, str) for item in value):  # sentences: a line for each
            return "".join(["[", *(f"\n  {item}," for item in items), "\n]"])
        return f"[{', '.join(items)}]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _build(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    hints = get_type_hints(kind)
    return from_mapping(kind, {name: _value(hints.get(name), value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    """The value as its field holds it: tables become dataclasses, text a path where one is wanted."""
    kinds = (hint, *get_args(hint))
    inner = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
    if inner is not None and isinstance(value, Mapping):
        return _build(inner, value)
    if inner is not None and isinstance(value, list):
        return tuple(_value(inner, item) for item in value)
    return Path(value) if Path in kinds and isinstance(value, str) else value

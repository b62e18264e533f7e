"""Any configuration out of a mapping, and as flags. Knows no option by name: the fields of the dataclass decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from triblade.config.types import describe, fits
from triblade.errors import ConfigError
from triblade.registry import unknown_name

_Config = TypeVar("_Config")


def from_mapping(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Build a config dataclass.

    Raises:
        ConfigError: a key is unknown (the hint has the nearest valid one) or missing, or a value is of another type than its
            field or out of range.
    """
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise unknown_name(f"{kind.__name__} option", name, list(known))
    missing = [
        f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if missing:
        raise ConfigError(f"{kind.__name__} misses: {', '.join(missing)}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    types = get_type_hints(kind)
    for name, value in given.items():
        if not fits(value, types[name]):
            raise ConfigError(f"{name} must be {describe(types[name])}, got: {value!r}", param=name)
    return kind(**given)


def _word(value: object) -> object:
    """As somebody would type it: 4 rather than 4.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_flags(config: object) -> list[str]:
    """The options that make this config dataclass on the command line; those at their defaults are left out."""
    flags: list[str] = []
    for field in fields(config):  # type: ignore[arg-type]
        value, name = getattr(config, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}={_word(item)}" for item in (value if isinstance(value, tuple) else (value,))]
    return flags

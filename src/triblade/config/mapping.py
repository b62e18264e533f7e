"""Any configuration out of a mapping or a TOML table. Knows no option by name: the fields of the dataclass decide."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from triblade.errors import ConfigError
from triblade.registry import unknown_name

_Config = TypeVar("_Config")


def from_mapping(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Build a config dataclass.

    Raises:
        ConfigError: a key is unknown (the hint has the nearest valid one) or missing, or a value is out of range.
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
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


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
            flags += [f"--{name}={item}" for item in (value if isinstance(value, tuple) else (value,))]
    return flags


def from_toml(kind: type[_Config], path: Path, table: str) -> _Config:
    """Read one table of a TOML file into a config dataclass; a table that is not there is an empty one.

    Raises:
        ConfigError: the file cannot be read, or see `from_mapping`.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read configuration file: {path}: {error}") from error
    return from_mapping(kind, document.get(table, {}))

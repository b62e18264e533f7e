"""Range checks that several configurations share."""

from __future__ import annotations

import math

from triblade.errors import ConfigError


def require_at_least(name: str, value: float | None, least: int) -> None:
    """None means "not given" and passes.

    Raises:
        ConfigError: `value` is below `least`.
    """
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, got: {value}", param=name)


def require_positive(name: str, value: float | None) -> None:
    """None means "not given" and passes.

    Raises:
        ConfigError: `value` is zero, negative or not finite.
    """
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a positive number, got: {value}", param=name)


def require_address(name: str, address: str) -> None:
    """Raises:
    ConfigError: `address` is neither HOST:PORT nor the path of a socket.
    """
    host, colon, port = address.rpartition(":")
    if "/" not in address and not (colon and host and port.isdigit()):
        raise ConfigError(f"{name} must be HOST:PORT or a path, got: {address!r}", param=name)

"""What the environment says, and the only file that asks it. Every variable is listed in docs/reference/cli.md.

Read when asked for, never at import, so that a test or a program can set a variable first.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from triblade.config.route import RouteConfig
from triblade.config.server import ServerConfig


def with_environment(config: ServerConfig) -> ServerConfig:
    """Add the API key from TRIBLADE_API_KEY, so that it need not stand on a command line."""
    key = os.environ.get("TRIBLADE_API_KEY")
    return replace(config, api_key=(*config.api_key, key)) if key else config


def router_environment(config: RouteConfig) -> RouteConfig:
    """Take the admin key from TRIBLADE_ADMIN_KEY, if none is given."""
    return replace(config, admin_key=config.admin_key or os.environ.get("TRIBLADE_ADMIN_KEY", ""))


def client_api_key() -> str | None:
    """The key to send to a server: TRIBLADE_API_KEY, else OPENAI_API_KEY."""
    return os.environ.get("TRIBLADE_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


def cache_dir() -> Path:
    """Where downloads are kept: TRIBLADE_CACHE, else triblade/ under XDG_CACHE_HOME, ~/.cache or the temporary folder."""
    if explicit := os.environ.get("TRIBLADE_CACHE"):
        return Path(explicit)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "triblade"
    home = os.path.expanduser("~")
    if home == "~":  # no HOME, and a container's user need not be in the user database
        return Path(tempfile.gettempdir()) / "triblade"
    return Path(home) / ".cache" / "triblade"


def forced_isa() -> str:
    """The instruction set that TRIBLADE_ISA asks for; empty for none."""
    return os.environ.get("TRIBLADE_ISA", "")


def offline() -> bool:
    """Whether the user forbade network access (TRIBLADE_OFFLINE or HF_HUB_OFFLINE)."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("TRIBLADE_OFFLINE", "HF_HUB_OFFLINE"))


def visible_devices() -> tuple[int, ...] | None:
    """Indices in CUDA_VISIBLE_DEVICES; None where it is not set, or names devices in another way."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(map(int, names)) if all(name.strip().isdigit() for name in names) else None


def worker_environment(devices: Sequence[int]) -> dict[str, str]:
    """Of a process that sees these devices, in this order, by the driver's numbers; without any, this process's own."""
    chosen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return {**os.environ, **chosen} if devices else dict(os.environ)


def extended_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Of a process that gets more variables than this one has."""
    return {**os.environ, **variables}

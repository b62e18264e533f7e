"""vLLM servers on this host: started with their share of the machine, awaited, watched, ended.

Knows options as data only, and no request.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from triblade.deploy.attached import AttachedProcess
from triblade.deploy.flags import SERVER_MODULE, flags
from triblade.deploy.translation import Role
from triblade.errors import EngineDeadError

POLL_S = 0.2
END_TIMEOUT_S = 15.0  # beyond the drain time, until a server is killed
LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStart:
    """How one server is started.

    Attributes:
        options: of vLLM, without address.
        variables: of its environment, beside this process's own.
    """

    name: str
    role: Role
    options: Mapping[str, Any]
    variables: Mapping[str, str]
    host: str
    port: int


class VLLMServer(AttachedProcess):
    """One vLLM process.

    Args:
        python: of its environment.
        start: how.
    """

    def __init__(self, python: Path, start: ServerStart) -> None:
        self.role = start.role
        self.url = f"http://{start.host}:{start.port}"
        words = [*flags(start.options), "--host", start.host, "--port", str(start.port)]
        super().__init__(start.name, [str(python.absolute()), "-m", SERVER_MODULE, *words], start.variables)

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded its model and answers."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=1.0, trust_env=False).status_code == httpx.codes.OK
        return False


def wait_until_ready(servers: Sequence[VLLMServer], timeout_s: float) -> None:
    """Until all have loaded.

    Raises:
        EngineDeadError: one ended, or the time is over.
    """
    deadline, missing = time.monotonic() + timeout_s, list(servers)
    while missing:
        check_alive(servers)
        missing = [server for server in missing if not server.is_ready]
        if missing and time.monotonic() > deadline:
            names = ", ".join(server.name for server in missing)
            raise EngineDeadError(f"not ready after {timeout_s:g} s: {names}", hint="see the log above")
        time.sleep(POLL_S)


def check_alive(servers: Sequence[AttachedProcess]) -> None:
    """Raises:
    EngineDeadError: one has ended.
    """
    for server in servers:
        if server.exit_code is not None:
            raise EngineDeadError(
                f"{server.name} ended with exit code {server.exit_code}", hint="its own message stands above"
            )


def end_all(servers: Sequence[VLLMServer], drain_timeout_s: float) -> None:
    """End the servers together."""
    for server in servers:
        server.end()
    deadline = time.monotonic() + drain_timeout_s + END_TIMEOUT_S
    for server in servers:
        server.wait(deadline - time.monotonic())


def free_port() -> int:
    """A port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        port: int = probe.getsockname()[1]
        return port

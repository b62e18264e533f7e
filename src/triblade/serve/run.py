"""Start serving: take the port, then load the model, then answer until told to stop.

The port comes first, so that a taken one is known in a second and not after minutes of loading. For the same reason
nothing heavy is imported before it is bound.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from triblade.config import EngineConfig, Plan, ServerConfig, TopologyConfig, TransferConfig
from triblade.errors import ConfigError

if TYPE_CHECKING:
    from triblade.serve.state import ServedEngine

StartEngine = Callable[[EngineConfig], "ServedEngine"]

BACKLOG = 2048
HINTS = {
    errno.EADDRINUSE: "another program listens there; stop it, or choose another port with --port",
    errno.EACCES: "ports below 1024 are for root; choose another one with --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; --host 0.0.0.0 takes all it has",
}


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    start: StartEngine | None = None,
    plan: Plan | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT.

    Requests in flight may finish within `drain_timeout_s`; a second signal ends at once.

    Args:
        engine_config: the model and how it runs.
        server_config: the server; see `with_environment` for keys from the environment.
        start: loads the model; default: an engine in this process.
        plan: what the configurations come from; traffic and latency are compared with it.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: the address cannot be listened on.
        TribladeError: whatever loading the model raises.
    """
    with bind(server_config) as listener:
        from triblade.serve.lifecycle import run_server
        from triblade.serve.state import ServerState

        run_server(listener, ServerState(engine_config, server_config, plan), start or start_local)
    return 0


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket; clients that connect from now on wait, they are not refused.

    Raises:
        ConfigError: naming the address and what to do.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot resolve host: {config.host!r}: {error.strerror}", hint="check --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = HINTS.get(error.errno or 0, "check --host and --port")
        raise ConfigError(
            f"cannot listen on port {config.port} of {config.host}: {error.strerror}", hint=hint
        ) from error
    return listener


def start_engine(server: ServerConfig, topology: TopologyConfig, transfer: TransferConfig) -> StartEngine:
    """What loads the model: into this process, as one engine or as two, or into workers."""
    if not topology.is_distributed:
        return start_local

    def start(config: EngineConfig) -> ServedEngine:
        from triblade.disagg.launch import Deployment, start_workers
        from triblade.disagg.one_process import start_threads

        begin = start_threads if topology.pd_isolation == "thread" else start_workers
        return begin(Deployment(config, topology, transfer, server.drain_timeout_s, server.log_level))

    return start


def start_local(config: EngineConfig) -> ServedEngine:
    """Load the model into this process."""
    from triblade.engine.local import LocalClient

    return LocalClient.start(config)

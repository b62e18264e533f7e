"""A router from start to end: take the port, connect, ask every replica how it is, pass requests, drain.

Knows no request. Invariant: connections and watching tasks live from the server's startup to its shutdown, in its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from triblade.config import RouteConfig, ServerConfig
from triblade.deploy.replicas import Fleet, Replica
from triblade.deploy.replicas_app import create_app
from triblade.deploy.replicas_metrics import RouterMetrics
from triblade.deploy.replicas_proxy import Proxy
from triblade.deploy.replicas_upstream import Upstream
from triblade.errors import ConfigError
from triblade.serve.errors import DrainingError
from triblade.serve.graceful import GracefulServer, address
from triblade.serve.run import bind

log = logging.getLogger(__name__)


def route(urls: Sequence[str], config: RouteConfig) -> int:
    """Route requests until SIGTERM or SIGINT.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: no replica is named, an address is none, or the port cannot be listened on.
    """
    config = replace(config, prefill=_addresses(config.prefill), decode=_addresses(config.decode))
    urls = _addresses(urls)
    if not (urls or config.decode):
        raise ConfigError("no replica is named", hint="triblade route http://HOST:PORT http://HOST:PORT ...")
    with bind(ServerConfig(host=config.host, port=config.port)) as listener:
        RouterServer(urls, config, listener).run(sockets=[listener])
    return 0


class RouterServer(GracefulServer):
    """The server of one router.

    Args:
        urls: of replicas that do everything.
        config: how to route.
        listener: where clients connect.

    Attributes:
        fleet: the replicas, as they are seen.
    """

    def __init__(self, urls: Sequence[str], config: RouteConfig, listener: socket.socket) -> None:
        self._config = config
        self._url = address(listener)
        self._metrics = RouterMetrics()
        self.fleet = Fleet(urls, config, self._metrics.ejected)
        self._metrics.watch(self.fleet)
        self._upstream = Upstream(config)
        self._proxy = Proxy(self.fleet, self._upstream, config, self._metrics)
        self._watching: list[asyncio.Task[None]] = []
        super().__init__(create_app(self.fleet, self._proxy, config, self._metrics), config.drain_timeout_s)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and look at the replicas."""
        self._upstream.open()
        self._watching = [asyncio.create_task(self._watch(replica)) for replica in self.fleet.replicas]
        await super().startup(sockets)
        log.info("routing to %d replicas at %s/v1", len(self.fleet.replicas), self._url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish, then end them with an error."""
        self._proxy.drain()
        if self._proxy.num_in_flight:
            seconds = self._config.drain_timeout_s
            log.info("draining: %g s to finish, requests in flight: %d", seconds, self._proxy.num_in_flight)
        await super().shutdown(sockets)
        for task in self._watching:
            task.cancel()
        await self._upstream.close()
        log.info("stopped")

    def drained(self) -> None:
        """See `GracefulServer`."""
        self._proxy.stop_all(DrainingError("the router is shutting down"))

    async def _watch(self, replica: Replica) -> None:
        """Ask a replica how it is, again and again."""
        while True:
            fault, is_gone = await self._upstream.fault(replica.url)
            if fault:
                self.fleet.failed(replica, fault, is_gone=is_gone)
            else:
                self.fleet.succeeded(replica)
            await asyncio.sleep(self._config.health_interval_s)


def _addresses(urls: Sequence[str]) -> tuple[str, ...]:
    """Addresses without /v1 and slash.

    Raises:
        ConfigError: one is none, or stands twice.
    """
    found = tuple(url.rstrip("/").removesuffix("/v1") for url in urls)
    for url in found:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"a replica is given by its address, got: {url}", hint="such as http://HOST:PORT")
        if found.count(url) > 1:
            raise ConfigError(f"a replica is named twice: {url}")
    return found

"""A router's own routes around the proxy: health, metrics, and the list of replicas that an operator drains.

Everything else is passed on. Knows no policy. Invariant: /replicas answers only to the admin key, and not at all without one.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from triblade.config import RouteConfig
from triblade.deploy.replicas import Fleet, Replica
from triblade.deploy.replicas_metrics import RouterMetrics
from triblade.deploy.replicas_prompt import COMPUTING
from triblade.deploy.replicas_proxy import SERVING, NoReplicaError, Proxy
from triblade.errors import RequestError
from triblade.serve.errors import AuthenticationError
from triblade.serve.middleware import BodyLimit, RequestLog

LISTED = COMPUTING | {
    "/v1/models",
    "/health",
    "/ping",
    "/metrics",
    "/replicas",
}  # others share one label of the metrics
JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class _Named:
    """A route, as the log and the metrics call it."""

    path: str


class RouterApp:
    """Answers what is the router's own, passes the rest.

    Args:
        proxy: made before the first request.
    """

    def __init__(self, fleet: Fleet, proxy: Proxy, config: RouteConfig, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._proxy = proxy
        self._config = config
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            TribladeError: it cannot be answered; nothing was sent.
        """
        path = scope["path"]
        scope["route"] = _Named(path if path in LISTED else "other")
        if path in ("/health", "/ping"):
            await self._health()(scope, receive, send)
        elif path == "/metrics":
            content, kind = self._metrics.exposition(Headers(scope=scope).get("accept", ""))
            await Response(content, media_type=kind)(scope, receive, send)
        elif path == "/replicas":
            await (await self._replicas(scope, receive))(scope, receive, send)
        else:
            await self._proxy(scope, receive, send)

    def _health(self) -> Response:
        """Well, if a request could be served."""
        ready = self._fleet.ready(SERVING)
        if not ready:
            raise NoReplicaError("no replica takes requests")
        return _json({"status": "ok", "replicas": len(ready)})

    async def _replicas(self, scope: Scope, receive: Receive) -> Response:
        """GET lists the replicas, POST {"url", "drain"} drains one or takes it back."""
        _check_key(Headers(scope=scope).get("authorization", ""), self._config.admin_key)
        if scope["method"] == "POST":
            self._set_draining((await receive()).get("body", b""))
        return _json({"replicas": [_state(replica) for replica in self._fleet.replicas]})

    def _set_draining(self, content: bytes) -> None:
        try:
            body = orjson.loads(content)
            url, drain = str(body["url"]).rstrip("/"), body["drain"]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError('the body must be {"url": ..., "drain": true or false}') from error
        found = [replica for replica in self._fleet.replicas if replica.url == url]
        if not found or not isinstance(drain, bool):
            raise RequestError(f"no such replica: {url[:200]}", hint="GET /replicas lists them", param="url")
        for replica in found:
            replica.is_draining = drain


def create_app(fleet: Fleet, proxy: Proxy, config: RouteConfig, metrics: RouterMetrics) -> ASGIApp:
    """Everything between the socket and the replicas."""
    return RequestLog(BodyLimit(RouterApp(fleet, proxy, config, metrics), config.max_body_bytes), metrics)


def _check_key(given: str, key: str) -> None:
    token = given.removeprefix("Bearer ").strip().encode("latin-1")
    if not key or not hmac.compare_digest(token, key.encode()):
        raise AuthenticationError(
            "/replicas needs the admin key", hint="route --admin-key KEY, and send it as a bearer token"
        )


def _state(replica: Replica) -> Mapping[str, Any]:
    return {
        "url": replica.url,
        "role": replica.role,
        "is_up": replica.is_up,
        "is_draining": replica.is_draining,
        "num_running": replica.num_running,
        "fault": "" if replica.is_up else replica.fault,
    }


def _json(body: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type=JSON_TYPE)

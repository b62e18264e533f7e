"""The ASGI application of one server: routes, error answers and the layers around them, put together.

Holds nothing itself; everything lives in the `ServerState` it is given, so two applications in one process do not
meet.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from triblade import __version__
from triblade.engine.client import EngineLoad
from triblade.errors import TribladeError
from triblade.serve.drift import PlanWatch
from triblade.serve.metrics import ServerMetrics
from triblade.serve.middleware import Authentication, BodyLimit, RateLimit, Readiness, RequestLog
from triblade.serve.problems import answer, answer_bug
from triblade.serve.rate_limit import RateLimiter
from triblade.serve.routes import generate, info, live, tokens
from triblade.serve.state import ServerState

TITLE = "triblade"
DESCRIPTION = "Open-weight language models over the OpenAI API. Errors have the OpenAI shape."


def create_app(state: ServerState) -> ASGIApp:
    """Everything between the socket and the engine."""

    def load() -> EngineLoad | None:
        engine = state.loaded_engine
        return None if engine is None else engine.load()

    watch = None if state.plan is None else PlanWatch(state.plan, lambda: _totals(load() or EngineLoad()))
    metrics = ServerMetrics(state.names[0], load, watch)
    config = state.config
    limiter = None if config.rate_limit_per_minute is None else RateLimiter(config.rate_limit_per_minute)
    app: ASGIApp = BodyLimit(_routed(state, metrics, watch), config.max_body_bytes)
    app = RateLimit(app, limiter)
    app = Readiness(app, state)
    app = Authentication(app, config.api_key)
    app = RequestLog(app, metrics)
    if config.allowed_origins:  # outermost: a browser asks before it sends a key
        methods, shown = ("GET", "POST"), ("X-Request-Id", "Retry-After")
        app = CORSMiddleware(app, config.allowed_origins, methods, allow_headers=["*"], expose_headers=shown)
    return app


def _totals(load: EngineLoad) -> dict[str, float]:
    """The counters of an engine that a plan is compared with."""
    drafts, transfers = load.speculation, load.transfers
    found: dict[str, float] = {"steps": drafts.num_steps, "step_tokens": drafts.num_steps + drafts.num_accepted_tokens}
    if transfers is not None:
        found |= {"kv_transfers": transfers.num_fetches, "kv_fallbacks": transfers.num_fallbacks}
    return found


def _routed(state: ServerState, metrics: ServerMetrics, watch: PlanWatch | None) -> FastAPI:
    app = FastAPI(title=TITLE, version=__version__, description=DESCRIPTION, redoc_url=None, redirect_slashes=False)
    for routes in (
        generate.router(state, metrics),
        tokens.router(state),
        info.router(state, metrics),
        live.router(state, watch),
    ):
        app.include_router(routes)
    for raised in (TribladeError, HTTPException, RequestValidationError):
        app.add_exception_handler(raised, answer)
    app.add_exception_handler(Exception, answer_bug)
    document = _document(app, with_key=bool(state.config.api_key))
    app.openapi = lambda: document  # type: ignore[method-assign]
    return app


def _document(app: FastAPI, *, with_key: bool) -> dict[str, Any]:
    """The OpenAPI document, without the framework's own 422, which is never sent."""
    document = get_openapi(title=TITLE, version=__version__, description=DESCRIPTION, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    schemas = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if with_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document

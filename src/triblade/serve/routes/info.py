"""What the server says about itself: models, health, version, metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from triblade import __version__
from triblade.serve.health import HealthProbe
from triblade.serve.metrics import ServerMetrics
from triblade.serve.responses import Model, ModelList, Version, problems
from triblade.serve.state import ServerState


def router(state: ServerState, metrics: ServerMetrics) -> APIRouter:
    """The routes without a body."""
    routes = APIRouter(tags=["server"])
    probe = HealthProbe(state)

    @routes.get("/v1/models", responses=problems(401, 500, 503))
    async def list_models() -> ModelList:
        """The names of the model."""
        return ModelList(data=[_model(name, state) for name in state.names])

    @routes.get("/v1/models/{model:path}", responses=problems(401, 404, 500, 503))
    async def retrieve_model(model: str) -> Model:
        """One of the names."""
        return _model(state.resolve_name(model), state)

    @routes.get("/health", response_class=Response, responses={200: {"description": "It works."}, **problems(500, 503)})
    async def health() -> Response:
        """Generate one token; 503 when that fails, and while the server is loading or draining."""
        await probe.check()
        return Response()

    @routes.get("/ping", response_class=Response, responses={200: {"description": "Ready."}, **problems(500, 503)})
    async def ping() -> Response:
        """Whether the server takes requests; computes nothing."""
        state.require_ready()
        return Response()

    @routes.get("/version", responses=problems(401, 500))
    async def version() -> Version:
        """The version of triblade."""
        return Version(version=__version__)

    scrape = {"description": "Prometheus metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}

    @routes.get("/metrics", response_class=Response, responses={200: scrape, **problems(401, 500)})
    async def read_metrics(request: Request) -> Response:
        """Prometheus metrics."""
        text, media_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": media_type})

    return routes


def _model(name: str, state: ServerState) -> Model:
    length = state.require_ready().max_model_len
    return Model(id=name, created=state.created, root=state.engine_config.model, max_model_len=length)

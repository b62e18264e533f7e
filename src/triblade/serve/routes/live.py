"""The live page and what it needs beside the metrics: the plan that is served."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, HTTPException, Response

from triblade.serve.drift import PlanWatch
from triblade.serve.live import MEDIA_TYPES, read
from triblade.serve.responses import PlanAnswer, PlanFigure, PlanFinding, problems
from triblade.serve.state import ServerState

# Only our own files, and no frame of another site around them: a page that may hold a key is not for others to drive.
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


def router(state: ServerState, watch: PlanWatch | None) -> APIRouter:
    """The page, its files, and the plan."""
    routes = APIRouter(tags=["server"])

    @routes.get("/", include_in_schema=False)
    async def index() -> Response:
        return _file("index.html")

    @routes.get("/live/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return _file(name)

    @routes.get("/plan", responses=problems(401, 500))
    async def read_plan() -> PlanAnswer:
        """The plan that is served, what it predicts, and how the last requests compare; empty without `serve --plan`."""
        plan = state.plan
        if plan is None or watch is None:
            return PlanAnswer(served=False, prediction=[], findings=[], reasons=[])
        return PlanAnswer(
            served=True,
            prediction=[PlanFigure(**asdict(figure)) for figure in plan.prediction],
            findings=[PlanFinding(**asdict(finding)) for finding in watch.findings],
            reasons=list(plan.reasons),
        )

    return routes


def _file(name: str) -> Response:
    if name not in MEDIA_TYPES:
        raise HTTPException(404)
    return Response(read(name), media_type=MEDIA_TYPES[name], headers=HEADERS)

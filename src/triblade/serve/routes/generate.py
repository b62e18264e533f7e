"""POST /v1/completions, /v1/chat/completions, /v1/responses and /v1/embeddings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from triblade.serve.answer import GenerationResponse
from triblade.serve.errors import called
from triblade.serve.items import NAMES, chat_request
from triblade.serve.jobs import chat_job, completion_job, embedding_job
from triblade.serve.metrics import ServerMetrics
from triblade.serve.protocol import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest
from triblade.serve.refusals import CHAT, COMPLETION, EMBEDDING, RESPONSES, refuse_unsupported
from triblade.serve.render.chat import ChatRenderer
from triblade.serve.render.completions import CompletionRenderer
from triblade.serve.render.embeddings import EmbeddingRenderer
from triblade.serve.render.response import ResponseRenderer
from triblade.serve.responses import ChatCompletion, Completion, Embeddings, ResponseBody, problems
from triblade.serve.state import ServerState
from triblade.serve.strict_json import StrictRoute


def router(state: ServerState, metrics: ServerMetrics) -> APIRouter:
    """The routes that generate."""
    routes = APIRouter(route_class=StrictRoute, tags=["generation"])

    @routes.post("/v1/completions", responses=_answers(Completion), response_class=Response)
    async def create_completion(body: CompletionRequest) -> GenerationResponse:
        """Continue one or several prompts."""
        refuse_unsupported(body.model_extra or {}, COMPLETION)
        job = await completion_job(body, state)
        return GenerationResponse(job, state, metrics, CompletionRenderer)

    @routes.post("/v1/chat/completions", responses=_answers(ChatCompletion), response_class=Response)
    async def create_chat_completion(body: ChatCompletionRequest) -> GenerationResponse:
        """Answer a conversation."""
        refuse_unsupported(body.model_extra or {}, CHAT)
        job = await chat_job(body, state)
        return GenerationResponse(job, state, metrics, ChatRenderer)

    @routes.post("/v1/responses", responses=_answers(ResponseBody), response_class=Response)
    async def create_response(body: ResponsesRequest) -> GenerationResponse:
        """Answer a conversation, as items."""
        refuse_unsupported(body.model_extra or {}, RESPONSES)
        with called(**NAMES):
            job = await chat_job(chat_request(body), state)
        return GenerationResponse(replace(job, id_prefix="resp_"), state, metrics, partial(ResponseRenderer, body))

    @routes.post("/v1/embeddings", responses=_answers(Embeddings, streams=False), response_class=Response)
    async def create_embedding(body: EmbeddingRequest) -> GenerationResponse:
        """A vector for each of one or several prompts."""
        refuse_unsupported(body.model_extra or {}, EMBEDDING)
        with called(prompt="input"):
            job = await embedding_job(body, state)
        return GenerationResponse(job, state, metrics, partial(EmbeddingRenderer, body.encoding_format or "float"))

    return routes


def _answers(model: type[Any], *, streams: bool = True) -> dict[int | str, dict[str, Any]]:
    found: dict[str, Any] = {"model": model, "description": "The answer."}
    if streams:
        fields = {"data": {"type": "string"}, "event": {"type": "string"}}
        event = {"type": "object", "description": "One event.", "properties": fields, "required": ["data"]}
        stream = {"schema": event, "example": 'data: {"choices": [...]}\n\ndata: [DONE]\n\n'}
        found["description"] = "The answer; server-sent events with `stream: true`."
        found["content"] = {"text/event-stream": stream}
    return {200: found, **problems(400, 401, 404, 413, 429, 500, 503)}

"""POST /tokenize, POST /detokenize and GET /tokenizer_info, as vLLM has them. Nothing is computed by the model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from triblade.sampling_params import check_token_ids
from triblade.serve.jobs import chat_token_ids, text_token_ids, token_text
from triblade.serve.problems import JSON_TYPE
from triblade.serve.protocol import DetokenizeRequest, TokenizeRequest
from triblade.serve.responses import Detokenized, Tokenized, TokenizerInfo, problems
from triblade.serve.state import ServerState
from triblade.serve.strict_json import StrictRoute, dumps

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def router(state: ServerState) -> APIRouter:
    """The routes that only use the tokenizer."""
    routes = APIRouter(route_class=StrictRoute, tags=["tokens"])
    errors = problems(400, 401, 404, 413, 429, 500, 503)

    @routes.post("/tokenize", response_class=Response, responses={200: {"model": Tokenized}, **errors})
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or of a conversation."""
        engine = state.require_ready()
        state.resolve_name(body.model)
        if body.messages is not None:
            ids = await chat_token_ids(engine, body, body.messages, state)
        else:
            ids = await text_token_ids(engine, body.prompt or "", body.add_special_tokens)
        strings = [engine.tokenizer.token(token) for token in ids] if body.return_token_strs else None
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
        return Response(dumps({**answer, "token_strs": strings}), media_type=JSON_TYPE)

    @routes.post("/detokenize", response_class=Response, responses={200: {"model": Detokenized}, **errors})
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids, special tokens included."""
        engine = state.require_ready()
        state.resolve_name(body.model)
        check_token_ids("tokens", body.tokens, engine.tokenizer.vocab_size)
        return Response(dumps({"prompt": await token_text(engine, body.tokens)}), media_type=JSON_TYPE)

    @routes.get("/tokenizer_info", responses=problems(401, 500, 503))
    async def tokenizer_info() -> TokenizerInfo:
        """The special tokens and the chat template, for clients that use the server as their tokenizer."""
        tokenizer = state.require_ready().tokenizer
        named = {name: tokenizer.special_tokens.get(name) for name in SPECIAL_NAMES}
        return TokenizerInfo(**named, chat_template=tokenizer.chat_template)

    return routes

"""The bodies of answers as types: for the OpenAPI document, and for the small answers that are made from them.

Generated answers are written by `render/`, token by token, without passing through these types; the tests check them
against the document.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or unknown.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "Too many requests per minute.",
    500: "A fault of the server.",
    503: "Loading, draining, overloaded, timed out, or the engine is dead.",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every answer that is not 200."""

    error: ErrorDetail


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route."""
    return {status: {"model": ErrorBody, "description": REASONS[status]} for status in statuses}


class _Answer(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class PromptTokensDetails(BaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int


class UsageBody(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LegacyLogprobs(BaseModel):
    """Log-probabilities of a completion; the lists run in parallel."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None


class Completion(_Answer):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody


class TopLogprob(BaseModel):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    """What to call; the arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(BaseModel):
    """What the model said; `content` may be null beside calls, and calls and reasoning are left out where there are none."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Answer):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None


class ChatCompletion(_Answer):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody


class InputTokensDetails(PromptTokensDetails):
    """Where input tokens came from."""

    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """What output tokens were."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why the answer was cut."""

    reason: Literal["max_output_tokens"]


class ResponseBody(_Answer):
    """Answer of POST /v1/responses; it repeats what was asked for."""

    model_config = ConfigDict(protected_namespaces=(), extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[dict[str, Any]]
    usage: ResponseUsage


class Embedding(_Answer):
    """The vector of one prompt; base64 text where that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(_Answer):
    """Answer of POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Tokenized(_Answer):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Answer):
    """Answer of POST /detokenize."""

    prompt: str


class TokenizerInfo(_Answer):
    """Answer of GET /tokenizer_info; null is what the model has not."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None


class Model(_Answer):
    """A model, under one of its names."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "triblade"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(_Answer):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Version(_Answer):
    """Answer of GET /version."""

    version: str


class PlanFigure(_Answer):
    """A number that the plan predicts."""

    name: str
    value: float
    unit: str
    label: str


class PlanFinding(_Answer):
    """Something the plan assumes or predicts, and what was seen over the last complete window of requests."""

    name: str
    title: str
    assumed: float
    seen: float
    drifted: bool


class PlanAnswer(_Answer):
    """The plan that is served."""

    served: bool
    prediction: list[PlanFigure]
    findings: list[PlanFinding]
    reasons: list[str]

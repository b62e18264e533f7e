"""From the fields of a request to `SamplingParams`.

A field that a request leaves out takes the server's default: the model's generation config, or the OpenAI API's value.
Knows no tokenizer; ids are checked against the vocabulary by the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from triblade.config import ServerConfig
from triblade.errors import RequestError
from triblade.sampling_params import SamplingParams
from triblade.serve.protocol import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, GenerationBody
from triblade.serve.structured import structured_outputs

logger = logging.getLogger(__name__)

COMPLETION_MAX_TOKENS = 16  # what the OpenAI API says for completions without max_tokens
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # may come from the generation config
PLAIN_FIELDS = (
    "n",
    "seed",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    *MODEL_DEFAULTS,
)
LIST_FIELDS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults that a model's generation config states; values that no request could use are left out."""
    usable = {}
    for name in MODEL_DEFAULTS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except (RequestError, TypeError) as error:
            logger.warning("generation config: ignored %s=%r: %s", name, value, error)
        else:
            usable[name] = value
    return usable


def completion_params(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a completion; `max_tokens` None means the default, which depends on the room the prompt leaves.

    Raises:
        RequestError: naming the field.
    """
    if body.best_of not in (None, 1 if body.n is None else body.n):
        hint = "leave best_of out"
        raise RequestError(f"best_of must be equal to n, got: {body.best_of}", hint=hint, param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 without echo, got: 0", param="max_tokens")
    values = _common(body, defaults)
    values["max_tokens"] = body.max_tokens
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return SamplingParams(**values)


def chat_params(body: ChatCompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a chat completion; without a limit it may fill the context.

    Raises:
        RequestError: naming the field.
    """
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(body, name)
    if limit is not None and limit < 1:
        raise RequestError(f"{name} must be at least 1, got: {limit}", param=name)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    values = _common(body, defaults)
    values["max_tokens"] = limit
    values["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return SamplingParams(**values)


def embedding_params(body: EmbeddingRequest, config: ServerConfig) -> SamplingParams:
    """Parameters of a request for vectors."""
    return SamplingParams(max_tokens=0, pooling=body.pooling or config.embedding_pooling)


def _common(body: GenerationBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed with stream: true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not available with stream: true", param="prompt_logprobs")
    values = dict(defaults)
    values.update({name: getattr(body, name) for name in PLAIN_FIELDS if getattr(body, name) is not None})
    values.update({name: tuple(getattr(body, name)) for name in LIST_FIELDS if getattr(body, name) is not None})
    values["logit_bias"] = _logit_bias(body.logit_bias or {})
    values["prompt_logprobs"] = body.prompt_logprobs
    values["structured_outputs"] = structured_outputs(body)
    return values


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """Token ids are the keys, which JSON makes strings."""
    wrong = next((key for key in biases if not (key.isascii() and key.isdigit() and len(key) <= 10)), None)
    if wrong is not None:
        raise RequestError(f"logit_bias keys must be token ids, got: {wrong[:80]!r}", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}

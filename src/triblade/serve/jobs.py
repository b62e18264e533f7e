"""From a checked body to a `Job`: token ids and sampling parameters for every prompt, and what the answer must show.

Everything that can be wrong with a request is found here, before the first byte of an answer is sent. Long texts are
tokenized in a worker thread, so that other streams keep their pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from triblade.errors import RequestError
from triblade.sampling_params import SamplingParams, check_token_ids
from triblade.serve.chat_answer import chat_reading, held
from triblade.serve.message import PLAIN, Reading
from triblade.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationBody,
    TemplateFields,
)
from triblade.serve.sampling import COMPLETION_MAX_TOKENS, chat_params, completion_params, embedding_params
from triblade.serve.state import ServedEngine, ServerState
from triblade.serve.tools.request import shown_tools, tool_use

INLINE_CHARACTERS = 4096  # tokenized at once (well under a millisecond); a longer text goes to a thread

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt to generate from."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None  # what `echo` shows; None where nothing is echoed


class _ChatPrompt(NamedTuple):
    """A conversation as the template wrote it."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, ready for the engine."""

    id_prefix: str  # of the answer's id, with what parts it from the rest
    model: str  # as the answer names it
    prompts: Sequence[PromptJob]
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    return_speculation: bool = False
    wants_prompt_logprobs: bool = False
    priority: int
    reading: Reading = PLAIN

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.prompts[0].params.n

    @property
    def num_sequences(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.n


async def completion_job(body: CompletionRequest, state: ServerState) -> Job:
    """Prepare a completion.

    Raises:
        RequestError: naming the field at fault.
    """
    engine = state.require_ready()
    model = state.resolve_name(body.model)
    params = completion_params(body, state.defaults)
    prompts = _prompt_list(body.prompt)
    state.check_size(len(prompts) * params.n)
    characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    prepare = partial(_completion_prompts, engine, prompts, params, body)
    return _job(body, model, await _offload(characters + _checking_size(params), prepare))


async def chat_job(body: ChatCompletionRequest, state: ServerState) -> Job:
    """Prepare a chat completion.

    Raises:
        RequestError: naming the field at fault, or in the words of the chat template.
    """
    engine = state.require_ready()
    model = state.resolve_name(body.model)
    params = chat_params(body, state.defaults)
    state.check_size(params.n)
    use = tool_use(body, state.config, engine.tokenizer.tool_template)
    prompt = await _chat_prompt(engine, body, body.messages, state)
    reading = chat_reading(use, state.config, prompt.text, has_form=params.structured_outputs is not None)
    params = held(params, use, reading, engine.tokenizer)
    await _offload(_checking_size(params), partial(engine.check, prompt.token_ids, params))
    return replace(_job(body, model, [PromptJob(prompt.token_ids, params)]), reading=reading)


async def embedding_job(body: EmbeddingRequest, state: ServerState) -> Job:
    """Prepare a request for vectors.

    Raises:
        RequestError: naming the field at fault.
    """
    engine = state.require_ready()
    model = state.resolve_name(body.model)
    params = embedding_params(body, state.config)
    inputs = _prompt_list(body.input)
    state.check_size(len(inputs))
    characters = sum(len(text) for text in inputs if isinstance(text, str))
    return Job(
        id_prefix="embd-",
        model=model,
        prompts=await _offload(characters, partial(_embedding_prompts, engine, inputs, params, body)),
        priority=body.priority or 0,
    )


async def chat_token_ids(
    engine: ServedEngine, body: TemplateFields, messages: list[dict[str, Any]], state: ServerState
) -> list[int]:
    """Token ids of a conversation. The template writes the special tokens; more are added only when asked for.

    Raises:
        RequestError: the messages or the template are wrong, or the template may not come from a request.
    """
    return (await _chat_prompt(engine, body, messages, state)).token_ids


async def _chat_prompt(
    engine: ServedEngine, body: TemplateFields, messages: list[dict[str, Any]], state: ServerState
) -> _ChatPrompt:
    given = body.chat_template is not None or "chat_template" in (body.chat_template_kwargs or {})
    if given and not state.config.trust_request_chat_template:
        raise RequestError(
            "this server takes no chat template from requests",
            hint="leave chat_template out, or start the server with --trust-request-chat-template",
            param="chat_template",
        )
    characters = sum(len(str(message.get("content", ""))) for message in messages)
    return await _offload(characters, partial(_render_and_encode, engine, body, messages))


async def text_token_ids(engine: ServedEngine, text: str, add_special_tokens: bool | None) -> list[int]:
    """Token ids of a text."""
    encode = partial(engine.tokenizer.encode, text, add_special_tokens=add_special_tokens is not False)
    return await _offload(len(text), encode)


async def token_text(engine: ServedEngine, token_ids: list[int]) -> str:
    """Text of token ids, special tokens included."""
    return await _offload(len(token_ids), partial(engine.tokenizer.decode, token_ids, skip_special_tokens=False))


def _checking_size(params: SamplingParams) -> int:
    """Checking a form compiles it, which may take seconds; everything else is quick."""
    return 0 if params.structured_outputs is None else INLINE_CHARACTERS + 1


async def _offload(size: int, work: Callable[[], _Result]) -> _Result:
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)


def _prompt_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # one list of ids: the first element tells
    return list(prompt)


def _completion_prompts(
    engine: ServedEngine, prompts: Sequence[str | list[int]], params: SamplingParams, body: CompletionRequest
) -> list[PromptJob]:
    return [_completion_prompt(engine, prompt, params, body) for prompt in prompts]


def _completion_prompt(
    engine: ServedEngine, prompt: str | list[int], params: SamplingParams, body: CompletionRequest
) -> PromptJob:
    token_ids = _token_ids(engine, prompt, body.add_special_tokens)
    if params.max_tokens is None:
        room = max(1, engine.max_model_len - len(token_ids))
        params = replace(params, max_tokens=min(COMPLETION_MAX_TOKENS, room))
    engine.check(token_ids, params)
    return PromptJob(token_ids, params, _echoed(engine, prompt, params) if body.echo else None)


def _embedding_prompts(
    engine: ServedEngine, inputs: Sequence[str | list[int]], params: SamplingParams, body: EmbeddingRequest
) -> list[PromptJob]:
    prompts = [PromptJob(_token_ids(engine, given, body.add_special_tokens), params) for given in inputs]
    for prompt in prompts:
        engine.check(prompt.token_ids, params)
    return prompts


def _token_ids(engine: ServedEngine, prompt: str | list[int], add_special_tokens: bool | None) -> list[int]:
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False)
    check_token_ids("prompt", prompt, engine.tokenizer.vocab_size)
    return prompt


def _echoed(engine: ServedEngine, prompt: str | list[int], params: SamplingParams) -> str:
    if isinstance(prompt, str):
        return prompt
    return engine.tokenizer.decode(prompt, skip_special_tokens=params.skip_special_tokens)


def _render_and_encode(engine: ServedEngine, body: TemplateFields, messages: list[dict[str, Any]]) -> _ChatPrompt:
    go_on = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    text = engine.tokenizer.render_chat(
        messages,
        add_generation_prompt=not go_on if opens is None else opens,
        continue_final_message=go_on,
        chat_template=body.chat_template,
        tools=shown_tools(body),
        template_kwargs=body.chat_template_kwargs,
    )
    return _ChatPrompt(text, engine.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens)))


def _job(body: GenerationBody, model: str, prompts: Sequence[PromptJob]) -> Job:
    return Job(
        id_prefix="cmpl-" if isinstance(body, CompletionRequest) else "chatcmpl-",
        model=model,
        prompts=prompts,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        return_speculation=bool(body.return_speculation),
        wants_prompt_logprobs=body.prompt_logprobs is not None,
        priority=body.priority or 0,
    )

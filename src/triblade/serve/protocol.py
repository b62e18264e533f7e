"""The bodies of requests, field by field: names and types, nothing about models.

Types are strict (a number in quotes is an error), null means "not given". Ranges are checked where the values are
used (`SamplingParams`, the engine), so that they exist once. Fields not listed here stay in `model_extra`;
`refusals.py` decides which of them may be ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from triblade.sampling_params import Pooling

MAX_SAFE_FLOAT = 2**53  # whole numbers up to here survive being written as 1.0


def _whole(value: Any) -> Any:
    """Take 3.0 for 3, as JSON does; larger floats have lost digits and stay floats, which are refused."""
    if isinstance(value, float) and abs(value) <= MAX_SAFE_FLOAT and value.is_integer():
        return int(value)
    return value


Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), BeforeValidator(_whole)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1), BeforeValidator(_whole)]


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    ids = [_whole(token) for token in value]
    for token in ids:
        if type(token) is not int:
            raise ValueError("must be a list of token ids")
    return ids


def _prompt(value: Any) -> str | list[str] | list[int] | list[list[int]]:
    """Told apart by the first element: four validators in turn would each complain about every token."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists; not empty")
    if isinstance(value[0], str):
        if not all(isinstance(text, str) for text in value):
            raise ValueError("must not mix strings with anything else")
        return value
    if isinstance(value[0], list):
        return [_token_ids(ids) for ids in value]
    return _token_ids(value)


def _stop(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise ValueError("must be a string or a list of strings")
    return strings


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stop = Annotated[list[str], PlainValidator(_stop, json_schema_input_type=str | list[str])]
TokenIds = Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[int])]


EncodingFormat = Literal["float", "base64"]


class RequestBody(BaseModel):
    """What every body has."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, description="A name from /v1/models; default: the first one.")


class StreamOptions(BaseModel):
    """`stream_options` of a streamed request."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(None, description="Send one more chunk with the usage and without choices.")


class ChoiceFields(RequestBody):
    """How many choices there are, and how they are sent."""

    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    n: Integer | None = Field(None, description="Number of choices per prompt; default 1.")


class SamplingFields(RequestBody):
    """How tokens are chosen, of everything that is answered with text."""

    seed: Seed | None = None
    stop: Stop | None = Field(None, description="Strings that end a choice; not part of the answer.")
    temperature: float | None = Field(None, description="0 is greedy; default 1, or the model's.")
    top_p: float | None = None
    top_k: Integer | None = Field(None, description="0 or -1: all.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    priority: Integer | None = Field(None, description="Lower is served first; default 0.")


class GenerationBody(SamplingFields, ChoiceFields):
    """Fields that completions and chat completions share."""

    logit_bias: dict[str, float] | None = Field(None, description="Token id (a string of digits) -> -100 to 100.")
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: Integer | None = None
    max_tokens: Integer | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Integer | None = Field(None, description="Log-probabilities of the prompt; not with stream.")
    return_token_ids: bool | None = Field(None, description="Add the ids of prompt and answer.")
    return_speculation: bool | None = Field(None, description="Add what was drafted and accepted, step by step.")
    response_format: dict[str, Any] | None = Field(None, description="type text, json_object or json_schema.")
    structured_outputs: dict[str, Any] | None = Field(None, description="One of json, regex, choice, grammar.")
    guided_json: dict[str, Any] | str | None = Field(None, description="A JSON schema.")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="EBNF; the first rule is root.")


class CompletionRequest(GenerationBody):
    """Body of POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "smollm2-135m", "prompt": "Paris is the capital of", "max_tokens": 8}]
        }
    )

    prompt: Prompt
    add_special_tokens: bool | None = Field(None, description="Apply the tokenizer's own rule; default true.")
    echo: bool | None = Field(None, description="Put the prompt before the answer.")
    logprobs: Integer | None = Field(None, description="Number of alternatives per token.")
    best_of: Integer | None = Field(None, description="Only the value of n.")


Messages = Annotated[list[dict[str, Any]], Field(description="Objects with `role` and `content`.")]


class TemplateFields(RequestBody):
    """How the chat template is applied."""

    add_generation_prompt: bool | None = Field(None, description="Open an assistant message; default true.")
    continue_final_message: bool | None = Field(None, description="Leave the last message open.")
    add_special_tokens: bool | None = Field(None, description="Default false for messages, true for text.")
    chat_template: str | None = Field(None, description="Only where the server allows it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the template.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")


class ChatCompletionRequest(TemplateFields, GenerationBody):
    """Body of POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}]
        }
    )

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(None, description="Number of alternatives per token; needs logprobs.")
    tool_choice: dict[str, Any] | str | None = Field(None, description="auto, none, required, or a function.")
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls; default true.")
    max_completion_tokens: Integer | None = Field(None, description="Takes precedence over max_tokens.")


class TokenizeRequest(TemplateFields):
    """Body of POST /tokenize: a text or a conversation."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Hello"}]})

    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages must be given")
        return self


class ResponsesRequest(SamplingFields):
    """Body of POST /v1/responses; nothing is stored, so a conversation is sent whole."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "smollm2-135m", "input": "Hello"}]})

    input: str | list[dict[str, Any]] = Field(
        description="A text, or items: messages, calls, their results, reasoning."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = Field(
        None, description="Default: the rest of the context."
    )
    text: dict[str, Any] | None = Field(None, description="`format`: type text, json_object or json_schema.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: dict[str, Any] | str | None = Field(None, description="auto, none, required, or a function.")
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls; default true.")
    reasoning: dict[str, Any] | None = Field(None, description="Sent back as it is.")
    metadata: dict[str, Any] | None = Field(None, description="Sent back as it is.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")


class EmbeddingRequest(RequestBody):
    """Body of POST /v1/embeddings."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "smollm2-135m", "input": "Paris is a city."}]})

    input: Prompt
    encoding_format: EncodingFormat | None = Field(
        None, description="base64 is of float32, little-endian; default float."
    )
    pooling: Pooling | None = Field(None, description="Of the last token, or the mean of all; default: the server's.")
    add_special_tokens: bool | None = Field(None, description="Apply the tokenizer's own rule; default true.")
    priority: Integer | None = Field(None, description="Lower is served first; default 0.")


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})

    tokens: TokenIds

"""From a body of POST /v1/responses to the chat request that means the same.

Knows no model: what is wrong with a conversation, a tool or a form is found where chat requests are read; here only what has
another shape is rewritten. Invariant: a turn of the model that came back as several items (reasoning, text, calls) is one message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triblade.errors import RequestError
from triblade.models.chat_template import content_text
from triblade.serve.protocol import ChatCompletionRequest, ResponsesRequest

Message = dict[str, Any]
Item = Mapping[str, Any]

# Fields that both bodies have, with one meaning.
SHARED = frozenset(
    {"model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "priority", "parallel_tool_calls"}
    | {"presence_penalty", "frequency_penalty", "repetition_penalty", "chat_template_kwargs"}
)
ROLES = {"developer": "system"}  # chat templates know only the older name
# Chat field -> the field of the body that it was made of.
NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def chat_request(body: ResponsesRequest) -> ChatCompletionRequest:
    """The chat request.

    Raises:
        RequestError: an item, a tool or the form of the text is not understood; `param` names it.
    """
    fields = {name: getattr(body, name) for name in SHARED}
    return ChatCompletionRequest(
        **fields,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format((body.text or {}).get("format")),
    )


def _messages(body: ResponsesRequest) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items: Sequence[Item] = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type") or ("message" if "role" in item else None)
        add = ADDERS.get(kind) if isinstance(kind, str) else None
        if add is None:
            known = ", ".join(ADDERS)
            raise RequestError(f"{where}.type must be one of {known}, got: {kind!r:.80}", param=where)
        add(messages, item, where)
    return messages


def _add_message(messages: list[Message], item: Item, where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be a string, got: {role!r:.80}", param=where)
    content = content_text(item.get("content"), f"{where}.content")
    if role == "assistant" and messages and messages[-1].keys() == {"role", "reasoning_content"}:
        messages[-1]["content"] = content
    else:
        messages.append({"role": ROLES.get(role, role), "content": content})


def _add_reasoning(messages: list[Message], item: Item, where: str) -> None:
    """What the model thought begins its turn; where only a summary came back, that stands for it."""
    text = content_text(item.get("content") or item.get("summary"), f"{where}.content")
    if text:
        messages.append({"role": "assistant", "reasoning_content": text})


def _add_call(messages: list[Message], item: Item, where: str) -> None:
    call = {"id": _text(item, "call_id", where), "type": "function"}
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append({**call, "function": function})


def _add_result(messages: list[Message], item: Item, where: str) -> None:
    content = content_text(item.get("output"), f"{where}.output")
    messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})


ADDERS: Mapping[str, Callable[[list[Message], Item, str], None]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_result,
}


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string, got: {value!r:.80}", param=f"{where}.{name}")
    return value


def _tool(tool: Item, where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"{where}: this server has no tools of its own, got type: {tool.get('type')!r:.80}"
        raise RequestError(message, hint="declare functions, and call them yourself", param=where)
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | str | None) -> dict[str, Any] | str | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: Any) -> dict[str, Any] | None:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form if form is None or isinstance(form, dict) else {"type": form}
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}

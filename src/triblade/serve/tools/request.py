"""The tools of a request, checked: which may be called, whether one must be, and how this model writes calls.

Knows no text of an answer. A request that forces a call needs no parser, since a grammar writes the call; one that leaves it to the
model needs to know how the model does it, and is refused where that is not known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triblade.config import ServerConfig
from triblade.errors import RequestError
from triblade.serve.protocol import ChatCompletionRequest, TemplateFields
from triblade.serve.tools.formats import ToolFormat, find_format, plain_json
from triblade.structured.json_schema import ANY_OBJECT, narrowed

MAX_TOOLS = 128
MAX_NAME = 128  # characters
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called; `schema` is what a grammar holds its arguments to, as JSON text."""

    name: str
    schema: str
    is_strict: bool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about calls."""

    format: ToolFormat
    tools: Sequence[Tool]
    is_forced: bool
    single: bool

    @property
    def is_held(self) -> bool:
        """Whether a grammar keeps calls well formed: forced ones, and those to strict functions where their beginning is text."""
        is_text = not (self.format.opener and self.format.in_list)
        return self.is_forced or (is_text and any(tool.is_strict for tool in self.tools))


def shown_tools(body: TemplateFields) -> list[dict[str, Any]] | None:
    """The tools that the chat template is given: all of them, or none where none may be called."""
    return None if isinstance(body, ChatCompletionRequest) and body.tool_choice == "none" else body.tools


def tool_use(body: ChatCompletionRequest, config: ServerConfig, template: str | None) -> ToolUse | None:
    """What a request asks for; None where nothing may be called.

    Args:
        body: the request.
        config: names the parser.
        template: the chat template, which an unnamed parser is found by.

    Raises:
        RequestError: tools or tool_choice are wrong, or nobody knows how this model writes calls.
    """
    tools = _tools(body.tools or [])
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if choice == "none":
        return None
    is_forced = choice != "auto"
    if isinstance(choice, dict):
        tools = [_named(choice, tools)]
    elif choice not in ("auto", "required"):
        raise _wrong(f"tool_choice must be auto, none, required or a function, got: {choice!r:.80}", "tool_choice")
    if not tools:
        if is_forced:
            raise _wrong("tool_choice needs tools", "tool_choice")
        return None
    found = find_format(config.tool_call_parser, template)
    if not is_forced and (found is None or not config.enable_auto_tool_choice):
        raise _not_known(found is None)
    single = body.parallel_tool_calls is False or isinstance(choice, dict)
    return ToolUse(found or plain_json(), tools, is_forced, single)


def _tools(given: Sequence[Mapping[str, Any]]) -> list[Tool]:
    if len(given) > MAX_TOOLS:
        raise _wrong(f"at most {MAX_TOOLS} tools, got: {len(given)}", "tools")
    tools = [_tool(definition, f"tools[{number}]") for number, definition in enumerate(given)]
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _wrong(f"two tools have the same name: {twice!r}", "tools")
    return tools


def _tool(definition: Mapping[str, Any], where: str) -> Tool:
    function = definition.get("function")
    if definition.get("type") != "function" or not isinstance(function, Mapping):
        raise _wrong(f"{where} must be an object with type: function and a function", where)
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise _wrong(f"{where}.function.name must be 1 to {MAX_NAME} printable characters, got: {name!r:.80}", where)
    is_strict = function.get("strict") is True
    parameters = NO_PARAMETERS if function.get("parameters") is None else function["parameters"]
    return Tool(name, _schema(parameters, is_strict, f"{where}.function.parameters"), is_strict)


def _schema(parameters: Any, is_strict: bool, where: str) -> str:
    """What arguments are held to: any object where a grammar cannot hold them to more and nobody asked it to."""
    text = json.dumps(parameters)
    try:
        if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
            raise RequestError("a function's parameters must be a JSON schema with type: object")
        narrowed(text)
    except RequestError as error:
        if is_strict or not isinstance(parameters, Mapping):
            raise RequestError(f"{where}: {error.message}", hint=error.hint, param=where) from error
        return ANY_OBJECT
    return text


def _named(choice: Mapping[str, Any], tools: Sequence[Tool]) -> Tool:
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, Mapping):
        raise _wrong("tool_choice must be auto, none, required, or an object with type: function", "tool_choice")
    found = next((tool for tool in tools if tool.name == function.get("name")), None)
    if found is None:
        raise _wrong(f"tool_choice names no tool of the request: {function.get('name')!r:.80}", "tool_choice")
    return found


def _not_known(is_unknown: bool) -> RequestError:
    if is_unknown:
        message = "tool_choice auto: this model's chat template does not say how it writes calls"
        hint = "start the server with --tool-call-parser, or send tool_choice: required"
        return RequestError(message, hint=hint, param="tool_choice")
    hint = "start the server with --enable-auto-tool-choice, or send tool_choice: required"
    return RequestError("tool_choice auto is turned off on this server", hint=hint, param="tool_choice")


def _wrong(message: str, param: str) -> RequestError:
    return RequestError(message, param=param)

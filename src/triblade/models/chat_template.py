"""Chat templates: Jinja programs that model authors ship, rendered in a sandbox.

Knows no tokenizer and no model. A template is other people's code: whatever it raises becomes a RequestError that has
the template's own words, and nothing of it survives the call. Message content reaches a template in the one form it
can read: a string, or a list of parts for the templates that iterate over parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, TypedDict

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triblade.errors import RequestError

Messages = Sequence[Mapping[str, Any]]

# Part type -> the key that holds its text. Other types (images, audio) are refused by name.
# Type of a part -> its field; the later ones are those of the Responses API.
_TEXT_PARTS = {"text": "text", "refusal": "refusal"} | dict.fromkeys(
    ("input_text", "output_text", "reasoning_text", "summary_text"), "text"
)
_PROBE = "triblade probe"
# Ends in a space, so that a template that trims the message shows by its absence.
_CONTINUE_MARK = "\ue000continue here\ue001 "


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of `Tokenizer.render_chat`."""

    add_generation_prompt: bool
    """End with the opening of an assistant message. Default: true."""
    continue_final_message: bool
    """Leave the last message open, so that the model goes on with it. Default: false."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tool definitions, handed to the template as they are."""
    chat_template: str | None
    """A template for this call: source, or the name of one of the model's own."""
    template_kwargs: Mapping[str, Any] | None
    """More variables for the template."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for rendering it is its body."""

    tags = frozenset(("generation",))  # type: ignore[assignment]  # only looked up in

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Raises:
        RequestError: from the constructor, when the source is not valid Jinja.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template is not valid: {error}", param="chat_template") from error

    def render(self, messages: Messages, variables: Mapping[str, Any]) -> str:
        """The conversation as prompt text. `variables` are the template's other inputs (`tools`, `bos_token`, ...)."""
        normal = normalize_messages(messages, as_parts=self.wants_parts)
        return self._render(normal, variables)

    def render_open(self, messages: Messages, variables: Mapping[str, Any]) -> str:
        """Like `render`, cut off right after the text of the last message.

        Raises:
            RequestError: the template does not show that text unchanged.
        """
        normal = normalize_messages(messages, as_parts=self.wants_parts)
        final_text = _append_text(normal[-1], _CONTINUE_MARK)
        text = self._render(normal, {**variables, "add_generation_prompt": False})
        end = text.rfind(_CONTINUE_MARK.rstrip())
        if end < 0 or final_text.strip() not in text:
            raise RequestError(
                "the last message cannot be continued: the chat template does not show its text unchanged",
                param="continue_final_message",
            )
        trimmed = not text.startswith(_CONTINUE_MARK, end)
        return text[:end].rstrip() if trimmed else text[:end]

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template shows content given as parts but not content given as a string."""
        return not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: Any) -> bool:
        try:
            return _PROBE in self._render([{"role": "user", "content": content}], {"add_generation_prompt": False})
        except RequestError:
            return False

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render({"tools": None, "documents": None, **variables, "messages": messages})
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error
        except Exception as error:  # a template can raise anything: it is a program
            text = f"the chat template failed: {type(error).__name__}: {error}"
            raise RequestError(text, param="messages") from error


def normalize_messages(messages: Messages, *, as_parts: bool) -> list[dict[str, Any]]:
    """Copies of the messages with content as text (or as a list of text parts) and tool arguments as objects.

    Raises:
        RequestError: naming the message and the field that is not understood.
    """
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    return [_normalize(message, f"messages[{i}]", as_parts) for i, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], where: str, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a role, got: {message!r:.200}", param=where)
    text = content_text(message.get("content"), f"{where}.content")
    normal = {key: value for key, value in message.items() if value is not None}
    normal["content"] = [{"type": "text", "text": text}] if as_parts else text
    if "tool_calls" in normal:
        normal["tool_calls"] = _tool_calls(normal["tool_calls"], f"{where}.tool_calls")
    return normal


def content_text(content: Any, where: str) -> str:
    """The text of a message's content: a string, None (empty), or text parts joined in order without a separator.

    Raises:
        RequestError: for a part that is not text, naming its type.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        kind = type(content).__name__
        raise RequestError(f"{where} must be a string or a list of parts, got: {kind}", param=where)
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        hint = 'this model reads text only: send parts of the form {"type": "text", "text": "..."}'
        raise RequestError(f"{where}: unknown content part type: {kind!r}", hint=hint, param=where)
    text = part.get(key)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{key} must be a string, got: {text!r:.200}", param=f"{where}.{key}")
    return text


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """Clients send a call's arguments as JSON text; templates expect the object."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where} must be a list, got: {calls!r:.200}", param=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be an object with a function and its name, got: {call!r:.200}", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            where = f"{where}.function.arguments"
            raise RequestError(f"{where} is not valid JSON: {arguments!r:.200}", param=where) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _append_text(message: dict[str, Any], suffix: str) -> str:
    """Add `suffix` to a normalized message's text and return the text it had."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + suffix
        return content
    text: str = content[-1]["text"]
    message["content"] = [*content[:-1], {"type": "text", "text": text + suffix}]
    return text


def _environment() -> jinja2.Environment:
    """The names and whitespace rules that published chat templates are written against."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

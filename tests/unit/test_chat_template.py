"""Chat templates: what clients may send, what templates may do, and whose words an error carries."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from triblade.errors import RequestError
from triblade.models.chat_template import ChatTemplate, content_text

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
PARTS_ONLY = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, variables)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_block_whitespace_is_trimmed_as_templates_expect() -> None:
    assert render("{% if true %}\n  a\n    {% endif %}\nb") == "  a\nb"


@pytest.mark.parametrize("source", [PLAIN, PARTS_ONLY, EITHER])
def test_a_list_of_text_parts_is_the_same_as_their_text(source: str) -> None:  # D17
    as_string = render(source, [{"role": "user", "content": "Hello, world <3"}])
    assert "Hello, world <3" in as_string
    assert render(source, [{"role": "user", "content": parts("Hello, ", "world ", "<3")}]) == as_string


def test_a_template_that_reads_parts_only_gets_parts() -> None:  # D17
    assert ChatTemplate(PARTS_ONLY).wants_parts
    assert not ChatTemplate(EITHER).wants_parts
    assert not ChatTemplate(PLAIN).wants_parts
    assert render(PARTS_ONLY) == "user:[hi]"


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "wave"}, {"text": "a"}, "a", 7]
)
def test_unknown_part_types_are_named(part: Any) -> None:  # D17
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    with pytest.raises(
        RequestError, match=re.escape(f"messages[1].content[2]: unknown content part type: {kind!r}")
    ) as error:
        render(PLAIN, [*HI, {"role": "user", "content": [*parts("a", "b"), part]}])
    assert error.value.param == "messages[1].content[2]"
    assert error.value.http_status == 400


@pytest.mark.parametrize("content", [7, {"type": "text", "text": "a"}, b"raw", [{"type": "text", "text": 3}]])
def test_content_of_other_kinds_is_refused(content: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content"):
        render(PLAIN, [{"role": "user", "content": content}])


def test_absent_content_is_empty() -> None:
    assert render(PLAIN, [{"role": "assistant", "content": None}, {"role": "user"}]) == "<assistant>\n<user>\n"
    assert content_text(None, "x") == ""


@pytest.mark.parametrize("messages", [[], [{}], ["hi"], [{"role": 1, "content": "a"}], [{"content": "a"}]])
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        render(PLAIN, messages)


GEMMA_RULES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System message must be first') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (["system", "user"], "System role not supported"),
        (["user", "user"], "Conversation roles must alternate user/assistant/..."),
        (["user", "system", "user"], "System message must be first"),
    ],
)
def test_a_templates_refusal_reaches_the_client_in_its_words(roles: list[str], words: str) -> None:  # D16
    with pytest.raises(RequestError, match=re.escape(words)) as error:
        render(GEMMA_RULES, [{"role": role, "content": "x"} for role in roles])
    assert error.value.http_status == 400
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ missing.thing }}", "'missing' is undefined"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
    ],
)
def test_faults_and_escapes_of_a_template_are_request_errors(source: str, said: str) -> None:  # D16
    with pytest.raises(RequestError, match=said):
        render(source)


def test_invalid_source_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="chat template is not valid"):
        ChatTemplate("{% if %}")


def test_messages_of_the_caller_are_not_changed() -> None:
    messages = [{"role": "assistant", "content": parts("a"), "tool_calls": [call('{"x": 1}')]}]
    ChatTemplate(PLAIN).render_open(messages, {})
    assert messages == [{"role": "assistant", "content": parts("a"), "tool_calls": [call('{"x": 1}')]}]


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


TOOLS = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("arguments", ['{"city": "Köln <b>"}', {"city": "Köln <b>"}])
def test_tool_arguments_are_objects_and_json_is_not_escaped(arguments: Any) -> None:
    assert render(TOOLS, [{"role": "assistant", "tool_calls": [call(arguments)]}]) == '{"city": "Köln <b>"}'


@pytest.mark.parametrize("calls", [7, "x", ["x"], [{"function": "f"}], [call("{")]])
def test_malformed_tool_calls_are_refused(calls: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls"):
        render(TOOLS, [{"role": "assistant", "tool_calls": calls}])


def test_helpers_that_templates_use() -> None:
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b") == "a2b"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ {'b': 1, 'a': [1, 2]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  1,\n  2\n ]\n}'
    assert render("{{ bos_token }}{{ eos_token }}|", bos_token="<s>") == "<s>|"


def test_continuing_the_last_message_cuts_behind_its_text() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    messages = [*HI, {"role": "assistant", "content": "Sure, "}]
    assert (
        ChatTemplate(source).render_open(messages, {"add_generation_prompt": True}) == "<user>hi</s><assistant>Sure, "
    )
    trimmed = source.replace("m.content", "m.content | trim")
    assert ChatTemplate(trimmed).render_open(messages, {}) == "<user>hi</s><assistant>Sure,"


def test_a_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="cannot be continued") as error:
        ChatTemplate("{{ messages[0].content }}").render_open([*HI, {"role": "assistant", "content": "x"}], {})
    assert error.value.param == "continue_final_message"

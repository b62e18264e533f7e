"""Forms of calls and reasoning, compiled and followed by tiny random models: every answer is read back as what was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from constrained import END, answers, byte_tokenizer, engine, form

from triblade.config import ServerConfig
from triblade.llm import LLM
from triblade.registry import TOOL_CALL_PARSERS
from triblade.sampling_params import SamplingParams, StructuredOutputs
from triblade.serve.chat_answer import chat_reading, held
from triblade.serve.message import MessageReader, Reading
from triblade.serve.pieces import Message
from triblade.serve.protocol import ChatCompletionRequest
from triblade.serve.tools.request import tool_use
from triblade.spec.token_mask import has_any
from triblade.structured.composed import composed, part_of

PARAMETERS: dict[str, Any] = {
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"enum": [1, 2]},
    },
    "required": ["city", "unit"],
}
FREE: dict[str, Any] = {"type": "object", "properties": {"a": {"uniqueItems": True}}}  # no grammar holds it
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}},
    {
        "type": "function",
        "function": {"name": "wea", "parameters": {"type": "object", "properties": {"x": {"const": 1}}}},
    },
]
LOOSE = [{"type": "function", "function": {"name": "free", "parameters": FREE}}]
CHANCES = 12


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = engine()
    yield llm
    llm.engine.check_idle()


def planned(parser: str, prompt: str = "", **fields: Any) -> tuple[StructuredOutputs, Reading]:
    """What a request with these fields is held to, and how its answers are read."""
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **{"tools": TOOLS, **fields})
    config = ServerConfig(tool_call_parser=parser, reasoning_parser="qwen3" if prompt else "none")
    use = tool_use(body, config, None)
    wanted = form("json_schema", {"const": "yes"}) if fields.get("response_format") else None
    reading = chat_reading(use, config, prompt, has_form=wanted is not None)
    params = held(SamplingParams(structured_outputs=wanted), use, reading, byte_tokenizer())
    assert params.structured_outputs is not None
    return params.structured_outputs, reading


def messages(llm: LLM, wanted: StructuredOutputs, reading: Reading, **params: Any) -> list[dict[str, Any]]:
    """The messages of finished answers, each read at once and letter by letter."""
    found = []
    for answer in answers(llm, [wanted] * CHANCES, **params):
        if answer.finish_reason != "stop":
            continue
        told = []
        for texts in ([answer.text], list(answer.text)):
            reader, message = MessageReader(reading), Message()
            for text in [*texts, ""]:
                message.add(reader.feed(text, is_last=not text))
            for call in message.calls:
                del call["id"]
            told.append(message.as_json())
        assert told[0] == told[1]
        found.append(told[0])
    assert len(found) > CHANCES // 4
    return found


def calls_in(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_forced_calls_are_valid(llm: LLM, parser: str) -> None:
    wanted, reading = planned(parser, tool_choice="required", parallel_tool_calls=False)
    named, named_reading = planned(parser, tool_choice={"type": "function", "function": {"name": "weather"}})
    seen = set()
    for message in [*messages(llm, wanted, reading), *messages(llm, named, named_reading)]:
        assert message["content"] is None
        ((name, arguments),) = calls_in(message)
        seen.add(name)
        if name == "weather":
            assert jsonschema_rs.is_valid(PARAMETERS, arguments), arguments
        else:
            assert arguments in ({}, {"x": 1})
    assert "weather" in seen


def accepts(llm: LLM, wanted: StructuredOutputs, text: str) -> bool:
    """Whether this is a whole answer of the form."""
    assert llm.engine.compile is not None
    constraint = llm.engine.compile(wanted, frozenset({END}))()
    return all(constraint.accept(token) for token in byte_tokenizer().encode(text)) and has_any(
        constraint.allowed(), [END]
    )


def written(parser: str, *calls: tuple[str, str]) -> str:
    """Calls as a grammar writes them."""
    key = "parameters" if parser == "llama3_json" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if parser == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    return "; ".join(objects) if parser == "llama3_json" else f"[{', '.join(objects)}]"


def read(reading: Reading, text: str) -> dict[str, Any]:
    message = Message()
    message.add(MessageReader(reading).feed(text, is_last=True))
    return message.as_json()


GOOD, OTHER = ("weather", '{"city": "Rome", "unit": "C"}'), ("wea", '{"x": 1}')


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_several_calls(llm: LLM, parser: str) -> None:
    wanted, reading = planned(parser, tool_choice="required")
    assert accepts(llm, wanted, written(parser, GOOD, OTHER, GOOD))
    assert calls_in(read(reading, written(parser, GOOD, OTHER))) == [
        (name, json.loads(text)) for name, text in (GOOD, OTHER)
    ]
    assert not accepts(llm, wanted, "")
    assert not accepts(llm, wanted, written(parser, ("weather", '{"city": "Rome"}')))
    single, _ = planned(parser, tool_choice="required", parallel_tool_calls=False)
    assert accepts(llm, single, written(parser, OTHER))
    assert not accepts(llm, single, written(parser, GOOD, OTHER))
    named, _ = planned(parser, tool_choice={"type": "function", "function": {"name": "wea"}})
    assert not accepts(llm, named, written(parser, GOOD))


def test_a_schema_that_no_grammar_holds_becomes_any_object(llm: LLM) -> None:
    wanted, _ = planned("hermes", tools=LOOSE, tool_choice="required")
    assert accepts(llm, wanted, written("hermes", ("free", '{"a": [1, 1], "b": {}}')))
    assert not accepts(llm, wanted, written("hermes", ("free", "[]")))


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "json"])
def test_strict_functions_where_the_model_decides(llm: LLM, parser: str) -> None:
    """Text is free; whatever begins like a call is one."""
    wanted, reading = planned(parser, tool_choice="auto")
    assert reading.calls is not None
    assert reading.calls.is_held
    assert accepts(llm, wanted, "Hello, [world]! <b> {} ")
    assert accepts(llm, wanted, written(parser, GOOD, OTHER))
    assert not accepts(llm, wanted, written(parser, ("weather", "{}")))
    assert not accepts(llm, wanted, written(parser, ("unknown", "{}")))
    if parser == "hermes":
        assert accepts(llm, wanted, f"I look.\n{written(parser, GOOD)}\nDone.")


def test_calls_that_begin_with_a_special_token_are_not_held() -> None:
    body = ChatCompletionRequest(messages=[], tools=TOOLS)
    use = tool_use(body, ServerConfig(tool_call_parser="mistral"), None)
    assert use is not None
    assert not use.is_held


@pytest.mark.parametrize("is_open", [True, False])
def test_a_form_begins_behind_reasoning(llm: LLM, is_open: bool) -> None:
    wanted, reading = planned(
        "hermes", "...<think>\n" if is_open else "...", tools=None, response_format={"type": "json_object"}
    )
    thought = "So <b> </thin {" if is_open else "<think>\nSo <b> </thin {"
    assert accepts(llm, wanted, f'{thought}</think>\n\n"yes"')
    assert not accepts(llm, wanted, f"{thought}</think>\n\nno")
    assert accepts(llm, wanted, '"yes"') is not is_open
    assert read(reading, f'{thought}</think>\n\n"yes"')["content"] == '"yes"'


def test_a_prompt_that_ends_behind_reasoning_leaves_the_form(llm: LLM) -> None:
    wanted, reading = planned("hermes", "<think></think>\n\n", tools=None, response_format={"type": "json_object"})
    assert reading.markers is None
    assert [message["content"] for message in messages(llm, wanted, reading)] == ['"yes"'] * CHANCES


def test_calls_or_a_form(llm: LLM) -> None:
    wanted, reading = planned("hermes", response_format={"type": "json_object"}, parallel_tool_calls=False)
    found = messages(llm, wanted, reading)
    assert all(message["content"] == '"yes"' or calls_in(message) for message in found)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_object", ""), ("regex", "[ab]{3}"), ("choice", ["x", "y"]), ("grammar", 'root ::= "q" | "z"')],
)
def test_every_form_is_a_part(llm: LLM, kind: str, text: Any) -> None:
    part = part_of(form(kind, text))
    assert part_of(composed(part)) == part
    found = answers(llm, [composed(part)] * 6)
    ended = [answer.text for answer in found if answer.finish_reason == "stop"]
    assert ended
    for said in ended:
        if kind == "json_object":
            assert isinstance(json.loads(said), dict)
        else:
            assert said in ("x", "y", "q", "z") or (len(said) == 3 and set(said) <= {"a", "b"})

"""Tools and reasoning over HTTP: what the model is shown and held to, and that streamed and whole answers say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_client import FakeClient, FakeTokenizer, Script
from live_server import Live, live_server
from openai import OpenAI

from triblade.config import ServerConfig
from triblade.errors import ConfigError
from triblade.serve.pieces import Message

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Look it up.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
STRICT: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
SHOWN = "tool weather\ntool time\n"


def prompt(text: str, shown: str = SHOWN) -> str:
    return f"{shown}user: {text}\nassistant: "


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    engine = FakeClient(max_model_len=1024)
    engine.scripts[prompt("call")] = Script(CALLS.encode())
    engine.scripts[prompt("cut")] = Script(CALLS.encode()[:60])
    engine.scripts[prompt("think")] = Script(f"<think>\nHm, so.</think>\n\n{CALLS}".encode())
    with live_server(engine, reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with live.client() as openai:
        yield openai


def ask(client: OpenAI, text: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="fake", messages=messages, **{"tools": TOOLS, **options})


def whole(client: OpenAI, text: str, **options: Any) -> tuple[Any, ...]:
    """(content, reasoning, calls, reason) of an answer."""
    choice = ask(client, text, **options).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    reasoning = (choice.message.model_extra or {}).get("reasoning_content", "")
    return choice.message.content, reasoning, calls, choice.finish_reason


def streamed(client: OpenAI, text: str, **options: Any) -> tuple[Any, ...]:
    """The same, out of the deltas of a stream."""
    content, reasoning, calls, reasons = "", "", list[list[str]](), list[str]()
    for chunk in ask(client, text, stream=True, **options):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert (call.type, call.index, call.function.arguments) == ("function", len(calls), "")
                calls.append([call.function.name, ""])
            else:
                calls[call.index][1] += call.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    (reason,) = reasons
    return content or None, reasoning, [tuple(call) for call in calls], reason


@pytest.mark.parametrize("read", [whole, streamed])
def test_calls(client: OpenAI, read: Any) -> None:  # D18
    calls = [("weather", '{"city": "Köln"}'), ("time", "{}")]
    assert read(client, "call") == ("Let me see.", "", calls, "tool_calls")
    assert read(client, "call", parallel_tool_calls=False)[2] == calls[:1]
    assert read(client, "think") == ("Let me see.", "Hm, so.", calls, "tool_calls")
    assert read(client, "cut") == (CALLS.encode()[:60].decode(), "", [], "stop")  # a call that never ends
    assert read(client, "call", max_tokens=110)[2:] == (calls[:1], "length")
    assert read(client, "hello") == ("Hello, world!", "", [], "stop")


def test_logprobs_and_choices_beside_calls(client: OpenAI) -> None:
    answer = ask(client, "call", logprobs=True, n=2, seed=1)
    assert [len(choice.logprobs.content) for choice in answer.choices] == [len(CALLS.encode()) + 1 + i for i in (0, 1)]
    chunks = [c.choices[0] for c in ask(client, "call", logprobs=True, stream=True)]
    assert sum(len(choice.logprobs.content) for choice in chunks if choice.logprobs) == len(CALLS.encode()) + 1


def test_the_helpers_of_the_client_read_the_stream(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "call"}]
    with client.chat.completions.stream(model="fake", messages=messages, tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("weather", {"city": "Köln"}),
        ("time", {}),
    ]


def test_results_go_back(live: Live, client: OpenAI) -> None:
    """What an agent sends next: the call as it came, and its result."""
    message = ask(client, "call").choices[0].message
    history = [{"role": "user", "content": "call"}, message.model_dump(exclude_none=True)]
    answer = client.chat.completions.create(model="fake", messages=history, tools=TOOLS)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "stop"
    assert live.engine.tokenizer.decode(live.engine.records[-1].prompt_token_ids).startswith(SHOWN)


def form_of(live: Live, client: OpenAI, **options: Any) -> Any:
    ask(client, "hello", **options)
    form = live.engine.records[-1].params.structured_outputs
    assert form is None or form.kind == "structural_tag"
    return None if form is None else json.loads(form.text)["format"]


def test_what_the_answer_is_held_to(live: Live, client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    assert form_of(live, client) is None
    assert form_of(live, client, tool_choice="none") is None
    thinking, plain = form_of(live, client, tool_choice="required")["elements"]
    assert thinking["elements"][0]["end"] == "</think>"
    assert [tag["begin"].split('"')[3] for tag in plain["tags"]] == ["weather", "time"]
    assert plain["at_least_one"]
    assert not plain["stop_after_first"]
    (tag,) = form_of(live, client, tool_choice=named)["elements"][1]["tags"]
    assert '"time"' in tag["begin"]
    assert form_of(live, client, tool_choice="required", parallel_tool_calls=False)["elements"][1]["stop_after_first"]
    assert form_of(live, client, tools=STRICT)["elements"][1]["triggers"] == ["<tool_call>"]
    both = form_of(live, client, response_format={"type": "json_object"})["elements"][1]["elements"]
    assert [part["type"] for part in both] == ["tags_with_separator", "json_schema"]
    behind = form_of(live, client, tools=[], response_format={"type": "json_object"})["elements"]
    assert [part["type"] for part in behind] == ["sequence", "json_schema"]


def test_none_hides_the_tools(live: Live, client: OpenAI) -> None:
    ask(client, "hi", tool_choice="none")
    assert live.engine.tokenizer.decode(live.engine.records[-1].prompt_token_ids) == prompt("hi", "")


def test_tokenize_shows_the_tools(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    assert bytes(live.post("/tokenize", body).json()["tokens"]).decode() == prompt("hi")


class SilentTokenizer(FakeTokenizer):
    """A chat template that says nothing of calls; one more special token, which opens them."""

    tool_template = "{{ tools }}"

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        text = super().decode(ids, skip_special_tokens=skip_special_tokens)
        return text.replace("[TOOL_CALLS]", "") if skip_special_tokens else text


@pytest.mark.parametrize(
    ("config", "words"),
    [({}, "--tool-call-parser"), ({"tool_call_parser": "hermes", "enable_auto_tool_choice": False}, "turned off")],
)
def test_auto_needs_a_parser(config: dict[str, Any], words: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    with live_server(FakeClient(max_model_len=1024, tokenizer=SilentTokenizer()), **config) as live:
        answer = live.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert live.post("/v1/chat/completions", {**body, "tool_choice": "required"}).status_code == 200


def test_special_tokens_that_open_calls_are_shown() -> None:
    engine = FakeClient(max_model_len=1024, tokenizer=SilentTokenizer())
    engine.scripts[prompt("call")] = Script(b'[TOOL_CALLS] [{"name": "time", "arguments": {}}]')
    with live_server(engine, tool_call_parser="mistral") as live, live.client() as client:
        assert whole(client, "call") == (None, "", [("time", "{}")], "tool_calls")
        assert not engine.records[-1].params.skip_special_tokens
        ask(client, "hi", tools=[])
        assert engine.records[-1].params.skip_special_tokens


def test_an_empty_message_has_content() -> None:
    assert Message().as_json() == {"role": "assistant", "content": "", "refusal": None}


@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parsers_are_refused_at_start(field: str) -> None:
    with pytest.raises(ConfigError, match="mistral"):
        ServerConfig(**{field: "mistrall"})

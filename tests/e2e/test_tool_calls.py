"""Calls of the real model over HTTP, for every way of writing them: told as a stream and as a whole, and answered.

The demo model was not trained to call, so a grammar holds it to calls; what it fills in is its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from live_server import Live, live_server
from openai import OpenAI
from tool_templates import TEMPLATES

from triblade.config import EngineConfig
from triblade.engine.local import LocalClient

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo", "Lima"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
TIME = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 12}}, "required": ["zone"]}
SCHEMAS: dict[str, Any] = {"get_weather": PARAMETERS, "get_time": TIME}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"Use {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED: Any = [{"role": "user", "content": "What will the weather be in Oslo over the next 3 days?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Kept:
    """An engine that outlives the servers in front of it."""

    def __init__(self, engine: LocalClient) -> None:
        self._engine = engine

    def close(self) -> None:
        """It is not the server's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[LocalClient]:
    # float32 and one thread: equal requests give equal tokens.
    config = EngineConfig(model=str(smollm2_path), dtype="float32", threads=1, max_model_len=1024, num_kv_blocks=96)
    client = LocalClient.start(config)
    yield client
    client.close()


@pytest.fixture(scope="module", params=TEMPLATES)
def live(engine: LocalClient, request: pytest.FixtureRequest) -> Iterator[Live]:
    """A server that reads calls as one family writes them, for requests that bring a template of this family."""
    config = {"tool_call_parser": request.param, "trust_request_chat_template": True}
    with live_server(start=lambda _: Kept(engine), **config) as server:  # type: ignore[arg-type]
        while server.get("/ping").status_code != 200:
            pass
        server.parser = request.param  # type: ignore[attr-defined]
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with live.client(timeout=120) as made:
        yield made


def body(live: Live, **fields: Any) -> dict[str, Any]:
    template = TEMPLATES[live.parser]  # type: ignore[attr-defined]
    extra = {"chat_template": template}
    common = {"model": "fake", "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 90}
    return {**common, "extra_body": extra, **fields}


def told(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or []]


def joined(stream: Any) -> tuple[list[tuple[str, Any]], str, str | None]:
    """Calls, content and reason of a stream; ids, types and names come once, with the first delta of a call."""
    calls: list[list[str]] = []
    content, reason = "", None
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert (call.type, bool(call.id)) == ("function", True)
                calls.append([call.function.name, ""])
            else:
                assert (call.type, call.id, call.function.name) == (None, None, None)
            calls[call.index][1] += call.function.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls], content, reason


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_streamed_and_whole(live: Live, client: OpenAI, choice: Any) -> None:  # D18
    fields = body(live, tool_choice=choice, parallel_tool_calls=False)
    whole = client.chat.completions.create(**fields)
    message = whole.choices[0].message
    ((name, arguments),) = told(message.tool_calls)
    assert jsonschema_rs.is_valid(SCHEMAS[name], arguments)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    if choice is NAMED:
        assert name == "get_weather"
    assert joined(client.chat.completions.create(**fields, stream=True)) == ([(name, arguments)], "", "tool_calls")


def test_the_helpers_of_the_client(live: Live, client: OpenAI) -> None:
    with client.chat.completions.stream(**body(live, tool_choice=NAMED)) as stream:
        final = stream.get_final_completion()
    ((name, arguments),) = told(final.choices[0].message.tool_calls)
    assert jsonschema_rs.is_valid(SCHEMAS[name], arguments)


def test_the_result_goes_back(live: Live, client: OpenAI) -> None:
    fields = body(live, tool_choice=NAMED)
    message = client.chat.completions.create(**fields).choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*ASKED, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**{**fields, "messages": messages, "tool_choice": "none", "max_tokens": 8})
    assert answer.choices[0].message.content
    extra = {"messages": messages, "tools": TOOLS, "chat_template": fields["extra_body"]["chat_template"]}
    tokens = live.post("/tokenize", extra).json()["tokens"]
    prompt = live.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert call.function.name in prompt
    assert "rain" in prompt


def test_free_answers_streamed_and_whole(live: Live, client: OpenAI) -> None:  # D18
    fields = body(live, max_tokens=30)
    whole = client.chat.completions.create(**fields).choices[0]
    found = joined(client.chat.completions.create(**fields, stream=True))
    assert found == (told(whole.message.tool_calls), whole.message.content or "", whole.finish_reason)


def test_calls_as_items(live: Live, client: OpenAI) -> None:
    """The same over the Responses API, whose template is the model's own."""
    tools: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    fields: dict[str, Any] = {"model": "fake", "input": ASKED[0]["content"], "tools": tools, "temperature": 0}
    fields |= {"tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 90}
    answer = client.responses.create(**fields)
    (call,) = answer.output
    assert call.type == "function_call"
    assert jsonschema_rs.is_valid(PARAMETERS, json.loads(call.arguments))
    with client.responses.stream(**fields) as stream:
        (streamed,) = stream.get_final_response().output
    assert (streamed.type, streamed.arguments) == ("function_call", call.arguments)  # type: ignore[union-attr]

"""POST /v1/responses through the official client: items in and out, the events of a stream, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_client import EOS, FakeClient, Script
from live_server import Live, live_server
from openai import OpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from triblade.serve.responses import ResponseBody

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>Let me see.</think>"


class City(BaseModel):
    """A form."""

    name: str
    inhabitants: int


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    engine = FakeClient(max_model_len=512, num_cached=2)

    def script(text: str, answer: str, tools: str = "", **options: Any) -> None:
        engine.scripts[f"{tools}user: {text}\nassistant: "] = Script(answer.encode(), **options)

    script("think", THOUGHT + " Grüße 😀!")
    script("call", f"{THOUGHT}I will ask. {CALL}\n{CALL}", "tool get_weather\n")
    script("city", '{"name": "Köln", "inhabitants": 1000000}')
    script("nothing", "")
    script("fault", "Hello", fail_after=3)
    script("slow", "Hello, world!", pause_s=0.05)
    with live_server(engine, reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with live.client() as made:
        yield made


def kinds(response: Response) -> list[str]:
    return [item.type for item in response.output]


def events(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The raw events of a stream; each is under its own name."""
    answer = live.post("/v1/responses", {**body, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: "), parse_constant=pytest.fail))
        assert name == f"event: {found[-1]['type']}"
    return found


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def test_a_response(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hi")
    assert answer.output_text == "Hello, world!"
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "fake")
    assert answer.id.startswith("resp_")
    (message,) = answer.output
    assert (message.type, message.id[:4], message.status) == ("message", "msg_", "completed")  # type: ignore[union-attr]
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (20, 14, 34)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert (answer.store, answer.error, answer.incomplete_details) == (False, None, None)
    assert (answer.temperature, answer.top_p, answer.tools, answer.tool_choice) == (1, 1, [], "auto")


def test_what_was_asked_comes_back(client: OpenAI) -> None:
    asked: dict[str, Any] = {"instructions": "Be brief.", "metadata": {"k": "v"}, "temperature": 0.5}
    asked |= {"max_output_tokens": 40, "parallel_tool_calls": False, "top_p": 0.9, "tools": [WEATHER]}
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):  # D16: in the template's words
        client.responses.create(model="fake", input="hi", **asked)
    del asked["instructions"]
    answer = client.responses.create(model="fake", input="hi", reasoning={"effort": "low"}, **asked)
    assert {key: value for key, value in answer.to_dict().items() if key in asked} == asked
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "low"


def test_an_answer_that_is_cut(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hi", max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "Hel")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_an_empty_answer_is_an_empty_message(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="nothing")
    assert (kinds(answer), answer.output_text, answer.status) == (["message"], "", "completed")


def test_reasoning_is_an_item(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="think", include=["reasoning.encrypted_content"])
    assert kinds(answer) == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "Let me see."  # type: ignore[union-attr,index]
    assert answer.output_text == "Grüße 😀!"
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len(THOUGHT) - len("<think") - len(">")


def test_calls_are_items(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="call", tools=[WEATHER])
    assert kinds(answer) == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output_text == "I will ask."
    calls: list[Any] = answer.output[2:]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_weather", {"city": "Köln"})] * 2
    assert len({call.call_id for call in calls}) == 2
    assert answer.status == "completed"


@pytest.mark.parametrize(("text", "tools"), [("hi", []), ("think", []), ("call", [WEATHER]), ("nothing", [])])
def test_a_stream_tells_what_the_body_says(live: Live, text: str, tools: list[Any]) -> None:  # D18, C30
    found = events(live, {"input": text, "tools": tools})
    whole = live.post("/v1/responses", {"input": text, "tools": tools}).json()
    assert [told["sequence_number"] for told in found] == list(range(len(found)))
    assert [told["type"] for told in found[:2]] == ["response.created", "response.in_progress"]
    assert all(told["response"]["output"] == [] for told in found[:2])
    last = found[-1]
    assert last["type"] == "response.completed"
    assert without_ids(last["response"]["output"]) == without_ids(whole["output"])
    assert last["response"]["usage"] == whole["usage"]
    assert all(told["response"]["id"] == last["response"]["id"] for told in found if "response" in told)
    _check_items(found[2:-1], last["response"]["output"])


def _check_items(found: list[dict[str, Any]], items: list[dict[str, Any]]) -> None:
    """Each item is opened, told and closed before the next one; its deltas are its text."""
    for number, item in enumerate(items):
        own = [told for told in found if told["output_index"] == number]
        assert found[: len(own)] == own
        found = found[len(own) :]
        types = [told["type"].removeprefix("response.") for told in own]
        event = {"message": "output_text", "reasoning": "reasoning_text"}.get(item["type"], "function_call_arguments")
        deltas = [f"{event}.delta"] * types.count(f"{event}.delta")
        parts = (["content_part.added"], ["content_part.done"]) if "content" in item else ([], [])
        expected = ["output_item.added", *parts[0], *deltas, f"{event}.done", *parts[1], "output_item.done"]
        assert types == expected
        assert own[0]["item"] == {**item, "status": "in_progress"} | (
            {"content": []} if "content" in item else {"arguments": ""}
        )
        assert own[-1]["item"] == item
        assert all(told["item_id"] == item["id"] for told in own[1:-1])
        joined = "".join(told["delta"] for told in own if "delta" in told)
        assert joined == (item["content"][0]["text"] if "content" in item else item["arguments"])
    assert not found


def test_the_helpers_of_the_client_read_the_stream(client: OpenAI) -> None:
    with client.responses.stream(model="fake", input="call", tools=[WEATHER]) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == "I will ask."
    assert kinds(final) == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[2].arguments == '{"city": "Köln"}'  # type: ignore[union-attr]
    assert final.usage is not None


def test_parse_and_forms(live: Live, client: OpenAI) -> None:
    answer = client.responses.parse(model="fake", input="city", text_format=City)
    assert answer.output_parsed == City(name="Köln", inhabitants=1000000)
    form = live.engine.records[-1].params.structured_outputs
    assert form is not None
    assert '"inhabitants"' in form.text
    with client.responses.stream(model="fake", input="city", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    client.responses.create(model="fake", input="hi", text={"format": {"type": "json_object"}})
    assert live.engine.records[-1].params.structured_outputs is not None
    client.responses.create(model="fake", input="hi", text={"format": {"type": "text"}})
    assert live.engine.records[-1].params.structured_outputs is None


def test_a_conversation_goes_back_as_items(live: Live, client: OpenAI) -> None:
    first = client.responses.create(model="fake", input="call", tools=[WEATHER], tool_choice="auto")
    seen: list[Any] = []
    real = live.engine.tokenizer.render_chat
    live.engine.tokenizer.render_chat = lambda messages, **options: (
        seen.append(messages)
        or real(  # type: ignore
            [{"role": "user", "content": "hi"}], **options
        )
    )
    try:
        results: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            for call in first.output
            if call.type == "function_call"
        ]
        items: list[Any] = [{"role": "user", "content": "call"}, *(item.to_dict() for item in first.output), *results]
        parts = [{"type": "input_text", "text": "And "}, {"type": "input_text", "text": "now?"}]
        items.append({"type": "message", "role": "developer", "content": parts})
        client.responses.create(model="fake", input=items, instructions="Be brief.", tools=[WEATHER])
    finally:
        del live.engine.tokenizer.render_chat
    (messages,) = seen
    roles = ["system", "user", "assistant", "tool", "tool", "system"]
    assert [message["role"] for message in messages] == roles
    turn = messages[2]
    assert (turn["reasoning_content"], turn["content"]) == ("Let me see.", "I will ask.")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["get_weather"] * 2
    assert [message["tool_call_id"] for message in messages[3:5]] == [call["id"] for call in turn["tool_calls"]]
    assert messages[5]["content"] == "And now?"


def test_sampling_fields_arrive(live: Live, client: OpenAI) -> None:
    body = {"seed": 5, "top_k": 3, "stop": ["x"], "priority": 2, "min_p": 0.1, "presence_penalty": 0.5}
    client.responses.create(model="fake", input="hi", temperature=0, max_output_tokens=9, extra_body=body)
    record = live.engine.records[-1]
    params = record.params
    assert (params.seed, params.top_k, params.stop, params.min_p, params.presence_penalty) == (5, 3, ("x",), 0.1, 0.5)
    assert (params.temperature, params.max_tokens, params.n, record.priority) == (0, 9, 1, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"store": True}, "store", "nothing is stored"),
        ({"background": True}, "background", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "not stored"),
        ({"truncation": "auto"}, "truncation", "shorten"),
        ({"include": ["message.output_text.logprobs"]}, "include", "log-probabilities"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "type: function"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "xml"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "schema"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "item_reference"),
        ({"input": [{"type": []}]}, "input[0]", "type"),
        ({"input": [{"content": "x"}]}, "input[0]", "type"),
        ({"input": [{"role": 5, "content": "x"}]}, "input[0]", "role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "input_image",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "string"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0].arguments", "string"),
        ({"input": "x" * 600}, "input", "context length is 512"),
        ({"temperature": -1}, "temperature", "between 0"),
        ({"model": "other"}, "model", "other"),
    ],
)
def test_wrong_requests(live: Live, wrong: dict[str, Any], param: str, words: str, stream: bool) -> None:  # D03, D05
    before = len(live.engine.records)
    answer = live.post("/v1/responses", {"model": "fake", "input": "hi", "stream": stream, **wrong})
    assert answer.status_code == (404 if "model" in wrong else 400)
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"].startswith(param)
    assert len(live.engine.records) == before


def test_harmless_fields_pass(live: Live) -> None:
    body = {"store": False, "background": False, "previous_response_id": None, "truncation": "disabled", "include": []}
    body |= {
        "user": "me",
        "service_tier": "auto",
        "max_tool_calls": 3,
        "stream_options": {"include_obfuscation": False},
    }
    assert live.post("/v1/responses", {"input": "hi", **body}).json()["status"] == "completed"


def test_a_fault_before_and_in_a_stream(live: Live, client: OpenAI) -> None:  # D06
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.responses.create(model="fake", input="fault")
    found = events(live, {"input": "fault"})
    assert found[-1]["type"] == "response.failed"
    failed = found[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "not finite" in failed["error"]["message"]
    assert (failed["output"][0]["status"], failed["output"][0]["content"][0]["text"]) == ("incomplete", "Hel")
    stream = client.responses.create(model="fake", input="fault", stream=True)
    assert [event.type for event in stream][-1] == "response.failed"


def test_a_client_that_leaves(live: Live, client: OpenAI) -> None:  # D08
    with client.responses.create(model="fake", input="slow", stream=True) as stream:
        next(iter(stream))
    record = live.engine.records[-1]
    for _ in range(200):
        if record.dropped:
            break
        live.get("/ping")
    assert record.dropped
    assert EOS not in record.prompt_token_ids


def test_the_documented_type(live: Live) -> None:
    for options in ({}, {"max_output_tokens": 3}, {"tools": [WEATHER]}):
        body = live.post("/v1/responses", {"input": "hi", **options}).content
        assert ResponseBody.model_validate_json(body, strict=True).object == "response"

"""Wrong requests: every one gets a status, one readable line in the OpenAI shape, and leaves the server as it was."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_client import FakeClient, Script
from live_server import Live, eventually, live_server

from triblade.errors import EngineDeadError

CHAT = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(FakeClient(max_model_len=64)) as server:
        yield server


@pytest.fixture(autouse=True)
def good_afterwards(live: Live) -> Iterator[None]:
    """After every bad request a good one works, and nothing is left running."""
    yield
    assert live.post(COMPLETIONS, {"prompt": "x"}).json()["choices"][0]["text"] == "Hello, world!"
    eventually(lambda: live.engine.running == 0)


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer that must have this status and the OpenAI shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


UNHELD = {"strict": True, "parameters": {"type": "object", "properties": {"a": {"uniqueItems": True}}}}
WRONG_VALUES = [
    # (route, field, value, words of the message)
    (COMPLETIONS, "prompt", None, "must be a string"),
    (COMPLETIONS, "prompt", [], "must be a string"),
    (COMPLETIONS, "prompt", [[1], []], "empty"),
    (COMPLETIONS, "prompt", [1, "a"], "list of token ids"),
    (COMPLETIONS, "prompt", ["a", 1], "mix"),
    (COMPLETIONS, "prompt", [True], "token ids"),
    (COMPLETIONS, "prompt", [-1], "between 0 and 257"),  # C22
    (COMPLETIONS, "prompt", [2**40], "between 0 and 257"),  # C22
    (COMPLETIONS, "prompt", [1.5], "token ids"),
    (COMPLETIONS, "max_tokens", -1, "at least"),  # C38
    (COMPLETIONS, "max_tokens", 0, "without echo"),  # C38
    (COMPLETIONS, "max_tokens", "5", "valid integer"),
    (COMPLETIONS, "max_tokens", 1e30, "valid integer"),
    (COMPLETIONS, "max_tokens", 1.5, "valid integer"),
    (COMPLETIONS, "max_tokens", 10**6, "context length is 64"),  # C36
    (COMPLETIONS, "temperature", -0.1, "between 0"),
    (COMPLETIONS, "temperature", "hot", "valid number"),
    (COMPLETIONS, "temperature", True, "valid number"),
    (COMPLETIONS, "top_p", 0, "(0, 1]"),
    (COMPLETIONS, "top_k", -2, "-1 or 0"),
    (COMPLETIONS, "top_k", 2**63, "less than"),
    (COMPLETIONS, "repetition_penalty", 0, "above 0"),  # C11
    (COMPLETIONS, "presence_penalty", 3, "between -2 and 2"),
    (COMPLETIONS, "n", 0, "between 1"),
    (COMPLETIONS, "n", 129, "between 1"),
    (COMPLETIONS, "best_of", 3, "equal to n"),
    (COMPLETIONS, "seed", 2**64, "valid integer"),
    (COMPLETIONS, "stop", [""], "characters"),
    (COMPLETIONS, "stop", [1], "list of strings"),
    (COMPLETIONS, "stop_token_ids", [151645], "between 0 and 257"),  # C20
    (COMPLETIONS, "allowed_token_ids", [258], "between 0 and 257"),  # A24
    (COMPLETIONS, "allowed_token_ids", [], "non-empty"),
    (COMPLETIONS, "logit_bias", {"a": 1}, "token ids"),
    (COMPLETIONS, "logit_bias", {"-1": 1}, "token ids"),
    (COMPLETIONS, "logit_bias", {"9999999999": 1}, "between 0 and 257"),
    (COMPLETIONS, "logit_bias", {"5": 101}, "between -100 and 100"),
    (COMPLETIONS, "logprobs", 21, "at most 20"),
    (COMPLETIONS, "logprobs", True, "valid integer"),
    (COMPLETIONS, "min_tokens", 17, "at most max_tokens (16)"),
    (COMPLETIONS, "bad_words", [""], "non-empty"),
    (COMPLETIONS, "stream", "yes", "valid boolean"),
    (COMPLETIONS, "stream_options", {"include_usage": True}, "stream: true"),
    (COMPLETIONS, "model", 5, "valid string"),
    (COMPLETIONS, "suffix", "end", "not supported"),
    (CHATS, "messages", [], "empty"),
    (CHATS, "messages", "hi", "valid list"),
    (CHATS, "messages", [{"role": "system", "content": "x"}], "must alternate"),  # D16: the template's words
    (CHATS, "messages", [*CHAT, *CHAT], "must alternate"),  # D16
    (CHATS, "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),  # D17
    (CHATS, "max_tokens", 0, "at least 1"),  # C38
    (CHATS, "max_completion_tokens", -5, "at least 1"),  # C38
    (CHATS, "logprobs", 5, "valid boolean"),
    (CHATS, "top_logprobs", 2, "needs logprobs"),
    (CHATS, "chat_template", "{{ messages }}", "no chat template from requests"),
    (CHATS, "tools", [{"type": "function"}], "and a function"),
    (CHATS, "tools", [{"type": "custom", "custom": {"name": "f"}}], "type: function"),
    (CHATS, "tools", [{"type": "function", "function": {"name": ""}}], "printable"),
    (CHATS, "tools", [{"type": "function", "function": {"name": "f"}}] * 2, "same name"),
    (CHATS, "tools", [{"type": "function", "function": {"name": "f", "parameters": []}}], "type: object"),
    (CHATS, "tools", [{"type": "function", "function": {"name": "f", **UNHELD}}], "uniqueItems"),
    (CHATS, "tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)], "at most 128"),
    (CHATS, "tools", "f", "valid list"),
    (CHATS, "tool_choice", "required", "needs tools"),
    (CHATS, "tool_choice", "always", "auto, none, required"),
    (CHATS, "tool_choice", {"type": "function", "function": {"name": "f"}}, "names no tool"),
    (CHATS, "tool_choice", {"type": "allowed_tools"}, "type: function"),
    (CHATS, "parallel_tool_calls", "no", "valid boolean"),
    (CHATS, "functions", [{"name": "f"}], "not supported"),
    (CHATS, "response_format", {"type": "xml"}, "json_schema"),
    (CHATS, "response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "with a schema"),
    (CHATS, "guided_json", [], "object"),
    (CHATS, "guided_choice", [], "1 to 1024"),
    (COMPLETIONS, "guided_regex", "", "not empty"),
    (COMPLETIONS, "structured_outputs", {"xml": "a"}, "it knows json"),
    (COMPLETIONS, "structured_outputs", {"regex": "a", "choice": ["b"]}, "only one form"),
    (CHATS, "audio", {"voice": "x"}, "not supported"),
    (CHATS, "modalities", ["text", "audio"], "not supported"),
    (CHATS, "echo", True, "not supported"),
    ("/tokenize", "prompt", [1], "valid string"),
    ("/detokenize", "tokens", [-1], "between 0 and 257"),
    ("/detokenize", "tokens", [2**32], "between 0 and 257"),  # C29
    ("/detokenize", "tokens", "abc", "list of token ids"),
]


@pytest.mark.parametrize(("path", "field", "value", "words"), WRONG_VALUES)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_values(live: Live, path: str, field: str, value: Any, words: str, stream: bool) -> None:  # D04, D05
    base: dict[str, Any] = {COMPLETIONS: {"prompt": "x"}, CHATS: {"messages": CHAT}}.get(path, {})
    before = len(live.engine.records)
    body = {**base, **({"stream": True} if stream and field != "stream_options" else {}), field: value}
    found = error(live.post(path, body), 400)
    assert found["type"] == "invalid_request_error"
    assert words in found["message"]
    assert found["param"].split(".")[0].split("[")[0] == field
    assert len(live.engine.records) == before  # D15: the engine never saw it


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools": [], "functions": None, "function_call": "none", "response_format": {"type": "text"}},
        {"modalities": ["text"], "user": "me", "metadata": {"a": 1}, "service_tier": "auto", "store": False},
        {"something_new": [1]},
    ],
)
def test_harmless_fields_are_ignored(live: Live, extra: dict[str, Any]) -> None:
    assert live.post(CHATS, {"messages": CHAT, **extra}).status_code == 200


BROKEN_JSON = {
    "nothing": b"",
    "half": b'{"prompt": "x"',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "beyond a double": b'{"prompt": "x", "temperature": 1e999}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "zero byte": b'{"prompt": "x"}\x00',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep enough for the parser": b'{"x": ' + b"[" * 500 + b"]" * 500 + b', "prompt": 5}',
    "deep in a message": b'{"messages": [{"role": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    "a list": b"[1]",
    "a string": b'"prompt"',
    "null": b"null",
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BROKEN_JSON.values(), ids=BROKEN_JSON)
def test_broken_json(live: Live, path: str, body: bytes) -> None:
    response = live.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert error(response, 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize(("body", "found"), [(b"[1]", "[1]"), (b"null", "null"), (b'"x"', "'x'"), (b"true", "true")])
def test_a_body_that_is_no_object(live: Live, body: bytes, found: str) -> None:
    response = live.http.post(CHATS, content=body, headers={"Content-Type": "application/json"})
    assert error(response, 400)["message"] == f"the body: must be an object, got: {found}"


def test_odd_but_right_json(live: Live) -> None:
    body = {"prompt": "a\u0000b", "user": "x" * 1000}  # a zero character is a character
    assert live.post(COMPLETIONS, body).status_code == 200
    assert live.engine.records[-1].prompt_token_ids[1:] == [*b"a\0b"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_only_json_is_read(live: Live, kind: str | None) -> None:
    """A web page may send these to a server on its reader's machine without asking."""
    headers = {} if kind is None else {"Content-Type": kind}
    response = live.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert "Content-Type: application/json" in error(response, 400)["message"]


def test_several_mistakes_are_told_at_once(live: Live) -> None:
    found = error(live.post(COMPLETIONS, {"prompt": "x", "n": "a", "seed": "b"}), 400)
    assert "n: " in found["message"]
    assert "seed: " in found["message"]
    assert found["param"] == "n"


def test_missing_field(live: Live) -> None:
    found = error(live.post(CHATS, {"model": "fake"}), 400)
    assert (found["message"], found["param"]) == ("messages is required", "messages")


def test_nested_field(live: Live) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": "yes"}}
    assert error(live.post(COMPLETIONS, body), 400)["param"] == "stream_options.include_usage"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
def test_unknown_model(live: Live, path: str) -> None:  # D04
    body = {"model": "gpt-9", "prompt": "x", "messages": CHAT, "tokens": [1]}
    if path == "/tokenize":
        del body["messages"]
    found = error(live.post(path, body), 404)
    assert found["code"] == "model_not_found"
    assert "'gpt-9'" in found["message"]
    assert "fake" in found["message"]
    assert error(live.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"


def test_unknown_route_and_method(live: Live) -> None:  # D03
    assert "/v1/nothing" in error(live.get("/v1/nothing"), 404)["message"]
    response = live.get(COMPLETIONS)
    assert "GET" in error(response, 405)["message"]
    assert response.headers["allow"] == "POST"
    assert error(live.http.delete("/v1/models"), 405)


def test_the_official_client_raises_typed_errors(live: Live) -> None:  # D03
    with live.client() as client:
        with pytest.raises(openai.BadRequestError, match="temperature must be between 0") as bad:
            client.completions.create(model="fake", prompt="x", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError, match="unknown model"):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}], stream=True)
        with pytest.raises(openai.BadRequestError, match="context length is 64") as long:
            client.completions.create(model="fake", prompt="x" * 100)
        assert long.value.code == "context_length_exceeded"


def test_too_many_sequences_for_the_queue(live: Live) -> None:
    found = error(live.post(COMPLETIONS, {"prompt": ["x"] * 2000, "max_tokens": 1}), 400)
    assert "at most 1028" in found["message"]


FAULTS = {
    "the engine dies": (EngineDeadError("the engine stopped"), 503, "the engine stopped"),
    "a bug": (ZeroDivisionError("secret detail"), 500, "internal error"),
    "bad numbers": (None, 500, "logits are not finite"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("stream", [False, True])
def test_faults_before_the_first_token(
    live: Live, name: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:  # D05, H06
    raised, status, words = FAULTS[name]
    live.engine.scripts["faulty"] = Script(fail_after=0, error=raised)
    with caplog.at_level(logging.ERROR, "triblade"):
        found = error(live.post(COMPLETIONS, {"prompt": "faulty", "stream": stream}), status)
    assert words in found["message"]
    assert "secret" not in found["message"]
    eventually(lambda: len(errors_of(caplog)) == 1)
    assert bool(errors_of(caplog)[0].exc_info) == (status == 500)  # every 500 leaves a trace in the log


def errors_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged as an error; other tests may have made loggers talkative."""
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_the_middle(live: Live, name: str, caplog: pytest.LogCaptureFixture) -> None:  # D06
    raised, status, words = FAULTS[name]
    live.engine.scripts["faulty"] = Script(fail_after=3, error=raised)
    with caplog.at_level(logging.CRITICAL, "triblade"):
        assert words in error(live.post(COMPLETIONS, {"prompt": "faulty"}), status)["message"]
        stream = live.post(COMPLETIONS, {"prompt": "faulty", "stream": True})
        with live.client() as client, pytest.raises(openai.APIError, match=words):
            list(client.completions.create(model="fake", prompt="faulty", stream=True))
    *chunks, last, done, end = stream.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert words in json.loads(last.removeprefix("data: "))["error"]["message"]
    parsed = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in parsed) == "Hel"
    assert {choice["finish_reason"] for choice in parsed} == {None}


def test_one_fault_among_several_prompts(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    live.engine.scripts["faulty"] = Script(fail_after=1)
    live.engine.scripts["endless"] = Script(b"x" * 60, pause_s=0.05)
    with caplog.at_level(logging.CRITICAL, "triblade"):
        body = {"prompt": ["endless", "faulty"], "max_tokens": 40}
        assert "not finite" in error(live.post(COMPLETIONS, body), 500)["message"]
    eventually(lambda: live.engine.running == 0)  # the other prompt is dropped, too
    assert next(r for r in reversed(live.engine.records) if len(r.prompt_token_ids) == 8).dropped


def test_an_end_without_a_reason_is_told(live: Live, caplog: pytest.LogCaptureFixture) -> None:  # D06
    live.engine.scripts["silent"] = Script(silent_end=True)
    with caplog.at_level(logging.CRITICAL, "triblade"):
        assert error(live.post(COMPLETIONS, {"prompt": "silent"}), 500)
        stream = live.post(COMPLETIONS, {"prompt": "silent", "stream": True}).text
    assert '"error"' in stream
    assert stream.endswith("data: [DONE]\n\n")


def test_generation_config_supplies_defaults() -> None:
    given = {"temperature": 0.25, "top_k": 9, "top_p": None, "min_p": "wrong", "max_new_tokens": 3}
    engine = FakeClient(generation_config=given)
    with live_server(engine) as live:
        live.post(COMPLETIONS, {"prompt": "x", "top_k": 4})
        params = engine.records[-1].params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.25, 4, 1.0, 0.0)
    with live_server(engine, generation_config="none") as live:
        live.post(COMPLETIONS, {"prompt": "x"})
        assert engine.records[-1].params.temperature == 1.0


def test_templates_of_requests_are_an_option() -> None:
    with live_server(trust_request_chat_template=True) as live:
        assert live.post(CHATS, {"messages": CHAT, "chat_template": "x"}).status_code == 200

"""What clients get, through the official client over real sockets: completions, chat, streams, models, tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_client import BOS, EOS, FakeClient, Script
from live_server import Live, eventually, live_server
from openai import AsyncOpenAI, OpenAI, Stream

EMOJI = "Grüße, 你好 😀!"
CHAT = [{"role": "user", "content": "hi"}]
CHAT_PROMPT = "user: hi\nassistant: "


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    engine = FakeClient(max_model_len=512, num_cached=3)
    engine.scripts["emoji"] = engine.scripts["user: emoji\nassistant: "] = Script(EMOJI.encode())
    engine.scripts["slow"] = Script(pause_s=0.02)
    with live_server(engine, served_model_name=("fake", "org/other")) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with live.client() as openai:
        yield openai


def events(live: Live, path: str, body: dict[str, Any]) -> list[Any]:
    """The raw events of a stream, [DONE] included; strict JSON."""
    response = live.post(path, {**body, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [p if p == "[DONE]" else json.loads(p, parse_constant=pytest.fail) for p in payloads]


def test_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="x", max_tokens=20)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 14, 16)  # BOS x; text and EOS
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_max_tokens_defaults(live: Live, client: OpenAI) -> None:  # C37
    for value in ({}, {"max_tokens": None}):
        client.completions.create(model="fake", prompt="x", extra_body=value)
        assert live.engine.records[-1].params.max_tokens == 16
        client.chat.completions.create(model="fake", messages=CHAT, extra_body=value)
        assert live.engine.records[-1].params.max_tokens is None  # the rest of the context
    client.completions.create(model="fake", prompt=[1] * 505)
    assert live.engine.records[-1].params.max_tokens == 7  # less than 16 is left


def test_one_token_and_length(client: OpenAI) -> None:  # C38
    answer = client.completions.create(model="fake", prompt="x", max_tokens=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("H", "length")


@pytest.mark.parametrize("prompt", ["one", ["one", "two"], [1, 2, 3], [[1, 2], [3]]])
def test_prompts_in_every_form(live: Live, client: OpenAI, prompt: Any) -> None:
    before = len(live.engine.records)
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=20)
    begun = sorted((r.prompt_token_ids for r in live.engine.records[before:]), reverse=isinstance(prompt[0], list) < 1)
    expected = {
        "one": [[BOS, *b"one"]],
        "['one', 'two']": [[BOS, *b"two"], [BOS, *b"one"]],
        "[1, 2, 3]": [[1, 2, 3]],
        "[[1, 2], [3]]": [[1, 2], [3]],
    }[str(prompt)]
    assert begun == expected
    assert [choice.text for choice in answer.choices] == ["Hello, world!"] * len(expected)


def test_choice_numbers(live: Live, client: OpenAI) -> None:  # C03
    for stream in (False, True):
        texts: dict[int, str] = {}
        answer = client.completions.create(model="fake", prompt=["a", "emoji"], n=2, max_tokens=40, stream=stream)
        for part in answer if isinstance(answer, Stream) else [answer]:
            for choice in part.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        assert texts == {0: "Hello, world!", 1: "1Hello, world!", 2: EMOJI, 3: f"1{EMOJI}"}


def test_usage_counts_a_prompt_once(client: OpenAI) -> None:  # H15
    answer = client.completions.create(model="fake", prompt="abc", n=4, max_tokens=5)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 20)


def test_chat(live: Live, client: OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=CHAT)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert live.engine.records[-1].prompt_token_ids == list(CHAT_PROMPT.encode())  # C35: the template's own tokens only


def test_chat_options(live: Live) -> None:
    def prompt(**options: Any) -> str:
        assert live.post("/v1/chat/completions", {"messages": CHAT, **options}).status_code == 200
        return live.engine.tokenizer.decode(live.engine.records[-1].prompt_token_ids, skip_special_tokens=False)

    assert prompt(add_special_tokens=True) == f"<bos>{CHAT_PROMPT}"
    assert prompt(add_generation_prompt=False) == "user: hi\n"
    assert prompt(continue_final_message=True) == "user: hi"


def test_content_parts_equal_a_string(live: Live, client: OpenAI) -> None:  # D17
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    client.chat.completions.create(model="fake", messages=parts)
    assert live.engine.records[-1].prompt_token_ids == list(CHAT_PROMPT.encode())


def test_max_completion_tokens_wins(live: Live, client: OpenAI) -> None:
    client.chat.completions.create(model="fake", messages=CHAT, max_completion_tokens=2, max_tokens=9)
    assert live.engine.records[-1].params.max_tokens == 2


def test_every_sampling_field_arrives(live: Live, client: OpenAI) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [7], "min_tokens": 1}
    extra |= {"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False}
    extra |= {"allowed_token_ids": [72], "bad_words": ["no"], "priority": -3}
    client.completions.create(
        model="fake",
        prompt="x",
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        seed=2**63,
        stop="END",
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"72": 5},
        extra_body=extra,
    )
    record = live.engine.records[-1]
    params = record.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.1, -0.1)
    assert (params.seed, params.stop, params.stop_token_ids, params.min_tokens) == (2**63, ("END",), (7,), 1)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (True, True, False)
    assert (params.allowed_token_ids, params.bad_words, params.logit_bias) == ((72,), ("no",), {72: 5})
    assert record.priority == -3


def test_whole_floats_are_integers(live: Live) -> None:
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 3.0}).status_code == 200
    assert live.engine.records[-1].params.max_tokens == 3


def test_a_chat_stream(live: Live) -> None:  # D01, D07
    chunks = events(live, "/v1/chat/completions", {"messages": CHAT, "stream_options": {"include_usage": True}})
    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == len(CHAT_PROMPT) + 14
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello, world!"


def test_usage_stays_away_unless_asked_for(live: Live) -> None:
    chunks = events(live, "/v1/completions", {"prompt": "x"})
    assert not any("usage" in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_joined_is_the_body(client: OpenAI, chat: bool, logprobs: bool) -> None:  # C30, invariant 5
    options: dict[str, Any] = {"max_tokens": 40, "n": 2, "extra_body": {"return_token_ids": True}}
    if chat:
        options |= {"messages": [{"role": "user", "content": "emoji"}], "logprobs": logprobs}
        options |= {"top_logprobs": 2} if logprobs else {}
        create: Any = client.chat.completions.create
    else:
        options |= {"prompt": "emoji", "echo": True, "logprobs": 2 if logprobs else None}
        create = client.completions.create
    body = create(model="fake", **options)
    joined: dict[int, dict[str, Any]] = {}
    for chunk in create(model="fake", stream=True, **options):
        for choice in chunk.choices:
            so_far = joined.setdefault(choice.index, {"text": "", "ids": [], "logprobs": [], "finish": []})
            so_far["text"] += (choice.delta.content or "") if chat else choice.text
            so_far["ids"] += getattr(choice, "token_ids", None) or []
            so_far["finish"] += [choice.finish_reason] if choice.finish_reason else []
            if choice.logprobs:
                so_far["logprobs"] += (
                    choice.logprobs.content if chat else zip(*logprob_lists(choice.logprobs), strict=True)
                )
    assert len(body.choices) == 2
    for choice in body.choices:
        got = joined[choice.index]
        assert got["text"] == (choice.message.content if chat else choice.text)
        assert "\ufffd" not in got["text"]
        assert EMOJI in got["text"]
        assert got["ids"] == choice.token_ids
        assert got["finish"] == [choice.finish_reason]
        if logprobs:
            whole = choice.logprobs.content if chat else list(zip(*logprob_lists(choice.logprobs), strict=True))
            assert got["logprobs"] == whole
            assert whole
        else:
            assert choice.logprobs is None


def logprob_lists(logprobs: Any) -> tuple[list[Any], ...]:
    return logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset


@pytest.mark.parametrize("prompt", ["emoji", "naïve 😀", [BOS, *"é!".encode()]])
@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets(client: OpenAI, prompt: Any, stream: bool) -> None:  # C25
    answer = client.completions.create(model="fake", prompt=prompt, echo=True, logprobs=1, max_tokens=40, stream=stream)
    text, tokens, offsets = "", [], []
    for part in answer if isinstance(answer, Stream) else [answer]:
        choice = part.choices[0]
        text += choice.text
        tokens += choice.logprobs.tokens
        offsets += choice.logprobs.text_offset
    assert offsets == sorted(offsets)
    assert len(tokens) == len(offsets) > len(text)  # characters of several tokens, and BOS and EOS
    for token, offset in zip(tokens, offsets, strict=True):
        if token not in ("<bos>", "<eos>") and not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    assert tokens[-1] == "<eos>"
    assert offsets[-1] == len(text)


def test_legacy_logprobs(client: OpenAI) -> None:
    logprobs = client.completions.create(model="fake", prompt="x", logprobs=1, max_tokens=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "e"]
    assert logprobs.token_logprobs == [-1.5, -1.5]
    assert logprobs.top_logprobs == [{"I": -0.5, "H": -1.5}, {"f": -0.5, "e": -1.5}]  # the chosen one can be looked up


def test_echo_scores_the_prompt(client: OpenAI) -> None:  # C38, C24
    answer = client.completions.create(model="fake", prompt="ab", echo=True, max_tokens=0, logprobs=3)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<bos>", "a", "b"]
    assert choice.logprobs.token_logprobs == [None, -1.5, -1.5]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset == [0, 0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_chat_logprobs(client: OpenAI) -> None:  # C26
    messages: Any = [{"role": "user", "content": "emoji"}]
    answer = client.chat.completions.create(
        model="fake", messages=messages, logprobs=True, top_logprobs=2, max_tokens=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["G", "r", "\ufffd"]
    assert logprobs.content[2].bytes == list("ü".encode()[:1])
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [("H", -0.5), ("G", -1.5)]
    bare = client.chat.completions.create(model="fake", messages=messages, logprobs=True, max_tokens=1)
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.content is not None
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


def test_prompt_logprobs(live: Live) -> None:
    answer = live.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "prompt_logprobs": 2}).json()
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["97"] == {"logprob": -1.5, "rank": 2, "decoded_token": "a"}
    assert second["98"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    chat = live.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == len(CHAT_PROMPT)


def test_token_ids_on_request(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 2, "return_token_ids": True}
    choice = live.post("/v1/completions", body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([BOS, ord("x")], [*b"He"])
    chat = live.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "return_token_ids": True}).json()
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([*CHAT_PROMPT.encode()], [*b"He"])
    stream = events(live, "/v1/completions", body)
    assert [c["choices"][0]["prompt_token_ids"] for c in stream[:-1]] == [[BOS, ord("x")], None]
    assert "token_ids" not in live.post("/v1/completions", {"prompt": "x"}).json()["choices"][0]


def test_two_requests_of_one_label(live: Live) -> None:  # D11
    async def both() -> list[str]:
        headers = {"X-Request-Id": "same"}
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", default_headers=headers) as openai:
            prompts = ["slow", "emoji"]
            answers = await asyncio.gather(
                *(openai.completions.create(model="fake", prompt=prompt, max_tokens=40) for prompt in prompts)
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(both()) == ["Hello, world!", EMOJI]
    eventually(lambda: live.engine.running == 0)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "org/other"]
    model = client.models.retrieve("org/other")
    assert (model.id, model.owned_by) == ("org/other", "triblade")
    assert model.max_model_len == 512  # type: ignore[attr-defined]
    assert client.completions.create(model="org/other", prompt="x").model == "org/other"


def test_tokenize_and_back(live: Live) -> None:
    answer = live.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS, *"hé".encode()],
        "token_strs": ["<bos>", "h", "\ufffd", "\ufffd"],
    }
    assert live.post("/tokenize", {"prompt": "h", "add_special_tokens": False}).json()["tokens"] == [ord("h")]
    chat = live.post("/tokenize", {"messages": CHAT}).json()
    assert chat["tokens"] == [*CHAT_PROMPT.encode()]
    assert chat["token_strs"] is None
    assert live.post("/detokenize", {"tokens": [BOS, *"hé".encode(), EOS]}).json() == {"prompt": "<bos>hé<eos>"}


def test_the_tokenizer_says_what_it_is(live: Live) -> None:
    assert live.get("/tokenizer_info").json() == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": None,
        "pad_token": None,
        "chat_template": "{{ messages }}",
    }


def test_long_texts_are_tokenized_aside(live: Live) -> None:
    text = "é" * 20_000
    answer = live.post("/tokenize", {"prompt": text}).json()
    assert answer["tokens"] == [BOS, *text.encode()]
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": f"<bos>{text}"}


def test_version_and_ping(live: Live) -> None:
    from triblade import __version__

    assert live.get("/version").json() == {"version": __version__}
    assert live.get("/ping").status_code == 200

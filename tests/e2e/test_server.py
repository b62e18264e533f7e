"""The whole path, from the official client over HTTP to the real model and back."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import eventually
from openai import Stream
from real_server import RealServer

MODEL = "smollm2"
CAPITAL = "The capital of France is"
SCRIPTS = "Grüße aus Köln, 你好世界 😀👩‍💻 café №5 <|im_start|>user\nхорошо"
LONG = "One two three four five six seven eight nine ten. " * 12


def complete(server: RealServer, prompt: Any = CAPITAL, **options: Any) -> Any:
    options = {"model": MODEL, "max_tokens": 6, "temperature": 0, **options}
    return server.openai.completions.create(prompt=prompt, **options)


def joined(stream: Stream[Any]) -> tuple[str, list[str], Any]:
    """Text, finish reasons and usage of a completion stream."""
    text, reasons, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return text, reasons, usage


def test_a_completion(server: RealServer) -> None:
    answer = complete(server)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6)
    assert server.http.get("/health").status_code == 200


def test_a_stream_joined_is_the_body(server: RealServer) -> None:  # D01, D06, C14
    whole = complete(server)
    text, reasons, usage = joined(complete(server, stream=True, stream_options={"include_usage": True}))
    assert text == whole.choices[0].text
    assert reasons == [whole.choices[0].finish_reason]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat(server: RealServer) -> None:  # D07, C18
    messages: Any = [{"role": "user", "content": "What is the capital of Japan? Answer in one short sentence."}]
    whole = server.openai.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    assert "Tokyo" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    stream = server.openai.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=20, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)


def test_content_parts_and_no_second_bos(server: RealServer) -> None:  # C35, D17
    def ids(content: Any) -> list[int]:
        found: list[int] = server.http.post(
            "/tokenize", json={"messages": [{"role": "user", "content": content}]}
        ).json()["tokens"]
        return found

    plain = ids("Hello there")
    assert ids([{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]) == plain
    rendered = server.http.post("/detokenize", json={"tokens": plain}).json()["prompt"]
    assert rendered.startswith("<|im_start|>")
    assert rendered.endswith("<|im_start|>assistant\n")
    assert rendered.count("<|endoftext|>") == 0


def test_tokenize_and_back(server: RealServer) -> None:  # C34
    tokens = server.http.post("/tokenize", json={"prompt": SCRIPTS}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == SCRIPTS


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets(server: RealServer, stream: bool) -> None:  # C25, C24
    answer = complete(server, SCRIPTS, echo=True, logprobs=2, stream=stream, max_tokens=6)
    text, tokens, offsets, logprobs = "", [], [], []
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text += choice.text
            tokens += choice.logprobs.tokens
            offsets += choice.logprobs.text_offset
            logprobs += choice.logprobs.token_logprobs
    assert text.startswith(SCRIPTS)
    assert any(token.startswith("bytes:") for token in tokens)  # the test has characters of several tokens
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    assert logprobs[0] is None
    assert all(value <= 0 for value in logprobs[1:])


def test_scoring_a_prompt_only(server: RealServer) -> None:  # C38
    scored = complete(server, echo=True, logprobs=1, max_tokens=0)
    longer = complete(server, echo=True, logprobs=1, max_tokens=2)
    assert scored.choices[0].text == CAPITAL
    assert scored.usage.completion_tokens == 0
    first, *rest = scored.choices[0].logprobs.token_logprobs
    assert first is None
    assert rest == pytest.approx(longer.choices[0].logprobs.token_logprobs[1:5], abs=1e-4)


def test_chat_logprobs(server: RealServer) -> None:  # C26, C23
    messages: Any = [{"role": "user", "content": "Say yes."}]

    def content(temperature: float) -> Any:
        answer = server.openai.chat.completions.create(
            model=MODEL, messages=messages, temperature=temperature, max_tokens=1, logprobs=True, top_logprobs=3
        )
        assert answer.choices[0].logprobs is not None
        return (answer.choices[0].logprobs.content or [])[0]

    cold, warm = content(0), content(0.5)
    assert bytes(cold.bytes).decode() == cold.token
    assert len(cold.top_logprobs) == 3
    assert cold.logprob == cold.top_logprobs[0].logprob
    # Raw log-probabilities: the temperature does not show in them.
    assert [top.logprob for top in warm.top_logprobs] == pytest.approx([t.logprob for t in cold.top_logprobs], abs=1e-3)


@pytest.mark.parametrize("stop", [[" Paris"], [".\n", "zzz"], ["\n\nThe answer"]])
def test_stop_strings(server: RealServer, stop: list[str]) -> None:  # C13
    free = " Paris.\n\nThe answer is"
    cut = complete(server, max_tokens=8, stop=stop)
    text, reasons, _ = joined(complete(server, max_tokens=8, stop=stop, stream=True))
    assert text == cut.choices[0].text == free[: min(free.find(s) for s in stop if s in free)]
    assert reasons == [cut.choices[0].finish_reason] == ["stop"]


def test_seeds(server: RealServer) -> None:  # C02, C03
    def texts() -> list[str]:
        answer = complete(server, "Once upon a time", n=4, seed=7, temperature=1)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.text for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 4
    assert texts() == first


def test_prompt_lists(server: RealServer) -> None:  # C03
    prompts = [CAPITAL, "Two plus two is"]
    together = complete(server, prompts, n=1)
    alone = [complete(server, prompt).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == alone


def test_many_clients_get_their_own_answers(server: RealServer) -> None:  # C10, E14
    prompts = [f"{number} plus one is" for number in ("Three", "Four", "Five", "Six", "Seven", "Eight")]
    alone = [complete(server, prompt).choices[0].text for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: joined(complete(server, prompt, stream=True))[0], prompts))
    assert together == alone


def test_cached_tokens_are_told(server: RealServer) -> None:  # H14, E13
    before = server.metric("prefix_cache_hits_total")
    answers = [complete(server, LONG, max_tokens=4) for _ in range(2)]
    details = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert details[1] > 0
    assert server.metric("prefix_cache_hits_total") - before == sum(details)
    assert answers[0].choices[0].text == answers[1].choices[0].text


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": "word " * 1100},  # C36
        {"max_tokens": 1020},  # C36
        {"prompt": [-1]},  # C22
        {"prompt": [49152]},  # C22
        {"prompt": ""},
        {"extra_body": {"stop_token_ids": [151645]}},  # C20
        {"extra_body": {"allowed_token_ids": [49152]}},  # A24
        {"extra_body": {"repetition_penalty": 0}},  # C11
        {"logit_bias": {"49152": 1}},
    ],
)
def test_wrong_requests(server: RealServer, wrong: dict[str, Any]) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            complete(server, stream=stream, **wrong)
    assert complete(server, max_tokens=1).choices[0].text == " Paris"


def test_no_limit_means_the_rest_of_the_context(server: RealServer) -> None:  # C37
    messages: Any = [{"role": "user", "content": "Say hello."}]
    answer = server.openai.chat.completions.create(model=MODEL, messages=messages, temperature=0, stop=["."])
    assert answer.choices[0].message.content
    assert complete(server, max_tokens=None).usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(server: RealServer, stream: bool) -> None:  # D08, D10
    prompt = "Count from one to one thousand: one, two, three,"
    fresh = complete(server, prompt).choices[0].text
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        body = f'{{"prompt": "{prompt}", "max_tokens": 900, "temperature": 0, "ignore_eos": true, "stream": {str(stream).lower()}}}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        eventually(lambda: server.metric("num_requests_running") == 1)
        before = server.metric("request_success_total", finished_reason="abort")
    eventually(server.is_idle)
    assert server.metric("request_success_total", finished_reason="abort") == before + 1
    assert complete(server, prompt).choices[0].text == fresh


def test_more_requests_than_the_cache_holds(server: RealServer) -> None:  # E09, E12
    def one(number: int) -> str:
        reasons = joined(complete(server, f"{number}: {LONG}", max_tokens=8, stream=True))[1]
        return reasons[0]

    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(one, range(12))) <= {"stop", "length"}
    eventually(server.is_idle)


def test_a_taken_port_is_told_before_the_model_is_looked_for(tmp_path: Path) -> None:  # H01
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "triblade", "serve", str(tmp_path / "no-model"), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr
    assert done.stdout == ""


CITY = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome"]}, "letters": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["capital", "letters"],
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_by_a_schema(server: RealServer, stream: bool) -> None:  # F20, D14
    messages: Any = [{"role": "user", "content": "What is the capital of France, and how many letters does it have?"}]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=messages, response_format=wanted, temperature=0, max_tokens=60, stream=stream
    )
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    found = json.loads(text)
    assert found["capital"] == "Paris"
    assert 1 <= found["letters"] <= 9
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        complete(server, extra_body={"guided_json": {"type": "array", "uniqueItems": True}}, stream=stream)


def test_vectors_tell_what_is_near(server: RealServer) -> None:
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose by half a per cent."]
    for pooling in ("last", "mean"):
        options: Any = {"extra_body": {"pooling": pooling}}
        answer = server.openai.embeddings.create(model=MODEL, input=texts, **options)
        cat, kitten, rates = (found.embedding for found in answer.data)
        assert sum(x * x for x in cat) == pytest.approx(1, abs=1e-5)
        near, far = (sum(x * y for x, y in zip(cat, other, strict=True)) for other in (kitten, rates))
        assert near > far
        alone = server.openai.embeddings.create(model=MODEL, input=texts[0], **options).data[0].embedding
        assert alone == pytest.approx(cat, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_as_lm_eval_does(server: RealServer, max_tokens: int) -> None:  # C38
    """A batch of token lists with echo: the log-probabilities of each prompt, in their order."""
    prompts = [server.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in (CAPITAL, LONG)]
    options: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "seed": 1234}
    batch = complete(server, prompts, **options)
    for ids, choice in zip(prompts, batch.choices, strict=True):
        single = complete(server, ids, **options).choices[0]
        assert choice.logprobs.tokens == single.logprobs.tokens
        assert len(choice.logprobs.token_logprobs) == len(ids) + max_tokens
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(single.logprobs.token_logprobs[1:], abs=1e-4)

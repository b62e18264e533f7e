"""POST /v1/embeddings over real sockets, through the official client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_client import BOS, FakeClient, Script, embedding
from live_server import Live, live_server
from openai import OpenAI

from triblade.serve.responses import Embeddings


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    engine = FakeClient(max_model_len=64)
    engine.scripts["broken"] = Script(fail_after=0)
    with live_server(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with live.client() as made:
        yield made


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_both_encodings(client: OpenAI, encoding: Any) -> None:
    """The client asks for base64 when it is not told otherwise, and decodes it."""
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="fake", input="hi", **options)
    (found,) = answer.data
    value: Any = found.embedding
    if encoding == "base64":
        assert len(base64.b64decode(value)) == 4 * 3
    else:
        assert value == pytest.approx(embedding([BOS, *b"hi"]))
    assert (answer.object, found.object, found.index, answer.model) == ("list", "embedding", 0, "fake")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (["a", "bc"], [[BOS, *b"a"], [BOS, *b"bc"]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_inputs_in_every_form(client: OpenAI, given: Any, prompts: list[list[int]]) -> None:
    answer = client.embeddings.create(model="fake", input=given, encoding_format="float")
    assert [found.embedding for found in answer.data] == [embedding(ids) for ids in prompts]
    assert [found.index for found in answer.data] == list(range(len(prompts)))
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_what_the_engine_is_asked(live: Live, client: OpenAI) -> None:
    client.embeddings.create(model="fake", input="x", extra_body={"pooling": "mean", "priority": 7})
    record = live.engine.records[-1]
    assert (record.params.pooling, record.params.max_tokens, record.priority) == ("mean", 0, 7)
    client.embeddings.create(model="fake", input="x", extra_body={"add_special_tokens": False}, user="me")
    assert live.engine.records[-1].prompt_token_ids == [*b"x"]
    assert live.engine.records[-1].params.pooling == "last"
    with live_server(embedding_pooling="mean") as other:
        assert other.post("/v1/embeddings", {"input": "x"}).status_code == 200
        assert other.engine.records[-1].params.pooling == "mean"


def test_the_documented_type(live: Live) -> None:
    for encoding in ("float", "base64"):
        body = live.post("/v1/embeddings", {"input": ["a", "b"], "encoding_format": encoding}).content
        assert len(Embeddings.model_validate_json(body, strict=True).data) == 2


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"dimensions": 2}, "dimensions", "not made to be cut"),
        ({"normalize": False}, "normalize", "of length one"),
        ({"encoding_format": "hex"}, "encoding_format", "float"),
        ({"pooling": "max"}, "pooling", "last"),
        ({"input": []}, "input", "not empty"),
        ({"input": ["a", [1]]}, "input", "mix"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": [258]}, "input", "258"),  # C22
        ({"input": "x" * 64}, "input", "context length is 64"),  # C36
        ({"input": None}, "input", "input"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "shorten"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages", "input"),
    ],
)
def test_wrong_requests(live: Live, client: OpenAI, wrong: dict[str, Any], param: str, words: str) -> None:  # D03, D04
    before = len(live.engine.records)
    answer = live.post("/v1/embeddings", {"model": "fake", "input": "x", **wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert len(live.engine.records) == before


def test_harmless_fields_pass(live: Live) -> None:
    body = {"input": "x", "dimensions": None, "normalize": True, "user": "me", "whatever": 1}
    assert live.post("/v1/embeddings", body).status_code == 200


def test_a_fault_is_no_vector(client: OpenAI) -> None:  # A22
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.embeddings.create(model="fake", input=[[1], [*b"broken"]])


def test_vectors_count_as_requests(live: Live, client: OpenAI) -> None:  # H14
    before = live.metric("prompt_tokens_total"), live.metric("request_success_total", finished_reason="length")
    client.embeddings.create(model="fake", input=["ab", "c"])
    assert live.metric("prompt_tokens_total") == before[0] + 5
    assert live.metric("request_success_total", finished_reason="length") == before[1] + 2

"""The OpenAPI document is right: what it allows is answered as it says, and nothing it forbids breaks the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fake_client import FakeClient
from hypothesis import HealthCheck, given, settings
from live_server import Live, live_server
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from triblade.serve.responses import ChatCompletion, Completion

load_all_checks()
CONFORMANCE = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
OPERATIONS = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/embeddings",
    "POST /tokenize",
    "POST /detokenize",
    "GET /tokenizer_info",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /health",
    "GET /ping",
    "GET /version",
    "GET /metrics",
    "GET /plan",
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(FakeClient(max_model_len=64)) as server:
        yield server


@pytest.fixture(scope="module")
def operations(live: Live) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("label", OPERATIONS)
def test_conformance(operations: dict[str, Any], label: str, mode: GenerationMode) -> None:
    checks = [CHECKS.get_one(name) for name in CONFORMANCE]

    @given(case=operations[label].as_strategy(generation_mode=mode))
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    def conforms(case: Case) -> None:
        case.call_and_validate(checks=checks)

    if mode is GenerationMode.POSITIVE or label.startswith("POST"):
        conforms()


def test_the_document(live: Live) -> None:
    document = live.get("/openapi.json").json()
    found = {
        f"{method.upper()} {path}": o for path, methods in document["paths"].items() for method, o in methods.items()
    }
    assert set(found) == set(OPERATIONS)
    assert all(operation["description"] for operation in found.values())
    assert not any("422" in operation["responses"] for operation in found.values())
    for name in (
        "CompletionRequest",
        "ChatCompletionRequest",
        "EmbeddingRequest",
        "ResponsesRequest",
        "TokenizeRequest",
        "DetokenizeRequest",
    ):
        (example,) = document["components"]["schemas"][name]["examples"]
        path = next(path for path, methods in document["paths"].items() if name in str(methods))
        if "model" in example:
            example["model"] = "fake"
        assert live.post(path, example).status_code == 200
    assert "security" not in document


def test_answers_have_the_documented_types(live: Live) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for options in ({}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}):
        body = live.post("/v1/chat/completions", {**chat, **options}).content
        assert ChatCompletion.model_validate_json(body, strict=True).usage.prompt_tokens > 0
    for more in ({}, {"logprobs": 2, "echo": True}, {"prompt": ["a", "b"]}):
        body = live.post("/v1/completions", {"prompt": "x", "max_tokens": 3, **more}).content
        assert Completion.model_validate_json(body, strict=True).choices[0].finish_reason == "length"


def test_the_key_is_in_the_document() -> None:
    with live_server(api_key=("secret",)) as live:
        document = live.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"

"""One request of every kind that the API knows, with prompts long enough to be left to a prefill worker."""

from __future__ import annotations

from typing import Any

import pytest
from real_server import RealServer

MODEL = "smollm2"
LONG = " ".join(f"Sentence number {number} is about rivers and towns." for number in range(40))  # 400 tokens
CITY = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome"]}, "letters": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["capital", "letters"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
ASKED = [{"role": "user", "content": f"{LONG} What is the capital of France?"}]


def texts(server: RealServer) -> dict[str, Any]:
    """What answers of text are."""
    by_schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    by_tool: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    found: dict[str, Any] = {}
    for name, options in {"schema": {"response_format": by_schema}, "tool": by_tool}.items():
        answer = server.openai.chat.completions.create(
            model=MODEL, messages=ASKED, temperature=0, max_tokens=40, **options
        )
        message = answer.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        found[name] = (message.content, calls)
    guided: Any = {"guided_regex": "(yes|no), [a-z]{3}"}
    found["regex"] = completed(server, max_tokens=8, extra_body=guided).text
    return found


def numbers(server: RealServer) -> dict[str, list[float]]:
    """Vectors, and log-probabilities of a prompt."""
    found: dict[str, list[float]] = {}
    for pooling in ("last", "mean"):
        answer = server.openai.embeddings.create(model=MODEL, input=[LONG, "Short."], extra_body={"pooling": pooling})
        for place, vector in enumerate(answer.data):
            found[f"{pooling} {place}"] = vector.embedding
    scored = completed(server, echo=True, logprobs=1, max_tokens=1)
    found["echo"] = scored.logprobs.token_logprobs[1:]
    return found


def completed(server: RealServer, **options: Any) -> Any:
    return server.openai.completions.create(model=MODEL, prompt=LONG, temperature=0, **options).choices[0]


def check_every_kind(server: RealServer, one_engine: RealServer) -> None:
    """What a server answers is what one engine does."""
    assert texts(server) == texts(one_engine)
    expected = numbers(one_engine)
    for name, values in numbers(server).items():
        assert values == pytest.approx(expected[name], abs=1e-4), name

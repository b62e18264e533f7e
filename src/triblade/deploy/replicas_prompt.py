"""What a router has to know of a request's body: the beginning of its prompt, and whether KV can be handed over for it.

Knows no replica and no tokenizer: prompts are bytes, as they stand in the request, four to a token. Two requests have equal blocks
up to where their bytes differ (model, tools, messages or text, in the order in which templates put them).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

BYTES_PER_TOKEN = 4
BLOCK_BYTES = 512
MAX_BLOCKS = 1024  # of a longer prompt the beginning decides
DIGEST_BYTES = 8
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GENERATING = frozenset({CHAT, COMPLETION, "/v1/responses"})
COMPUTING = GENERATING | {"/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"}  # may be asked again


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one request.

    Attributes:
        blocks: digests of its first 512, 1,024, ... bytes.
        size_bytes: of all of it.
        body: the request; None where it is no JSON object.
    """

    blocks: tuple[bytes, ...] = ()
    size_bytes: int = 0
    body: Mapping[str, Any] | None = None

    @property
    def can_hand_over(self) -> bool:
        """Whether one server's KV is all that another one needs: one choice, and nothing is told of the prompt itself."""
        body = self.body
        if body is None or not ("messages" in body or isinstance(body.get("prompt"), str) or _is_ids(body)):
            return False
        single = all(body.get(name) in (None, 1) for name in ("n", "best_of"))
        return single and not body.get("echo") and body.get("prompt_logprobs") is None


def read_prompt(path: str, content: bytes) -> Prompt:
    """The prompt in a request's body; an empty one where there is none to see, which is the replica's to refuse."""
    if path not in COMPUTING:
        return Prompt()
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return Prompt()
    if not isinstance(body, dict):
        return Prompt()
    text = b"".join(_parts(body))
    return Prompt(tuple(_digests(text)), len(text), body)


def _parts(body: Mapping[str, Any]) -> Iterator[bytes]:
    """The bytes that the prompt will be made of; what comes first in the prompt comes first."""
    yield orjson.dumps(body.get("model"))
    if body.get("tools"):
        yield orjson.dumps(body["tools"])
    yield orjson.dumps(body.get("instructions"))
    for name in ("messages", "prompt", "input"):
        value = body.get(name)
        if isinstance(value, str):
            yield value.encode("utf-8", "surrogatepass")
        elif isinstance(value, list):
            yield from map(orjson.dumps, value)


def _digests(text: bytes) -> Iterator[bytes]:
    last = b""
    for begin in range(0, min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        last = hashlib.blake2b(text[begin : begin + BLOCK_BYTES], digest_size=DIGEST_BYTES, key=last).digest()
        yield last


def _is_ids(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)

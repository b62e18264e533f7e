"""Answers of /v1/embeddings: one vector per prompt, as numbers or as base64 of float32. Never a stream."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING, Any

from triblade.engine.outputs import RequestOutput
from triblade.serve.jobs import Job
from triblade.serve.protocol import EncodingFormat
from triblade.serve.render.base import Envelope, Usage
from triblade.serve.strict_json import dumps

if TYPE_CHECKING:
    from triblade.models.tokenizer import Tokenizer


class EmbeddingRenderer:
    """Implements `Renderer`."""

    def __init__(self, encoding: EncodingFormat, job: Job, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._encoding = encoding
        self._envelope = envelope
        self._vectors: dict[int, list[float]] = {}  # by prompt

    def collect(self, prompt: int, output: RequestOutput) -> None:
        """Keep an output for `body`."""
        if output.embedding is not None:
            self._vectors[prompt] = output.embedding

    def body(self, usage: Usage) -> bytes:
        """The whole answer."""
        envelope, tokens = self._envelope, usage.prompt_tokens
        data = [
            {"object": "embedding", "index": prompt, "embedding": self._encoded(vector)}
            for prompt, vector in sorted(self._vectors.items())
        ]
        answer = {"id": envelope.answer_id, "object": "list", "created": envelope.created, "model": envelope.model}
        return dumps({**answer, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    def _encoded(self, vector: list[float]) -> Any:
        if self._encoding == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

"""vLLM's way from prefill to decode, as bodies of requests. Pure: knows no connection.

The prefill server computes the prompt and one token that nobody uses, and answers with `kv_transfer_params`: where its KV blocks
are. The decode server gets the client's request with these, reads the blocks, and goes on. Invariant: parameters that a decode
server may have seen are never given to another one, because the blocks may be freed and hold other tokens by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

FIELD = "kv_transfer_params"
TO_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
OF_ANSWERS = ("stream", "stream_options", "min_tokens", "max_completion_tokens", "logprobs", "top_logprobs")


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill server: the same prompt, one token, its KV kept for somebody."""
    asked = {name: value for name, value in body.items() if name not in OF_ANSWERS}
    return asked | {"stream": False, "max_tokens": 1, FIELD: dict(TO_PREFILL)}


def decode_body(body: Mapping[str, Any], transfer: Mapping[str, Any]) -> dict[str, Any]:
    """The client's request for the decode server."""
    return {**body, FIELD: transfer}


def transfer_of(content: bytes) -> Mapping[str, Any] | None:
    """Where the KV is, as the prefill server's answer says; None: it keeps none."""
    try:
        found = orjson.loads(content).get(FIELD)
    except (orjson.JSONDecodeError, AttributeError):
        return None
    return found if isinstance(found, dict) else None

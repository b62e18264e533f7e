"""`triblade serve --pd-isolation thread` on the real model: one engine's answers, one set of weights, every kind of request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_server import eventually
from real_server import RealServer, real_server
from request_kinds import LONG, check_every_kind

OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--num-kv-blocks", "192", "--port", "0")
ROLES = (
    "--prefill-workers",
    "1",
    "--decode-workers",
    "1",
    "--pd-isolation",
    "thread",
    "--max-num-batched-tokens",
    "64",
)
WEIGHT_BYTES = 135e6 * 4
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def roles(smollm2_path: Path) -> Iterator[RealServer]:
    with real_server(smollm2_path, (*OPTIONS, *ROLES)) as running:
        yield running


def complete(server: RealServer, prompt: str, **options: Any) -> Any:
    options = {"max_tokens": 8, "temperature": 0, **options}
    return server.openai.completions.create(model="smollm2", prompt=prompt, **options)


def test_answers_are_those_of_one_engine(roles: RealServer, server: RealServer) -> None:  # G13
    for length in (1, 15, 70, 200):
        prompt = f"{length}: {LONG}"[: 5 * length]
        assert complete(roles, prompt).choices[0].text == complete(server, prompt).choices[0].text
    assert roles.metric("kv_transfers_total", outcome="complete") == 2
    assert roles.metric("kv_transfers_total", outcome="failed") == 0
    assert roles.metric("prefill_workers") == 1
    eventually(roles.is_idle, PATIENCE_S)


def test_every_kind_of_request(roles: RealServer, server: RealServer) -> None:
    check_every_kind(roles, server)
    assert roles.metric("kv_transfers_total", outcome="failed") == 0


def test_weights_are_held_once(roles: RealServer) -> None:
    """No worker was started, and the server's own process has no second copy."""
    assert "worker prefill-0" not in "".join(roles.log)
    assert (
        psutil.Process(roles.pid).memory_full_info().pss < 2.1 * WEIGHT_BYTES
    )  # libraries and rows take most of another

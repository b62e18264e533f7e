"""The fuzzer of benchmarks/ against the server on a fake engine: quick, and for the parts that need no model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fake_client import FakeClient
from live_server import eventually, live_server

REQUESTS = 600  # benchmarks/fuzz_server.py sends 2,000 to a real server


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[ModuleType]:
    path = Path(__file__).parents[2] / "benchmarks" / "fuzz_server.py"
    spec = importlib.util.spec_from_file_location("fuzz_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fuzz_server", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


def test_malformed_requests(fuzzer: ModuleType) -> None:
    with live_server(FakeClient(max_model_len=256)) as live:
        report = fuzzer.fuzz(live.url, requests=REQUESTS, seed=1)
        assert report.findings == []
        assert report.statuses["400"] > REQUESTS / 2
        assert report.statuses["200"] > 50  # not everything is refused
        eventually(lambda: live.engine.running == 0)


def test_the_fuzzer_finds_something(fuzzer: ModuleType) -> None:
    engine = FakeClient(max_model_len=256)
    engine.check = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    with live_server(engine) as live, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzzer, "good_answer", lambda client: "")
        report = fuzzer.fuzz(live.url, requests=100, seed=1)
    assert any("status 500" in finding for finding in report.findings)

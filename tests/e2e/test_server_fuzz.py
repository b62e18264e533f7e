"""Malformed requests against the server on the real model; `benchmarks/fuzz_server.py` sends 2,000 of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from real_server import RealServer

REQUESTS = 100


def test_malformed_requests(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:  # D04, D13
    path = Path(__file__).parents[2] / "benchmarks" / "fuzz_server.py"
    spec = importlib.util.spec_from_file_location("fuzz_server", path)
    assert spec is not None
    assert spec.loader is not None
    fuzzer = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fuzz_server", fuzzer)  # dataclasses look their module up
    spec.loader.exec_module(fuzzer)
    report = fuzzer.fuzz(server.url, requests=REQUESTS, seed=2)
    assert report.findings == []
    assert report.statuses["400"] > REQUESTS / 2
    assert server.http.get("/health").status_code == 200

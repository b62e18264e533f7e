"""The page at `/` over HTTP: complete, from nowhere else, open without a key, and honest about the plan."""

from __future__ import annotations

import json
import logging
import re

import pytest
from busy_server import PLAN, BusyClient
from live_server import live_server

from triblade.serve.drift import WINDOW_REQUESTS
from triblade.serve.live import MEDIA_TYPES


def test_every_file_that_the_page_names_is_served_and_nothing_comes_from_elsewhere() -> None:
    with live_server() as live:
        wanted, seen = ["/"], dict[str, str]()
        while wanted:
            path = wanted.pop()
            answer = live.get(path)
            assert answer.status_code == 200, path
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            seen[path] = answer.text
            wanted += [name for name in re.findall(r'"(/live/[^"]+)"', answer.text) if name not in seen]
        assert set(seen) == {"/", *(f"/live/{name}" for name in MEDIA_TYPES if name != "index.html")}
        outside = re.findall(r"https?://[^\s\"']+", "".join(seen.values()))
        assert set(outside) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
        assert live.get("/live/../app.py").status_code == 404
        assert live.get("/live/absent.js").status_code == 404


def test_the_page_reads_metrics_by_names_that_exist() -> None:
    with live_server(BusyClient()) as live:
        exposed = set(re.findall(r"^(?:triblade:)?(\w+)", live.get("/metrics").text, re.MULTILINE))
        script = live.get("/live/live.js").text
    named = set(re.findall(r'"(\w+_(?:total|seconds|running|waiting|perc|bytes|tokens|ratio|workers))"', script))
    assert len(named) > 20
    assert {name for name in named if name not in exposed and f"{name}_bucket" not in exposed} == set()


def test_the_page_is_open_and_its_data_is_not() -> None:
    with live_server(api_key=("secret",)) as live:
        assert live.get("/").status_code == 200
        assert live.get("/live/live.js").status_code == 200
        for path in ("/metrics", "/plan", "/v1/models"):
            assert live.get(path).status_code == 401, path
            assert live.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200, path


def test_without_a_plan_there_is_none() -> None:
    with live_server() as live:
        assert live.get("/plan").json() == {"served": False, "prediction": [], "findings": [], "reasons": []}
        assert "plan_drift" not in live.get("/metrics").text.replace("# HELP", "")


def test_traffic_that_the_plan_did_not_expect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "triblade.serve.drift")
    with live_server(plan=PLAN) as live:
        before = live.get("/plan").json()
        assert before["served"]
        assert before["findings"] == []
        assert before["prediction"] == [{"name": "tpot", "value": 1e6, "unit": "ms", "label": "predicted"}]
        for _ in range(WINDOW_REQUESTS):
            live.post("/v1/completions", {"model": "fake", "prompt": "hi"}).raise_for_status()
        findings = {finding["name"]: finding for finding in live.get("/plan").json()["findings"]}
        assert findings["prompt_tokens"] == {
            "name": "prompt_tokens",
            "title": "tokens per prompt",
            "assumed": 4000.0,
            "seen": 3.0,
            "drifted": True,
        }
        assert not findings["output_tokens"]["drifted"]
        assert live.metric("plan_drift", quantity="prompt_tokens") == 1
        assert live.metric("plan_seen", quantity="prompt_tokens") == 3
        assert live.metric("plan_drift", quantity="output_tokens") == 0
    assert "--prompt-tokens 3" in caplog.text
    assert json.dumps(before["reasons"]) == '["because"]'

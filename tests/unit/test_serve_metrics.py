"""Metrics agree with what clients were told, and health tells the truth."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_client import FakeClient, Script
from live_server import Live, eventually, live_server
from prometheus_client.parser import text_string_to_metric_families

from triblade.engine.client import EngineLoad
from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.engine.transfers import TransferCounts
from triblade.errors import EngineDeadError
from triblade.serve.health import HealthProbe
from triblade.serve.metrics import COUNTERS, GAUGES, HISTOGRAMS, ServerMetrics
from triblade.serve.recorder import RequestRecorder

COMPLETIONS = "/v1/completions"


@pytest.fixture
def live() -> Iterator[Live]:
    with live_server(FakeClient(num_cached=2)) as server:
        yield server


def post(live: Live, **body: Any) -> dict[str, Any]:
    answer = live.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 20, **body})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_counters_equal_usage(live: Live) -> None:  # H14, H15
    usages = [post(live)["usage"], post(live, n=4)["usage"], post(live, prompt=["a", "bc"], n=2)["usage"]]
    assert live.metric("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages) == 4 + 4 + 2 + 3
    assert live.metric("generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert live.metric("prefix_cache_hits_total") == cached == 8
    assert live.metric("prefix_cache_queries_total") == live.metric("prompt_tokens_total")
    assert live.metric("request_success_total", finished_reason="stop") == 1 + 4 + 4
    assert live.metric("request_prompt_tokens_count") == 4
    assert live.metric("request_generation_tokens_count") == 9
    assert live.metric("time_to_first_token_seconds_count") == 4
    assert live.metric("e2e_request_latency_seconds_count") == 3
    tokens = live.metric("generation_tokens_total")
    assert live.metric("inter_token_latency_seconds_count") == tokens - 9  # all but the first of each choice


def test_streams_count_like_bodies(live: Live) -> None:
    with live.client() as client:
        list(client.completions.create(model="fake", prompt="abc", stream=True, max_tokens=3))
    assert live.metric("generation_tokens_total") == 3
    assert live.metric("request_success_total", finished_reason="length") == 1


def test_faults_are_counted(live: Live) -> None:
    live.engine.scripts["bad"] = Script(fail_after=2)
    assert live.post(COMPLETIONS, {"prompt": "bad"}).status_code == 500
    assert live.metric("request_success_total", finished_reason="error") == 1
    assert live.metric("e2e_request_latency_seconds_count") == 0


def test_refused_requests_are_not_counted(live: Live) -> None:
    live.post(COMPLETIONS, {"prompt": "x", "n": 0})
    live.engine.num_waiting = 10**6
    live.post(COMPLETIONS, {"prompt": "x"})
    assert live.metric("request_success_total") == 0
    for status, route in (("400", COMPLETIONS), ("503", COMPLETIONS)):
        assert live.metric("http_requests_total", status=status, route=route, method="POST") == 1


def test_paths_and_methods_cannot_multiply_series(live: Live) -> None:
    for number in range(5):
        live.get(f"/scan/{number}")
        live.get(f"/v1/models/{number}")
        live.http.request(("PROPFIND", "MKCOL", "LOCK")[number % 3], "/")
    assert live.metric("http_requests_total", route="unknown", method="GET") == 5
    assert live.metric("http_requests_total", route="/v1/models/{model:path}", status="404") == 5
    assert live.metric("http_requests_total", method="other", status="404") == 5
    families = {family.name: family for family in text_string_to_metric_families(live.get("/metrics").text)}
    assert len(families["triblade:http_requests"].samples) < 15


def test_gauges_follow_the_engine(live: Live) -> None:  # H13
    assert live.metric("num_requests_running") == live.metric("kv_cache_usage_perc") == 0
    held = threading.Event()
    live.engine.scripts["held"] = Script(hold=held)
    live.engine.num_waiting, live.engine.num_preemptions = 7, 3
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(live.post, COMPLETIONS, {"prompt": "held", "n": 2})
        eventually(lambda: live.metric("num_requests_running") == 2)
        assert live.metric("kv_cache_usage_perc") == pytest.approx(0.02)
        assert live.metric("num_requests_waiting") == 7
        assert live.metric("num_preemptions_total") == 3
        held.set()
        assert future.result().status_code == 200
    assert live.metric("num_requests_running") == live.metric("kv_cache_usage_perc") == 0


def test_exposition_formats(live: Live) -> None:
    plain = live.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert "process_resident_memory_bytes" in plain.text
    modern = live.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    assert modern.text.endswith("# EOF\n")


def test_every_metric_has_a_help_text_and_a_row_in_the_docs() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    load = EngineLoad(transfers=TransferCounts())
    text = ServerMetrics("m", lambda: load).exposition("")[0].decode()
    for family in text_string_to_metric_families(text):
        if family.name.startswith("triblade:") and not family.name.endswith("_created"):
            assert family.documentation
            assert f"`{family.name}" in page, family.name


def value(metrics: ServerMetrics, name: str) -> float:
    for family in text_string_to_metric_families(metrics.exposition("")[0].decode()):
        for sample in family.samples:
            if sample.name == f"triblade:{name}":
                return sample.value
    raise AssertionError(name)


def test_spreads_of_transfers_are_histograms() -> None:
    counts = TransferCounts(prefill_kv_usage=0.25)
    for seconds in (0.01, 0.02, 100.0):
        counts.observe("seconds", seconds)
    metrics = ServerMetrics("m", lambda: EngineLoad(transfers=counts))
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition("")[0].decode())}
    found = families["triblade:kv_transfer_time_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in found if sample.name.endswith("_bucket")}
    assert [buckets[bound] for bound in ("0.005", "0.01", "0.025", "60.0", "+Inf")] == [0, 1, 2, 2, 3]
    assert value(metrics, "kv_transfer_time_seconds_sum") == pytest.approx(100.03)
    assert value(metrics, "kv_transfer_key_error_count") == 0
    assert value(metrics, "prefill_kv_cache_usage_perc") == 0.25


def test_negative_amounts_count_nothing() -> None:  # H13
    load = EngineLoad(num_running=-1, num_waiting=-2, num_kv_blocks=4, num_free_kv_blocks=9, num_preemptions=-3)
    metrics = ServerMetrics("m", lambda: load)
    for name in COUNTERS:
        metrics.count(name, -5)
    for name in HISTOGRAMS:
        metrics.observe(name, -0.5)
    metrics.ended(FinishReason.STOP, -1)
    recorder = RequestRecorder(metrics, 1, 1, arrival_s=0.0)
    recorder.note(0, RequestOutput(request_id="", num_prompt_tokens=-3, num_cached_tokens=-3, queue_time_s=-1.0))
    recorder.note(
        5, RequestOutput(request_id="", index=9, finish_reason=FinishReason.STOP)
    )  # a choice nobody asked for
    for name in (*(f"{name}_total" for name in COUNTERS), "num_preemptions_total", *GAUGES):
        assert value(metrics, name) == (4 if name == "num_kv_blocks" else 0)


def test_an_engine_that_cannot_be_read_breaks_no_scrape() -> None:  # H13
    def broken() -> EngineLoad:
        raise RuntimeError("gone")

    metrics = ServerMetrics("m", broken)
    assert value(metrics, "num_requests_running") == 0


def test_two_servers_do_not_share_metrics() -> None:
    with live_server() as one, live_server() as other:
        post(one)
        assert one.metric("generation_tokens_total") == 14
        assert other.metric("generation_tokens_total") == 0


# Health


def test_health_generates_a_token(live: Live) -> None:
    assert live.get("/health").status_code == 200
    record = live.engine.records[-1]
    assert (record.request_id, record.num_tokens, record.params.max_tokens) == ("health", 1, 1)
    assert record.priority < -1000  # before every request
    assert live.metric("generation_tokens_total") == 0  # probes are nobody's tokens


@pytest.mark.parametrize(
    "script", [Script(fail_after=0), Script(fail_after=0, error=EngineDeadError("the engine stopped"))]
)
def test_health_of_a_broken_engine(live: Live, script: Script) -> None:
    live.engine.scripts["\0"] = script
    unhealthy = live.get("/health")
    assert unhealthy.status_code == 503
    assert unhealthy.json()["error"]["code"] == "unhealthy"
    assert live.get("/ping").status_code == 200


def test_health_of_a_stuck_and_of_a_busy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HealthProbe.__init__, "__defaults__", (0.1,))  # seconds
    engine = FakeClient()
    engine.scripts["\0"] = Script(hold=threading.Event())
    with live_server(engine) as live:
        assert live.get("/health").status_code == 503
        engine.scripts["busy"] = Script(b"x" * 100, pause_s=0.01)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(live.post, COMPLETIONS, {"prompt": "busy", "max_tokens": 100})
            eventually(lambda: engine.running == 1)
            assert live.get("/health").status_code == 200  # it computes steps, if not ours
            assert future.result().status_code == 200


def test_probes_at_the_same_time_share_a_token(live: Live) -> None:
    live.engine.scripts["\0"] = Script(pause_s=0.3)
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(live.get, ["/health"] * 5))
    assert {answer.status_code for answer in answers} == {200}
    assert len(live.engine.records) == 1

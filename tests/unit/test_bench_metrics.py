"""From times to figures, and from figures to files, tables and pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triblade.bench.metrics import Distribution, Record, peak_in_flight, quantile, summarize
from triblade.bench.report import comparison_lines, result_page, summary_lines
from triblade.bench.result import Result, load_result
from triblade.config import BenchConfig
from triblade.errors import ConfigError


def record(sent_s: float, *pieces: float, tokens: int, error: str | None = None) -> Record:
    made = Record(0, 0, sent_s, list(pieces), end_s=pieces[-1] if pieces else sent_s + 1, error=error)
    made.prompt_tokens, made.output_tokens = 10, tokens
    return made


RECORDS = [
    record(0.0, 0.5, 0.6, 0.8, tokens=4),  # a piece had two tokens
    record(1.0, 1.1, tokens=1),
    record(1.0, tokens=0, error="status 500: broken"),
    record(1.5, tokens=0),
]


def test_definitions() -> None:
    one, single = RECORDS[:2]
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.1)  # (0.8 - 0.5) / 3
    assert one.gaps_s == pytest.approx([0.1, 0.2])
    assert one.e2e_s == pytest.approx(0.8)
    assert single.tpot_s is None
    assert single.gaps_s == []


def test_summary_counts_failures_apart() -> None:
    found = summarize(RECORDS, 2.0, {"ttft": 0.2})
    assert (found.requests, found.failed) == (4, 2)
    assert found.errors == {"status 500: broken": 1, "an empty answer": 1}
    assert (found.prompt_tokens, found.output_tokens) == (20, 5)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (1.0, 2.5, 12.5)
    assert (found.goodput_per_s, found.goodput_share) == (0.5, 0.25)  # failed ones are no good ones
    assert found.ttft_ms is not None
    assert found.ttft_ms.count == 2
    assert found.ttft_ms.quantiles["p50"] == pytest.approx(300)
    assert found.peak_in_flight == 2


def test_nothing_sent() -> None:
    found = summarize([], 0.0, {"ttft": 1.0})
    assert (found.requests, found.requests_per_s, found.ttft_ms, found.goodput_share) == (0, 0.0, None, None)
    assert summarize(RECORDS, 1.0, {}).goodput_per_s is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], q: float) -> None:
    assert quantile(sorted(values), q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20))
def test_peak_in_flight_is_the_most_at_any_start(spans: list[tuple[float, float]]) -> None:
    records = [Record(0, 0, start, end_s=start + length) for start, length in spans]
    moments = [r.sent_s for r in records if r.end_s > r.sent_s]
    expected = max((sum(r.sent_s <= t < r.end_s for r in records) for t in moments), default=0)
    assert peak_in_flight(records) == expected


def test_distribution_of_one() -> None:
    found = Distribution.of([3.0])
    assert found == Distribution(1, 3.0, 3.0, 3.0, dict.fromkeys(("p50", "p90", "p95", "p99"), 3.0))


def result(scale: float = 1.0, **options: object) -> Result:
    config = BenchConfig(**options)  # type: ignore[arg-type]
    made = [replace(r, piece_s=[r.sent_s + scale * (t - r.sent_s) for t in r.piece_s]) for r in RECORDS]
    return Result.of("model <x>", config, summarize(made, 2.0 * scale, {}), {"peak_memory_mib": 512.0}, made)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    made = result(output=tmp_path / "r.json")
    made.save(tmp_path / "r.json")
    read = load_result(tmp_path / "r.json")
    assert json.loads(json.dumps(made.summary)) == read.summary
    assert [Record(**r) for r in read.records] == RECORDS  # type: ignore[arg-type]
    assert comparison_lines(read, made).splitlines()[1].split() == ["requests/s", "1", "1", "same"]
    assert "note" not in comparison_lines(read, made)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": 1}', '{"format": 1, "x": 2}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="no result of a load test"):
        load_result(tmp_path / "r.json")
    (tmp_path / "r.json").write_text('{"format": 99}', encoding="utf-8")
    with pytest.raises(ConfigError, match="another version"):
        load_result(tmp_path / "r.json")


def test_comparison_says_what_is_better_and_what_differs() -> None:
    lines = comparison_lines(result(), result(2.0, prompt_tokens=64)).splitlines()
    rows = {line[:20].strip(): line for line in lines}
    assert rows["requests/s"].endswith("-50.0% worse")
    assert rows["TTFT p50, ms"].endswith("+100.0% worse")
    assert comparison_lines(result(2.0), result()).splitlines()[1].endswith("+100.0% better")
    assert lines[-1] == "note: prompt_tokens: 512 -> 64"


def test_lines_and_page() -> None:
    lines = summary_lines(result())
    assert "4 requests in 2.0 s, 2 failed" in lines
    assert "failed: 1 x status 500: broken" in lines
    assert "peak memory, MiB: 512" in lines
    page = result_page(result(), result(2.0))
    assert page.count("<svg") == 5
    assert "model &lt;x&gt;" in page
    assert "model <x>" not in page
    assert "http" not in page.replace("http-", "")  # nothing is fetched from anywhere

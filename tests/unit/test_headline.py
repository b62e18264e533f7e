"""The headline benchmark keeps every run, and goes on where it was stopped; on made-up figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from triblade.tune.measured import Run

LOADS, WAYS = ("chat", "document"), ("none", "quantization")


@pytest.fixture(scope="module")
def headline() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "headline.py"
    spec = importlib.util.spec_from_file_location("headline", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["headline"] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def run(e2el_ms: float) -> Run:
    return Run(
        ttft_ms=9, tpot_ms=2, e2el_ms=e2el_ms, output_tokens_per_s=1e5 / e2el_ms, requests_per_s=1, memory_mib=500
    )


def begin(headline: ModuleType, file: Path, **asked: Any) -> Any:
    empty: dict[str, dict[str, list[Run]]] = {load: {way: [] for way in WAYS} for load in LOADS}
    return headline.Progress(file, {"model": "m", **asked}, None, empty)


def test_goes_on_after_every_run(headline: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    begin(headline, file).add("chat", "none", run(1000))
    again = begin(headline, file)
    assert again.runs["chat"] == {"none": [run(1000)], "quantization": []}
    assert again.results() == {}  # no workload is whole
    again.add("chat", "quantization", run(400))
    found = json.loads(file.read_text())["results"]
    assert list(found) == ["chat"]
    assert found["chat"]["quantization"]["e2el_ms of none"] == 0.4


def test_medians_over_rounds(headline: ModuleType, tmp_path: Path) -> None:
    progress = begin(headline, tmp_path / "result.json")
    for way, base in (("none", 1000.0), ("quantization", 500.0)):
        for change in (0.9, 1.0, 3.0):
            progress.add("chat", way, run(base * change))
    assert progress.results()["chat"]["none"]["e2el_ms"] == 1000
    assert "| quantization | 500 (-50%) | 200 (2.00x) | 500 (+0%) |" in headline.markdown(progress.results())


def test_refuses_another_question(headline: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    begin(headline, file).add("chat", "none", run(1000))
    with pytest.raises(SystemExit, match="was begun with"):
        begin(headline, file, concurrency=8)


def test_what_was_asked_names_no_place(headline: ModuleType) -> None:
    told = headline.asked(
        Namespace(
            model="/a/m",
            checkpoint=Path("/b/c"),
            calibration=None,
            text=Path("/t"),
            work=Path("/w"),
            rounds=2,
            scheme="int4",
        )
    )
    assert told == {"model": "m", "checkpoint": "c", "calibration": None, "text": "t", "scheme": "int4"}

"""The dashboard and the alerts that are shipped ask for metrics and labels that servers have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from busy_server import PLAN, BusyClient
from live_server import live_server
from prometheus_client.parser import text_string_to_metric_families

from triblade.serve.drift import WINDOW_REQUESTS

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ALERTS = (FOLDER / "prometheus-alerts.yml").read_text()
LABEL = re.compile(r"(\w+)(?:=~|=|!=)\"")


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Name of each sample -> its labels."""
    found: dict[str, set[str]] = {}
    with live_server(BusyClient(), plan=PLAN) as live:
        for _ in range(WINDOW_REQUESTS):  # then the plan is compared with them
            live.post("/v1/completions", {"model": "fake", "prompt": "hi"}).raise_for_status()
        for family in text_string_to_metric_families(live.get("/metrics").text):
            found.setdefault(family.name, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("expression", [*EXPRESSIONS, ALERTS])
def test_every_metric_and_label_that_is_asked_for_exists(expression: str, exposed: dict[str, set[str]]) -> None:
    asked = re.findall(r"(triblade:\w+|process_\w+)(?:\{([^}]*)\})?", expression)
    assert asked
    for name, labels in asked:
        assert name in exposed, name
        assert set(LABEL.findall(labels)) <= exposed[name], (name, labels)


def test_panels_do_not_overlap_and_have_a_unit() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in DASHBOARD["panels"])


def test_alerts_name_options_that_exist() -> None:
    reference = (FOLDER.parents[1] / "docs" / "reference" / "cli.md").read_text()
    options = set(re.findall(r"--[a-z][a-z-]+", ALERTS))
    assert {option for option in options if option not in reference} == set()

"""Windows of requests against a plan: what drifts, what does not, and what is said about it."""

from __future__ import annotations

import logging

import pytest

from triblade.config import EngineConfig, Figure, Plan, TopologyConfig, WeightPlan, Workload
from triblade.serve.drift import ENDED, PlanWatch

WINDOW = 10
PREDICTED = {"ttft": (100.0, "ms"), "tpot": (10.0, "ms"), "tokens_per_step": (2.0, "tokens")}


def a_plan(topology: TopologyConfig | None = None, **workload: float | None) -> Plan:
    asked = {"prompt_tokens": 100, "output_tokens": 20, "prefix_share": 0.5, "concurrency": 4, **workload}
    return Plan(
        hardware="here",
        decode=EngineConfig(model="m"),
        prefill=EngineConfig(model="m") if topology else None,
        topology=topology or TopologyConfig(),
        weights=WeightPlan(scheme="int4"),
        workload=Workload(name="chat", **asked),  # type: ignore[arg-type]
        prediction=tuple(
            Figure(name=name, value=value, unit=unit, label="predicted") for name, (value, unit) in PREDICTED.items()
        ),
    )


class Traffic:
    """Requests that end one second after the other, of one kind at a time."""

    def __init__(self, plan: Plan) -> None:
        self.now = 0.0
        self.counters: dict[str, float] = {}
        self.watch = PlanWatch(plan, lambda: dict(self.counters), window_requests=WINDOW, clock=lambda: self.now)

    def requests(
        self, count: int = WINDOW, *, prompt: int = 100, output: int = 20, hits: float = 0.5, **more: float
    ) -> None:
        for _ in range(count):
            self.now += more.get("every_s", 1.0)
            for name in ("request_prompt_tokens", "prefix_cache_queries"):
                self.watch.note(name, prompt)
            self.watch.note("prefix_cache_hits", prompt * hits)
            self.watch.note("time_to_first_token_seconds", more.get("ttft_s", 0.1))
            self.watch.note("inter_token_latency_seconds", more.get("itl_s", 0.01))
            self.watch.note("e2e_request_latency_seconds", more.get("e2e_s", 4.0))
            steps = 10
            self.counters["steps"] = self.counters.get("steps", 0) + steps
            self.counters["step_tokens"] = self.counters.get("step_tokens", 0) + steps * more.get("per_step", 2.0)
            self.watch.note(ENDED, output)

    def drifted(self) -> set[str]:
        return {finding.name for finding in self.watch.findings if finding.drifted}


def test_the_planned_traffic_does_not_drift() -> None:
    traffic = Traffic(a_plan())
    traffic.requests()
    assert traffic.drifted() == set()
    seen = {finding.name: (finding.assumed, finding.seen) for finding in traffic.watch.findings}
    assert seen["prompt_tokens"] == (100, 100)
    assert seen["in_flight"] == (4, pytest.approx(4.0))
    assert seen["ttft"] == (100, pytest.approx(100.0))
    assert seen["tokens_per_step"] == (2.0, pytest.approx(2.0))


def test_nothing_is_judged_before_a_window_is_full() -> None:
    traffic = Traffic(a_plan())
    traffic.requests(WINDOW - 1, prompt=1000)
    assert traffic.watch.findings == ()


@pytest.mark.parametrize(
    ("changed", "quantity"),
    [
        ({"prompt": 160}, "prompt_tokens"),
        ({"prompt": 60}, "prompt_tokens"),
        ({"output": 40}, "output_tokens"),
        ({"output": 10}, "output_tokens"),
        ({"hits": 0.1}, "prefix_share"),
        ({"hits": 0.8}, "prefix_share"),
        ({"e2e_s": 9.0}, "in_flight"),
        ({"ttft_s": 0.2}, "ttft"),
        ({"itl_s": 0.02}, "tpot"),
        ({"per_step": 1.2}, "tokens_per_step"),
    ],
)
def test_each_quantity_drifts_alone(changed: dict[str, float], quantity: str) -> None:
    traffic = Traffic(a_plan())
    traffic.requests(**changed)  # type: ignore[arg-type]
    assert traffic.drifted() == {quantity}


@pytest.mark.parametrize(
    "changed", [{"ttft_s": 0.01}, {"itl_s": 0.001}, {"per_step": 4.0}, {"e2e_s": 0.5}, {"prompt": 140}]
)
def test_better_than_promised_and_small_changes_are_no_drift(changed: dict[str, float]) -> None:
    traffic = Traffic(a_plan())
    traffic.requests(**changed)  # type: ignore[arg-type]
    assert traffic.drifted() == set()


def test_a_rate_is_compared_where_the_plan_is_for_a_rate() -> None:
    traffic = Traffic(a_plan(request_rate=1.0))
    traffic.requests(every_s=1.0)
    assert traffic.drifted() == set()
    traffic.requests(every_s=0.5)
    assert traffic.drifted() == {"request_rate"}
    assert "in_flight" not in {finding.name for finding in traffic.watch.findings}


def test_harmed_transfers_are_seen_with_workers_only() -> None:
    traffic = Traffic(a_plan(TopologyConfig(prefill_workers=1, decode_workers=1)))
    traffic.counters |= {"kv_transfers": 10, "kv_fallbacks": 1}
    traffic.requests()
    assert traffic.drifted() == set()
    traffic.counters |= {"kv_transfers": 20, "kv_fallbacks": 8}  # 7 of the window's 10
    traffic.requests()
    assert traffic.drifted() == {"kv_fallbacks"}
    alone = Traffic(a_plan())
    alone.counters |= {"kv_transfers": 10, "kv_fallbacks": 9}
    alone.requests()
    assert "kv_fallbacks" not in {finding.name for finding in alone.watch.findings}


def test_drift_is_said_once_with_what_to_do_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "triblade.serve.drift")
    traffic = Traffic(a_plan())
    for _ in range(3):
        traffic.requests(prompt=1000, hits=0.1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    message = caplog.messages[0]
    assert "tokens per prompt: 1000, planned 100" in message
    assert "triblade plan MODEL --prompt-tokens 1000 --prefix-share 0.10" in message
    for _ in range(2):
        traffic.requests()
    assert caplog.messages[1:] == [f"the plan fits the last {WINDOW} answers again"]


def test_a_quantity_that_swings_around_the_limit_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic(a_plan())
    for prompt in (160, 140, 160, 140):  # beyond 1.5 times, then back within it, but not within 1.25
        traffic.requests(prompt=prompt)
    assert traffic.drifted() == {"prompt_tokens"}
    assert len(caplog.records) == 1


def test_slower_than_predicted_on_planned_traffic_asks_for_measurement(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic(a_plan())
    traffic.requests(ttft_s=1.0)
    assert "measure with triblade tune" in caplog.text

"""Plans of twelve pairs of hardware and workload, each read for sense; a change of rules or costs that turns one shows here."""

from __future__ import annotations

import re
from typing import Any

import pytest
from plan_shapes import EIGHT, SEVENTY

from triblade.config import PlanConfig
from triblade.tune.hardware import find_hardware
from triblade.tune.make_plan import make_plan
from triblade.tune.plan_report import describe
from triblade.tune.planner import decide
from triblade.tune.shape import ModelShape

LONG_PREFIX: dict[str, Any] = {
    "workload": "shared-prefix",
    "prompt_tokens": 6000,
    "output_tokens": 300,
    "prefix_share": 0.9,
}
PAIRS: list[tuple[ModelShape, str, dict[str, Any], str]] = [  # what is chosen where; read for sense in docs/log.md
    (EIGHT, "t4", {"workload": "chat"}, "no drafts, one engine"),
    (EIGHT, "a10", {"workload": "document"}, "no drafts, one engine"),
    (EIGHT, "l4", {"workload": "short", "concurrency": 32.0}, "no drafts, one engine"),
    (EIGHT, "rtx4090", {"workload": "chat", "concurrency": 1.0}, "suffix k 6, one engine"),
    (EIGHT, "a100-80gb", {**LONG_PREFIX, "concurrency": 16.0}, "no drafts, one engine"),
    (EIGHT, "h100", {"workload": "chat", "concurrency": 32.0}, "no drafts, one engine"),
    (
        SEVENTY,
        "h100",
        {"devices": 8, "workload": "chat", "concurrency": 64.0},
        "eagle k 2, P/D with 2 devices for prompts",
    ),
    (SEVENTY, "h200", {"workload": "document", "concurrency": 4.0}, "eagle k 2, one engine"),
    (EIGHT, "h200", {**LONG_PREFIX, "devices": 2, "request_rate": 8.0}, "eagle k 4, one engine on each of 2 devices"),
    (EIGHT, "b200", {"devices": 8, "workload": "long-output", "concurrency": 256.0}, "one engine on each of 8 devices"),
    (EIGHT, "cpu-server", {"workload": "chat", "concurrency": 4.0}, "eagle k 2, one engine"),
    (EIGHT, "cpu-edge", {"workload": "edit", "concurrency": 1.0}, "suffix k 4, one engine"),
]


@pytest.mark.parametrize(("shape", "hardware", "asked", "wanted"), PAIRS)
def test_plans_of_twelve_pairs_make_sense(shape: ModelShape, hardware: str, asked: dict[str, Any], wanted: str) -> None:
    config, sheet = PlanConfig(model=shape.name, hardware=hardware, **asked), find_hardware(hardware)
    decision = decide(config, shape, sheet)
    made, chosen, outcome = make_plan(decision, config), decision.chosen, decision.chosen.outcome
    lines = describe(decision, made, config).splitlines()
    (said,) = [line for line in lines if line.startswith("chosen: ")]
    assert said.startswith("chosen: int4")
    assert said.endswith(wanted)
    assert made.figure("memory") <= sheet.memory_gb
    assert outcome.e2el_s == pytest.approx(outcome.ttft_s + outcome.tpot_s * (made.workload.output_tokens - 1))
    assert decision.before is None or outcome.e2el_s < decision.before.outcome.e2el_s
    assert decision.runner_up is not None
    assert ("serve" if sheet.why_not_own_kernels is None else "deploy") in lines[-1]
    assert not [line for line in lines if re.search(r"\de\+\d|=\d+\.0\b", line)]
    assert chosen.candidate.drafter is None or outcome.tokens_per_step > 1


def test_guesses_that_never_pay_are_no_alternative() -> None:
    config = PlanConfig(model=EIGHT.name, hardware="l4", workload="short", concurrency=32)
    decision = decide(config, EIGHT, find_hardware("l4"))
    idle = [one.candidate for one in decision.rejected if one.gate == "drafts"]
    assert {one.weights.scheme for one in idle} == {"int4"}
    assert not {str(one) for one in idle} & {str(one.candidate) for one in decision.ranked}
    assert "drafts: no guess pays with 32 requests in flight" in make_plan(decision, config).reasons

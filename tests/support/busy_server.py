"""A fake engine and a plan with which a server exposes every metric it has."""

from __future__ import annotations

from dataclasses import replace

from fake_client import FakeClient

from triblade.config import EngineConfig, Figure, Plan, WeightPlan, Workload
from triblade.engine.client import EngineLoad
from triblade.engine.transfers import TransferCounts
from triblade.spec.record import SpeculationCounts

PLAN = Plan(
    hardware="here",
    decode=EngineConfig(model="fake"),
    weights=WeightPlan(scheme="int4"),
    workload=Workload(name="chat", prompt_tokens=4000, output_tokens=13, concurrency=1),
    prediction=(Figure(name="tpot", value=1e6, unit="ms", label="predicted"),),
    reasons=("because",),
)


class BusyClient(FakeClient):
    """A drafter and a prefill worker, so that every metric exists."""

    def load(self) -> EngineLoad:
        counts = SpeculationCounts()
        counts.add(drafted=2, accepted=1)
        return replace(super().load(), speculation=counts, transfers=TransferCounts(num_prefill_workers=1))

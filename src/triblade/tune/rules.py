"""The decision tables of `rules.toml`: which rules fit, what they advise, and the figures they bring.

Pure: reads one file of the package. Knows no formula; what a rule advises is one candidate among others, and decides only between
candidates that the cost model cannot tell apart.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from triblade.config import PlanConfig, Workload, from_mapping
from triblade.tune.hardware import Hardware

REPETITIVE = ("edit",)  # workloads whose answers repeat their prompts
CHAT, MOST_CACHED = "chat", 0.9
SAMPLED_SHARE = 0.8  # of the guesses that would be right at temperature 0
# Row S4: shorter prompts are answered without guesses, longer ones always with some.
DIRECT_PROMPT_TOKENS, SPECULATE_PROMPT_TOKENS = 128, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A row of a decision table: conditions, advice, and where it is from. None: says nothing about it."""

    id: str
    says: str
    source: str
    memory_from_gb: float = 0.0
    memory_below_gb: float = float("inf")
    least_devices: int = 1
    most_devices: int = 1 << 30
    workloads: tuple[str, ...] = ()
    ppl_from: float = 0.0
    ppl_below: float = float("inf")
    bits: int | None = None
    speculate: bool | None = None
    draft_length: int | None = None
    split: str | None = None
    placement: Literal["one", "two"] | None = None
    tensor_parallel: bool = False

    def fits(self, hardware: Hardware, devices: int, workload: Workload, max_ppl_increase: float) -> bool:
        """Whether all conditions hold."""
        return (
            self.memory_from_gb <= hardware.memory_gb < self.memory_below_gb
            and self.least_devices <= devices <= self.most_devices
            and (not self.workloads or workload.name in self.workloads)
            and self.ppl_from <= max_ppl_increase < self.ppl_below
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What a drafter guesses, and what guessing costs in plain steps."""

    share: float
    longest: int
    plain: float
    repetitive: float
    fixed_cost: float
    guess_cost: float
    source: str

    def right(self, workload: Workload) -> float:
        """Share of guesses that are right, of those whose predecessors were."""
        rate = self.repetitive if workload.name in REPETITIVE else self.plain
        return rate * (SAMPLED_SHARE if workload.sampled else 1.0)


def fitting_rules(hardware: Hardware, devices: int, workload: Workload, max_ppl_increase: float) -> tuple[Rule, ...]:
    """The rules that count; where two advise different things, the later one is more special and wins."""
    found = (from_mapping(Rule, row) for row in _tables()["rule"])
    return tuple(rule for rule in found if rule.fits(hardware, devices, workload, max_ppl_increase))


def advice(rules: tuple[Rule, ...]) -> Mapping[str, Any]:
    """All that the rules say together."""
    names = ("bits", "speculate", "draft_length", "split", "placement")
    said = {name: getattr(rule, name) for rule in rules for name in names if getattr(rule, name) is not None}
    return said


def ppl_increase(scheme: str) -> float:
    """How much perplexity grows by rounding to `scheme`, as a share."""
    value: float = _tables()["quality"][scheme]
    return value


@cache
def acceptance(drafter: str) -> Acceptance:
    """What a drafter is worth."""
    return from_mapping(Acceptance, _tables()["acceptance"][drafter])


def workload_of(config: PlanConfig) -> Workload:
    """The workload with its defaults in place of what the user left open.

    Raises:
        ConfigError: a value is out of range.
    """
    defaults = {"prefix_share": 0.0, **_tables()["workload"][config.workload]}
    given = {f.name: getattr(config, f.name, None) for f in fields(Workload) if f.name != "name"}
    said = {name: value for name, value in given.items() if value is not None}
    found: Workload = from_mapping(Workload, {**defaults, **said, "name": config.workload})
    if config.workload == CHAT and config.prefix_share is None:
        found = replace(found, prefix_share=_said_before(found.prompt_tokens, found.output_tokens))
    return found


def _said_before(prompt_tokens: int, output_tokens: int) -> float:
    """Share of the prompts of a conversation in two turns that its first turn brought.

    A question q and an answer o, then both and another question: prompts of (3q + o) / 2 on average, (q + o) / 2 of them known.
    """
    question = max(0.0, (2 * prompt_tokens - output_tokens) / 3)
    return min(MOST_CACHED, (question + output_tokens) / (2 * prompt_tokens))


@cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads((resources.files("triblade.tune") / "rules.toml").read_text(encoding="utf-8"))

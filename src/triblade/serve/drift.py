"""Whether traffic is what the Plan was made for, and whether the server gives what the Plan promised.

Fed with what the metrics are fed with; looks at the requests of one window after the other. Knows no HTTP and no engine. Invariant:
every window is judged by its own requests alone, so a change of traffic shows within two windows however long the server has run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from triblade.config import Plan

logger = logging.getLogger(__name__)

WINDOW_REQUESTS = 100
TOLERANCE, RETURN = 1.5, 1.25  # a quantity has drifted beyond the first, and is back within the second
SHARE_TOLERANCE, SHARE_RETURN = 0.2, 0.1  # of quantities that are shares: difference, not ratio
ENDED = "request_generation_tokens"  # observed once for each answer
Bad = Literal["either", "higher", "lower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Something that a plan assumes, and which direction of leaving it matters."""

    title: str
    assumed: Callable[[Plan], float | None]  # None: this plan says nothing about it
    seen: Callable[[Window], float | None]  # None: this window shows nothing
    bad: Bad = "either"
    is_share: bool = False
    flag: str = ""  # of `triblade plan`: what to say there to plan for what was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One quantity in the last complete window."""

    name: str
    title: str
    assumed: float
    seen: float
    drifted: bool


@dataclass(slots=True)
class Window:
    """Sums over the requests that ended since `begun_s`."""

    begun_s: float
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0  # its length, when it is complete

    def add(self, name: str, value: float) -> None:
        """One observation, or an amount of a counter."""
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] = self.counts.get(name, 0) + 1

    def mean(self, name: str) -> float | None:
        """Mean of the observations of `name`."""
        return self.sums[name] / self.counts[name] if self.counts.get(name) else None

    def ratio(self, name: str, of: str) -> float | None:
        """Sum of one over the sum of another."""
        return self.sums.get(name, 0.0) / self.sums[of] if self.sums.get(of) else None

    def per_second(self, value: float | None) -> float | None:
        """An amount by the length of the window."""
        return None if value is None or self.seconds <= 0 else value / self.seconds


def _predicted(name: str) -> Callable[[Plan], float | None]:
    return lambda plan: next((figure.value for figure in plan.prediction if figure.name == name), None)


def _in_flight(window: Window) -> float | None:
    """Mean number of requests being answered: their seconds by the window's (Little's law)."""
    return window.per_second(window.sums.get("e2e_request_latency_seconds"))


def _milliseconds(name: str) -> Callable[[Window], float | None]:
    return lambda window: None if (mean := window.mean(name)) is None else mean * 1e3


QUANTITIES: Mapping[str, Quantity] = {
    "prompt_tokens": Quantity(
        title="tokens per prompt",
        assumed=lambda plan: plan.workload.prompt_tokens,
        seen=lambda window: window.mean("request_prompt_tokens"),
        flag="--prompt-tokens",
    ),
    "output_tokens": Quantity(
        title="tokens per answer",
        assumed=lambda plan: plan.workload.output_tokens,
        seen=lambda window: window.mean(ENDED),
        flag="--output-tokens",
    ),
    "prefix_share": Quantity(
        title="share of prompts found in the prefix cache",
        assumed=lambda plan: plan.workload.prefix_share,
        seen=lambda window: window.ratio("prefix_cache_hits", of="prefix_cache_queries"),
        is_share=True,
        flag="--prefix-share",
    ),
    "in_flight": Quantity(
        title="requests in flight",
        assumed=lambda plan: plan.workload.concurrency if plan.workload.request_rate is None else None,
        seen=_in_flight,
        bad="higher",
        flag="--concurrency",
    ),
    "request_rate": Quantity(
        title="requests per second",
        assumed=lambda plan: plan.workload.request_rate,
        seen=lambda window: window.per_second(window.counts.get(ENDED)),
        bad="higher",
        flag="--request-rate",
    ),
    "ttft": Quantity(
        title="ms to the first token",
        assumed=_predicted("ttft"),
        seen=_milliseconds("time_to_first_token_seconds"),
        bad="higher",
    ),
    "tpot": Quantity(
        title="ms between tokens",
        assumed=_predicted("tpot"),
        seen=_milliseconds("inter_token_latency_seconds"),
        bad="higher",
    ),
    "tokens_per_step": Quantity(
        title="tokens per step of a sequence",
        assumed=_predicted("tokens_per_step"),
        seen=lambda window: window.ratio("step_tokens", of="steps"),
        bad="lower",
    ),
    "kv_fallbacks": Quantity(
        title="share of transfers that the KV codec would have harmed",
        assumed=lambda plan: 0.0 if plan.topology.is_distributed else None,
        seen=lambda window: window.ratio("kv_fallbacks", of="kv_transfers"),
        is_share=True,
    ),
}


class PlanWatch:
    """Compares windows of requests with a plan, logs what drifts, and keeps the findings of the last window.

    Args:
        counters: totals of the engine, read at the end of every window: `steps`, `step_tokens`, `kv_transfers`, `kv_fallbacks`.
        clock: seconds.
    """

    def __init__(
        self,
        plan: Plan,
        counters: Callable[[], Mapping[str, float]],
        *,
        window_requests: int = WINDOW_REQUESTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.findings: tuple[Finding, ...] = ()
        self._plan = plan
        self._counters = counters
        self._totals: Mapping[str, float] = {}
        self._window_requests = window_requests
        self._clock = clock
        self._window = Window(clock())

    def note(self, name: str, value: float) -> None:
        """What the metrics counted or observed."""
        self._window.add(name, value)
        if self._window.counts.get(ENDED, 0) >= self._window_requests:
            self._judge()

    def _judge(self) -> None:
        """End the window."""
        window, now = self._window, self._clock()
        self._window = Window(now)
        window.seconds = now - window.begun_s
        totals = self._counters()
        window.sums |= {name: total - self._totals.get(name, 0.0) for name, total in totals.items()}
        self._totals = totals
        before = {finding.name for finding in self.findings if finding.drifted}
        self.findings = tuple(self._findings(window, before))
        self._log(before)

    def _findings(self, window: Window, before: set[str]) -> list[Finding]:
        found = []
        for name, quantity in QUANTITIES.items():
            assumed, seen = quantity.assumed(self._plan), quantity.seen(window)
            if assumed is None or seen is None:
                continue
            drifted = _is_outside(quantity, assumed, seen, was_outside=name in before)
            found.append(Finding(name=name, title=quantity.title, assumed=assumed, seen=seen, drifted=drifted))
        return found

    def _log(self, before: set[str]) -> None:
        now = [finding for finding in self.findings if finding.drifted]
        if new := [finding for finding in now if finding.name not in before]:
            said = "; ".join(f"{f.title}: {f.seen:.4g}, planned {f.assumed:.4g}" for f in new)
            logger.warning(
                "the plan does not fit the last %d answers: %s; %s", self._window_requests, said, _advice(now)
            )
        elif before and not now:
            logger.info("the plan fits the last %d answers again", self._window_requests)


def _is_outside(quantity: Quantity, assumed: float, seen: float, *, was_outside: bool) -> bool:
    if quantity.is_share:
        return abs(seen - assumed) > (SHARE_RETURN if was_outside else SHARE_TOLERANCE)
    limit = RETURN if was_outside else TOLERANCE
    higher, lower = seen > assumed * limit, seen * limit < assumed
    return (higher and quantity.bad != "lower") or (lower and quantity.bad != "higher")


def _advice(drifted: list[Finding]) -> str:
    """What to do: plan for what was seen, or, where the traffic is as planned, measure."""
    flags = [
        f"{QUANTITIES[f.name].flag} {f.seen:.2f}"
        if QUANTITIES[f.name].is_share
        else f"{QUANTITIES[f.name].flag} {f.seen:.0f}"
        for f in drifted
        if QUANTITIES[f.name].flag
    ]
    if flags:
        return f"plan again: triblade plan MODEL {' '.join(flags)}"
    return "the traffic is as planned, so the prediction was wrong: measure with triblade tune"

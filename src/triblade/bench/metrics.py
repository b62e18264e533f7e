"""From the times of each request to what a load test reports: TTFT, TPOT, ITL, end to end, throughput, goodput.

    sent |----- TTFT -----| first token |-- ITL --|-- ITL --| ... last token |
         |---------------------------- E2E ----------------------------------|
    TPOT = (E2E - TTFT) / (output tokens - 1); ITL = between pieces of the answer as they came, which may hold several tokens.

Times are those of the client: `sent_s` is when a request was due, so that waiting for the load generator counts, too (no
coordinated omission). Failed requests are counted and never enter a percentile. Pure: no tensor, no network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, as whoever answered it counts them."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Record:
    """One request, in seconds from the start of the test."""

    conversation: int
    turn: int
    sent_s: float
    piece_s: list[float] = field(default_factory=list)  # when each piece of the answer came
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def count(self, usage: Usage) -> None:
        """What the target says that the request has used."""
        self.prompt_tokens, self.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        self.output_tokens = usage.output_tokens

    @property
    def ttft_s(self) -> float:
        return self.piece_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.piece_s[-1] - self.piece_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.piece_s)]

    @property
    def is_good(self) -> bool:
        """It has an answer, to the end."""
        return self.error is None and bool(self.piece_s)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one measure, with the number of values behind it."""

    count: int
    mean: float
    minimum: float
    maximum: float
    quantiles: Mapping[str, float]  # "p50" -> value

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None of no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        quantiles = {f"p{100 * q:g}": quantile(ordered, q) for q in QUANTILES}
        return cls(len(ordered), math.fsum(ordered) / len(ordered), ordered[0], ordered[-1], quantiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a load test found. Times in ms, rates per second."""

    duration_s: float
    requests: int
    failed: int
    errors: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    peak_in_flight: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    goodput_per_s: float | None  # None where no limits were set
    goodput_share: float | None


def summarize(records: Sequence[Record], duration_s: float, limits_s: Mapping[str, float]) -> Summary:
    """The report of finished requests.

    Args:
        limits_s: limits by name (`ttft`, `tpot`, `e2el`) in seconds; a request that meets all is good.
    """
    good = [record for record in records if record.is_good]
    errors: dict[str, int] = {}
    for record in records:
        if not record.is_good:
            reason = record.error or "an empty answer"
            errors[reason] = errors.get(reason, 0) + 1
    prompt, output = (sum(getattr(r, name) for r in good) for name in ("prompt_tokens", "output_tokens"))
    met = sum(meets(record, limits_s) for record in good)
    seconds = max(duration_s, 1e-9)
    return Summary(
        duration_s=duration_s,
        requests=len(records),
        failed=len(records) - len(good),
        errors=errors,
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in good),
        output_tokens=output,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        peak_in_flight=peak_in_flight(records),
        ttft_ms=Distribution.of(1000 * r.ttft_s for r in good),
        tpot_ms=Distribution.of(1000 * t for r in good if (t := r.tpot_s) is not None),
        itl_ms=Distribution.of(1000 * gap for r in good for gap in r.gaps_s),
        e2e_ms=Distribution.of(1000 * r.e2e_s for r in good),
        goodput_per_s=met / seconds if limits_s else None,
        goodput_share=met / len(records) if limits_s and records else None,
    )


def meets(record: Record, limits_s: Mapping[str, float]) -> bool:
    """Whether a good request keeps all limits."""
    found = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2e_s}
    return all(found[name] <= limit for name, limit in limits_s.items())


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of sorted values, with linear interpolation between neighbours (as numpy's default)."""
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def peak_in_flight(records: Sequence[Record]) -> int:
    """Most requests that ran at once."""
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak

"""What a step costs by its rows, learned from the steps that were run on a machine that others may use, too.

Knows no request and has no clock: times are arguments. A busy machine, a lower clock or longer contexts slow all steps alike, for
seconds at a time, so two steps can only be compared if they were run at about the same time. That is how everything is learned
here: a step is compared with the few before it, whose common slowness is the `level`; what is left says how much longer its rows
take than theirs. Invariants: a prediction never falls when rows are added; no observation moves it far; steps of always the same
rows move nothing but the level, and neither do times in which steps differ wildly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from statistics import median_low

EXACT_ROWS = 32  # up to here every number of rows is an entry of its own
BUCKET_RATIO = 1.1  # beyond, an entry spans this ratio
GROWTH = 0.2  # until more is known, twice the rows take 2 ** GROWTH times as long
SMOOTHING = 0.2  # rows within a ratio of e to this power tell something about each other
MIN_SPAN = 1.25  # measured rows must span this ratio to tell the growth beyond them
RECENT_STEPS = 9  # that a step is compared with
CALM = 0.1  # spread of the recent steps, as a share, at which a comparison counts half
FIRST_WEIGHT = 0.5
FIRST_SURPRISE = (
    0.15  # logarithm of a ratio: most by which the first observation of an entry differs from what was expected,
)
CALM_SURPRISE = 0.25  # and so much more if the recent steps were alike;
YOUNG_SURPRISE = 0.4  # the same later, divided by 1 + weight; beside it stand SPREADS times the spread
SPREADS = 3.0
MAX_WEIGHT = 150.0  # comparisons an entry remembers
HALF_LIFE_STEPS = 2048  # of the weight of an entry that is not observed
MIN_WEIGHT = 0.02  # an entry that weighs less is forgotten


class _Entry:
    """The relative time of steps with about as many rows."""

    __slots__ = ("last_step", "log_time", "rows", "weight")

    def __init__(self, rows: float, log_time: float, step: int) -> None:
        self.rows = rows  # mean of those observed
        self.log_time = log_time  # logarithm of seconds, less the common level
        self.weight = FIRST_WEIGHT
        self.last_step = step

    def weight_at(self, step: int) -> float:
        return self.weight * math.pow(0.5, (step - self.last_step) / HALF_LIFE_STEPS)


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Relative times of steps by rows: measured ones, interpolated between, continued beyond.

    Attributes:
        rows: ascending.
        times: of steps with so many rows; never falling.
    """

    rows: list[float]
    times: list[float]

    @property
    def most_rows(self) -> float:
        """Largest number of rows that was measured."""
        return self.rows[-1]

    def at(self, rows: float) -> float:
        """Of a step with so many rows."""
        right = bisect_left(self.rows, rows)
        if right == len(self.rows):
            return self.times[-1] * math.pow(rows / self.rows[-1], self._growth())
        if right == 0:
            return self.times[0] * math.pow(rows / self.rows[0], self._growth())
        before, after = self.rows[right - 1], self.rows[right]
        share = (rows - before) / (after - before)
        return self.times[right - 1] + share * (self.times[right] - self.times[right - 1])

    def _growth(self) -> float:
        """Exponent of time over rows outside the table: that of the chord through it, if it is long enough."""
        span = self.rows[-1] / self.rows[0]
        if span < MIN_SPAN:
            return GROWTH
        return min(math.log(self.times[-1] / self.times[0]) / math.log(span), 1.0)


class StepCost:
    """Times of steps by their rows: a table of entries relative to a level that moves with the machine."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._recent = deque[tuple[int, float]](maxlen=RECENT_STEPS)  # entry; logarithm of its time over the entry's
        self._level = 0.0
        self._step = 0

    @property
    def is_empty(self) -> bool:
        return not self._entries

    @property
    def level_s(self) -> float:
        """Seconds of a step whose relative time is 1, at present."""
        return math.exp(self._level)

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`; times that are not positive tell nothing."""
        if seconds <= 0:
            return
        self._step += 1
        bucket = _bucket(rows)
        entry = self._entries.get(bucket)
        expected = entry.log_time if entry else math.log(self.table().at(rows)) if self._entries else 0.0
        residual = math.log(seconds) - expected
        if entry is not None:
            self._compare(entry, bucket, residual, rows)
        else:
            most = FIRST_SURPRISE + CALM_SURPRISE * _calm(self._spread())
            surprise = _within(residual - self._level, most) if self._entries else 0.0
            self._entries[bucket] = _Entry(rows, expected + surprise, self._step)
        self._recent.append((bucket, residual))
        self._level = median_low([value for _, value in self._recent])

    def table(self) -> RowTimes:
        """What is known now: smooth and monotone, without what was not observed for long. There must have been an observation."""
        weights = {bucket: entry.weight_at(self._step) for bucket, entry in self._entries.items()}
        if any(weight >= MIN_WEIGHT for weight in weights.values()):
            self._entries = {bucket: e for bucket, e in self._entries.items() if weights[bucket] >= MIN_WEIGHT}
        points = [(e.rows, e.log_time, weights[bucket]) for bucket, e in sorted(self._entries.items())]
        means = _pooled([_smoothed(rows, points) for rows, _, _ in points], [weight for _, _, weight in points])
        return RowTimes([rows for rows, _, _ in points], [math.exp(mean) for mean in means])

    def _spread(self) -> float:
        """How much the recent steps differed from what was expected of them: half of them by less."""
        return median_low([abs(value - self._level) for _, value in self._recent]) if self._recent else 0.0

    def _compare(self, entry: _Entry, bucket: int, residual: float, rows: int) -> None:
        """Learn how an entry's time stands to those of the recent steps with other rows, as far as all of them agree."""
        others = [value for other, value in self._recent if other != bucket]
        if not others:
            return
        spread = self._spread()
        trust = len(others) / len(self._recent) * _calm(spread)
        weight = entry.weight_at(self._step)
        surprise = _within(residual - median_low(others), SPREADS * spread + YOUNG_SURPRISE / (1.0 + weight))
        share = trust / (weight + trust)
        entry.log_time += share * surprise
        entry.rows += share * (rows - entry.rows)
        entry.weight = min(weight + trust, MAX_WEIGHT)
        entry.last_step = self._step


def _smoothed(rows: float, points: list[tuple[float, float, float]]) -> float:
    """Logarithm of the time at `rows` by a local linear fit over its neighbours.

    What one more row costs is the difference of two noisy numbers; a line through several tells it better.

    Args:
        rows: one of the points' rows.
        points: rows, logarithm of the time, weight.
    """
    mass = x = y = xx = xy = 0.0
    for other, log_time, weight in points:
        distance = math.log(other / rows)
        share = weight * max(0.0, 1.0 - abs(distance) / SMOOTHING)
        mass += share
        x += share * distance
        y += share * log_time
        xx += share * distance * distance
        xy += share * distance * log_time
    spread = mass * xx - x * x
    return (xx * y - x * xy) / spread if spread > 1e-6 * mass * mass else y / mass


def _pooled(values: list[float], weights: list[float]) -> list[float]:
    """The nearest values that never fall: neighbours that do are replaced by their mean (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # weight, mean, number of values
    for value, weight in zip(values, weights, strict=True):
        mean, count = value, 1
        while pools and pools[-1][1] > mean:
            other_weight, other_mean, other_count = pools.pop()
            mean = (weight * mean + other_weight * other_mean) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((weight, mean, count))
    return [mean for _, mean, count in pools for _ in range(count)]


def _calm(spread: float) -> float:
    """How much a comparison counts."""
    return 1.0 / (1.0 + (spread / CALM) ** 2)


def _within(value: float, most: float) -> float:
    return min(max(value, -most), most)


def _bucket(rows: int) -> int:
    """Entry of a number of rows."""
    if rows <= EXACT_ROWS:
        return rows
    return EXACT_ROWS + 1 + int(math.log(rows / EXACT_ROWS) / math.log(BUCKET_RATIO))

"""What a step costs, learned from the steps that were run: seconds of the target by rows, seconds of drafting by length.

Knows no request and has no clock: times are arguments. Invariant: a prediction never falls when rows are added, and is never
moved far by a single observation (a step that the machine interrupted takes five times as long and means nothing).
"""

from __future__ import annotations

import math
from bisect import bisect_left

EXACT_ROWS = 32  # up to here every number of rows is an entry of its own
BUCKET_RATIO = 1.1  # beyond, an entry spans this ratio
GROWTH = 0.2  # until more is known, twice the rows take 2 ** GROWTH times as long
SMOOTHING = 0.3  # rows within a ratio of e to this power tell something about each other
MIN_SPAN = 1.25  # measured rows must span this ratio to tell the growth beyond them
SURPRISE = 1.5  # an observation counts as at most this many times its prediction, and at least one over it
FIRST_SURPRISE = (
    1.15  # the same for the first observation of an entry, so that one interruption does not bar the way back
)
LEVEL_GAIN = 0.1  # share of a surprise that is blamed on the machine or the contexts, and moves all entries
SETTLED_WEIGHT = 10.0  # observations after which a surprise is not the entry's own fault
MAX_WEIGHT = 50.0  # observations an entry remembers
HALF_LIFE_STEPS = 256  # of the weight of an entry that is not observed
MIN_WEIGHT = 0.25  # an entry that weighs less is forgotten


class _Entry:
    """The relative time of steps with about as many rows."""

    __slots__ = ("last_step", "log_time", "rows", "weight")

    def __init__(self, rows: float, log_time: float, step: int) -> None:
        self.rows = rows  # mean of those observed
        self.log_time = log_time  # logarithm of seconds, less the common level
        self.weight = 0.5
        self.last_step = step

    def weight_at(self, step: int) -> float:
        return self.weight * math.pow(0.5, (step - self.last_step) / HALF_LIFE_STEPS)


class StepCost:
    """Seconds of a step by its rows: a table of decayed means, made monotone, interpolated.

    Longer contexts, a busier machine or a lower clock change all steps alike. So part of every surprise moves a level common to
    all entries, and entries that were not visited stay comparable with those that were.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._level = 0.0
        self._step = 0
        self._knots: tuple[list[float], list[float]] | None = None  # rows, seconds; made when asked for
        self._known: dict[int, float] = {}  # predictions since the last observation

    @property
    def is_empty(self) -> bool:
        return not self._entries

    @property
    def most_rows(self) -> float:
        """Largest number of rows that is known."""
        return self._table()[0][-1]

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`; times that are not positive tell nothing."""
        if seconds <= 0:
            return
        self._step += 1
        entry = self._entries.get(_bucket(rows))
        if entry is not None:
            self._learn(entry, rows, math.log(seconds) - self._level - entry.log_time)
        elif self._entries:
            expected = math.log(self.seconds(rows))
            log_time = expected + _limited(math.log(seconds) - expected, FIRST_SURPRISE) - self._level
            self._entries[_bucket(rows)] = _Entry(rows, log_time, self._step)
        else:
            self._level = math.log(seconds)
            self._entries[_bucket(rows)] = _Entry(rows, 0.0, self._step)
        self._knots = None
        self._known.clear()

    def seconds(self, rows: float) -> float:
        """Predicted seconds of a step of that many rows, to the nearest whole one; there must have been an observation."""
        whole = round(rows)
        if whole not in self._known:
            self._known[whole] = self._predict(whole)
        return self._known[whole]

    def _predict(self, rows: int) -> float:
        known, seconds = self._table()
        right = bisect_left(known, rows)
        if right == len(known):
            return seconds[-1] * math.pow(rows / known[-1], self._growth())
        if right == 0:
            return seconds[0] * math.pow(rows / known[0], self._growth())
        share = (rows - known[right - 1]) / (known[right] - known[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])

    def _learn(self, entry: _Entry, rows: int, surprise: float) -> None:
        """Share a surprise between the entry and, once that is well known, the level of all.

        Interruptions lengthen steps and nothing shortens them: a step much faster than a young entry says that the entry
        was wrong.
        """
        weight = entry.weight_at(self._step)
        gain = LEVEL_GAIN if weight >= SETTLED_WEIGHT else 0.0
        if gain == 0.0 and surprise < -math.log(SURPRISE):
            weight = 0.0
        else:
            surprise = _limited(surprise, SURPRISE)
        self._level += gain * surprise
        entry.log_time += (1.0 - gain) * surprise / (weight + 1.0)
        entry.rows += (rows - entry.rows) / (weight + 1.0)
        entry.weight = min(weight + 1.0, MAX_WEIGHT)
        entry.last_step = self._step

    def _growth(self) -> float:
        """Exponent of time over rows outside the table: that of the chord through it, if it is long enough."""
        known, seconds = self._table()
        if known[-1] < MIN_SPAN * known[0]:
            return GROWTH
        return min(math.log(seconds[-1] / seconds[0]) / math.log(known[-1] / known[0]), 1.0)

    def _table(self) -> tuple[list[float], list[float]]:
        if self._knots is None:
            self._knots = self._make_table()
        return self._knots

    def _make_table(self) -> tuple[list[float], list[float]]:
        """Forget what is old, smooth, make monotone."""
        weights = {bucket: entry.weight_at(self._step) for bucket, entry in self._entries.items()}
        if any(weight >= MIN_WEIGHT for weight in weights.values()):
            self._entries = {bucket: e for bucket, e in self._entries.items() if weights[bucket] >= MIN_WEIGHT}
        points = [(e.rows, e.log_time, weights[bucket]) for bucket, e in sorted(self._entries.items())]
        means = _pooled([_smoothed(rows, points) for rows, _, _ in points], [weight for _, _, weight in points])
        return [rows for rows, _, _ in points], [math.exp(self._level + mean) for mean in means]


class DraftCost:
    """Seconds of drafting: what it takes even when nothing is asked for, a part for each token in a row (`depth`), and one for each
    token of all requests.

    The last two are fitted by least squares over decayed sums; a drafter that costs nothing gets numbers near 0.
    """

    KEEP = 0.98

    def __init__(self) -> None:
        self._dd = self._dt = self._tt = self._ds = self._ts = 0.0  # decayed sums over depth, tokens and seconds
        self._per_depth = self._per_token = 0.0
        self._idle: float | None = None  # seconds without drafts: some drafters keep in step with the target at a cost
        self._observed = 0
        self._pause = 0  # steps since drafting was observed

    def observe(self, depth: int, tokens: int, seconds: float) -> None:
        """Drafting up to `depth` tokens per request, `tokens` in all, took `seconds`; without any, time only passes."""
        self._pause += 1
        if depth == 0:
            self._observe_idle(seconds)
            return
        seconds = max(0.0, seconds - (self._idle or 0.0))
        keep = math.pow(self.KEEP, self._pause)
        if self._observed:
            expected = self._fitted(depth, tokens)
            keep *= 0.2 if seconds < 0.5 * expected else 1.0  # as with steps: what is shorter is nearer to the truth
            seconds = min(seconds, 2.0 * expected + 1e-5)
        self._pause = 0
        self._dd, self._dt, self._tt = (
            self._dd * keep + depth * depth,
            self._dt * keep + depth * tokens,
            self._tt * keep + tokens * tokens,
        )
        self._ds, self._ts = self._ds * keep + depth * seconds, self._ts * keep + tokens * seconds
        self._solve()
        self._observed += 1

    def seconds(self, depth: int, tokens: int) -> float:
        """Predicted seconds; those of drafts are 0 until they were observed twice, so that a drafter gets its chance."""
        return (self._idle or 0.0) + (self._fitted(depth, tokens) if self._observed > 1 else 0.0)

    def _observe_idle(self, seconds: float) -> None:
        if self._idle is None or seconds < 0.5 * self._idle:
            self._idle = seconds
        else:
            self._idle += 0.1 * (min(seconds, SURPRISE * self._idle + 1e-6) - self._idle)

    def _fitted(self, depth: int, tokens: int) -> float:
        return self._per_depth * depth + self._per_token * tokens

    def _solve(self) -> None:
        """Two normal equations with a trace of ridge, and no negative price.

        One request alone has depth = tokens and cannot tell the two apart. The ridge then blames the depth, so that drafting
        for many looks cheap, is tried, and is known.
        """
        ridge = 1e-3 * self._dd
        dd, tt = self._dd + ridge, self._tt + 10.0 * ridge
        determinant = dd * tt - self._dt * self._dt
        per_depth = (self._ds * tt - self._ts * self._dt) / determinant
        per_token = (self._ts * dd - self._ds * self._dt) / determinant
        if per_depth < 0.0:
            per_depth, per_token = 0.0, self._ts / self._tt
        elif per_token < 0.0:
            per_depth, per_token = self._ds / self._dd, 0.0
        self._per_depth, self._per_token = max(per_depth, 0.0), max(per_token, 0.0)


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


def _limited(surprise: float, most: float) -> float:
    """The logarithm of a ratio, within 1 / most and most."""
    return min(max(surprise, -math.log(most)), math.log(most))


def _bucket(rows: int) -> int:
    """Entry of a number of rows."""
    if rows <= EXACT_ROWS:
        return rows
    return EXACT_ROWS + 1 + int(math.log(rows / EXACT_ROWS) / math.log(BUCKET_RATIO))

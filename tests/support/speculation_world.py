"""A world in which draft policies can be tried in milliseconds: drafts with known acceptance, steps with known cost.

Every run is the same for the same seed. Tokens are counted by their expectation given the lengths asked for, so that runs can be
compared closely; the policy sees drawn outcomes, and times with as much noise as the world has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from triblade.spec.policy import Candidate, DraftPolicy, FixedPolicy, StepRecord, Verified

Acceptance = Callable[[int, int], Sequence[float]]  # (request, step) -> chance by position

ENDLESS = 10**9  # tokens
BURST_STEPS = 60


def cpu_like_s(rows: int) -> float:
    """Seconds of a step on hardware where the first rows are cheap."""
    return 1.0 + 0.09 * (min(rows, 5) - 1) + 0.2 * max(0, rows - 5)


def accelerator_like_s(rows: int) -> float:
    """Nearly flat up to 64 rows."""
    return 1.0 + 0.002 * (rows - 1) + 0.02 * max(0, rows - 64)


def two_cores_s(rows: int) -> float:
    """As measured with a small model in four bits on two cores; every row costs more than the one before, up to the fourth."""
    return (1.0, 1.09, 1.23, 1.43, 1.62)[rows - 1] if rows <= 5 else 1.62 + 0.18 * (rows - 5)


@dataclass
class Run:
    """What happened."""

    tokens: float = 0.0
    seconds: float = 0.0
    lengths: list[list[int]] = field(default_factory=list)  # by step
    asked: int = 0  # steps that the policy was asked for

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def switches(self) -> int:
        """Changes of the first request's length from step to step."""
        return sum(a[0] != b[0] for a, b in zip(self.lengths, self.lengths[1:], strict=False))


@dataclass(frozen=True)
class World:
    """Requests that are drafted for and verified.

    Attributes:
        acceptance: chance of each position of a request's drafts, given that those before were accepted.
        batch: requests at a time.
        tokens_each: after so many (expected) tokens a request ends and a new one takes its place; None: never.
        offers: chance that the drafter offers each token, given that it offered those before.
        least_chance: the drafter knows the chances, and ends a draft where all of it is right with less than this one.
        target_s: seconds of a step by its rows.
        depth_s, token_s: seconds of drafting per token in a row, and per token of all requests.
        once_s: seconds of drafting at all.
        jitter: share by which measured times vary; with `outliers` as the chance of one five times as long.
        bursts: share of the steps in stretches of 60, of which every other one takes five times as long.
        rests: nobody is asked while the policy rests and no request is new.
    """

    acceptance: Acceptance
    batch: int = 1
    tokens_each: int | None = None
    offers: float = 1.0
    least_chance: float = 0.0
    target_s: Callable[[int], float] = cpu_like_s
    depth_s: float = 0.06
    token_s: float = 0.0
    once_s: float = 0.0
    jitter: float = 0.0
    outliers: float = 0.0
    bursts: float = 0.0
    rests: bool = False

    def run(self, policy: DraftPolicy, steps: int, seed: int = 0) -> Run:
        """Let a policy decide for so many steps."""
        randomness = random.Random(seed)
        run = Run()
        left = {number: float(self.tokens_each or ENDLESS) for number in range(self.batch)}
        burst_until = rest = rested = 0
        for step in range(steps):
            candidates = [Candidate(number, 10, ENDLESS) for number in left]
            is_asleep, rest = rest > 0, max(0, rest - 1)
            if rested and not is_asleep:
                policy.rested(rested)
                rested = 0
            lengths = [0] * len(candidates) if is_asleep else policy.lengths(candidates)
            if self.rests and not is_asleep and not any(lengths):
                rest = policy.rest()
            rested += is_asleep
            run.lengths.append(lengths)
            verified = [self._verify(randomness, c.number, k, step) for c, k in zip(candidates, lengths, strict=True)]
            gains = {v.number: 1.0 + _expected(self.acceptance(v.number, step)[: v.proposed]) for v in verified}
            run.tokens += sum(gains.values())
            left = {number: tokens - gains[number] for number, tokens in left.items()}
            ended = [number for number, tokens in left.items() if tokens <= 0]
            verified = [outcome._replace(is_last=outcome.number in ended) for outcome in verified]
            rows = sum(1 + outcome.proposed for outcome in verified)
            target_s, draft_s = self.target_s(rows), self._draft_s([outcome.tries for outcome in verified])
            run.seconds += target_s + draft_s
            if randomness.random() < self.bursts / BURST_STEPS:
                burst_until = step + BURST_STEPS
            outliers = 0.5 if step < burst_until else self.outliers
            measured = [self._measured(randomness, seconds, outliers) for seconds in (target_s, draft_s)]
            if not is_asleep:
                policy.observe(StepRecord(verified, rows, *measured))
                run.asked += 1
            for number in ended:
                policy.forget(number)
                del left[number]
                left[max([*left, *ended]) + 1] = float(self.tokens_each or ENDLESS)
                rest = 0
        return run

    def fixed(self, length: int, steps: int = 400) -> float:
        """Tokens per second of a fixed length."""
        return self.run(FixedPolicy(length), steps).rate

    def best_fixed(self, most: int = 8) -> float:
        """Tokens per second of the best fixed length."""
        return max(self.fixed(length) for length in range(most + 1))

    def _verify(self, randomness: random.Random, number: int, asked: int, step: int) -> Verified:
        chances = self.acceptance(number, step)
        sure = [
            chance
            for chance, whole in zip(chances, accumulate(chances, mul), strict=True)
            if whole >= self.least_chance
        ]
        proposed = _run_length(randomness, [self.offers] * min(asked, len(sure)))
        return Verified(number, asked, proposed, _run_length(randomness, chances[:proposed]))

    def _draft_s(self, tries: Sequence[int]) -> float:
        return self.once_s * any(tries) + self.depth_s * max(tries) + self.token_s * sum(tries)

    def _measured(self, randomness: random.Random, seconds: float, outliers: float) -> float:
        measured = seconds * max(0.1, randomness.gauss(1.0, self.jitter))
        return 5.0 * measured if randomness.random() < outliers else measured


def constant(*chances: float) -> Acceptance:
    """The same chances for all; the last one holds for all later positions."""
    padded = [*chances, *[chances[-1]] * 16]
    return lambda request, step: padded


def easy_or_hard(easy: float, hard: float, share: float) -> Acceptance:
    """Each token of a draft is easy to guess with chance `share`, and hard otherwise."""

    def chances(request: int, step: int) -> list[float]:
        randomness = random.Random(request * 1_000_003 + step)
        return [easy if randomness.random() < share else hard for _ in range(16)]

    return chances


def _run_length(randomness: random.Random, chances: Sequence[float]) -> int:
    for length, chance in enumerate(chances):
        if randomness.random() >= chance:
            return length
    return len(chances)


def _expected(chances: Sequence[float]) -> float:
    total, product = 0.0, 1.0
    for chance in chances:
        product *= chance
        total += product
    return total

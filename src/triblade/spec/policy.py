"""How many tokens to draft for each request in the next step: 0 to `max_length`, whatever commits most tokens per second.

Knows no tensor, no token, no drafter and no clock: times and outcomes are told (`observe`), so the same history gives the same
lengths. Invariant: a request is never asked to draft more than it could still use.

    tokens of a step     E = sum over requests of 1 + a1 + a1 a2 + ... + a1 ... ak      (a_i: acceptance of its position i)
    seconds of a step    T(rows) + D(k): verification by its rows, drafting by its length, both learned from steps that ran
    the choice           all k = 0 at first; the request with the likeliest next token gets one more, and so on; of all
                         allocations on this way the one with the highest E / (T + D) is taken

Three things keep the choice steady and honest: a length changes only for a gain worth it (hysteresis); a request whose drafts do
not pay gets none, and is probed again after ever longer pauses; now and then a step is run plain, to know what it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from triblade.spec.acceptance import PositionCounts
from triblade.spec.step_cost import DraftCost, StepCost

DEFAULT_MAX_LENGTH = 8
NEGLIGIBLE = 0.02  # a token less likely than this is not worth the thought


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that decodes in the next step."""

    number: int
    num_prompt_tokens: int
    room: int  # tokens it may still get; a step with k drafts commits up to k + 1


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of the drafts of one request in one step."""

    number: int
    asked: int  # what `lengths` said
    proposed: int  # what the drafter offered of it; 0 is no verdict on its quality
    accepted: int  # of these, and committed
    is_last: bool = False  # the request ended with this step: what it did not accept was not judged


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its decoding requests, its rows, and its times."""

    verified: Sequence[Verified]
    rows: int  # tokens computed, chunks of prompts included
    target_s: float
    draft_s: float | None  # for proposing what this step verified; None where it took other work, too

    @property
    def is_decode_only(self) -> bool:
        """Chunks of prompts cost otherwise than rows that are verified."""
        return self.rows == sum(1 + each.proposed for each in self.verified)


class DraftPolicy(Protocol):
    """Decides draft lengths."""

    def lengths(self, candidates: Sequence[Candidate]) -> list[int]:
        """Tokens to draft for each request that decodes in the next step."""
        ...

    def observe(self, record: StepRecord) -> None:
        """A step was run."""
        ...

    def forget(self, number: int) -> None:
        """The request ended."""
        ...

    def plain_step_s(self, num_requests: int) -> float | None:
        """Seconds that a step without drafts would take, if that is known."""
        ...


@dataclass(frozen=True, slots=True)
class PromptRule:
    """What the length of a prompt decides beforehand; 0 switches a threshold off."""

    direct_below: int = 0  # prompts shorter than this are never drafted for
    speculate_from: int = 0  # prompts of this length and more are always drafted for, one token at least

    def apply(self, candidate: Candidate, length: int) -> int:
        """A length within the rule and within what the request can use."""
        if candidate.num_prompt_tokens < self.direct_below:
            return 0
        if 0 < self.speculate_from <= candidate.num_prompt_tokens:
            length = max(length, 1)
        return max(0, min(length, candidate.room - 1))


class FixedPolicy:
    """The same length always."""

    def __init__(self, length: int, rule: PromptRule | None = None) -> None:
        self._length = length
        self._rule = rule or PromptRule()

    def lengths(self, candidates: Sequence[Candidate]) -> list[int]:
        """See `DraftPolicy.lengths`."""
        return [self._rule.apply(candidate, self._length) for candidate in candidates]

    def observe(self, record: StepRecord) -> None:
        """Nothing that is observed changes it."""

    def forget(self, number: int) -> None:
        """It remembers nobody."""

    def plain_step_s(self, num_requests: int) -> float | None:
        """Unknown: no step is run plain to find out."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The constants of `AdaptivePolicy`."""

    max_length: int = DEFAULT_MAX_LENGTH
    gain: float = 0.02  # a request must get faster by this share for its length to change
    first_acceptance: float = 0.5  # assumed of each position before anything is known
    first_weight: float = 2.0  # tries that this assumption counts for
    prior_weight: float = 6.0  # tries of a request that the average of all requests counts for
    request_keep: float = 0.94  # a request's last 17 tries of a position count
    shared_keep: float = 0.98  # of all requests together the last 50
    plain_steps_first: int = 3  # before anything is drafted
    plain_every: int = 128  # at least one step in so many is plain
    decide_every: int = 6  # steps between decisions while the batch stays the same
    learning_steps: int = 16  # first steps, with a decision after each
    growth: float = 1.5  # no decision goes beyond this many times the rows measured so far, plus 2
    probe_length: int = 2
    probe_steps: int = 4  # with drafts verified
    probe_patience: int = 32  # steps after which a probe ends, drafts or not
    probe_after: int = 32  # steps until the first probe; doubles with every probe in vain
    probe_after_at_most: int = 2048


class _Habits:
    """What a request (or all of them together) was offered and accepted."""

    __slots__ = ("accepted", "offered")

    def __init__(self, length: int, keep: float) -> None:
        self.accepted = PositionCounts(length, keep)
        self.offered = PositionCounts(length, keep)

    def observe(self, outcome: Verified) -> None:
        self.offered.observe(outcome.asked, outcome.proposed)
        self.accepted.observe(outcome.accepted if outcome.is_last else outcome.proposed, outcome.accepted)


@dataclass(frozen=True, slots=True)
class _Prospect:
    """What drafts of a request promise."""

    likelihood: list[float]  # by position: that it is accepted, if it is offered; falls from one to the next
    rows: list[float]  # by length, from 0: expected rows of the step
    tokens: list[float]  # by length, from 0: expected tokens of the step


class AdaptivePolicy:
    """Learns acceptance and costs, and chooses the lengths that commit most tokens per second.

    Args:
        settings: its constants.
        rule: what the lengths of prompts decide.
    """

    def __init__(self, settings: PolicySettings | None = None, rule: PromptRule | None = None) -> None:
        self._settings = settings = settings or PolicySettings()
        self._rule = rule or PromptRule()
        self._step_cost = StepCost()
        self._draft_cost = DraftCost()
        self._shared = _Habits(settings.max_length, settings.shared_keep)
        self._habits: dict[int, _Habits] = {}
        self._chosen: dict[int, int] = {}
        self._probes = _Probes(settings)
        self._steps = 0  # observed
        self._decided_at = 0
        self._plain_at = 0

    def lengths(self, candidates: Sequence[Candidate]) -> list[int]:
        """See `DraftPolicy.lengths`."""
        if self._must_be_plain():
            return [0] * len(candidates)
        numbers = {candidate.number for candidate in candidates}
        if self._is_due(len(candidates)) or not numbers <= self._chosen.keys():
            self._decide(candidates)
        probe_length = min(self._settings.probe_length, self._settings.max_length)
        probed = self._probes.choose([number for number in numbers if self._chosen[number] == 0], self._steps)
        lengths = []
        for candidate in candidates:
            length = probe_length if candidate.number == probed else self._chosen[candidate.number]
            lengths.append(self._rule.apply(candidate, length))
        return lengths

    def observe(self, record: StepRecord) -> None:
        """See `DraftPolicy.observe`."""
        if not record.verified:
            return
        self._steps += 1
        for outcome in record.verified:
            self._observe_request(outcome)
        if not any(outcome.proposed for outcome in record.verified):
            self._plain_at = self._steps
        if record.is_decode_only:
            self._step_cost.observe(record.rows, record.target_s)
            if record.draft_s is not None:
                asked = [outcome.asked for outcome in record.verified]
                self._draft_cost.observe(max(asked), sum(asked), record.draft_s)

    def forget(self, number: int) -> None:
        """See `DraftPolicy.forget`."""
        self._habits.pop(number, None)
        self._chosen.pop(number, None)
        self._probes.forget(number)

    def plain_step_s(self, num_requests: int) -> float | None:
        """See `DraftPolicy.plain_step_s`."""
        return None if self._step_cost.is_empty else self._step_cost.seconds(num_requests)

    def _must_be_plain(self) -> bool:
        """Without a plain step to compare with, nobody knows what speculation gains."""
        settings = self._settings
        if self._step_cost.is_empty or self._steps < settings.plain_steps_first:
            return True
        return self._steps - self._plain_at >= settings.plain_every

    def _is_due(self, num_requests: int) -> bool:
        """Decisions take time of their own, the more the larger the batch, and each takes a few steps to show."""
        settings = self._settings
        pause = settings.decide_every + num_requests // 4
        return self._steps < settings.learning_steps or self._steps >= self._decided_at + pause

    def _observe_request(self, outcome: Verified) -> None:
        self._shared.observe(outcome)
        if outcome.is_last:  # nothing is remembered of it, so that nothing is left whenever it is forgotten
            return
        habits = self._habits.get(outcome.number)
        if habits is None:
            habits = self._habits[outcome.number] = _Habits(self._settings.max_length, self._settings.request_keep)
        habits.observe(outcome)
        self._probes.observe(outcome, self._steps)

    def _decide(self, candidates: Sequence[Candidate]) -> None:
        """Choose lengths; one that was chosen before changes only if that makes its request faster by `gain`."""
        self._decided_at = self._steps
        batch = _Batch(self._prospects(candidates), self._step_cost, self._draft_cost)
        most_rows = self._settings.growth * self._step_cost.most_rows + 2.0
        lengths = batch.best_lengths(most_rows)
        best_rate = batch.rate(lengths)
        needed = self._settings.gain / len(candidates) * best_rate
        for index, candidate in enumerate(candidates):
            before = self._chosen.get(candidate.number)
            if before is not None and before != lengths[index]:
                kept = [*lengths[:index], before, *lengths[index + 1 :]]
                if best_rate - batch.rate(kept) < needed:
                    lengths[index] = before
        if not self._beats_plain(batch, lengths):
            lengths = [0] * len(lengths)
        for candidate, length in zip(candidates, lengths, strict=True):
            self._chosen[candidate.number] = length
            self._probes.decided(candidate.number, length)

    def _beats_plain(self, batch: _Batch, lengths: Sequence[int]) -> bool:
        """Whether drafting is worth it at all; to go on with it takes less than to begin."""
        gain = self._settings.gain * (0.5 if any(self._chosen.values()) else 1.0)
        return batch.rate(lengths) > (1.0 + gain) * batch.rate([0] * len(lengths))

    def _prospects(self, candidates: Iterable[Candidate]) -> list[_Prospect]:
        settings = self._settings
        flat = [settings.first_acceptance] * settings.max_length
        accepted = self._shared.accepted.estimates(flat, settings.first_weight)
        offered = self._shared.offered.estimates([1.0] * settings.max_length, settings.first_weight)
        prospects = []
        for candidate in candidates:
            habits = self._habits.get(candidate.number)
            limit = self._rule.apply(candidate, settings.max_length)
            if habits is None:
                prospects.append(_prospect(accepted[:limit], offered[:limit]))
                continue
            own_accepted = habits.accepted.estimates(accepted[:limit], settings.prior_weight)
            own_offered = habits.offered.estimates(offered[:limit], settings.prior_weight)
            prospects.append(_prospect(own_accepted, own_offered))
        return prospects


class _Batch:
    """The requests of a step, as a function from draft lengths to tokens per second."""

    def __init__(self, prospects: list[_Prospect], step_cost: StepCost, draft_cost: DraftCost) -> None:
        self._prospects = prospects
        self._step_cost = step_cost
        self._draft_cost = draft_cost

    def rate(self, lengths: Sequence[int]) -> float:
        """Committed tokens per second, expected."""
        rows = tokens = 0.0
        depth = asked = 0
        for prospect, wanted in zip(self._prospects, lengths, strict=True):
            length = min(wanted, len(prospect.likelihood))
            rows += prospect.rows[length]
            tokens += prospect.tokens[length]
            depth = max(depth, length)
            asked += length
        return tokens / (self._step_cost.seconds(rows) + self._draft_cost.seconds(depth, asked))

    def best_lengths(self, most_rows: float) -> list[int]:
        """The lengths with the highest rate among those that `_fill` finds for each greatest length."""
        steps = sorted(
            (-likelihood, position, index)
            for index, prospect in enumerate(self._prospects)
            for position, likelihood in enumerate(prospect.likelihood)
            if likelihood > NEGLIGIBLE
        )
        best = [0] * len(self._prospects)
        best_rate = self.rate(best)
        for depth in range(1, 1 + max((position + 1 for _, position, _ in steps), default=0)):
            rate, taken = self._fill([(index, position) for _, position, index in steps if position < depth], most_rows)
            if rate > best_rate:
                best_rate, best = rate, [taken.count(index) for index in range(len(best))]
        return best

    def _fill(self, steps: list[tuple[int, int]], most_rows: float) -> tuple[float, list[int]]:
        """Add tokens, likeliest first; the best rate on the way, and whose tokens were added until then."""
        rows = tokens = float(len(self._prospects))
        best_rate, best_count, depth = 0.0, 0, 0
        for count, (index, position) in enumerate(steps, 1):
            prospect = self._prospects[index]
            rows += prospect.rows[position + 1] - prospect.rows[position]
            tokens += prospect.tokens[position + 1] - prospect.tokens[position]
            if rows > most_rows:
                break
            depth = max(depth, position + 1)
            rate = tokens / (self._step_cost.seconds(rows) + self._draft_cost.seconds(depth, count))
            if rate > best_rate:
                best_rate, best_count = rate, count
        return best_rate, [index for index, _ in steps[:best_count]]


class _Probes:
    """Drafts for one request that has none, a few steps long, to see whether that is still right.

    Fruitless probes double the pause to the next one, so that they cost less and less; a probe after which the request drafts
    sets it back.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._pause = settings.probe_after
        self._due_at = settings.probe_after
        self._request: int | None = None  # being probed
        self._steps_left = 0
        self._began_at = 0
        self._awaits_verdict: int | None = None
        self._probed: dict[int, int] = {}  # request -> step of its last probe

    def choose(self, idle: Sequence[int], step: int) -> int | None:
        """The request to probe in the next step, of those that get no drafts."""
        if self._request is not None and self._request not in idle:
            self._finish(step)
        if self._request is None and idle and step >= self._due_at:
            self._request = min(idle, key=lambda number: (self._probed.get(number, -1), -number))
            self._probed[self._request] = step
            self._steps_left = self._settings.probe_steps
            self._began_at = step
        return self._request

    def observe(self, outcome: Verified, step: int) -> None:
        """A step of a request is over."""
        if outcome.number != self._request:
            return
        self._steps_left -= outcome.proposed > 0
        if self._steps_left <= 0 or step >= self._began_at + self._settings.probe_patience:
            self._finish(step)

    def decided(self, number: int, length: int) -> None:
        """A length was chosen for a request; after a probe this is its verdict."""
        if number == self._awaits_verdict:
            self._awaits_verdict = None
            if length > 0:
                self._due_at -= self._pause - self._settings.probe_after
                self._pause = self._settings.probe_after

    def forget(self, number: int) -> None:
        """The request ended; a probe of it ends too, without a verdict, and the next one waits as long as this one did."""
        self._probed.pop(number, None)
        if number == self._request:
            self._request = None
            self._due_at = self._began_at + self._pause
        if number == self._awaits_verdict:
            self._awaits_verdict = None

    def _finish(self, step: int) -> None:
        """Pause; longer than the last time unless the verdict says otherwise."""
        self._awaits_verdict, self._request = self._request, None
        self._pause = min(2 * self._pause, self._settings.probe_after_at_most)
        self._due_at = step + self._pause


def _prospect(accepted: Sequence[float], offered: Sequence[float]) -> _Prospect:
    likelihood, rows, tokens = list[float](), [1.0], [1.0]
    chance = reach = 1.0
    for accept, offer in zip(accepted, offered, strict=True):
        chance *= accept
        reach *= offer
        likelihood.append(chance)
        rows.append(rows[-1] + reach)
        tokens.append(tokens[-1] + chance * reach)
    return _Prospect(likelihood, rows, tokens)

"""How many tokens to draft for each request in the next step: 0 to `max_length`, whatever commits most tokens per second.

Knows no tensor, no token, no drafter and no clock: times and outcomes are told (`observe`), so the same history gives the same
lengths. Invariant: a request is never asked to draft more than it could still use.

    tokens of a step     E = sum over requests of 1 + a1 + a1 a2 + ... + a1 ... ak      (a_i: acceptance of its position i)
    seconds of a step    T(rows) + D(k): verification by its rows, drafting by the tokens tried, both learned from steps that ran
    the choice           all k = 0 at first; the request with the likeliest next token gets one more, and so on; of all
                         allocations on this way the one with the highest E / (T + D) is taken

Three things keep the choice steady and honest: a length changes only for a gain worth it (hysteresis); a request whose drafts do
not pay gets none, and is probed again after ever longer pauses; now and then a step is run plain, to know what it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triblade.spec.acceptance import PositionCounts
from triblade.spec.draft_cost import DraftCost
from triblade.spec.draft_lengths import DraftSearch, Prospect
from triblade.spec.outcomes import Candidate, StepRecord, Verified
from triblade.spec.probes import PLAIN, Detour, Detours, Probes, ProbeSettings
from triblade.spec.step_cost import RowTimes, StepCost

__all__ = [
    "AdaptivePolicy",
    "Candidate",
    "DraftPolicy",
    "FixedPolicy",
    "PolicySettings",
    "PromptRule",
    "StepRecord",
    "Verified",
]

DEFAULT_MAX_LENGTH = 8
FEW_REQUESTS = 4  # with fewer, the first lengths are
REST_AT_MOST = 256  # steps
FIRST_LENGTHS = (0, 0, 0, 1, 2, 0, 1, 2, 1, 0, 2, 1)  # so that what is compared at first was measured more than once


class DraftPolicy(Protocol):
    """Decides draft lengths."""

    def lengths(self, candidates: Sequence[Candidate]) -> list[int]:
        """Tokens to draft for each request that decodes in the next step."""
        ...

    def observe(self, record: StepRecord) -> None:
        """A step was run."""
        ...

    def rest(self) -> int:
        """Steps in which nobody need be asked: `lengths` has just said 0 to all, and would again while no request is new."""
        ...

    def rested(self, steps: int) -> None:
        """So many plain steps were run, of which it is not told more."""
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
        self._is_direct = False  # whether it is the rule that no drafts were wanted, not a request that is about to end

    def lengths(self, candidates: Sequence[Candidate]) -> list[int]:
        """See `DraftPolicy.lengths`."""
        self._is_direct = all(candidate.num_prompt_tokens < self._rule.direct_below for candidate in candidates)
        return [self._rule.apply(candidate, self._length) for candidate in candidates]

    def observe(self, record: StepRecord) -> None:
        """Nothing that is observed changes it."""

    def rest(self) -> int:
        """As long as can be where all prompts are short: only new requests change that."""
        return REST_AT_MOST if self._is_direct else 0

    def rested(self, steps: int) -> None:
        """Nothing grows old."""

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
    first_weight: float = 8.0  # tries that this assumption counts for
    prior_weight: float = 6.0  # tries of a request that the average of all requests counts for
    request_keep: float = 0.94  # a request's last 17 tries of a position count
    shared_keep: float = 0.98  # of all requests together the last 50,
    usual_keep: float = 0.995  # and of their first tokens the last 200, for the long run
    request_fade: float = 0.98  # what a step without drafts leaves of these counts,
    shared_fade: float = 0.99
    usual_fade: float = 0.996  # so that a bad stretch is forgiven after a time as long as the evidence was strong
    patience: float = 0.05  # share of the rate that may be lost for what pays in the long run
    plain_steps_first: int = 3  # before anything is drafted
    detour_worth: float = 0.8  # share of the best rate that is expected of it at least
    decide_every: int = 4  # steps between decisions while the batch stays the same; doubles while they change nothing
    decide_every_at_most: int = 12
    learning_steps: int = 16  # first steps, with a decision after each
    growth: float = 1.5  # no decision goes beyond this many times the rows measured so far, plus 2
    probe_length: int = 2
    probes: ProbeSettings = field(default_factory=ProbeSettings)


class _Habits:
    """What a request (or all of them together) was offered and accepted."""

    __slots__ = ("accepted", "backed", "offered")

    def __init__(self, length: int, keep: float) -> None:
        self.accepted = PositionCounts(length, keep)  # of what was offered, behind accepted tokens
        self.offered = PositionCounts(length, keep)  # of what was asked for, behind offered tokens
        self.backed = PositionCounts(length, keep)  # of what was asked for, behind accepted tokens

    def observe(self, outcome: Verified) -> None:
        self.offered.observe(outcome.asked, outcome.proposed)
        self.backed.observe(min(outcome.asked, outcome.accepted + 1), outcome.proposed)
        if outcome.proposed:
            self.accepted.observe(outcome.judged, outcome.accepted)

    def prospect(self, prior: Sequence[Sequence[float]], limit: int, weight: float) -> Prospect:
        """What to expect of drafts of up to `limit` tokens, with what is expected of all as the prior."""
        own = (self.accepted, self.offered, self.backed)
        return Prospect.of(*(counts.estimates(base[:limit], weight) for counts, base in zip(own, prior, strict=True)))


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
        self._usual = PositionCounts(1, settings.usual_keep)
        self._habits: dict[int, _Habits] = {}
        self._chosen: dict[int, int] = {}
        self._probes = Probes(settings.probes)
        self._detours = Detours(settings.probes)
        self._worth: list[Detour] = []  # at the last decision
        self._row_times: RowTimes | None = None  # at the last decision
        self._steps = 0  # observed,
        self._unlearned: list[StepRecord] = []  # the last of them, since the last decision
        self._idle_steps = 0  # since somebody drafted, not forgiven yet
        self._decided_at = 0
        self._pause = settings.decide_every
        self._rest = 0

    def lengths(self, candidates: Sequence[Candidate]) -> list[int]:
        """See `DraftPolicy.lengths`."""
        self._rest = 0
        is_due = self._is_due(len(candidates))
        if is_due:
            self._learn()
        if self._step_cost.is_empty or self._steps < self._settings.plain_steps_first:
            return [0] * len(candidates)  # without a plain step to compare with, nobody knows what drafts gain
        if self._steps < len(FIRST_LENGTHS) and len(candidates) < FEW_REQUESTS:
            return [self._rule.apply(c, min(FIRST_LENGTHS[self._steps], self._settings.max_length)) for c in candidates]
        numbers = {candidate.number for candidate in candidates}
        if is_due or not numbers <= self._chosen.keys():
            self._decide(candidates)
        shift = self._detours.choose(self._worth, self._steps)
        if shift is PLAIN:
            return [0] * len(candidates)
        probe_length = min(self._settings.probe_length, self._settings.max_length)
        idle = [c.number for c in candidates if self._chosen[c.number] == 0 and self._rule.apply(c, 1) > 0]
        probed = self._probes.choose(idle, self._steps)
        if probed is None and not any(self._chosen.values()):
            self._rest = min(self._probes.due_at - 1 - self._steps, REST_AT_MOST) if idle else REST_AT_MOST
        lengths = []
        for candidate in candidates:
            chosen = self._shifted(self._chosen[candidate.number], shift)
            lengths.append(self._rule.apply(candidate, probe_length if candidate.number == probed else chosen))
        return lengths

    def observe(self, record: StepRecord) -> None:
        """See `DraftPolicy.observe`."""
        if not record.verified:
            return
        self._steps += 1
        self._unlearned.append(record)
        self._detours.observe(self._steps, is_plain=not any(outcome.proposed for outcome in record.verified))
        for outcome in record.verified:
            if outcome.number == self._probes.request:
                self._probes.observe(outcome, self._steps)

    def rest(self) -> int:
        """See `DraftPolicy.rest`; it ends with the next probe."""
        return self._rest

    def rested(self, steps: int) -> None:
        """See `DraftPolicy.rested`."""
        self._learn()
        self._steps += steps
        self._idle_steps += steps
        self._detours.observe(self._steps, is_plain=True)

    def _learn(self) -> None:
        """What the steps since the last decision tell, all at once: code that has just run runs several times as fast."""
        records, self._unlearned = self._unlearned, []
        for record in records:
            self._learn_step(record)

    def _learn_step(self, record: StepRecord) -> None:
        asked = [outcome for outcome in record.verified if outcome.asked]
        for outcome in asked:
            self._forgive()
            self._observe_request(outcome)
        self._idle_steps += not asked
        if record.is_decode_only:
            self._step_cost.observe(record.rows, record.target_s)
            if record.draft_s is not None and not self._step_cost.is_empty:
                tries = [outcome.tries for outcome in record.verified]
                self._draft_cost.observe(max(tries), sum(tries), record.draft_s / self._step_cost.level_s)

    def forget(self, number: int) -> None:
        """See `DraftPolicy.forget`."""
        self._learn()
        self._habits.pop(number, None)
        self._chosen.pop(number, None)
        self._probes.forget(number)

    def plain_step_s(self, num_requests: int) -> float | None:
        """See `DraftPolicy.plain_step_s`."""
        if self._step_cost.is_empty:
            self._learn()
        return None if self._step_cost.is_empty else self._times().at(num_requests) * self._step_cost.level_s

    def _times(self) -> RowTimes:
        """Those of the last decision: a table for every step would take its time."""
        return self._row_times or self._step_cost.table()

    def _is_due(self, num_requests: int) -> bool:
        """Decisions take time of their own, the more the larger the batch, and each takes a few steps to show."""
        pause = self._pause + num_requests // 4
        return self._steps < self._settings.learning_steps or self._steps >= self._decided_at + pause

    def _shifted(self, length: int, shift: int) -> int:
        """A length that is one at all, with something added."""
        return min(max(length + shift, 1), self._settings.max_length) if length else 0

    def _observe_request(self, outcome: Verified) -> None:
        self._shared.observe(outcome)
        if outcome.proposed:
            self._usual.observe(outcome.judged, outcome.accepted)
        if outcome.is_last:  # nothing is remembered of it, so that nothing is left whenever it is forgotten
            return
        habits = self._habits.get(outcome.number)
        if habits is None:
            habits = self._habits[outcome.number] = _Habits(self._settings.max_length, self._settings.request_keep)
        habits.observe(outcome)

    def _forgive(self) -> None:
        """Nobody drafted in the last steps: what speaks against it has grown old and was not renewed."""
        steps, self._idle_steps = self._idle_steps, 0
        if not steps:
            return
        for habits in self._habits.values():
            habits.accepted.fade(self._settings.request_fade**steps)
        self._shared.accepted.fade(self._settings.shared_fade**steps)
        self._usual.fade(self._settings.usual_fade**steps)

    def _decide(self, candidates: Sequence[Candidate]) -> None:
        """Choose lengths; one that was chosen before changes only if that makes its request faster by `gain`."""
        settings = self._settings
        self._learn()
        self._forgive()
        self._decided_at = self._steps
        times = self._row_times = self._step_cost.table()
        search = DraftSearch(self._prospects(candidates), times, self._draft_cost.times())
        lengths = self._steady(candidates, search, search.best_lengths(settings.growth * times.most_rows + 2.0))
        if not self._beats_plain(search, lengths):
            lengths = self._patient(candidates, search)
        is_new = False
        for candidate, length in zip(candidates, lengths, strict=True):
            is_new |= self._chosen.get(candidate.number) != length
            self._chosen[candidate.number] = length
            self._probes.decided(candidate.number, length)
        self._pause = settings.decide_every if is_new else min(2 * self._pause, settings.decide_every_at_most)
        self._worth = self._detours_worth_it(search, lengths)

    def _detours_worth_it(self, search: DraftSearch, lengths: list[int]) -> list[Detour]:
        """What to try beside the lengths chosen: all that may be nearly as good."""
        others: dict[Detour, list[int]] = {PLAIN: [0] * len(lengths)}
        others |= {shift: [self._shifted(length, shift) for length in lengths] for shift in (1, -1)}
        least = self._settings.detour_worth * search.rate(lengths)
        return [detour for detour, other in others.items() if other != lengths and search.rate(other) > least]

    def _steady(self, candidates: Sequence[Candidate], search: DraftSearch, lengths: list[int]) -> list[int]:
        """The best lengths, but those from before where that is about as good."""
        best_rate = search.rate(lengths)
        needed = self._settings.gain / len(candidates) * best_rate
        for index, candidate in enumerate(candidates):
            before = self._chosen.get(candidate.number)
            if before is not None and before != lengths[index]:
                kept = [*lengths[:index], before, *lengths[index + 1 :]]
                if best_rate - search.rate(kept) < needed:
                    lengths[index] = before
        return lengths

    def _beats_plain(self, search: DraftSearch, lengths: Sequence[int]) -> bool:
        """Whether drafting is worth it at all; to go on with it takes less than to begin."""
        gain = self._settings.gain * (0.5 if any(self._chosen.values()) else 1.0)
        return search.rate(lengths) > (1.0 + gain) * search.rate([0] * len(lengths))

    def _patient(self, candidates: Sequence[Candidate], search: DraftSearch) -> list[int]:
        """One token for whoever drafted until now, if it costs next to nothing and pays in the long run; else nothing.

        Many texts are now easy, now hard to guess. Who gives up in every hard piece is late for the next easy one.
        """
        nothing = [0] * len(candidates)
        lengths = [min(self._chosen.get(candidate.number, 0), 1) for candidate in candidates]
        if search.rate(lengths) < (1.0 - self._settings.patience) * search.rate(nothing):
            return nothing
        usual = self._usual.estimates([self._settings.first_acceptance], self._settings.first_weight)
        offered = self._shared.offered.estimates([1.0], self._settings.first_weight)
        long_run = search.with_prospects([Prospect.of(usual, offered, offered)] * len(candidates))
        return lengths if long_run.rate(lengths) > long_run.rate(nothing) else nothing

    def _prospects(self, candidates: Iterable[Candidate]) -> list[Prospect]:
        settings = self._settings
        (usual,) = self._usual.estimates([settings.first_acceptance], settings.first_weight)
        first = min(usual, settings.first_acceptance)  # a bad name lasts longer than a good one
        accepted = self._shared.accepted.estimates([first] * settings.max_length, settings.first_weight)
        offered = self._shared.offered.estimates([1.0] * settings.max_length, settings.first_weight)
        backed = self._shared.backed.estimates([1.0] * settings.max_length, settings.first_weight)
        prior, prospects = (accepted, offered, backed), []
        for candidate in candidates:
            habits = self._habits.get(candidate.number)
            limit = self._rule.apply(candidate, settings.max_length)
            prospects.append(
                habits.prospect(prior, limit, settings.prior_weight)
                if habits is not None
                else Prospect.of(*(base[:limit] for base in prior))
            )
        return prospects

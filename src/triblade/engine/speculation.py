"""Between two steps: how many tokens to draft for each request, blocks for their KV, the drafts, and what became of them.

Joins a drafter, which knows no scheduler, with a policy, which knows no tensor. A length is cut to what the request may still
produce, to the free blocks and to the budget of the next step, so that a draft never costs another request its turn.

Where drafts lose, even asking costs: a few per cent of a step. Then everything here sleeps, and counts steps, until the policy
wants to know again. Drafters are used to that: they catch up, with what they still can know, and those that know less for it are
called in the last steps of the rest already.

Life of a step: its tokens are committed, `note` counts them request by request -> `after_step` tells the policy what it took, asks
for lengths, and has the drafter propose what the next step verifies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from triblade.config import EngineConfig
from triblade.engine.request import Request
from triblade.engine.runner import StepResult
from triblade.engine.scheduler import Scheduler
from triblade.spec.constraint import allowed_length
from triblade.spec.drafter import Draft, Drafter, DraftItem, FillsRows, ReceivedRows, WarmsUp
from triblade.spec.policy import (
    AdaptivePolicy,
    Candidate,
    DraftPolicy,
    FixedPolicy,
    PolicySettings,
    PromptRule,
    StepRecord,
    Verified,
)
from triblade.spec.record import PLAIN_STEP, Speculation, SpeculationCounts

log = logging.getLogger(__name__)

FEW_REQUESTS = 4  # with fewer, so much can be gained that a new one ends every pause at once
NEWCOMER_STEPS = 32  # that a new one waits at most beside many
IDLE_STEPS = 64  # without a draft for anybody of many, until the first nap
ACTIVE_STEPS = 32  # with drafts in a row, after which naps are short again
NAP_STEPS, NAP_STEPS_AT_MOST = 256, 2048  # doubles from nap to nap


class _Naps:
    """For how long nobody is asked beside a drafter that finds nothing."""

    def __init__(self) -> None:
        self._idle = self._active = 0
        self._next = NAP_STEPS

    def after(self, *, found_drafts: bool) -> int:
        """Steps to sleep after one that had requests to draft for."""
        self._active = self._active + 1 if found_drafts else 0
        self._idle = 0 if found_drafts else self._idle + 1
        if self._active >= ACTIVE_STEPS:
            self._next = NAP_STEPS
        if self._idle < IDLE_STEPS:
            return 0
        steps, self._idle = self._next, 0
        self._next = min(2 * self._next, NAP_STEPS_AT_MOST)
        return steps


class _Sleep:
    """Steps in which nobody is asked: a rest, because the policy wants no drafts, or a nap, because none are found."""

    def __init__(self) -> None:
        self.steps_left = self.steps_slept = 0
        self._naps = _Naps()
        self._is_nap = False

    def begin(self, rest: int, num_requests: int, *, found_drafts: bool) -> None:
        """After a step that `num_requests` went on from; the policy rests for so many."""
        self._is_nap = num_requests >= FEW_REQUESTS
        nap = self._naps.after(found_drafts=found_drafts) if self._is_nap else 0
        self._is_nap = nap > rest
        self.steps_left = max(nap, rest)

    def meet(self, num_requests: int) -> None:
        """Somebody is new among so many."""
        if not self._is_nap:
            self.steps_left = min(self.steps_left, 0 if num_requests < FEW_REQUESTS else NEWCOMER_STEPS)

    def passes(self, num_requests: int) -> bool:
        """Whether this step passes in sleep; few requests do not go on with a nap."""
        if self.steps_left == 0 or (self._is_nap and num_requests < FEW_REQUESTS):
            self.steps_left = 0
            return False
        self.steps_left -= 1
        self.steps_slept += 1
        return True


def make_policy(config: EngineConfig) -> DraftPolicy:
    """The policy that a configuration asks for."""
    rule = PromptRule(config.direct_prompt_tokens, config.speculate_prompt_tokens)
    if config.draft_policy == "fixed":
        return FixedPolicy(config.num_speculative_tokens, rule)
    return AdaptivePolicy(PolicySettings(max_length=config.num_speculative_tokens), rule)


class Speculator:
    """Asks a drafter for proposals after every step.

    Args:
        drafter: proposes.
        scheduler: holds blocks and budget.
        policy: decides how many tokens to draft.

    Attributes:
        counts: of all requests since the start.
    """

    def __init__(self, drafter: Drafter, scheduler: Scheduler, policy: DraftPolicy) -> None:
        self.drafter = drafter
        self.policy = policy
        self.counts = SpeculationCounts()
        self._scheduler = scheduler
        self._asked: dict[int, int] = {}  # request number -> tokens asked for in the draft that is not verified yet
        self._noted: list[tuple[Speculation, Verified]] = []  # decoding requests of this step
        self._sleep = _Sleep()
        self._is_behind = False  # whether the drafter has slept since its last draft
        self._draft_s: float | None = None  # of the last proposals; None where they took in more than the last step

    def note(self, result: StepResult, num_committed: int, *, is_last: bool) -> None:
        """A request got `num_committed` tokens in this step, at least one; `is_last` if it ends with them."""
        request = result.item.request
        if request.speculation is None:
            request.speculation = Speculation()
            self._sleep.meet(len(self._scheduler.running))
        drafted, accepted, is_asleep = result.item.num_draft_tokens, num_committed - 1, self._sleep.steps_left > 0
        if is_asleep and not drafted:  # as cheap as can be, for most steps go here where drafts lose
            request.speculation.trace.append(PLAIN_STEP)
            self.counts.num_steps += 1
            return
        request.speculation.add(drafted, accepted)
        self.counts.add(drafted, accepted)
        if is_asleep:
            return
        asked = self._asked.pop(request.number, drafted)
        if _decodes(result):
            verified = Verified(request.number, asked, drafted, accepted, is_last)
            self._noted.append((request.speculation, verified))

    def after_step(self, results: Sequence[StepResult], seconds: float) -> None:
        """A step took `seconds`: learn from it, and draft for its requests that go on; others' drafts stay as they are.

        A prompt that was computed for others has ended, but its rows are still to be filled.
        """
        if self._sleep.passes(len(results)):
            return
        self._wake()
        self._learn(sum(result.item.num_tokens for result in results), seconds)
        self._propose([r for r in results if not r.request.is_finished or r.request.keeps_blocks])

    def num_filled(self, request: Request) -> int | None:
        """Leading tokens of a request whose rows have the drafter's part; None: the drafter has none."""
        return self.drafter.num_filled(request) if isinstance(self.drafter, FillsRows) else None

    def received(self, request: Request, rows: ReceivedRows) -> None:
        """Rows came from another worker into a request's blocks."""
        if isinstance(self.drafter, FillsRows):
            self.drafter.received(request, rows)

    def forget(self, request: Request) -> None:
        """A request ended."""
        self.drafter.forget(request)
        self.policy.forget(request.number)
        self._asked.pop(request.number, None)
        if request.speculation is not None and log.isEnabledFor(logging.DEBUG):
            log.debug("%s, choice %d: speculation %s", request.request_id, request.index, request.speculation.as_json())

    def _wake(self) -> None:
        """Tell the policy how long it slept, if it did."""
        if self._sleep.steps_slept:
            self.policy.rested(self._sleep.steps_slept)
            self._sleep.steps_slept = 0

    def _learn(self, rows: int, seconds: float) -> None:
        """Tell the policy, and each request what its tokens would have taken without drafts."""
        noted, self._noted = self._noted, []
        record = StepRecord([verified for _, verified in noted], rows, seconds, self._draft_s)
        self.policy.observe(record)
        if not noted or not record.is_decode_only or self._draft_s is None:
            return
        is_plain = all(verified.proposed == 0 for _, verified in noted)
        plain_s = seconds if is_plain else self.policy.plain_step_s(len(noted))
        if plain_s is None:
            return
        for speculation, verified in noted:
            speculation.plain_s += plain_s * (1 + verified.accepted)
            speculation.spent_s += seconds + self._draft_s

    def _propose(self, results: list[StepResult]) -> None:
        if not results:
            self._draft_s = None
            return
        items = self._items(results)
        start = time.perf_counter()
        drafts = self.drafter.propose(items)
        self._draft_s = time.perf_counter() - start if all(map(_decodes, results)) and not self._is_behind else None
        self._rest(results, items, drafts)
        for item, draft in zip(items, drafts, strict=True):
            assert len(draft.token_ids) <= item.length, "a draft is longer than asked for"
            assert isinstance(item.request, Request)
            item.request.propose(_possible(item.request, draft), draft.weights)
            self._asked[item.request.number] = item.length

    def _rest(self, results: list[StepResult], items: list[DraftItem], drafts: list[Draft]) -> None:
        """Sleep if the policy rests, or, beside many requests, if the drafter was silent for long: one would have got a draft."""
        num_decoding = sum(map(_continues, results))
        if any(item.length for item in items):
            self._is_behind, rest = False, 0
        elif num_decoding:
            warm_up = self.drafter.warm_up_steps if isinstance(self.drafter, WarmsUp) else 0
            rest = max(0, self.policy.rest() - warm_up)
        else:
            return
        self._sleep.begin(rest, num_decoding, found_drafts=any(draft.token_ids for draft in drafts))
        if self._sleep.steps_left:
            self._is_behind, self._draft_s = True, None

    def _items(self, results: list[StepResult]) -> list[DraftItem]:
        """Lengths as the policy wants them, as far as budget and blocks go; 0 within a prompt."""
        decoding = [result.request for result in results if _continues(result)]
        candidates = [
            Candidate(r.number, r.num_prompt_tokens, r.max_tokens - len(r.output_token_ids)) for r in decoding
        ]
        wanted = dict(zip((r.number for r in decoding), self.policy.lengths(candidates), strict=True))
        budget = self._scheduler.max_num_batched_tokens - len(self._scheduler.running)
        items = []
        for result in results:
            request = result.request
            length = max(0, min(wanted.get(request.number, 0), budget))
            if length:
                length = self._scheduler.reserve(request, length)
            budget -= length
            items.append(DraftItem(request, result.item.start, request.num_computed_tokens, result.first_row, length))
        return items


def _possible(request: Request, draft: Draft) -> list[int]:
    """The draft up to the first token that the request's constraint would refuse anyway.

    Drawn drafts stay whole: that a token was drawn and refused is part of how its replacement is distributed.
    """
    if request.constraint is None or draft.weights is not None:
        return draft.token_ids
    return draft.token_ids[: allowed_length(request.constraint, draft.token_ids)]


def _continues(result: StepResult) -> bool:
    """Whether a request got a token and wants more."""
    return result.item.samples and not result.request.is_finished


def _decodes(result: StepResult) -> bool:
    """Whether a request computed one known token, and drafts; chunks of prompts take more."""
    return result.item.num_tokens == result.item.num_draft_tokens + 1

"""Between two steps: how many tokens to draft for each request, blocks for their KV, and the drafts themselves.

Joins a drafter, which knows no scheduler, with a policy, which knows no tensor. A length is cut to what the request may still
produce, to the free blocks and to the budget of the next step, so that a draft never costs another request its turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from triblade.engine.request import Request
from triblade.engine.runner import StepResult
from triblade.engine.scheduler import Scheduler
from triblade.spec.drafter import Drafter, DraftItem


class Speculator:
    """Asks a drafter for proposals after every step.

    Args:
        drafter: proposes.
        scheduler: holds blocks and budget.
        length: most tokens to draft for a request.
    """

    def __init__(self, drafter: Drafter, scheduler: Scheduler, length: int) -> None:
        self.drafter = drafter
        self.length = length
        self._scheduler = scheduler

    def propose(self, results: Sequence[StepResult]) -> None:
        """Draft for the requests of a step that go on; others' drafts stay as they are."""
        results = [result for result in results if not result.request.is_finished]
        if not results:
            return
        budget = self._scheduler.max_num_batched_tokens - len(self._scheduler.running)
        items = []
        for result in results:
            length = self._length(result, budget)
            budget -= length
            items.append(_draft_item(result, length))
        for item, draft in zip(items, self.drafter.propose(items), strict=True):
            assert len(draft.token_ids) <= item.length, "a draft is longer than asked for"
            assert isinstance(item.request, Request)
            item.request.propose(draft.token_ids, draft.weights)

    def forget(self, request: Request) -> None:
        """A request ended."""
        self.drafter.forget(request)

    def _length(self, result: StepResult, budget: int) -> int:
        request = result.request
        if not result.item.samples:
            return 0
        left = request.max_tokens - len(request.output_token_ids)  # the step adds one token to the drafts it accepts
        return self._scheduler.reserve(request, max(0, min(self.length, left - 1, budget)))


def _draft_item(result: StepResult, length: int) -> DraftItem:
    request, start = result.request, result.item.start
    return DraftItem(request, start, request.num_computed_tokens, result.first_row, length)

"""A scheduler driven by a runner without a model: KV is a dictionary from slot to the tokens it stands for.

Every step checks that a request's computed slots hold exactly its own prefix, so a block that was shared, evicted, reassigned or
published wrongly is seen at once. The "model" is a function of all tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triblade.engine.block_pool import BlockPool, HashFunction, hash_block
from triblade.engine.request import Request
from triblade.engine.scheduler import ScheduledRequest, Scheduler
from triblade.sampling_params import SamplingParams

VOCABULARY = 1000


def next_token(tokens: Sequence[int]) -> int:
    """The fake model: depends on every token and its position."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCABULARY


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    """What an engine must produce, by the plainest loop."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeEngine:
    """Scheduler + fake runner; `steps` remembers what was scheduled."""

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = hash_block,
        draft: Callable[[Request], list[int]] | None = None,
        draft_length: int = 3,
        num_lookahead_tokens: int = 0,
    ) -> None:
        self.draft, self.draft_length = draft, draft_length
        self.pool = BlockPool(num_blocks, hash_function)
        self.scheduler = Scheduler(
            self.pool,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            num_lookahead_tokens=num_lookahead_tokens,
        )
        self.block_size = block_size
        self.slots: dict[int, tuple[int, ...]] = {}
        self.steps: list[list[ScheduledRequest]] = []
        self.starved: list[Request] = []
        self._count = 0

    def request(self, prompt: Sequence[int], max_tokens: int = 5, **fields: object) -> Request:
        """Make and queue a request."""
        request = Request(
            request_id="r",
            number=self._count,
            prompt_token_ids=list(prompt),
            params=SamplingParams(),
            seed=0,
            max_tokens=max_tokens,
            **fields,  # type: ignore[arg-type]
        )
        self._count += 1
        self.scheduler.add(request)
        return request

    def step(self) -> list[ScheduledRequest]:
        output = self.scheduler.schedule()
        for request in output.starved:
            self.starved.append(request)
            self.scheduler.finish(request)
        for item in output.scheduled:
            self._compute(item)
        for item in output.scheduled:
            self._commit(item)
            if self.draft is not None and item.samples and not item.request.is_finished:
                item.request.propose(
                    self.draft(item.request)[: self.scheduler.reserve(item.request, self.draft_length)]
                )
        self.steps.append(output.scheduled)
        self.check()
        return output.scheduled

    def run(self, limit: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                self.pool.check()
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def check(self) -> None:
        self.pool.check(list(self.scheduler.owned_blocks()))
        for request in (*self.scheduler.running, *self.scheduler.receiving, *self.scheduler.waiting):
            assert request.num_computed_tokens <= request.num_tokens
            assert len(request.block_table) * self.block_size >= request.num_computed_tokens

    def _commit(self, item: ScheduledRequest) -> None:
        """Verify the drafts, append what holds and one token more, then advance the frontier."""
        request, drafts = item.request, item.request.draft_token_ids[: item.num_draft_tokens]
        accepted = 0
        while item.samples:
            token = next_token(request.token_ids)
            request.append(token)
            if (
                len(request.output_token_ids) >= request.max_tokens
                or accepted == len(drafts)
                or token != drafts[accepted]
            ):
                break
            accepted += 1
        self.scheduler.update(item, accepted)
        if len(request.output_token_ids) >= request.max_tokens:
            self.scheduler.finish(request)

    def _compute(self, item: ScheduledRequest) -> None:
        request = item.request
        for position in range(item.start):
            expected = tuple(request.token_ids[: position + 1])
            assert self.slots[self._slot(request, position)] == expected, "foreign KV read"
        tokens = request.token_ids + request.draft_token_ids
        for position in range(item.start, item.start + item.num_tokens):
            self.slots[self._slot(request, position)] = tuple(tokens[: position + 1])

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self.block_size] * self.block_size + position % self.block_size

"""A table-driven draft model on blocks that remember what was written, and a small engine whose every decision a test makes.

The KV of a token is the hash of all tokens up to it, as a real one depends on all of them. `ToyDraft.forward` refuses to read
anything but the KV of the tokens that stand before, so a frontier that is wrong by one fails at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from triblade.engine.block_pool import BlockPool, CachedBlock
from triblade.sampling_params import SamplingParams
from triblade.spec.draft_model import DraftLimits, DraftTokens, ModelDrafter
from triblade.spec.drafter import Draft, DraftItem

BLOCK = 4
VOCABULARY = 50


def next_token(tokens: Sequence[int]) -> int:
    """The toy model: a function of the last two tokens and the length."""
    return (7 * tokens[-1] + 3 * tokens[max(0, len(tokens) - 2)] + len(tokens)) % VOCABULARY


def chain(tokens: Sequence[int]) -> list[int]:
    """KV of each token."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


@dataclass(eq=False)
class ToyRequest:
    """Implements `DraftState`."""

    number: int
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    output_token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    block_table: array[int] = field(default_factory=lambda: array("i"))
    published: list[CachedBlock] = field(default_factory=list)
    num_computed: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


@dataclass
class ToyScores:
    """Implements `DraftScores`."""

    best: list[int]
    logits: Tensor | None


class ToyDraft:
    """Implements `DraftExecutor` and checks what it is given."""

    def __init__(self, model: Callable[[Sequence[int]], int] = next_token) -> None:
        self.model = model
        self.kv: dict[int, int] = {}  # slot -> KV
        self.texts: dict[
            int, list[int]
        ] = {}  # by request: the tokens whose KV is there, as far as they were computed here
        self.num_computed = 0  # tokens, over all forwards
        self.rows: list[list[int]] = []  # of the last forward: the tokens up to each
        self.largest_forward = 0
        self.broken = False  # rows are not finite

    def forward(self, items: Sequence[DraftTokens]) -> None:
        lengths = [item.num_tokens for item in items]
        assert lengths == sorted(lengths)
        assert min(lengths) > 0
        self.rows = []
        for item in items:
            self._compute(item)
        self.num_computed += sum(lengths)
        self.largest_forward = max(self.largest_forward, sum(lengths))

    def _compute(self, item: DraftTokens) -> None:
        request, known = item.request, item.request.token_ids
        before = (known + self.texts.get(request.number, [])[len(known) :])[: item.start]
        text = before + item.token_ids
        self.texts[request.number] = text
        slots = [request.block_table[p // BLOCK] * BLOCK + p % BLOCK for p in range(len(text))]
        wanted = chain(text)
        read = [self.kv.get(slot) for slot in slots[: item.start]]
        assert read == wanted[: item.start], f"request {request.number} reads foreign KV at {item.start}"
        self.kv.update(zip(slots[item.start :], wanted[item.start :], strict=True))
        self.rows += [text[: item.start + n + 1] for n in range(item.num_tokens)]

    def score(self, rows: Sequence[int], *, with_logits: bool) -> ToyScores:
        best = [-1 if self.broken else self.model(self.rows[row]) for row in rows]
        return ToyScores(best, None)


class ToyEngine:
    """Requests over one pool with a prefix cache. Tests say what is computed, accepted and taken away."""

    def __init__(self, draft: ToyDraft, num_blocks: int = 64, context: int = 1000, max_tokens: int = 1000) -> None:
        self.draft = draft
        self.pool = BlockPool(num_blocks)
        limits = DraftLimits(context_length=context, max_tokens=max_tokens)
        self.drafter = ModelDrafter(draft, BLOCK, limits)
        self.requests: list[ToyRequest] = []
        self._count = 0

    def add(self, prompt: list[int]) -> ToyRequest:
        request = ToyRequest(self._count, prompt)
        self._count += 1
        self.requests.append(request)
        return request

    def start(self, request: ToyRequest) -> bool:
        """Give a request without blocks those for all its tokens, its cached prefix shared."""
        tokens = request.token_ids
        prefix = self.pool.match(tokens, BLOCK, (len(tokens) - 1) // BLOCK)
        needed = -(-len(tokens) // BLOCK) - len(prefix)
        if needed > self.pool.num_free - self.pool.count_free(prefix):
            return False
        request.block_table = array("i", self.pool.share(prefix) + self.pool.allocate(needed))
        request.published, request.num_computed = prefix, len(prefix) * BLOCK
        return True

    def preempt(self, request: ToyRequest) -> None:
        self.pool.release(request.block_table)
        request.block_table, request.published, request.num_computed = array("i"), [], 0

    def finish(self, request: ToyRequest) -> None:
        self.preempt(request)
        self.requests.remove(request)
        self.drafter.forget(request)

    def reserve(self, request: ToyRequest, stop: int) -> bool:
        """Blocks for positions before `stop`."""
        needed = -(-stop // BLOCK) - len(request.block_table)
        if needed > self.pool.num_free:
            return False
        request.block_table.extend(self.pool.allocate(max(0, needed)))
        return True

    def commit(self, request: ToyRequest, num_tokens: int, new: Sequence[int], length: int) -> DraftItem:
        """The target has computed `num_tokens` known tokens and the accepted ones; `new` are accepted tokens and the one behind."""
        start = request.num_computed
        request.output_token_ids += new
        request.num_computed += num_tokens + max(0, len(new) - 1)
        for index in range(len(request.published), request.num_computed // BLOCK):
            tokens = request.token_ids[index * BLOCK : (index + 1) * BLOCK]
            parent = request.published[-1] if request.published else None
            request.published.append(self.pool.publish(request.block_table[index], tokens, parent))
        stop = request.num_computed
        return DraftItem(request, start, stop, 0, length if self.reserve(request, stop + length) else 0)

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        drafts = self.drafter.propose(items)
        for item, draft in zip(items, drafts, strict=True):
            assert len(draft.token_ids) <= item.length
            text = list(item.request.token_ids)
            for token in draft.token_ids:  # from right KV comes the right proposal
                assert token == self.draft.model(text)
                text.append(token)
        return drafts


def accepted(request: ToyRequest, draft: Sequence[int], target: Callable[[Sequence[int]], int]) -> list[int]:
    """What greedy verification commits: the agreeing proposals and one token of the target's own."""
    text, new = list(request.token_ids), list[int]()
    for proposed in [*draft, None]:
        token = target(text)
        new.append(token)
        text.append(token)
        if token != proposed:
            break
    return new

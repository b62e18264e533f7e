"""How often a drafter is right: a few prompts, greedily, through a twin of the engine that shares weights and no counters.

A draft that fits by every file may still never be accepted, and nobody would notice but for the speed. Knows no drafter by name.
Invariant: the engine's counters, requests, seeds and prefix cache are what they were.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from triblade.engine.block_pool import BlockPool
from triblade.engine.engine import Engine
from triblade.engine.request import Request
from triblade.engine.scheduler import Scheduler
from triblade.engine.speculation import Speculator
from triblade.sampling_params import SamplingParams
from triblade.spec.policy import FixedPolicy

log = logging.getLogger(__name__)

PROMPTS = (
    "The first rule of a good kitchen is that",
    "Dear Sir or Madam,\nI am writing to",
    "def fibonacci(n):\n",
    "Question: Why does the moon have phases?\nAnswer:",
)
MAX_TOKENS, LENGTH = 24, 4
NEAR_ZERO = 0.1  # of the drafted tokens; a draft with the wrong rope setting has less


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of drafts.

    Attributes:
        drafted: how many drafts had a token at each position.
        accepted: how many of these tokens were accepted.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        return self.drafted[0] if self.drafted else 0

    @property
    def mean_length(self) -> float:
        """Tokens per draft that was verified: those accepted and the target's own."""
        return 1 + sum(self.accepted) / max(1, self.num_drafts)

    @property
    def share(self) -> float:
        """Of drafted tokens that were accepted."""
        return sum(self.accepted) / max(1, sum(self.drafted))

    @property
    def is_near_zero(self) -> bool:
        """Whether drafting only costs time."""
        return self.share < NEAR_ZERO

    def __str__(self) -> str:
        rates = ", ".join(f"{a / d:.0%}" for a, d in zip(self.accepted, self.drafted, strict=True))
        return (
            f"{self.mean_length:.2f} tokens per step of up to {1 + len(self.drafted)}, "
            f"{sum(self.accepted)} of {sum(self.drafted)} drafted tokens accepted (by position: {rates or 'none'})"
        )


def probe(engine: Engine, prompts: Sequence[str] = PROMPTS, params: SamplingParams | None = None) -> Acceptance:
    """Let the engine's drafter draft for a few prompts, all at once, and count.

    Args:
        engine: idle, with a speculator.
        prompts: texts to continue; cut to half of the context.
        params: default: greedy, a few tokens, beyond the end of a turn.
    """
    twin = _twin(engine)
    params = params or SamplingParams(
        temperature=0, max_tokens=max(1, min(MAX_TOKENS, engine.context_length // 2)), ignore_eos=True
    )
    for prompt in prompts:
        ids = engine.tokenizer.encode(prompt)[: engine.context_length // 2]
        if ids:
            twin.add(twin.prepare(ids, params))
    drafted, accepted = Counter[int](), Counter[int]()
    while twin.has_work:
        before = [(r, len(r.draft_token_ids), len(r.output_token_ids)) for r in twin.scheduler.running]
        twin.step()
        for request, length, outputs in before:
            drafted.update(range(length))
            accepted.update(range(_accepted(request, length, outputs)))
    positions = range(len(drafted))
    return Acceptance(tuple(drafted[p] for p in positions), tuple(accepted[p] for p in positions))


def warn_if_never_right(engine: Engine) -> None:
    """Probe, and say so if the drafter is of no use: the failure that otherwise nobody sees."""
    acceptance = probe(engine)
    log.info("drafts: %s", acceptance)
    if acceptance.is_near_zero:
        log.warning(
            "drafts are almost never right: %s; speculation costs time here. Compare the models with "
            "`triblade doctor --target MODEL --draft MODEL`, or use another draft",
            acceptance,
        )


def _accepted(request: Request, length: int, outputs: int) -> int:
    """Drafts among the tokens that a step added; the last token is the target's own."""
    return max(0, len(request.output_token_ids) - outputs - 1) if length else 0


def _twin(engine: Engine) -> Engine:
    """An engine of the same runner and drafter over a pool of its own, whose rows are those of the engine's cache."""
    assert engine.speculator is not None, "nothing drafts"
    assert not engine.has_work, "the rows of running requests would be overwritten"
    original = engine.scheduler
    scheduler = Scheduler(
        BlockPool(engine.pool.num_blocks),
        block_size=original.block_size,
        max_num_seqs=original.max_num_seqs,
        max_num_batched_tokens=original.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    twin = Engine(engine.model, engine.runner, scheduler, context_length=engine.context_length, seed=0)
    twin.speculator = Speculator(engine.speculator.drafter, scheduler, FixedPolicy(LENGTH))
    return twin

"""The frontier of a draft model's KV, on a toy draft that refuses to read anything wrong (see `draft_simulation`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from draft_simulation import BLOCK, VOCABULARY, ToyDraft, ToyEngine, ToyRequest, ToyScores, accepted, next_token
from hypothesis import given
from hypothesis import strategies as st

from triblade.sampling_params import SamplingParams
from triblade.spec.distribution import filtered_weights
from triblade.spec.draft_model import IDLE_STEPS, DraftLimits, ModelDrafter
from triblade.spec.drafter import DraftItem

LENGTH = 4


def decode(engine: ToyEngine, request: ToyRequest, steps: int, length: int = LENGTH) -> list[int]:
    """Draft and verify greedily against the toy model; how many proposals each step accepted."""
    counts, draft = [], list[int]()
    for _ in range(steps):
        new = accepted(request, draft, next_token)
        counts.append(len(new) - 1)
        known = len(request.token_ids) - request.num_computed
        draft = engine.propose([engine.commit(request, known, new, length)])[0].token_ids
    return counts


def test_a_draft_that_is_its_target_is_always_accepted() -> None:  # F17
    engine = ToyEngine(ToyDraft(), num_blocks=200)
    request = engine.add([1, 2, 3])
    engine.start(request)
    counts = decode(engine, request, 120)
    assert counts[1:] == [LENGTH] * 119
    assert len(request.output_token_ids) > 500


@pytest.mark.parametrize(("kept", "computed"), [(LENGTH, 2), (LENGTH - 1, 1), (1, 1), (0, 1)])
def test_of_accepted_tokens_only_the_last_proposal_is_computed_again(kept: int, computed: int) -> None:  # F17: the hole
    engine = ToyEngine(ToyDraft())
    request = engine.add([1, 2, 3, 4, 5])
    engine.start(request)
    (draft,) = engine.propose([engine.commit(request, 5, [6], LENGTH)])
    before = engine.draft.num_computed
    other = (draft.token_ids[kept] + 1 if kept < LENGTH else 0) % VOCABULARY
    engine.propose([engine.commit(request, 1, [*draft.token_ids[:kept], other], LENGTH)])
    assert engine.draft.num_computed - before == computed + LENGTH - 1


def test_a_draft_that_is_always_wrong_is_harmless() -> None:  # F21
    draft = ToyDraft(lambda tokens: (next_token(tokens) + 1) % VOCABULARY)
    engine = ToyEngine(draft)
    request = engine.add([1, 2, 3])
    engine.start(request)
    assert decode(engine, request, 30) == [0] * 30
    assert request.output_token_ids == plain([1, 2, 3], 30)


def plain(prompt: list[int], count: int) -> list[int]:
    """What the toy model writes."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


def test_rows_that_are_not_finite_end_a_proposal() -> None:
    engine = ToyEngine(ToyDraft())
    engine.draft.broken = True
    request = engine.add([1, 2, 3])
    engine.start(request)
    assert engine.propose([engine.commit(request, 3, [9], LENGTH)])[0].token_ids == []
    engine.draft.broken = False
    assert len(engine.propose([engine.commit(request, 1, [9], LENGTH)])[0].token_ids) == LENGTH


@pytest.mark.parametrize("context", range(8, 14))
def test_beyond_its_context_the_draft_rests(context: int) -> None:  # F16
    engine = ToyEngine(ToyDraft(), context=context)
    request = engine.add([1, 2, 3])
    engine.start(request)
    draft, text = list[int](), plain([1, 2, 3], 40)
    while len(request.output_token_ids) < 30:
        known = len(request.token_ids) - request.num_computed
        item = engine.commit(request, known, accepted(request, draft, next_token), LENGTH)
        draft = engine.propose([item])[0].token_ids
        assert len(draft) == max(0, min(LENGTH, context - item.stop))  # position context - 1 is the last to be computed
    assert request.output_token_ids == text[: len(request.output_token_ids)]
    assert len(engine.draft.kv) <= context + BLOCK


def test_a_prompt_is_computed_chunk_by_chunk_with_the_target() -> None:
    engine = ToyEngine(ToyDraft())
    request = engine.add(list(range(20)))
    engine.start(request)
    for count, computed in ((7, 7), (8, 15)):
        assert engine.propose([engine.commit(request, count, [], 0)])[0].token_ids == []
        assert engine.draft.num_computed == computed
    assert len(engine.propose([engine.commit(request, 5, [3], LENGTH)])[0].token_ids) == LENGTH
    assert engine.draft.num_computed == 21 + LENGTH - 1


def test_who_wants_no_draft_costs_nothing_until_it_wants_one() -> None:
    engine = ToyEngine(ToyDraft())
    request = engine.add([1, 2, 3])
    engine.start(request)
    decode(engine, request, 20, length=0)
    assert engine.draft.num_computed == 0
    decode(engine, request, 1)
    assert engine.draft.num_computed == len(request.token_ids) + LENGTH - 1


def test_prompts_wait_while_drafts_are_switched_off() -> None:
    engine = ToyEngine(ToyDraft())
    request = engine.add([1, 2, 3])
    engine.start(request)
    decode(engine, request, IDLE_STEPS, length=0)
    late = engine.add(list(range(20)))
    engine.start(late)
    engine.propose([engine.commit(late, 16, [], 0)])
    assert engine.draft.num_computed == 0
    assert len(engine.propose([engine.commit(late, 4, [7], LENGTH)])[0].token_ids) == LENGTH
    assert engine.draft.num_computed == 21 + LENGTH - 1


def test_a_forward_never_exceeds_its_budget_and_short_runs_go_first() -> None:
    engine = ToyEngine(ToyDraft(), max_tokens=8)
    long, short = engine.add(list(range(30))), engine.add([1, 2, 3])
    items = []
    for request in (long, short):
        engine.start(request)
        items.append(engine.commit(request, len(request.prompt_token_ids), [5], LENGTH))
    first, second = engine.propose(items)
    assert (first.token_ids, len(second.token_ids)) == ([], LENGTH)
    assert engine.draft.largest_forward == 8
    for _ in range(6):  # 31 tokens at up to 7 a call, beside one of the other
        drafts = engine.propose([engine.commit(request, 1, [5], LENGTH) for request in (long, short)])
    assert [len(draft.token_ids) for draft in drafts] == [LENGTH, LENGTH]
    assert engine.draft.largest_forward == 8


def test_a_cached_prefix_is_not_computed_again() -> None:
    engine = ToyEngine(ToyDraft())
    prompt = list(range(16))
    for expected in (
        17 + LENGTH - 1,
        17 + LENGTH - 1 + 5 + LENGTH - 1,
    ):  # the second: the last block's 4 tokens and the new one
        request = engine.add(prompt)
        engine.start(request)
        engine.propose([engine.commit(request, 16 - request.num_computed, [7], LENGTH)])
        assert engine.draft.num_computed == expected


def test_blocks_that_were_cached_behind_the_drafters_back_are_computed_first() -> None:
    """A request that ends with its first token is never shown to the drafter, but its prompt is cached."""
    engine = ToyEngine(ToyDraft())
    prompt = list(range(16))
    unseen = engine.add(prompt)
    engine.start(unseen)
    engine.commit(unseen, 16, [7], 0)
    engine.finish(unseen)
    request = engine.add(prompt)
    engine.start(request)
    assert request.num_computed == 12
    assert len(engine.propose([engine.commit(request, 4, [7], LENGTH)])[0].token_ids) == LENGTH
    assert engine.draft.num_computed == 17 + LENGTH - 1


def test_ended_requests_leave_nothing() -> None:
    engine = ToyEngine(ToyDraft(), num_blocks=12)
    for number in range(1000):
        request = engine.add([number % 50, 2, number % 7])
        engine.start(request)
        decode(engine, request, 2)
        engine.finish(request)
    assert engine.drafter.num_claims <= 12
    engine.drafter.forget(ToyRequest(99, [1]))  # never seen
    assert engine.drafter.num_requests == 0
    engine.pool.check()


def test_a_block_that_was_partly_overwritten_holds_nothing() -> None:
    """By luck it comes back to a request with the tokens that it held before."""
    draft = ToyDraft()
    drafter = ModelDrafter(draft, BLOCK, DraftLimits(context_length=99, max_tokens=99))
    for number, (prompt, computed) in enumerate((([1, 2, 3, 4, 5], 6), ([9, 9], 3), ([1, 2, 3, 4, 5], 6))):
        before = draft.num_computed
        request = ToyRequest(number, prompt, output_token_ids=[7])
        request.block_table.extend([0, 1])
        drafter.propose([DraftItem(request, 0, len(prompt), 0, 1)])
        assert draft.num_computed - before == computed
        drafter.forget(request)


@given(st.data())
def test_the_draft_reads_only_kv_of_committed_tokens(data: st.DataObject) -> None:
    """Any history of prompts with common prefixes, chunks, drafts kept or not, preemptions, ends and cache hits.

    `ToyDraft` fails when what a forward reads is not the KV of the tokens before, `ToyEngine.propose` when a proposal is not
    what the toy model says after the committed tokens.
    """

    def choose(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    engine = ToyEngine(ToyDraft(), num_blocks=14, context=choose(10, 60), max_tokens=choose(6, 40))
    drafts: dict[int, list[int]] = {}
    for _ in range(choose(5, 25)):
        action = choose(0, 9)
        started = [r for r in engine.requests if r.block_table]
        if action < 2 or not engine.requests:
            engine.add([5] * choose(0, 10) + [choose(0, 3) for _ in range(choose(1, 6))])
        elif action == 2 and started:
            engine.preempt(started[-1])
        elif action == 3 and started:
            engine.finish(started[choose(0, len(started) - 1)])
        else:
            random_step(engine, choose, drafts)
    for request in engine.requests[:]:
        engine.finish(request)
    engine.pool.check()
    assert engine.drafter.num_requests == 0


def random_step(engine: ToyEngine, choose: Callable[[int, int], int], drafts: dict[int, list[int]]) -> None:
    """One step over some of the requests, with as many proposals accepted as chance says."""
    items = []
    for request in engine.requests:
        if not request.block_table and not engine.start(request):
            continue
        pending = len(request.token_ids) - request.num_computed
        count = choose(1, pending)
        draft = drafts.pop(request.number, []) if count == pending else []
        kept = draft[: choose(0, len(draft))]
        new = [*kept, choose(0, 3)] if count == pending else []
        if not engine.reserve(request, request.num_computed + count + len(new)):
            engine.preempt(request)
            continue
        item = engine.commit(request, count, new, choose(0, 5) if new else 0)
        if new and choose(0, 4) == 0:
            engine.finish(request)  # ended in this very step: the drafter does not see it
        elif choose(0, 4):  # an engine that switched speculation off need not ask
            items.append(item)
    for item, draft in zip(items, engine.propose(items), strict=True):
        drafts[item.request.number] = draft.token_ids


class FlatDraft(ToyDraft):
    """A draft with a distribution: fixed logits whatever the text."""

    def score(self, rows: Sequence[int], *, with_logits: bool) -> ToyScores:
        logits = torch.linspace(0, 3, VOCABULARY).repeat(len(rows), 1)
        return ToyScores([VOCABULARY - 1] * len(rows), logits if with_logits else None)


def sampled(seed: int, temperature: float, smoothing: float, length: int = 3) -> tuple[list[int], torch.Tensor | None]:
    drafter = ModelDrafter(FlatDraft(), BLOCK, DraftLimits(context_length=99, max_tokens=99, temperature=smoothing))
    request = ToyRequest(0, [1, 2], SamplingParams(temperature=temperature, top_k=20), [3], seed)
    request.block_table.extend([0, 1, 2])
    (draft,) = drafter.propose([DraftItem(request, 0, 2, 0, length)])
    return draft.token_ids, draft.weights


def test_draws_come_from_the_weights_that_are_returned() -> None:  # F03
    counts = torch.zeros(VOCABULARY)
    for seed in range(2000):
        tokens, weights = sampled(seed, 0.8, 1.5, length=2)
        assert weights is not None
        counts += torch.bincount(torch.tensor(tokens), minlength=VOCABULARY)
    expected = filtered_weights(
        torch.linspace(0, 3, VOCABULARY)[None], [SamplingParams(temperature=0.8 * 1.5, top_k=20)]
    )[0]
    assert torch.equal(weights, expected.repeat(2, 1))
    expected = expected / expected.sum() * counts.sum()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - expected)[kept].square() / expected[kept]).sum()
    assert statistic < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


def test_draws_depend_on_seed_and_position_alone() -> None:
    assert sampled(5, 1.0, 1.0)[0] == sampled(5, 1.0, 1.0)[0]
    assert sampled(5, 1.0, 1.0, length=2)[0] == sampled(5, 1.0, 1.0, length=3)[0][:2]
    assert len({tuple(sampled(seed, 1.0, 1.0)[0]) for seed in range(20)}) > 10


@pytest.mark.parametrize(("temperature", "smoothing"), [(0.0, 1.2), (1.0, 0.0)])
def test_greedy_requests_and_drafts_without_a_temperature_propose_the_best(
    temperature: float, smoothing: float
) -> None:
    assert sampled(1, temperature, smoothing) == ([VOCABULARY - 1] * 3, None)

"""The suffix drafter: which tokens it indexes when, and what an ended request leaves behind."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from triblade.sampling_params import SamplingParams
from triblade.spec.drafter import DraftItem
from triblade.spec.suffix import CONTEXT_TOKENS, SuffixDrafter, make_index
from triblade.spec.suffix_index import SuffixIndex, SuffixOptions

BOLD = SuffixOptions(own_doubt=0.0, shared_doubt=0.0)


@dataclass
class State:
    """A request as a drafter sees it."""

    number: int
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    block_table: array[int] = field(default_factory=lambda: array("i"))

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


class RecordingIndex(SuffixIndex):
    """Remembers what it was given."""

    def __init__(self, options: SuffixOptions = BOLD) -> None:
        super().__init__(options)
        self.given: list[tuple[int, list[int]]] = []
        self.shared: list[list[int]] = []

    def propose(self, request: int, tokens: Sequence[int], length: int, least: float) -> list[int]:
        self.given.append((request, list(tokens)))
        return super().propose(request, tokens, length, least)

    def share(self, tokens: Sequence[int]) -> None:
        self.shared.append(list(tokens))
        super().share(tokens)


def item(state: State, length: int = 4, start: int | None = None) -> DraftItem:
    """The item after a step that computed all but the newest token."""
    stop = len(state.token_ids) - 1
    return DraftItem(state, stop - 1 if start is None else start, stop, 0, length)


def test_drafts_are_certain_and_aligned_with_the_items() -> None:
    copying, new = State(0, [1, 2, 3, 4, 1, 2]), State(1, [5, 6, 7])
    drafts = SuffixDrafter(RecordingIndex()).propose([item(new), item(copying, 2)])
    assert [draft.token_ids for draft in drafts] == [[], [3, 4]]
    assert all(draft.weights is None for draft in drafts)


def test_every_committed_token_is_indexed_once() -> None:
    index, state = RecordingIndex(), State(0, [1, 2, 3])
    drafter = SuffixDrafter(index)
    drafter.propose([item(state, 0, 0)])  # a chunk of the prompt
    state.output_token_ids.append(4)
    drafter.propose([item(state)])
    state.output_token_ids += [5, 6]
    drafter.propose([item(state)])
    drafter.propose([item(state, start=0)])  # preempted: computed again from its first token
    assert index.given == [(0, [1, 2, 3, 4]), (0, [5, 6]), (0, [])]


def test_rejected_proposals_leave_no_trace() -> None:
    """F21: nothing is ever accepted, and every proposal is that of a fresh drafter."""
    state = State(0, [1, 2, 3, 4] * 4)
    drafter = SuffixDrafter(RecordingIndex())
    for step in range(20):
        (draft,) = drafter.propose([item(state)])
        (fresh,) = SuffixDrafter(RecordingIndex()).propose([item(state)])
        assert draft.token_ids == fresh.token_ids
        wrong = 1 + (draft.token_ids or [step])[0] % 4  # another token than the proposed one
        state.output_token_ids.append(wrong)


def test_the_output_of_an_ended_request_helps_the_next_one() -> None:
    drafter = SuffixDrafter(make_index(BOLD))
    prompt, output = list(range(100, 120)), [1, 2, 3, 4, 5]
    first = State(0, prompt, output)
    drafter.propose([item(first)])
    drafter.forget(first)
    (draft,) = drafter.propose([item(State(1, prompt, []))])  # the same question again
    assert draft.token_ids == output[:4]


def test_an_ended_request_leaves_its_output_and_the_end_of_its_prompt() -> None:
    index = RecordingIndex()
    drafter = SuffixDrafter(index)
    prompt = list(range(50))
    drafter.forget(State(0, prompt, [60, 61]))  # never proposed for: length was always 0
    drafter.forget(State(1, prompt))  # aborted before its first token
    assert index.shared == [[*prompt[-CONTEXT_TOKENS:], 60, 61]]
    assert index.num_requests == 0


def test_five_thousand_requests_stay_within_the_capacity() -> None:
    index = make_index(SuffixOptions(shared_capacity_tokens=4096))
    drafter = SuffixDrafter(index)
    for number in range(5000):
        state = State(number, [number % 97, number % 89, 3, number % 83] * 4)
        for token in range(number % 6):  # some are aborted at once
            drafter.propose([item(state)])
            state.output_token_ids.append(token)
        drafter.forget(state)
        assert index.num_shared_tokens <= 4096
    assert index.num_requests == 0
    assert index.num_shared_tokens == 4096
    assert not drafter._indexed


def test_the_same_history_gives_the_same_drafts() -> None:
    def drafts() -> list[list[int]]:
        drafter, made = SuffixDrafter(), []
        for number in range(6):
            state = State(number, [number, 2, 3, 4, 5, 2, 3])
            for token in (4, 5, 2, 3, 4, 5):
                made += [draft.token_ids for draft in drafter.propose([item(state)])]
                state.output_token_ids.append(token)
            drafter.forget(state)
        return made

    first = drafts()
    assert first == drafts()
    assert any(first)


def test_the_more_requests_share_a_step_the_surer_a_draft_must_be() -> None:
    def drafted(others: int) -> int:
        copying = State(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
        items = [item(copying, 8), *(item(State(n, [50 + n]), 8) for n in range(1, others + 1))]
        return len(SuffixDrafter().propose(items)[0].token_ids)

    lengths = [drafted(others) for others in (0, 1, 3, 15)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2] > lengths[3] == 0

"""From logits to a token: penalties, bars, greedy choice and log-probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from triblade.errors import RequestError
from triblade.sampling_params import SamplingParams
from triblade.spec.sampler import Sampler, SamplerRow, best_tokens

VOCAB = 12
END = 2  # as in SmolLM2, where padding and end of text are one id


def row(
    output: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (),
    stops: Sequence[int] = (END,),
    bad_words: Sequence[Sequence[int]] = (),
    seed: int = 0,
    **params: Any,
) -> SamplerRow:
    return SamplerRow(
        params=SamplingParams(**{"temperature": 0.0, **params}),
        seed=seed,
        position=len(output),
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        stop_token_ids=frozenset(stops),
        bad_words=bad_words,
    )


def random_logits(rows: int, columns: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3


def barred(processed: Tensor) -> list[set[int]]:
    return [set((line == -torch.inf).nonzero().flatten().tolist()) for line in processed]


def reference_penalties(logits: list[float], row: SamplerRow) -> list[float]:
    params, out = row.params, row.output_token_ids
    logits = [x + params.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]
    for token in {*row.prompt_token_ids, *out}:
        logits[token] = logits[token] / params.repetition_penalty ** (1 if logits[token] > 0 else -1)
    return [
        x - params.frequency_penalty * out.count(i) - params.presence_penalty * (i in out) for i, x in enumerate(logits)
    ]


PENALISED = [
    row([4, 4, 5], prompt=[3, 3, 3], repetition_penalty=1.7),
    row([4, 4, 5], prompt=[3, 3, 3], presence_penalty=0.9),
    row([4, 4, 5], prompt=[3, 3, 3], frequency_penalty=-0.7),
    row([], prompt=[3, 7, 3, 3], repetition_penalty=0.4, frequency_penalty=1.0),
    row([9] * 40 + [1], prompt=[END, 9], repetition_penalty=2, presence_penalty=-1.5, frequency_penalty=0.3),
    row([6], prompt=[1], logit_bias={6: -4.5, 11: 100, 0: -100}, repetition_penalty=1.3),
    row([6, 1]),
    row([6], prompt=[8, END, END, END]),
]


def test_penalties_equal_a_reference() -> None:
    logits = random_logits(len(PENALISED))
    before = logits.clone()
    processed = Sampler(VOCAB).process(logits, PENALISED)
    for line, expected_from, penalised in zip(processed.tolist(), logits.tolist(), PENALISED, strict=True):
        assert line == pytest.approx(reference_penalties(expected_from, penalised), rel=1e-6)  # C09
    assert torch.equal(logits, before)


def test_a_batch_penalises_each_row_as_if_alone() -> None:
    logits = random_logits(len(PENALISED))
    together = Sampler(VOCAB).process(logits, PENALISED)
    for number, penalised in enumerate(PENALISED):
        alone = Sampler(VOCAB).process(logits[number : number + 1], [penalised])
        assert torch.equal(alone[0], together[number])  # C10
    assert torch.equal(together[6:], logits[6:])  # rows without penalties, whatever is in their history


def test_penalties_see_the_whole_history() -> None:
    """There is no window: the first of 3,000 tokens counts as much as the last."""
    output = [5, *[6] * 3000, 7]
    processed = Sampler(VOCAB).process(torch.zeros(1, VOCAB), [row(output, frequency_penalty=1.0)])  # C12
    assert processed[0, [5, 6, 7]].tolist() == [-1.0, -3000.0, -1.0]


def test_rows_without_options_are_not_copied() -> None:
    logits = random_logits(3)
    assert (
        Sampler(VOCAB).process(logits, [row([1]), row([END]), row(temperature=1.0, top_k=3)]).data_ptr()
        == logits.data_ptr()
    )


@pytest.mark.parametrize(("position", "expected"), [(0, {END, 9}), (1, {END, 9}), (2, set()), (3, set())])
def test_stop_tokens_are_barred_until_min_tokens_exist(position: int, expected: set[int]) -> None:
    rows = [row([4] * position, stops=(END, 9, VOCAB + 40), min_tokens=2)]
    assert barred(Sampler(VOCAB).process(random_logits(1), rows)) == [expected]  # C19


def test_min_tokens_counts_tokens_before_the_end_token() -> None:
    wants_end = torch.zeros(1, VOCAB)
    wants_end[0, END], wants_end[0, 7] = 9.0, 5.0
    output: list[int] = []
    while END not in output:
        output += Sampler(VOCAB).sample(wants_end, [row(output, min_tokens=2)]).token_ids
    assert output == [7, 7, END]  # C19


def test_rows_of_one_choice_follow_their_own_prefix() -> None:
    """As verification of drafts will ask: one row per position, each with its hypothetical output."""
    tables = random_logits(VOCAB, seed=3)
    tables[:, END] += 9.0
    options: dict[str, Any] = {
        "repetition_penalty": 1.6,
        "frequency_penalty": 0.8,
        "logit_bias": {4: 2.0},
        "min_tokens": 5,
        "bad_words": [[1, 3], [4]],
    }
    words = options.pop("bad_words")
    sampler, previous = Sampler(VOCAB), 0
    output: list[int] = []
    for _ in range(10):
        output += sampler.sample(
            tables[previous].unsqueeze(0), [row(output, prompt=[8], bad_words=words, **options)]
        ).token_ids
        previous = output[-1]
    rows = [row(output[:length], prompt=[8], bad_words=words, **options) for length in range(10)]
    at_once = sampler.sample(tables[[0, *output[:-1]]], rows)
    assert at_once.token_ids == output  # F12, F13
    assert END not in output[:5]
    assert END in output[5:]


@pytest.mark.parametrize(
    ("output", "words", "expected"),
    [
        ([], [[5]], {5}),
        ([], [[4, 5]], set()),
        ([4], [[4, 5]], {5}),
        ([4, 6], [[4, 5]], set()),
        ([1, 4, 6], [[4, 6, 7], [6, 8], [1, 4, 9], [6]], {7, 8, 6}),
        ([6], [[1, 6, 7]], set()),  # longer than the history
        ([6], [[], [6, 7]], {7}),
        ([6], [[6, VOCAB + 5]], set()),
    ],
)
def test_bad_words_lose_their_last_token_only(output: list[int], words: list[list[int]], expected: set[int]) -> None:
    assert barred(Sampler(VOCAB).process(random_logits(1), [row(output, bad_words=words)])) == [expected]


def test_bad_words_do_not_look_into_the_prompt() -> None:
    processed = Sampler(VOCAB).process(random_logits(1), [row([], prompt=[4], bad_words=[[4, 5]])])
    assert barred(processed) == [set()]


def test_only_allowed_tokens_are_left() -> None:
    rows = [row(allowed_token_ids=(3, 11, 3)), row(), row(allowed_token_ids=(0,), logit_bias={0: -100.0})]
    logits = random_logits(3)
    everything = set(range(VOCAB))
    processed = Sampler(VOCAB).process(logits, rows)
    assert barred(processed) == [everything - {3, 11}, set(), everything - {0}]
    assert processed[0, [3, 11]].tolist() == logits[0, [3, 11]].tolist()


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"allowed_token_ids": (END,), "min_tokens": 5}, END),  # min_tokens yields
        ({"allowed_token_ids": (5,), "bad_words": [[5]]}, 5),  # bad words yield
        (
            {"allowed_token_ids": (5, END), "bad_words": [[5]], "min_tokens": 5},
            END,
        ),  # min_tokens yields before bad words
        ({"bad_words": [[token] for token in range(VOCAB)]}, 6),  # every token is a bad word: as if none were
    ],
)
def test_bars_that_leave_no_token_yield_in_order(options: dict[str, Any], chosen: int) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 6] = 8.0
    for temperature in (0.0, 1e-3):
        assert Sampler(VOCAB).sample(logits, [row(temperature=temperature, **options)]).token_ids == [chosen]


def test_padding_columns_are_never_chosen_nor_seen() -> None:
    logits = random_logits(40, VOCAB + 4)
    logits[:, VOCAB:] = 1e9
    logits[::2, VOCAB + 1] = torch.inf
    rows = [row(temperature=n % 2 * 2.0, seed=n, logprobs=VOCAB, repetition_penalty=1.0 + n % 3) for n in range(40)]
    sampler = Sampler(VOCAB)
    sampled = sampler.sample(logits, rows)
    assert max(sampled.token_ids) < VOCAB  # A23
    assert sampled == sampler.sample(logits[:, :VOCAB].contiguous(), rows)
    assert sampler.probabilities(sampler.process(logits, rows), rows).shape == (40, VOCAB)


def test_added_tokens_can_be_allowed() -> None:
    """Ids behind the base vocabulary are ordinary columns."""
    rows = [row(allowed_token_ids=(VOCAB - 1,))]
    assert Sampler(VOCAB).sample(random_logits(1, VOCAB + 4), rows).token_ids == [VOCAB - 1]  # A24


@pytest.mark.parametrize("columns", [VOCAB, 50_000])
def test_greedy_takes_the_smallest_of_equal_ids(columns: int) -> None:
    logits = torch.zeros(3, columns)
    logits[0, [7, 9]] = 1.0
    logits[1, [columns - 1, 11, 10]] = 2.0
    chosen = [Sampler(columns).sample(logits[rows], [row()] * len(logits[rows])).token_ids for rows in ([0], [0, 1, 2])]
    assert chosen == [[7], [7, 10, 0]]


def test_greedy_rows_are_not_scaled_beside_sampled_ones() -> None:
    logits = random_logits(4)
    rows = [
        row(allowed_token_ids=(4, 5)),
        row(temperature=0.3, seed=1),
        row(logit_bias={1: -100.0}, stops=(3,), min_tokens=3),
        row(temperature=50.0, seed=2, allowed_token_ids=(1, 2, 3)),
    ]
    sampler = Sampler(VOCAB)
    probabilities = sampler.probabilities(sampler.process(logits, rows), rows)
    assert bool(probabilities.isfinite().all())  # C07
    assert probabilities.sum(-1).tolist() == pytest.approx([1.0] * 4)
    assert [line.max().item() for line in probabilities[[0, 2]]] == [1.0, 1.0]
    together = sampler.sample(logits, rows).token_ids
    assert together == [sampler.sample(logits[n : n + 1], rows[n : n + 1]).token_ids[0] for n in range(4)]


def test_faulty_rows_are_found_and_disturb_no_other() -> None:
    logits = random_logits(5)
    clean = logits.clone()
    logits[1, 3], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    first, last = clean[[0, 4]].argmax(-1).tolist()
    assert best_tokens(logits) == [first, -1, -1, -1, last]  # A22
    for temperature in (0.0, 0.8):
        rows = [row(temperature=temperature, seed=n, top_p=0.9, logprobs=2) for n in range(5)]
        sampled, expected = Sampler(VOCAB).sample(logits, rows), Sampler(VOCAB).sample(clean, rows)
        assert all(0 <= token < VOCAB for token in sampled.token_ids)
        for number in (0, 4):
            assert sampled.token_ids[number] == expected.token_ids[number]
            assert sampled.logprobs[number] == expected.logprobs[number]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(3)
    options: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "logprobs": 4, "presence_penalty": 2.0}
    rows = [row([1, 2], **options), row(logprobs=0), row()]
    sampled = Sampler(VOCAB).sample(logits, rows)
    expected = logits.double().log_softmax(-1)
    first, second, third = sampled.logprobs
    assert third is None
    assert first is not None
    assert second is not None
    assert first.logprob == pytest.approx(expected[0, sampled.token_ids[0]].item(), abs=1e-5)  # C23
    best = expected[0].topk(4)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert (second.token_id, second.rank, second.top) == (int(logits[1].argmax()), 1, ())


def test_impossible_candidates_have_finite_logprobs() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 4] = 1.0
    scored = Sampler(VOCAB).logprobs(logits, [7], [3])[0]
    assert (scored.logprob, scored.rank) == (-9999.0, 2)
    assert scored.top == ((4, 0.0), (0, -9999.0), (1, -9999.0))
    json.dumps([scored.logprob, *scored.top], allow_nan=False)  # C24


def test_equal_logits_rank_by_id() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, -1.0, 2.0]])
    scored = Sampler(6).logprobs(logits, [1], [5])[0]
    assert [token for token, _ in scored.top] == [1, 3, 5, 0, 2]
    assert scored.rank == 1
    greedy = Sampler(6).sample(logits, [row(logprobs=1)]).logprobs[0]
    assert greedy is not None
    assert greedy.top[0][0] == greedy.token_id


@pytest.mark.parametrize("token", [-1, VOCAB, 2**32])
def test_ids_that_were_never_filled_in_are_refused(token: int) -> None:
    with pytest.raises(RequestError, match=f"between 0 and {VOCAB - 1}, got: {token}$"):  # C29
        Sampler(VOCAB).logprobs(random_logits(2, VOCAB + 3), [0, token], [1, 1])


def test_long_prompts_are_scored_in_pieces_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = random_logits(23), [n % VOCAB for n in range(23)]
    whole = Sampler(VOCAB).logprobs(logits, targets, list(range(23)))
    monkeypatch.setattr("triblade.spec.logprobs.CELLS_AT_ONCE", 5 * VOCAB)
    assert Sampler(VOCAB).logprobs(logits, targets, list(range(23))) == whole
    assert [len(scored.top) for scored in whole] == [min(n, VOCAB) for n in range(23)]
    assert Sampler(VOCAB).logprobs(logits[:0], [], []) == []


def test_logprobs_of_a_large_vocabulary_are_exact() -> None:
    logits = random_logits(2, 49_152, seed=5)
    scored = Sampler(49_152).logprobs(logits, [17, 40_000], [1, 1])
    expected = logits.double().log_softmax(-1)
    assert scored[0].logprob == pytest.approx(expected[0, 17].item(), abs=1e-6)
    assert scored[1].logprob == pytest.approx(expected[1, 40_000].item(), abs=1e-6)
    assert scored[1].rank == int((logits[1] > logits[1, 40_000]).sum()) + 1
    assert math.isfinite(scored[0].top[0][1])

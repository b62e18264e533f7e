"""The engine on tiny models: limits, ends, choices, faults, counters. Whatever happens, the pool is whole afterwards."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from tiny import prompt
from tiny_engine import EOS, open_tiny, plain_decoder, plain_greedy, tiny_llm

from triblade.engine.outputs import FinishReason
from triblade.errors import ContextLengthError, RequestError
from triblade.llm import LLM, Completion
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams

IDS = prompt(9)


@cache
def model() -> OpenModel:
    return open_tiny("llama")


@cache
def greedy(count: int = 12) -> tuple[int, ...]:
    """What the model says after IDS when nothing stops it."""
    return tuple(plain_greedy(plain_decoder(model()), IDS, count))


@pytest.fixture
def llm() -> LLM:
    return tiny_llm(model())


def one(llm: LLM, ids: list[int] = IDS, **params: object) -> Completion:
    settings: dict[str, object] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params}
    completion = llm.generate([ids], SamplingParams(**settings))[0][0]  # type: ignore[arg-type]
    llm.engine.check_idle()
    return completion


def test_max_tokens(llm: LLM) -> None:  # C38: one token and "length"
    for count in (1, 2, 8):
        completion = one(llm, max_tokens=count)
        assert completion.token_ids == list(greedy()[:count])
        assert completion.finish_reason is FinishReason.LENGTH


def test_no_tokens_scores_the_prompt_only(llm: LLM) -> None:  # C38
    completion = one(llm, max_tokens=0, prompt_logprobs=1)
    assert completion.token_ids == []
    assert completion.text == ""
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in completion.prompt_logprobs] == [None, *IDS[1:]]


def test_without_max_tokens_up_to_the_context(llm: LLM) -> None:  # C37
    completion = one(llm, max_tokens=None)
    assert len(IDS) + len(completion.token_ids) == llm.engine.context_length == 64
    assert completion.finish_reason is FinishReason.LENGTH


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    prompts, each = [IDS, IDS[:3]], [SamplingParams(max_tokens=2, seed=7), SamplingParams(max_tokens=5, seed=1)]
    together = [completion.token_ids for (completion,) in llm.generate(prompts, each)]
    alone = [llm.generate([prompt], params)[0][0] for prompt, params in zip(prompts, each, strict=True)]
    assert together == [completion.token_ids for completion in alone]
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate(prompts[:1], each)
    llm.engine.check_idle()


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    completion = one(llm)
    assert completion.text.strip() == " ".join(f"w{token}" for token in completion.token_ids)


@pytest.mark.parametrize("position", [0, 1, 5])
def test_end_token_ends_and_is_counted(position: int) -> None:  # C18
    token = greedy()[position]
    if token in greedy()[:position]:
        position = greedy().index(token)
    opened = open_tiny("llama")
    object.__setattr__(opened, "eos_token_ids", frozenset({token}))
    completion = one(tiny_llm(opened), ignore_eos=False)
    assert completion.token_ids == list(greedy()[: position + 1])
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason is None
    assert f"w{token}" not in completion.text.split()


def test_ignore_eos_still_honours_stop_token_ids() -> None:  # C17
    opened = open_tiny("llama")
    object.__setattr__(opened, "eos_token_ids", frozenset({greedy()[0], EOS}))
    llm = tiny_llm(opened)
    assert one(llm, ignore_eos=True).token_ids == list(greedy()[:8])
    stop = greedy()[3]
    completion = one(llm, ignore_eos=True, stop_token_ids=(stop,))
    assert completion.token_ids == list(greedy()[: greedy().index(stop) + 1])
    assert completion.stop_reason == stop


def test_min_tokens_bars_the_end_exactly_until_reached() -> None:  # C19
    opened = open_tiny("llama")
    object.__setattr__(opened, "eos_token_ids", frozenset({greedy()[0]}))
    llm = tiny_llm(opened)
    for least in (1, 2, 3):
        completion = one(llm, ignore_eos=False, min_tokens=least)
        assert len(completion.token_ids) > least or completion.finish_reason is FinishReason.LENGTH
        assert greedy()[0] not in completion.token_ids[:least]
    assert one(llm, ignore_eos=False, min_tokens=0).token_ids == [greedy()[0]]


def test_stop_string_cuts_text_and_tokens(llm: LLM) -> None:  # C13, F08
    words = [f"w{token}" for token in greedy()[:8]]
    completion = one(llm, stop=(words[3],), logprobs=0)
    first = words.index(words[3])
    assert completion.stop_reason == words[3]
    assert completion.finish_reason is FinishReason.STOP
    assert words[3] not in completion.text
    assert completion.token_ids == list(greedy()[: first + 1])
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids


@pytest.mark.parametrize(
    ("ids", "params", "param"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),  # C22
        ([96], {}, "prompt"),
        ([2**40], {}, "prompt"),
        (IDS, {"stop_token_ids": (96,)}, "stop_token_ids"),  # C20
        (IDS, {"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        (IDS, {"logit_bias": {1000: 1.0}}, "logit_bias"),
        (IDS, {"logprobs": 21}, "logprobs"),
        (IDS, {"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_bad_requests_cost_nothing(llm: LLM, ids: list[int], params: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        one(llm, ids, **params)
    assert caught.value.param == param
    assert not llm.engine.has_work
    assert one(llm).token_ids == list(greedy()[:8])


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param"), [(64, None, "prompt"), (80, 1, "prompt"), (60, 5, "max_tokens")]
)
def test_context_overflow_names_the_numbers(
    llm: LLM, prompt_tokens: int, max_tokens: int | None, param: str
) -> None:  # C36
    with pytest.raises(ContextLengthError, match=f"64 tokens, the request has {prompt_tokens} prompt tokens") as caught:
        one(llm, prompt(prompt_tokens), max_tokens=max_tokens)
    assert caught.value.param == param
    assert len(one(llm, prompt(60), max_tokens=4).token_ids) == 4


def test_a_request_larger_than_the_pool_is_refused() -> None:  # E09
    llm = tiny_llm(model(), num_kv_blocks=5)  # 20 tokens
    with pytest.raises(ContextLengthError, match="20 tokens, the request has 30"):
        one(llm, prompt(30))
    assert one(llm, prompt(10), max_tokens=10).finish_reason is FinishReason.LENGTH


def test_choices_differ_and_repeat(llm: LLM) -> None:  # C02, C03
    params = SamplingParams(n=4, seed=5, temperature=1.5, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate([IDS, IDS[:4]], params) for _ in range(2))
    for choices, again in zip(first, second, strict=True):
        assert [c.index for c in choices] == [0, 1, 2, 3]
        assert len({tuple(c.token_ids) for c in choices}) == 4
        assert [c.token_ids for c in choices] == [c.token_ids for c in again]
    single = llm.generate([IDS], SamplingParams(seed=5, temperature=1.5, max_tokens=8, ignore_eos=True))[0][0]
    assert single.token_ids == first[0][0].token_ids
    llm.engine.check_idle()


def test_choices_share_the_prompt(llm: LLM) -> None:  # H15
    choices = llm.generate([prompt(17)], SamplingParams(n=3, max_tokens=2, ignore_eos=True))[0]
    assert [c.num_cached_tokens for c in choices] == [0, 16, 16]
    load = llm.engine.load()
    assert load.num_prompt_tokens == 17
    assert load.num_cached_prompt_tokens == 0


def test_a_seeded_request_does_not_feel_its_neighbours(llm: LLM) -> None:  # C01
    seeded = SamplingParams(seed=1, temperature=1.0, max_tokens=8, ignore_eos=True)
    alone = llm.generate([IDS], seeded)[0][0].token_ids
    for neighbour in (
        SamplingParams(seed=2, max_tokens=8),
        SamplingParams(max_tokens=8),
        SamplingParams(temperature=0),
    ):
        requests = [llm.engine.prepare(IDS, seeded), llm.engine.prepare(IDS[:5], neighbour)]
        tokens: list[int] = []
        for request, output in llm._run([r for group in requests for r in group]):
            tokens += output.token_ids if request is requests[0][0] else []
        assert tokens == alone


def test_requests_without_a_seed_differ_but_an_engine_seed_repeats_them() -> None:
    params = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    runs = [[c[0].token_ids for c in tiny_llm(model(), seed=7).generate([IDS, IDS], params)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    assert tiny_llm(model()).generate([IDS], params)[0][0].token_ids != runs[0][0]


def test_padding_rows_of_the_embedding_are_never_sampled() -> None:  # A23
    opened = open_tiny("llama", vocabulary=80)
    opened.checkpoint.tensor("lm_head.weight")[80:] = opened.checkpoint.tensor("lm_head.weight")[:16] * 50
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, logprobs=5)
    for completion in tiny_llm(opened).generate([[5, 6]] * 4, params):
        assert max(completion[0].token_ids) < 80
        assert completion[0].logprobs is not None
        assert all(token < 80 for entry in completion[0].logprobs for token, _ in entry.top)


def test_tokens_without_an_embedding_row_do_not_exist() -> None:  # A24
    llm = tiny_llm(open_tiny("llama", vocabulary=99))
    for params in ({"allowed_token_ids": (96,)}, {"logit_bias": {98: 1.0}}, {"stop_token_ids": (97,)}):
        with pytest.raises(RequestError, match="between 0 and 95"):
            one(llm, **params)
    assert one(llm, allowed_token_ids=(95,)).token_ids == [95] * 8


def test_garbage_in_padding_columns_ends_no_request() -> None:  # A23
    opened = open_tiny("llama", vocabulary=80)
    opened.checkpoint.tensor("lm_head.weight")[80:] = torch.nan
    assert len(one(tiny_llm(opened), [5, 6]).token_ids) == 8


def test_a_row_that_is_not_finite_ends_with_an_error_and_harms_nobody() -> None:  # A22
    opened = open_tiny("llama")
    opened.checkpoint.tensor("model.embed_tokens.weight")[77] = torch.inf
    llm = tiny_llm(opened)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={77: -100})
    bad, good = llm.generate([[3, 77, 4], IDS], params)
    assert bad[0].finish_reason is FinishReason.ERROR
    assert bad[0].error is not None
    assert "not finite" in bad[0].error
    assert bad[0].token_ids == []
    assert good[0].finish_reason is FinishReason.LENGTH
    assert good[0].token_ids == one(llm, logit_bias={77: -100}).token_ids


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_a_former_owner_left_in_a_block_poisons_nobody(deterministic: bool) -> None:  # A22
    llm = tiny_llm(model(), deterministic=deterministic, backend="reference", enable_prefix_caching=False)
    expected = llm.generate([IDS, IDS[:2]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    llm.engine.runner.executor.cache.pool.view(torch.float32).fill_(torch.nan)
    again = llm.generate([IDS, IDS[:2]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert [c[0].token_ids for c in again] == [c[0].token_ids for c in expected]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_abort_in_every_state(steps: int) -> None:  # E12
    llm = tiny_llm(model(), max_num_batched_tokens=4, max_num_seqs=2)
    engine = llm.engine
    requests = [engine.prepare(prompt(10, seed=i), SamplingParams(max_tokens=20, temperature=0)) for i in range(4)]
    engine.add([r for group in requests for r in group])
    for _ in range(steps):
        engine.step()
    ended = engine.abort([requests[0][0], requests[3][0]])
    assert [output.finish_reason for _, output in ended] == [FinishReason.ABORT] * 2
    assert engine.abort([requests[0][0]]) == []
    finished = {}
    while engine.has_work:
        finished.update({request: output for request, output in engine.step() if output.finished})
    assert set(finished) == {requests[1][0], requests[2][0]}
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.check_idle()


def test_leaving_a_stream_early_aborts_it(llm: LLM) -> None:
    for output in llm.stream(IDS, SamplingParams(max_tokens=30, ignore_eos=True)):
        assert output.token_ids
        break
    assert not llm.engine.has_work
    llm.engine.check_idle()


def test_counters_agree_with_what_requests_report(llm: LLM) -> None:  # H14
    before = llm.engine.load()
    completions = [
        llm.generate([prompt(n)], SamplingParams(max_tokens=3, ignore_eos=True))[0][0] for n in (9, 17, 17, 30)
    ]
    load = llm.engine.load()
    assert load.num_prompt_tokens - before.num_prompt_tokens == 9 + 17 + 17 + 30
    assert load.num_cached_prompt_tokens == sum(c.num_cached_tokens for c in completions) > 0
    assert load.num_generated_tokens == sum(len(c.token_ids) for c in completions) == 12
    assert load.num_computed_prompt_tokens == load.num_prompt_tokens - load.num_cached_prompt_tokens
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert load.num_free_kv_blocks == load.num_kv_blocks


def test_bad_words_are_never_completed(llm: LLM) -> None:
    words = [f"w{token}" for token in greedy()[:8]]
    completion = one(llm, bad_words=(words[0], f"{words[1]} {words[2]}"))
    text = completion.text.split()
    assert words[0] not in text
    assert not any(pair == (words[1], words[2]) for pair in pairwise(text))


def test_allowed_token_ids(llm: LLM) -> None:  # A24
    completion = one(llm, allowed_token_ids=(40, 95))
    assert set(completion.token_ids) <= {40, 95}

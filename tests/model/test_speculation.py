"""Drafting seen from outside, on tiny engines: what is counted is what was committed, and a useless drafter is switched off."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from drafters import RandomDrafter, ScriptedDrafter, speculate
from speculation_world import cpu_like_s
from tiny_engine import open_tiny, plain_decoder, plain_greedy, tiny_llm

from triblade.config import EngineConfig
from triblade.engine.speculation import make_policy
from triblade.errors import ConfigError
from triblade.llm import LLM
from triblade.sampling_params import SamplingParams
from triblade.spec.drafter import Draft, DraftItem, DraftState
from triblade.spec.policy import AdaptivePolicy, Candidate, DraftPolicy, FixedPolicy, PromptRule, StepRecord

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [3] * 10]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, ...], list[int]]:
    decoder = plain_decoder(open_tiny())
    return {tuple(prompt): plain_greedy(decoder, prompt, 40) for prompt in PROMPTS}


def drafting(
    answers: dict[tuple[int, ...], list[int]], wrong: float, length: int = 3, policy: DraftPolicy | None = None
) -> LLM:
    model = open_tiny()
    return speculate(tiny_llm(model), ScriptedDrafter(answers, model.config.vocab_size, wrong), length, policy)


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_counts_are_the_tokens_that_came_out(answers: dict[tuple[int, ...], list[int]], wrong: float) -> None:  # F09
    llm = drafting(answers, wrong)
    completions = [choices[0] for choices in llm.generate(PROMPTS, GREEDY)]
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.token_ids == answers[tuple(prompt)][:12]
        assert completion.speculation is not None
        assert sum(1 + accepted for _, accepted in completion.speculation.trace) == 12
    load = llm.engine.load()
    assert load.speculation.num_steps + load.speculation.num_accepted_tokens == load.num_generated_tokens == 36
    traces = [completion.speculation.trace for completion in completions if completion.speculation]
    assert load.speculation.num_draft_tokens == sum(drafted for trace in traces for drafted, _ in trace)
    assert sum(load.speculation.accepted_per_position) == load.speculation.num_accepted_tokens


@pytest.mark.parametrize("position", range(4))
def test_what_is_accepted_behind_an_end_token_is_not_counted(
    answers: dict[tuple[int, ...], list[int]], position: int
) -> None:  # F09, F07
    prompt = PROMPTS[0]
    answer = answers[tuple(prompt)]
    end = next(i for i in range(5 + position, 40) if answer[i] not in answer[:i])
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop_token_ids=(answer[end],))
    ((completion,),) = drafting(answers, 0.0, length=4).generate([prompt], params)
    assert completion.token_ids == answer[: end + 1]
    assert completion.speculation is not None
    assert sum(1 + accepted for _, accepted in completion.speculation.trace) == end + 1


@pytest.mark.parametrize("room", range(1, 7))
def test_drafts_stay_within_the_answer(answers: dict[tuple[int, ...], list[int]], room: int) -> None:  # F15
    """One token comes with the prompt; a step of k drafts gives k + 1."""
    params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
    ((completion,),) = drafting(answers, 0.0, length=4).generate([PROMPTS[0]], params)
    assert completion.token_ids == answers[tuple(PROMPTS[0])][:room]
    assert completion.finish_reason == "length"
    assert completion.speculation is not None
    steps = {1: [], 2: [(0, 0)], 3: [(1, 1)], 4: [(2, 2)], 5: [(3, 3)], 6: [(4, 4)]}
    assert completion.speculation.trace == [(0, 0), *steps[room]]


class TimedPolicy(AdaptivePolicy):
    """Hears what steps would take on a real machine, so that nothing here depends on this one."""

    def observe(self, record: StepRecord) -> None:
        drafted = max((outcome.asked for outcome in record.verified), default=0)
        super().observe(record._replace(target_s=cpu_like_s(record.rows), draft_s=0.06 * drafted))


@pytest.mark.parametrize(("wrong", "is_on"), [(1.0, False), (0.1, True)])
def test_a_useless_drafter_is_switched_off(
    answers: dict[tuple[int, ...], list[int]], wrong: float, is_on: bool
) -> None:  # F19
    llm = drafting(answers, wrong, policy=TimedPolicy())
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for number in range(9):
        ((completion,),) = llm.generate([PROMPTS[number % 3]], params)
        assert completion.token_ids == answers[tuple(PROMPTS[number % 3])]
        assert completion.speculation is not None
    counts = completion.speculation.counts
    assert (counts.num_drafts > 0.9 * (counts.num_steps - 1)) if is_on else counts.num_drafts <= 4


class SecondPolicy(FixedPolicy):
    """Claims that a plain step takes one second."""

    def plain_step_s(self, num_requests: int) -> float | None:
        return 1.0


def test_the_speedup_is_that_of_plain_steps_for_as_many_tokens(answers: dict[tuple[int, ...], list[int]]) -> None:  # S8
    ((completion,),) = drafting(answers, 0.4, policy=SecondPolicy(3)).generate([PROMPTS[0]], GREEDY)
    assert completion.speculation is not None
    # The prompt's step, and the first draft, which was made while the drafter took in the prompt, are no measure.
    # Plain steps are their own measure: here some thousandths of the second that the policy tells.
    seconds = sum(1 + accepted for drafted, accepted in completion.speculation.trace[2:] if drafted)
    assert completion.speculation.plain_s == pytest.approx(seconds, abs=0.5)
    assert completion.speculation.spent_s > 0
    assert completion.speculation.speedup == completion.speculation.plain_s / completion.speculation.spent_s


def test_an_adaptive_policy_changes_no_token(answers: dict[tuple[int, ...], list[int]]) -> None:  # F01
    llm = drafting(answers, 0.3, policy=AdaptivePolicy())
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for _ in range(3):
        found = [choices[0] for choices in llm.generate(PROMPTS, params)]
        assert [completion.token_ids for completion in found] == [answers[tuple(prompt)] for prompt in PROMPTS]
    assert llm.engine.load().speculation.num_accepted_tokens > 0
    assert all(c.speculation is not None and c.speculation.speedup is not None for c in found)
    llm.engine.check_idle()


def test_a_fixed_length_knows_no_speedup(answers: dict[tuple[int, ...], list[int]]) -> None:
    ((completion,),) = drafting(answers, 0.0).generate([PROMPTS[0]], GREEDY)
    assert completion.speculation is not None
    assert completion.speculation.speedup is None
    assert completion.speculation.counts.mean_accepted_length == pytest.approx(1 + 8 / 3)


def test_without_a_drafter_there_is_no_record() -> None:
    llm = tiny_llm(open_tiny())
    ((completion,),) = llm.generate([PROMPTS[0]], GREEDY)
    assert completion.speculation is None
    assert llm.engine.load().speculation.num_steps == 0


def test_aborted_requests_leave_nothing_behind(answers: dict[tuple[int, ...], list[int]]) -> None:
    policy = AdaptivePolicy()
    llm = drafting(answers, 0.3, policy=policy)
    for count in range(1, 12):
        for number, _ in enumerate(llm.stream(PROMPTS[count % 3], GREEDY)):
            if number == count:
                break
    llm.engine.check_idle()
    left = [
        value for value in (*vars(policy).values(), *vars(llm.engine.speculator).values()) if isinstance(value, dict)
    ]
    assert len(left) >= 3
    assert not any(left)


def test_the_trace_is_logged(answers: dict[tuple[int, ...], list[int]], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="triblade.engine.speculation"):
        drafting(answers, 0.0).generate([PROMPTS[0]], GREEDY)
    (record,) = (r for r in caplog.records if r.name == "triblade.engine.speculation")  # others may log as well
    assert "'trace': [[0, 0], [3, 3], [3, 3], [2, 2]]" in record.getMessage()


def test_the_configuration_chooses_the_policy() -> None:
    candidates = [Candidate(1, 20, 100), Candidate(2, 64, 100)]
    config = EngineConfig(model="m", draft_policy="fixed", num_speculative_tokens=5, direct_prompt_tokens=32)
    assert isinstance(make_policy(config), FixedPolicy)
    assert make_policy(config).lengths(candidates) == [0, 5]
    assert isinstance(make_policy(EngineConfig(model="m")), AdaptivePolicy)
    with pytest.raises(ConfigError, match="draft_policy"):
        EngineConfig(model="m", draft_policy="fixde")  # type: ignore[arg-type]


class Counting(RandomDrafter):
    """Notes how much text its request had whenever it was asked, and for how many tokens."""

    warm_up_steps = 0

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.calls: list[tuple[int, int]] = []

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        self.calls.append((len(items[0].request.output_token_ids), max(item.length for item in items)))
        return super().propose(items)


def test_who_wants_no_drafts_is_asked_seldom() -> None:  # F19
    model = open_tiny("llama", max_position_embeddings=2048)
    drafter, policy = Counting(model.config.vocab_size), FixedPolicy(3, PromptRule(direct_below=4))
    llm = speculate(tiny_llm(model, num_kv_blocks=1200, enable_prefix_caching=False), drafter, 3, policy)
    params = SamplingParams(temperature=0, max_tokens=520, ignore_eos=True)
    llm.generate([[1, 2, 3]] * 4, params)
    assert drafter.calls == [(1, 0), (258, 0), (515, 0)]  # asleep for 256 steps each time
    drafter.calls.clear()
    llm.generate([[1, 2, 3, 4]], replace(params, max_tokens=5))
    assert drafter.calls[0] == (1, 3)  # a new request of few ends the rest
    llm.engine.check_idle()


def test_a_drafter_warms_up_before_it_is_probed() -> None:  # F19
    model = open_tiny("llama", max_position_embeddings=2048)
    drafter, policy = Counting(model.config.vocab_size), TimedPolicy()
    drafter.warm_up_steps = 16
    llm = speculate(tiny_llm(model, num_kv_blocks=1200, enable_prefix_caching=False), drafter, 3, policy)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=600, ignore_eos=True))
    asked = dict(drafter.calls)  # tokens there were -> length
    # Others are drafted for as well, because the evidence has grown old.
    warm = [at for at in asked if asked[at] and [asked.get(at - steps) for steps in range(1, 18)] == [0] * 16 + [None]]
    assert len(warm) >= 2
    assert sum(at > 100 for at in asked) < 150
    llm.engine.check_idle()


def test_a_drafter_that_offers_many_requests_nothing_is_left_alone_for_a_while() -> None:  # F19
    class Silent:
        calls = 0

        def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
            self.calls += 1
            return [Draft([]) for _ in items]

        def forget(self, request: DraftState) -> None:
            pass

    drafter = Silent()
    model = open_tiny("llama", max_position_embeddings=512)
    llm = speculate(tiny_llm(model, num_kv_blocks=1200, enable_prefix_caching=False), drafter, 3)
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    llm.generate([[1, 2, 3]] * 4, params)
    assert drafter.calls == 64
    llm.generate([[1, 2, 3]], params)
    assert drafter.calls == 64 + 299  # one request is asked for as long as the policy wants drafts

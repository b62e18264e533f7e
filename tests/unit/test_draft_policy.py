"""Draft lengths in a simulated world: near the best length, never far below plain decoding, and steady."""

from __future__ import annotations

import itertools

import pytest
from speculation_world import Run, World, accelerator_like_s, constant, cpu_like_s, easy_or_hard, two_cores_s

from triblade.spec.policy import (
    AdaptivePolicy,
    Candidate,
    FixedPolicy,
    PolicySettings,
    PromptRule,
    StepRecord,
    Verified,
)

ACCEPTANCES = {
    "none": (0.0,),
    "poor": (0.1,),
    "half": (0.5,),
    "head": (0.7, 0.65, 0.6, 0.55),
    "good": (0.9,),
    "sure": (0.98,),
}
NOISE = {"jitter": 0.1, "outliers": 0.02}


@pytest.mark.parametrize("cost", [cpu_like_s, accelerator_like_s])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", ACCEPTANCES)
def test_comes_close_to_the_best_fixed_length(cost, batch: int, name: str) -> None:
    world = World(constant(*ACCEPTANCES[name]), batch=batch, tokens_each=128, target_s=cost, token_s=0.01)
    run = world.run(AdaptivePolicy(), 2000 // batch + 300)
    assert run.rate > 0.965 * world.best_fixed()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("cost", [cpu_like_s, two_cores_s, accelerator_like_s])
@pytest.mark.parametrize(("easy", "hard", "share", "least_chance"), [(0.95, 0.2, 0.5, 0.15), (0.95, 0.05, 0.5, 0.5)])
def test_a_drafter_that_ends_its_drafts_is_asked_for_enough(
    easy: float, hard: float, share: float, least_chance: float, cost, batch: int
) -> None:
    """What is asked for and not offered costs nothing, and what goes on is right more often than the average."""
    chances = easy_or_hard(easy, hard, share)
    prices = {"once_s": 0.05, "depth_s": 0.035, "token_s": 0.01}
    world = World(chances, batch=batch, tokens_each=128, least_chance=least_chance, target_s=cost, **prices)
    rates = [world.run(AdaptivePolicy(), 1000, seed).rate for seed in range(3)]
    assert sum(rates) / len(rates) > 0.975 * max(world.fixed(length, 1000) for length in range(9))


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", ["none", "poor"])
@pytest.mark.parametrize("noise", [{}, NOISE], ids=["quiet", "noisy"])
@pytest.mark.parametrize("rests", [False, True])
def test_a_losing_drafter_costs_less_than_3_percent(
    batch: int, name: str, noise: dict[str, float], rests: bool
) -> None:  # F19
    world = World(constant(*ACCEPTANCES[name]), batch=batch, tokens_each=128, token_s=0.01, rests=rests, **noise)
    run = world.run(AdaptivePolicy(), 2000)
    assert world.fixed(4) < 0.8 * world.fixed(0)  # it loses indeed
    assert run.rate > world.fixed(0) / 1.03
    drafted = [sum(lengths) > 0 for lengths in run.lengths[1000:]]
    # Switched off but for probes, and, alone, for a few tries after the evidence has grown old.
    assert sum(drafted) <= (130 if batch == 1 else 30)
    assert any(sum(lengths) > 0 for lengths in run.lengths[100:])  # and probed


@pytest.mark.parametrize("seed", range(3))
def test_a_short_run_of_a_large_batch_loses_less_than_3_percent(seed: int) -> None:  # F19: little time to learn in
    world = World(constant(0.0), batch=16, tokens_each=128, token_s=0.01, **NOISE)
    assert world.run(AdaptivePolicy(), 160, seed).rate > 0.97 * world.fixed(0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("acceptance", "batch"), [("head", 1), ("good", 4), ("head", 16)])
def test_noise_does_not_mislead(seed: int, acceptance: str, batch: int) -> None:
    chances = constant(*ACCEPTANCES[acceptance])
    world = World(chances, batch=batch, tokens_each=128, target_s=accelerator_like_s, token_s=0.01, **NOISE)
    run = world.run(AdaptivePolicy(), 600, seed)
    assert run.rate > 0.96 * world.best_fixed()


@pytest.mark.parametrize("name", ["none", "poor", "half", "head"])
def test_other_loads_on_the_machine_do_not_mislead(name: str) -> None:
    """Two cores with a head as drafter, where others slow whole stretches of steps up to five times: mean of four runs."""
    chances = constant(*ACCEPTANCES[name])
    world = World(
        chances,
        tokens_each=128,
        target_s=two_cores_s,
        once_s=0.1,
        depth_s=0.035,
        jitter=0.06,
        outliers=0.02,
        bursts=0.15,
    )
    runs = [world.run(AdaptivePolicy(), 1200, seed) for seed in range(4)]
    rates = [run.rate / world.best_fixed() for run in runs]
    assert sum(rates) / len(rates) > 0.96
    assert min(rates) > 0.92


def test_a_first_step_that_takes_twenty_times_as_long_is_no_measure() -> None:
    """The first step of a process faults its memory in; compared with it every draft would seem to pay."""
    slow = iter([20.0])
    world = World(constant(0.0), target_s=lambda rows: cpu_like_s(rows) * next(slow, 1.0))
    run = world.run(AdaptivePolicy(), 300)
    assert sum(sum(lengths) > 0 for lengths in run.lengths[60:]) <= 12


def test_drafts_stop_soon_after_acceptance_collapses() -> None:
    world = World(lambda request, step: [0.9 if step < 500 else 0.02] * 16)
    run = world.run(AdaptivePolicy(), 800)
    assert run.lengths[499][0] >= 3
    assert max(lengths[0] for lengths in run.lengths[540:580]) <= 2  # one token, for the sake of the long run
    assert sum(lengths[0] for lengths in run.lengths[590:]) <= 65  # off, but for probes and a few tries


def test_drafts_grow_soon_after_acceptance_improves() -> None:
    world = World(lambda request, step: [0.4 if step < 500 else 0.95] * 16)
    run = world.run(AdaptivePolicy(), 600)
    assert max(lengths[0] for lengths in run.lengths[480:500]) <= 2
    assert run.lengths[560][0] >= 4


@pytest.mark.parametrize("rests", [False, True])
def test_a_probe_finds_out_that_drafts_pay_again(rests: bool) -> None:
    world = World(lambda request, step: [0.02 if step < 300 else 0.9] * 16, rests=rests)
    run = world.run(AdaptivePolicy(), 1200)
    assert max(lengths[0] for lengths in run.lengths[260:300]) <= 2
    assert run.lengths[-1][0] >= 3


@pytest.mark.parametrize("rests", [False, True])
def test_probes_come_ever_more_rarely(rests: bool) -> None:
    run = World(constant(0.0), batch=4, token_s=0.01, rests=rests).run(AdaptivePolicy(), 4000)
    starts = [step for step in range(100, 4000) if sum(run.lengths[step]) and not sum(run.lengths[step - 1])]
    pauses = [b - a for a, b in itertools.pairwise(starts)]
    assert len(pauses) >= 3
    assert all(later >= 1.8 * earlier for earlier, later in itertools.pairwise(pauses))


@pytest.mark.parametrize("name", ["half", "head", "good"])
def test_lengths_do_not_oscillate(name: str) -> None:
    run = World(constant(*ACCEPTANCES[name]), **NOISE).run(AdaptivePolicy(), 2000)
    detours = 2000 / PolicySettings().probes.detour_every  # each is two switches
    assert run.switches <= 70 + 2 * detours


def test_each_request_has_its_own_length() -> None:
    chances = lambda request, step: [0.95 if request == 0 else 0.02] * 16  # noqa: E731
    run = World(chances, batch=4, target_s=lambda rows: 1.0 + 0.05 * (rows - 4)).run(AdaptivePolicy(), 400)
    last = [lengths for lengths in run.lengths[-100:] if any(lengths)]  # a few are plain, to measure
    assert len(last) >= 90
    assert min(lengths[0] for lengths in last) >= 4
    assert sum(sum(lengths[1:]) for lengths in last) <= 30  # of three requests in a hundred steps


def test_an_offer_of_nothing_is_no_failure() -> None:
    """A drafter that finds something one time in five, and is right then, goes on being asked."""
    world = World(constant(0.9), offers=0.2, depth_s=0.0005, **NOISE)
    run = world.run(AdaptivePolicy(), 1000)
    assert run.rate > 1.1 * world.fixed(0)
    assert sum(lengths == [0] for lengths in run.lengths[-200:]) <= 2


def test_longer_contexts_do_not_make_drafts_look_bad() -> None:
    """Steps get slower by and by; the plain ones measured long ago must not count as faster for that."""
    clock = itertools.count()
    world = World(constant(0.6), target_s=lambda rows: cpu_like_s(rows) * (1.0 + next(clock) / 1500))
    run = world.run(AdaptivePolicy(), 1500)
    assert sum(lengths == [0] for lengths in run.lengths[20:]) <= 40


def test_what_costs_nothing_is_drafted_to_the_full() -> None:
    run = World(constant(0.99), target_s=lambda rows: 1.0, depth_s=0.0).run(AdaptivePolicy(), 100)
    assert run.lengths[-1] == [8]


def test_the_same_history_gives_the_same_lengths() -> None:
    world = World(constant(0.7), batch=4, tokens_each=64, **NOISE)
    runs: list[Run] = [world.run(AdaptivePolicy(), 300, seed=7) for _ in range(2)]
    assert runs[0].lengths == runs[1].lengths


@pytest.mark.parametrize("room", range(7))
def test_nobody_drafts_more_than_can_be_used(room: int) -> None:  # F15
    """A step commits one token more than it accepts, so `room` tokens need no more than room - 1 drafts."""
    policy = AdaptivePolicy(PolicySettings(plain_steps_first=1))
    policy.observe(StepRecord([Verified(1, 0, 0, 0)], 1, 1.0, 0.0))
    for _ in range(20):
        (length,) = policy.lengths([Candidate(1, 10, 1000)])
        policy.observe(StepRecord([Verified(1, length, length, length)], 1 + length, 1.0, 0.0))
    expected = max(0, room - 1)
    assert policy.lengths([Candidate(1, 10, room)]) == [expected]
    assert policy.lengths([Candidate(2, 10, room)]) == [expected]
    assert FixedPolicy(8).lengths([Candidate(1, 10, room)]) == [expected]


def test_short_prompts_go_direct_and_long_ones_speculate() -> None:
    candidates = [Candidate(1, 127, 100), Candidate(2, 128, 100), Candidate(3, 512, 100)]
    rule = PromptRule(direct_below=128, speculate_from=512)
    assert FixedPolicy(5, rule).lengths(candidates) == [0, 5, 5]
    policy = AdaptivePolicy(rule=rule)
    for _ in range(60):  # a drafter that is never right
        lengths = policy.lengths(candidates)
        assert lengths[0] == 0
        verified = [Verified(c.number, k, k, 0) for c, k in zip(candidates, lengths, strict=True)]
        policy.observe(StepRecord(verified, 3 + sum(lengths), 1.0 + 0.1 * sum(lengths), 0.0))
    assert policy.lengths(candidates) == [0, 0, 1]


def test_the_end_of_a_request_is_no_rejection() -> None:  # F09: drafts behind an end token were never judged
    ended, judged = AdaptivePolicy(), AdaptivePolicy()
    for policy, is_last in ((ended, True), (judged, False)):
        policy.observe(StepRecord([Verified(0, 0, 0, 0)], 1, 1.0, 0.0))
        for number in range(1, 25):
            policy.observe(StepRecord([Verified(number, 4, 4, 0, is_last)], 5, 1.3, 0.1))
            policy.forget(number)
        policy.observe(StepRecord([Verified(25, 0, 0, 0, is_last=True)], 1, 1.0, 0.0))  # so that none is due
    assert ended.lengths([Candidate(99, 10, 100)])[0] > 0
    assert judged.lengths([Candidate(99, 10, 100)]) == [0]


def test_prompt_chunks_teach_no_costs() -> None:
    policy = AdaptivePolicy()
    for _ in range(5):
        policy.observe(StepRecord([Verified(1, 0, 0, 0)], 1, 1.0, 0.0))
    for _ in range(5):
        policy.observe(StepRecord([Verified(1, 0, 0, 0)], 400, 60.0, 0.0))
    assert policy.plain_step_s(1) == pytest.approx(1.0)
    assert policy.plain_step_s(2) < 1.5


def test_nothing_is_kept_of_requests_that_ended() -> None:
    policy = AdaptivePolicy()
    World(constant(0.5), batch=4, tokens_each=8, **NOISE).run(policy, 500)
    sizes = [len(value) for value in vars(policy).values() if isinstance(value, dict)]
    assert sizes
    assert max(sizes) <= 4


def test_without_requests_there_are_no_lengths() -> None:
    policy = AdaptivePolicy()
    assert policy.lengths([]) == []
    policy.observe(StepRecord([], 64, 1.0, 0.0))
    assert policy.plain_step_s(1) is None

"""Points, the design of nine, who is best, and why a technique hurts: the pure parts of tuning."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from tuning import SMALL, World, space

from triblade.config import TuneConfig
from triblade.errors import ConfigError, TuneError
from triblade.tune.ablation import Corners, Verdict, repairs
from triblade.tune.hardware import find_hardware
from triblade.tune.measured import Measurement, Quality, Run, Trial, choose, hopeless, pareto_set, run_of
from triblade.tune.points import NO_DRAFTER, TOGETHER, Point, corners, nine, without
from triblade.tune.trial_plan import Checkpoint, TrialPlanner, prediction, traffic
from triblade.tune.tune_report import Report, state
from triblade.tune.tuner import Findings

CONFIG = TuneConfig(model="small")
SPACE = space(CONFIG)
WHOLE = Point(weights="int4", drafter="eagle", draft_length=4, placement="30:70")


def run(e2el_ms: float, rate: float = 100.0, memory: float = 100.0, **more: Any) -> Run:
    figures = {"ttft_ms": 1.0, "tpot_ms": 1.0, "requests_per_s": rate / 100}
    return Run(e2el_ms=e2el_ms, output_tokens_per_s=rate, memory_mib=memory, **{**figures, **more})


def trial(number: int, e2el_ms: float, point: Point = WHOLE, quality: Quality | None = None, **more: Any) -> Trial:
    found = Measurement(runs=(run(e2el_ms, **more),), quality=quality)
    return Trial(number=number, kind="grid", point=point, measurement=found)


def test_nine_of_27_have_every_pair_of_values_once() -> None:  # J1
    found = nine(SPACE)
    axes = [[getattr(point, name) for point in found] for name in ("weights", "draft_length", "placement")]
    assert [sorted(set(map(str, axis))) for axis in axes] == [
        ["int3", "int4", "int8"],
        ["2", "4", "6"],
        ["20:80", "30:70", "50:50"],
    ]
    for one, other in combinations(axes, 2):
        assert set(Counter(zip(one, other, strict=True)).values()) == {1}
        assert len(set(zip(one, other, strict=True))) == 9


def test_weights_that_stay_leave_nine_combinations_of_two_axes() -> None:
    stored = space(CONFIG, replace(SMALL, stored_bits=4))
    found = {(point.weights, point.draft_length, point.placement) for point in nine(stored)}
    assert found == {("stored", k, split) for k, split in product(CONFIG.draft_lengths, CONFIG.splits)}
    assert stored.none.techniques == ()


def test_what_does_not_count_makes_no_other_point() -> None:
    plain = Point(weights="bf16")
    same = (
        replace(plain, draft_length=6),
        replace(plain, wire_codec="int8"),
        replace(plain, remote_prefill_tokens=512),
        replace(plain, smoothed=True),
    )
    assert {point.plain for point in same} == {plain}
    assert replace(WHOLE, draft_length=6).plain != WHOLE
    assert str(replace(plain, draft_length=6, remote_prefill_tokens=512)) == "bf16, no drafts, one engine"


def test_corners_are_all_smaller_sets_of_techniques() -> None:
    found = corners(WHOLE, SPACE)
    assert len(set(found)) == len(found) == 7
    assert Counter(len(point.techniques) for point in found) == {0: 1, 1: 3, 2: 3}
    assert without(WHOLE, "workers", SPACE).placement == TOGETHER
    assert without(WHOLE, "drafts", SPACE).drafter == NO_DRAFTER
    assert without(WHOLE, "quantization", SPACE).weights == "bf16"


@pytest.mark.parametrize(
    "options",
    [
        {"bits": (4, 8)},
        {"bits": (4, 8, 8)},
        {"bits": (2, 4, 8)},
        {"splits": ("50:50",)},
        {"stop_factor": 1.0},
        {"repeats": 0},
        {"resume": True, "overwrite": True},
        {"minutes": 0.0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"(?s){next(iter(options))}"):
        TuneConfig(model="m", **options)


def test_the_pareto_set_has_whatever_nothing_beats() -> None:
    quick = trial(1, 100.0, memory=200.0)
    small = trial(2, 200.0, memory=100.0)
    worse = trial(3, 210.0, memory=120.0)
    exact = trial(4, 300.0, memory=300.0, quality=Quality(kl=0.0))
    quick, small, worse = (
        replace(one, measurement=replace(one.measurement, quality=Quality(kl=0.1)))  # type: ignore[arg-type]
        for one in (quick, small, worse)
    )
    failed = Trial(number=5, kind="grid", point=WHOLE, error="no")
    assert [one.number for one in pareto_set([worse, exact, small, quick, failed])] == [1, 2, 4]


def test_the_choice_keeps_the_floor_and_the_goals() -> None:
    fast = trial(1, 100.0, quality=Quality(ppl_increase=0.2))
    failing = trial(2, 110.0, failed=1)
    good = trial(3, 150.0, point=Point(weights="int8", drafter="eagle"))
    slow = trial(4, 300.0, point=Point(weights="bf16"))
    assert choose([fast, failing, good, slow], CONFIG) == good
    assert choose([fast, failing, good, slow], replace(CONFIG, e2el_ms=100.0)) is None
    assert choose([fast, good], replace(CONFIG, max_ppl_increase=0.3)) == fast


def test_of_what_cannot_be_told_apart_the_plainest_is_chosen() -> None:
    stacked, plain = trial(1, 100.0), trial(2, 102.0, point=Point(weights="int4"))
    assert choose([stacked, plain], CONFIG) == plain
    assert choose([stacked, trial(2, 120.0, point=Point(weights="int4"))], CONFIG) == stacked


def test_cost_is_chosen_by_requests_per_second() -> None:
    quick = trial(1, 100.0, rate=100.0)
    cheap = trial(2, 150.0, rate=300.0)
    assert choose([quick, cheap], CONFIG) == quick
    assert choose([quick, cheap], replace(CONFIG, objective="cost")) == cheap


def test_bad_trials_are_hopeless_after_one_run() -> None:
    known = [trial(1, 100.0, rate=100.0, memory=100.0)]
    assert "trial 1" in (hopeless([run(300.0, rate=30.0, memory=110.0)], None, known, CONFIG) or "")
    assert hopeless([run(300.0, rate=30.0, memory=90.0)], None, known, CONFIG) is None  # smaller
    assert hopeless([run(150.0, rate=70.0, memory=110.0)], None, known, CONFIG) is None  # not that much slower
    assert hopeless([run(300.0, rate=30.0)], None, [], CONFIG) is None
    assert "20.0%" in (hopeless([run(10.0)], Quality(ppl_increase=0.2), [], CONFIG) or "")


def test_a_run_takes_the_figures_of_a_load_test() -> None:
    summary: dict[str, Any] = {
        "ttft_ms": {"mean": 10.0},
        "tpot_ms": None,
        "e2e_ms": {"mean": 50.0},
        "output_tokens_per_s": 7.0,
        "requests_per_s": 0.5,
        "prompt_tokens": 300,
        "requests": 4,
        "failed": 1,
        "target": {"peak_memory_mib": 64.0, "acceptance_rate": 0.5, "kv_transfer_wire_bytes": 9.0},
    }
    found = run_of(summary)
    assert (found.ttft_ms, found.tpot_ms, found.e2el_ms, found.memory_mib) == (10.0, 0.0, 50.0, 64.0)
    assert (found.prompt_tokens, found.failed, found.sent_bytes, found.tokens_per_step) == (100.0, 1, 9.0, None)


def around(world: World, whole: Point = WHOLE) -> Corners:
    """A combination and its corners, as a world has them."""
    points = [whole, *corners(whole, SPACE)]
    found = [
        Trial(number=n, kind="ablation", point=point, measurement=Measurement(runs=(world.run(point, 0),)))
        for n, point in enumerate(points)
    ]
    return Corners(found[0], found, SPACE, "latency")


def test_a_technique_that_helps_is_said_to() -> None:
    verdicts = around(World()).verdicts()
    assert [verdict.technique for verdict in verdicts] == ["quantization", "drafts", "workers"]
    assert not any(verdict.hurts or verdict.is_weakened or verdict.causes for verdict in verdicts[:2])
    assert verdicts[0].together == pytest.approx(-0.5)
    assert verdicts[0].alone == pytest.approx(-0.5)


def test_drafts_that_do_not_fit_the_quantized_model_are_found_and_explained() -> None:  # J2
    acceptance = {"bf16": 0.7, "int8": 0.6, "int4": 0.05, "int3": 0.05}
    found = {verdict.technique: verdict for verdict in around(World(acceptance)).verdicts()}["drafts"]
    assert found.hurts
    assert found.is_weakened
    assert found.together > 0.1
    assert (found.alone or 0) < 0
    assert any("5% of the guesses are right, 70% with bf16" in cause for cause in found.causes)
    assert any("too few to pay" in cause for cause in found.causes)
    tries = repairs(found, WHOLE, SPACE, can_smooth=True)
    assert [why for _, why in tries] == ["smoothing before rounding", "shorter drafts", "another drafter"]
    assert [point.draft_length for point, _ in tries] == [4, 2, 4]
    assert "smoothing before rounding" not in [w for _, w in repairs(found, WHOLE, SPACE, can_smooth=False)]


def test_many_requests_at_once_are_a_cause() -> None:  # J2, F19
    crowded = World(dict.fromkeys(("bf16", "int8", "int4", "int3"), 0.6), guess_cost=1.0)
    found = {verdict.technique: verdict for verdict in around(crowded).verdicts()}["drafts"]
    assert found.hurts
    assert any("requests at once fill the arithmetic units" in cause for cause in found.causes)


def test_prompts_too_short_to_be_sent_are_a_cause() -> None:  # J2
    found = around(World(workers=1.3, sent_bytes=0.0)).verdicts()[2]
    assert found.hurts
    assert any("no prompt was computed by the prefill worker" in cause for cause in found.causes)
    names = [why for _, why in repairs(found, WHOLE, SPACE, can_smooth=False)]
    assert names == ["another split", "another split", "only long prompts for the prefill worker"]


def test_a_trial_that_others_disturbed_says_so() -> None:
    quiet, loud = trial(1, 100.0, other_cores=0.1), trial(2, 120.0, other_cores=1.2)
    findings = Findings(trials=[quiet, loud], pareto=[], chosen=None, none=None)
    report = Report(config=CONFIG, space=SPACE, findings=findings, machine="m", plan=None, plan_file=Path("p"))
    assert "disturbed" not in state(quiet, report)
    assert "others kept 1.2 cores busy" in state(loud, report)


def test_a_difference_within_noise_is_no_verdict() -> None:
    assert not any(verdict.hurts for verdict in around(World(workers=0.78)).verdicts())


def test_more_bits_repair_weights() -> None:
    hurting = Verdict(technique="quantization", alone=None, together=0.5, limit=0.03)
    assert repairs(hurting, WHOLE, SPACE, can_smooth=False)[0][0].weights == "int8"
    assert not repairs(hurting, replace(WHOLE, weights="int8"), SPACE, can_smooth=False)


PLANNER = TrialPlanner(CONFIG, SMALL, find_hardware("cpu-desktop"))


def test_a_point_becomes_the_plan_that_is_served() -> None:
    point = replace(WHOLE, kv_dtype="int8", wire_codec="int8", chunk=256, remote_prefill_tokens=64)
    plan = PLANNER.plan(point, Checkpoint(model="folder", convert="triblade convert"))
    assert (plan.decode.model, plan.weights.convert) == ("folder", "triblade convert")
    assert (plan.decode.drafter, plan.decode.num_speculative_tokens) == ("eagle", 4)
    assert (plan.decode.kv_cache_dtype, plan.decode.max_num_batched_tokens) == ("int8", 256)
    assert plan.prefill == plan.decode
    assert (plan.topology.prefill_workers, plan.topology.pd_memory) == (1, "30:70")
    assert (plan.transfer.wire_codec, plan.transfer.remote_prefill_tokens) == ("int8", 64)
    assert set(prediction(plan)) == {"ttft_ms", "tpot_ms", "e2el_ms", "output_tokens_per_s", "memory_mib"}


def test_a_point_without_techniques_is_one_plain_engine() -> None:
    plan = PLANNER.plan(SPACE.none, Checkpoint(model="small"))
    assert (plan.prefill, plan.decode.drafter, plan.topology.is_distributed) == (None, None, False)
    assert plan.weights.scheme == "bf16"


def test_a_short_run_touches_less_of_the_cache_and_has_more_prompts_that_wait() -> None:
    def foreseen(requests: int) -> dict[str, float]:
        asked = {"workload": "document", "prompt_tokens": 1000, "output_tokens": 64, "concurrency": 32}
        config = replace(CONFIG, num_requests=requests, **asked)
        return prediction(replace(PLANNER, config=config).plan(SPACE.none, Checkpoint(model="small")))

    short, long = foreseen(32), foreseen(10000)
    assert short["memory_mib"] < long["memory_mib"]
    assert short["ttft_ms"] > long["ttft_ms"]
    assert short["e2el_ms"] == long["e2el_ms"]


def test_what_does_not_fit_is_refused_before_anything_starts() -> None:
    tiny = replace(find_hardware("cpu-desktop"), memory_gb=0.01)
    with pytest.raises(TuneError, match="memory"):
        TrialPlanner(CONFIG, SMALL, tiny).plan(WHOLE, Checkpoint(model="m"))


def test_traffic_has_the_lengths_that_were_planned() -> None:
    chat = traffic(CONFIG, PLANNER.workload, 0)
    first, answer = chat.prompt_tokens, chat.output_tokens
    assert (first + (2 * first + answer)) / 2 == pytest.approx(PLANNER.workload.prompt_tokens, abs=2)
    assert (first + answer) / (3 * first + answer) == pytest.approx(PLANNER.workload.prefix_share, abs=0.01)
    again = traffic(CONFIG, PLANNER.workload, 1)
    assert (chat.seed, again.seed) == (0, 1)
    assert (chat.warmup_requests, again.warmup_requests) == (2, 0)
    shared = replace(CONFIG, workload="shared-prefix")
    load = traffic(shared, TrialPlanner(shared, SMALL, PLANNER.hardware).workload, 0)
    assert load.prefix_tokens + load.prompt_tokens == 1536

"""The simulation against sums that can be done by hand, against a step-by-step twin, and its search."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from triblade import cli
from triblade.config import (
    DeployConfig,
    EngineConfig,
    Plan,
    RouteConfig,
    SimulateConfig,
    WeightPlan,
    Workload,
    read_toml,
    to_toml,
)
from triblade.deploy.accepted import release
from triblade.deploy.simulation import Site, simulate
from triblade.deploy.simulation_plan import fleet_plan
from triblade.deploy.simulation_replica import Limits, SimulatedReplica
from triblade.deploy.simulation_run import answer
from triblade.deploy.simulation_times import StepTimes
from triblade.deploy.simulation_traffic import SimulatedRequest, Traffic
from triblade.deploy.translation import translate

TIMES = StepTimes(step_s=0.01, sequence_s=0.001, prompt_token_s=0.0001)
LIMITS = Limits(chunk_tokens=100, max_running=4, kv_tokens=10_000)
MEASURED = ["--step-ms", "10", "--sequence-us", "200", "--prompt-token-us", "50", "--prompt-tokens", "400"]
MEASURED += ["--output-tokens", "100", "--request-rate", "40", "--requests", "1500", "--chunk-tokens", "512"]


def request(arrival_s: float = 0.0, prompt: int = 150, output: int = 3, conversation: int = 0) -> SimulatedRequest:
    return SimulatedRequest(arrival_s, conversation, prompt, output)


def served(requests: list[SimulatedRequest], times: StepTimes = TIMES, limits: Limits = LIMITS) -> SimulatedReplica:
    """All of them by one replica."""
    replica = SimulatedReplica(times, limits)
    coming = sorted(requests, key=lambda one: one.arrival_s)
    while coming or replica.next_s < math.inf:
        if coming and coming[0].arrival_s <= replica.next_s:
            replica.add(coming[0], coming.pop(0).arrival_s)
        else:
            replica.finish()
    return replica


def test_one_request_takes_its_chunks_and_its_steps() -> None:
    one = request()
    replica = served([one])
    first_s = (0.01 + 0.01) + (0.01 + 0.001 + 0.005)  # 100 prompt tokens, then 50 and a token
    assert one.first_s == pytest.approx(first_s)
    assert one.end_s == pytest.approx(first_s + 2 * 0.011)
    assert replica.busy_s == pytest.approx(one.end_s)


def test_a_request_that_comes_waits_for_the_step_that_is_computed() -> None:
    long, late = request(prompt=100, output=100), request(0.1005, prompt=100, output=1, conversation=1)
    served([long, late])
    begin_s = long.first_s
    steps = math.ceil((0.1005 - begin_s) / 0.011)
    assert late.first_s == pytest.approx(begin_s + steps * 0.011 + 0.01 + 2 * 0.001 + 0.01)


def slow_twin(requests: list[SimulatedRequest]) -> Iterator[tuple[float, float]]:
    """First and last token of each request, computed step by step."""
    now_s, waiting, left, given = 0.0, list(requests), {}, {}
    first: dict[int, float] = {}
    end: dict[int, float] = {}
    while len(end) < len(requests):
        for one in [one for one in waiting if one.arrival_s <= now_s]:
            if len(left) + len(given) < LIMITS.max_running:
                waiting.remove(one)
                left[one] = one.prompt_tokens
        if not left and not given:
            now_s = waiting[0].arrival_s
            continue
        budget, tokens = LIMITS.chunk_tokens, list(given)
        for one in list(left):
            taken = min(budget, left[one])
            left[one] -= taken
            budget -= taken
            if not left[one]:
                del left[one]
                tokens.append(one)
        now_s += TIMES.of(len(tokens), 0, LIMITS.chunk_tokens - budget)
        for one in tokens:
            first.setdefault(id(one), now_s)
            given[one] = given.get(one, 0) + 1
            if given[one] == one.output_tokens:
                end[id(one)] = now_s
                del given[one]
    return ((first[id(one)], end[id(one)]) for one in requests)


def test_it_leaps_over_equal_steps_and_ends_where_steps_would() -> None:
    traffic = Traffic(request_rate=15, prompt_tokens=90, output_tokens=12)
    requests = traffic.requests(200, seed=3)
    expected = list(slow_twin(requests))
    served(requests)
    for one, (first_s, end_s) in zip(requests, expected, strict=True):
        assert (one.first_s, one.end_s) == pytest.approx((first_s, end_s))


def test_a_prefix_is_computed_once_and_gives_way_to_what_runs() -> None:
    turns = [SimulatedRequest(float(at), 7, 200 * (at + 1), 2, 0, 200 * at) for at in range(3)]
    served(turns)
    assert [one.cached_tokens for one in turns] == [0, 200, 400]
    again = SimulatedRequest(9.0, 7, 800, 2, 0, 600)
    served([*turns, SimulatedRequest(5.0, 8, 9_500, 2), again])
    assert again.cached_tokens == 0


def test_memory_for_whole_answers_is_reserved() -> None:
    first, second = request(prompt=5_000, output=10), request(0.001, prompt=5_500, output=10, conversation=1)
    served([first, second])
    assert second.first_s > first.end_s


def test_prefill_elsewhere_costs_a_transfer_and_computes_no_prompt() -> None:
    site = Site(replicas=1, prefill=1, times=StepTimes(step_s=0.01, prompt_token_s=1e-4, transfer_s=0.5), limits=LIMITS)
    requests = [request(at * 2.0, prompt=1000, conversation=at) for at in range(10)]
    found = simulate(requests, site)
    assert found.ttft_s["p50"] == pytest.approx(
        10 * 0.02 + 0.5 + 0.01 + 1e-4
    )  # chunks, transfer, the last prompt token
    assert found.hit_rate == 0
    assert 0 < found.busy < found.prefill_busy < 1


def test_only_what_the_decode_replica_lacks_is_sent() -> None:
    times = StepTimes(step_s=0.01, transfer_token_s=1e-3)
    site = Site(replicas=1, prefill=1, times=times, limits=Limits(chunk_tokens=10_000))
    first, second = SimulatedRequest(0.0, 0, 600, 10), SimulatedRequest(5.0, 0, 900, 10, 0, 610)
    simulate([first, second], site)
    assert (first.ttft_s, second.ttft_s) == pytest.approx((0.01 + 0.6 + 0.01, 0.01 + (900 - 610) * 1e-3 + 0.01))
    other = SimulatedRequest(5.0, 1, 900, 10, 0, 610)  # its turn before was computed elsewhere
    simulate([SimulatedRequest(0.0, 0, 600, 10), other], site)
    assert other.ttft_s == pytest.approx(0.01 + 0.9 + 0.01)


def test_prefix_routing_finds_more_than_chance() -> None:
    traffic = Traffic(request_rate=20, prompt_tokens=300, output_tokens=20, turns=5)
    hits = {}
    for policy in ("prefix", "random"):
        site = Site(replicas=8, times=TIMES, limits=Limits(kv_tokens=60_000), route=RouteConfig(policy=policy))  # type: ignore[arg-type]
        hits[policy] = simulate(traffic.requests(2000, 0), site).hit_rate
    assert hits["prefix"] > 2 * hits["random"]


def test_too_few_replicas_are_not_stable() -> None:
    traffic = Traffic(request_rate=100, prompt_tokens=100, output_tokens=50)
    assert not simulate(traffic.requests(3000, 0), Site(replicas=2, times=TIMES)).is_stable
    assert simulate(traffic.requests(3000, 0), Site(replicas=40, times=TIMES)).is_stable


def test_traffic_is_what_was_asked_for() -> None:
    traffic = Traffic(request_rate=50, prompt_tokens=100, output_tokens=10, shared_tokens=256, turns=2)
    requests = traffic.requests(4000, 1)
    assert len(requests) / requests[-1].arrival_s == pytest.approx(50, rel=0.1)
    assert requests == sorted(requests, key=lambda one: one.arrival_s)
    first, other = requests[0].prompt(), next(one for one in requests if one.conversation != 0).prompt()
    assert first.blocks[:2] == other.blocks[:2]
    assert [one.arrival_s for one in traffic.requests(4000, 1)] == [one.arrival_s for one in requests]


def test_the_search_returns_what_is_just_enough() -> None:
    config = SimulateConfig(
        step_ms=10,
        sequence_us=200,
        prompt_token_us=50,
        prompt_tokens=400,
        output_tokens=100,
        request_rate=40,
        requests=1500,
        tpot_ms=30,
    )
    found = answer(config)
    together, apart = found.found
    for one in (together, apart):
        assert found.question.is_good(one.result)
        assert not found.question.is_good(found.question.simulated(one.replicas - 1, one.prefill).result)
    assert apart.prefill >= 1


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *MEASURED, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["found"]
    assert [row["is_good"] for row in rows] == [True, True]
    assert cli.main(["simulate", *MEASURED, "--replicas", "1", "--prefill", "0"]) == 0
    assert "missed" in capsys.readouterr().out
    assert cli.main(["simulate", *MEASURED, "--tpot-ms", "1", "--max-replicas", "4"]) == 2
    assert "not even 4 replicas keep the goals" in capsys.readouterr().err


def test_the_command_with_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "vocab_size": 32000}
    shape |= {"intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape |= {
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert cli.main(["plan", str(tmp_path), "--hardware", "h200", "--request-rate", "20", "--output", str(plan)]) == 0
    fleet = tmp_path / "fleet.toml"
    assert (
        cli.main(["simulate", "--plan", str(plan), "--prefill", "0", "--requests", "500", "--output", str(fleet)]) == 0
    )
    assert "kept" in capsys.readouterr().out
    assert read_toml(Plan, fleet).topology.decode_workers >= 1


@pytest.mark.parametrize(("prefill", "decode"), [(0, 3), (2, 1)])
def test_a_fleet_becomes_a_plan_that_deploy_takes(prefill: int, decode: int, tmp_path: Path) -> None:
    engine = EngineConfig(model="/models/m")
    chat = Workload(name="chat", prompt_tokens=400, output_tokens=100, concurrency=8)
    one = Plan(hardware="h200", decode=engine, weights=WeightPlan(scheme="int4"), workload=chat, tensor_parallel=2)
    config = SimulateConfig(step_ms=10, prompt_tokens=400, output_tokens=100, request_rate=5, requests=200)
    found = answer(replace(config, replicas=decode, prefill=prefill))
    made = fleet_plan(one, found.question, found.best)
    assert (made.devices, made.workload.request_rate) == (2 * (prefill + decode), 5)
    assert "simulated at 5 requests/s they keep the goals" in made.reasons[-1]
    (tmp_path / "plan.toml").write_text(to_toml(made), encoding="utf-8")
    read = read_toml(Plan, tmp_path / "plan.toml")
    roles = translate(read, DeployConfig(plan=Path("plan.toml"), target="kubernetes"), release("0.33.0", "cuda")).roles
    expected = {"prefill": prefill, "decode": decode} if prefill else {"whole": decode}
    assert {role.role: role.replicas for role in roles} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "step times come from a plan or were measured"),
        (["--step-ms", "1"], "the traffic is not known: request_rate, prompt_tokens, output_tokens"),
        (["--step-ms", "1", "--output", "fleet.toml"], "a plan is written from a plan"),
        (["--step-ms", "1", "--percentile", "95"], "percentile must be 50, 90 or 99"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *options]) == 2
    assert message in capsys.readouterr().err

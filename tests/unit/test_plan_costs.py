"""The cost model of plans: monotony, bytes and tokens by hand, waves of users, drafts that pay."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from plan_shapes import EIGHT

from triblade.config import Workload
from triblade.tune.cost import StepCost, Weights
from triblade.tune.hardware import Hardware, find_hardware, hardware_names, kernels_of
from triblade.tune.serving import Candidate, Outcome, Site, expected_tokens, predict

H200 = find_hardware("h200")
INT4 = Weights(scheme="int4", bits=4)
BF16 = Weights(scheme="bf16", bits=16)


def cost(hardware: Hardware = H200, weights: Weights = BF16, kv: str = "bfloat16") -> StepCost:
    return StepCost(EIGHT.config, hardware, kernels_of(hardware), weights, kv)


@pytest.mark.parametrize("name", hardware_names())
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_more_bandwidth_or_rate_is_never_slower(name: str, batch: int) -> None:
    sheet = find_hardware(name)
    for better in (
        replace(sheet, bandwidth_gb_s=2 * sheet.bandwidth_gb_s),
        replace(sheet, float16=2 * sheet.float16),
        replace(sheet, int8=2 * sheet.int8),
    ):
        for weights in (BF16, INT4):
            slow, fast = cost(sheet, weights), cost(better, weights)
            assert fast.decode_s(batch, 1024) <= slow.decode_s(batch, 1024)
            assert fast.prefill_s(1000, 0, 512) <= slow.prefill_s(1000, 0, 512)


def test_more_bits_never_take_less_memory() -> None:
    sizes = [cost(weights=Weights(scheme="x", bits=bits)).weight_bytes for bits in (3, 4, 8, 16)]
    assert sizes == sorted(sizes)
    assert cost(kv="int8").kv_token_bytes < 0.52 * cost().kv_token_bytes


def test_bytes_by_hand() -> None:
    """8.03e9 parameters of 16 bits; 4 bits and a scale of 16 for 64 in the layers, embedding and head dense on a GPU."""
    assert cost().weight_bytes == 2 * (cost().body_parameters + 2 * 128256 * 4096)
    assert cost(weights=INT4).body_bytes == cost().body_parameters * 4.25 / 8
    assert cost().kv_token_bytes == 2 * 32 * 8 * 128 * 2


def test_more_of_anything_takes_longer() -> None:
    one = cost(weights=INT4)
    for few, many in ((1, 2), (8, 16), (64, 128)):
        assert one.decode_s(few, 1024) < one.decode_s(many, 1024)
        assert one.decode_s(few, 1024) < one.decode_s(few, 2048)
        assert one.decode_s(few, 1024) < one.decode_s(few, 1024, rows_each=4)
        assert one.prefill_s(512 * few, 0, 2048) < one.prefill_s(512 * many, 0, 2048)


def test_tokens_of_a_step_by_hand() -> None:
    """eagle, chat: 0.55 of each guess, two of them: 1 + 0.55 + 0.3025 tokens for three rows."""
    workload = Workload(name="chat", prompt_tokens=100, output_tokens=100, concurrency=1)
    tokens, rows, drafting = expected_tokens(Candidate(weights=BF16, drafter="eagle", draft_length=2), workload)
    assert tokens == pytest.approx(1.8525)
    assert (rows, drafting) == (3, pytest.approx(0.16))
    assert expected_tokens(Candidate(weights=BF16), workload) == (1, 1, 0)


def outcome(candidate: Candidate, workload: Workload, hardware: Hardware = H200, requests: float = math.inf) -> Outcome:
    where = cost(hardware, candidate.weights)
    site = Site(hardware=hardware, kernels=where.kernels, devices=1, chunk=512)
    found = predict(candidate, where, site, workload, 64, requests)
    assert isinstance(found, Outcome)
    return found


def test_users_whose_answers_are_of_one_length_move_in_waves() -> None:
    """Eight prompts of 64 tokens are one chunk, and end with it; of 512 tokens they come one after the other: 4.5 on average."""
    short = Workload(name="fixed", prompt_tokens=64, output_tokens=64, concurrency=8)
    one = cost()
    assert outcome(Candidate(weights=BF16), short).ttft_s == pytest.approx(one.prompts_step_s(512, 32, 8))
    long = replace(short, prompt_tokens=512)
    assert outcome(Candidate(weights=BF16), long, requests=8).ttft_s == pytest.approx(4.5 * one.prefill_s(512, 0, 512))
    mixed = outcome(Candidate(weights=BF16), replace(long, name="random"))
    assert mixed.ttft_s < outcome(Candidate(weights=BF16), long).ttft_s
    assert mixed.e2el_s == pytest.approx(outcome(Candidate(weights=BF16), long).e2el_s)


def test_after_the_first_wave_prompts_wait_for_steps_that_were_lost_only() -> None:
    """Eight prompts of a step each; a user is back after 10 ms and the step under way, seven of eight wait for that long."""
    asked = Workload(name="fixed", prompt_tokens=512, output_tokens=64, concurrency=8)
    plain = Candidate(weights=BF16)
    first, settled = outcome(plain, asked, requests=8), outcome(plain, asked)
    step_s = cost().prefill_s(512, 0, 512)
    token_s = (settled.e2el_s - 8 * step_s) / 63
    assert settled.ttft_s == pytest.approx(step_s * (1 + (1 + 0.01 / token_s) * 7 / 8))
    assert settled.ttft_s < first.ttft_s
    assert settled.e2el_s == first.e2el_s
    half = outcome(plain, asked, requests=16)
    assert half.ttft_s == pytest.approx((first.ttft_s + settled.ttft_s) / 2)


def test_drafts_are_as_long_as_they_pay() -> None:
    """What may draft eight tokens is never slower than what may draft two, or none."""
    for users in (1, 16, 64):
        asked = Workload(name="chat", prompt_tokens=64, output_tokens=64, concurrency=users)
        times = [
            outcome(Candidate(weights=BF16, drafter=drafter, draft_length=length), asked).e2el_s
            for drafter, length in (("eagle", 8), ("eagle", 2), (None, 0))
        ]
        assert times == sorted(times)


def test_sending_answers_takes_a_cpu_from_its_steps() -> None:
    here = find_hardware("cpu-desktop")
    asked = Workload(name="fixed", prompt_tokens=64, output_tokens=65, concurrency=4)
    found = outcome(Candidate(weights=BF16), asked, here)
    sending_s = 4 * kernels_of(here).event_us * 1e-6
    assert found.tpot_s == pytest.approx(cost(here).decode_s(4, 96.5) + sending_s)
    assert kernels_of(H200).event_us == 0

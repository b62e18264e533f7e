"""Every symptom from figures: what is said, what is not, and that remedies name options that exist."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from triblade.doctor.symptoms import LongPrompt, Visit, diagnose

DOCUMENTS = Path(__file__).parents[2] / "docs" / "reference"
MIB = 2.0**20
WELL = Visit(
    model="m",
    max_model_len=2048,
    first_s=0.02,
    gaps_s=(0.004,) * 60,
    most_waiting=0,
    most_running=8,
    asked_at_once=8,
    most_kv_usage=0.3,
    growth={
        "spec_decode_num_drafts_total": 100,
        "spec_decode_num_draft_tokens_total": 200,
        "spec_decode_num_accepted_tokens_total": 120,
    },
    busy_share=0.95,
    busy_cores=1.9,
    cores=2,
    foreign_cores=0.1,
    long=LongPrompt(tokens=1984, gaps_s=(0.01,) * 20, first_s=0.4),
    too_long_status=400,
    repetition=0.03,
    perplexity=16.6,
    expected_perplexity=16.5,
    memory_bytes=[510 * MIB, *([512 * MIB] * 4)],
    idle_running=0,
    idle_kv_usage=0,
    planned={"ttft": 30.0, "tpot": 5.0},
)
DRAFTS = ("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")


def drafts(*counts: float) -> dict[str, float]:
    return dict(zip(DRAFTS, counts, strict=True))


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    # (symptom, what is different from a server that is well, part of the cause, part of the remedy)
    (
        "crash on long text",
        {"long": LongPrompt(tokens=1984, error="the connection failed", lives=False)},
        "died or hangs",
        "--max-num-batched-tokens",
    ),
    (
        "crash on long text",
        {"long": LongPrompt(tokens=1984, error="status 400: the context is 1024")},
        "more tokens than it can hold",
        "--max-model-len",
    ),
    ("crash on long text", {"too_long_status": 200}, "cut or computed beyond", "--max-model-len"),
    ("crash on long text", {"too_long_status": 500}, "cut or computed beyond", "--max-model-len"),
    ("leak", {"memory_bytes": [(500 + 10 * n) * MIB for n in range(5)]}, "every request is kept", "restart"),
    ("leak", {"idle_running": 2, "idle_kv_usage": 0.1}, "clients that left", "--request-timeout-s"),
    ("quality drop", {"perplexity": 19.0}, "rounded too coarsely", "triblade convert"),
    ("repetition", {"repetition": 0.6}, "few bits", "repetition_penalty"),
    ("acceptance under 1.5", {"growth": drafts(100, 400, 10)}, "does not fit", "triblade doctor --target"),
    ("acceptance under 1.5", {"growth": drafts(100, 100, 40)}, "hard to guess", "--num-speculative-tokens 2"),
    (
        "device under 40 % busy",
        {"busy_share": 0.2, "busy_cores": 0.4},
        "too few requests",
        "--drafter",
    ),
    (
        "device under 40 % busy",
        {"busy_share": 0.13, "busy_cores": 1.0, "cores": 8},
        "one of 8 cores",
        "--threads 8",
    ),
    ("slow", {"growth": {**WELL.growth, "num_preemptions_total": 7}}, "too small", "--kv-cache-dtype int8"),
    ("slow", {"most_waiting": 6, "most_running": 2}, "at most 2 sequences", "--max-num-seqs"),
    ("slow", {"most_waiting": 6, "most_running": 2, "most_kv_usage": 0.97}, "KV cache is full", "--kv-cache-dtype"),
    ("slow", {"long": LongPrompt(tokens=1984, gaps_s=(0.01, 0.4))}, "chunks of long prompts", "--prefill-workers"),
    ("slow", {"foreign_cores": 1.0}, "wait for a core", "--cpu-cores"),
    ("slow", {"first_s": 0.5}, "not the one that was planned for", "triblade tune"),
    ("slow", {"gaps_s": (0.02,) * 60}, "not the one that was planned for", "triblade tune"),
]


def test_a_server_that_is_well_has_no_finding() -> None:
    assert diagnose(WELL) == []


def test_nothing_seen_is_nothing_found() -> None:
    assert diagnose(Visit()) == []


@pytest.mark.parametrize(("symptom", "different", "cause", "remedy"), CASES)
def test_each_symptom_has_its_own_cause(symptom: str, different: dict[str, Any], cause: str, remedy: str) -> None:
    (finding,) = diagnose(replace(WELL, **different))
    assert finding.symptom == symptom
    assert cause in finding.cause
    assert remedy in finding.remedy
    assert re.search(r"\d", finding.evidence), "evidence has a figure"


def test_a_waiting_queue_explains_an_idle_device() -> None:
    found = diagnose(replace(WELL, busy_share=0.3, most_waiting=7, most_running=1))
    assert {finding.symptom for finding in found} == {"device under 40 % busy", "slow"}
    assert all("--max-num-seqs" in finding.remedy for finding in found)


@pytest.mark.parametrize(
    "harmless",
    [
        {"memory_bytes": [(500 + n) * MIB for n in range(5)]},  # an allocator
        {"memory_bytes": ()},
        {"memory_bytes": [500 * MIB, 520 * MIB, 510 * MIB, 530 * MIB, 540 * MIB]},  # up and down
        {"memory_bytes": [500 * MIB]},
        {"perplexity": 17.0},
        {"growth": drafts(0, 0, 0)},
        {"long": LongPrompt(tokens=1984, gaps_s=(0.004, 0.03))},
    ],
)
def test_what_is_no_symptom(harmless: dict[str, Any]) -> None:
    assert diagnose(replace(WELL, **harmless)) == []


def test_remedies_name_options_and_commands_that_exist() -> None:
    reference = (DOCUMENTS / "cli.md").read_text() + (DOCUMENTS / "http-api.md").read_text()
    remedies = [diagnose(replace(WELL, **different))[0].remedy for _, different, _, _ in CASES]
    options = {option for remedy in remedies for option in re.findall(r"--[a-z][a-z-]+", remedy)}
    assert len(options) > 10
    assert {option for option in options if f"`{option}`" not in reference} == set()
    assert "`repetition_penalty`" in reference

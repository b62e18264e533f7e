"""`triblade doctor URL` against servers that are ill in known ways, and against a real one that is well."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient, Script
from live_server import live_server
from real_server import real_server

from triblade.cli import main
from triblade.doctor.symptoms import Finding, Visit, diagnose
from triblade.doctor.visit import BEGINNINGS, SAMPLE, visit
from triblade.engine.client import EngineLoad
from triblade.engine.outputs import RequestOutput
from triblade.errors import EngineDeadError, RequestError
from triblade.spec.record import SpeculationCounts

ROOM = 8192  # tokens, which are bytes here
TEXT = b"Every word here is told apart from all the other ones by some letter or another, so that nothing comes twice"


def healthy(**more: Any) -> FakeClient:
    return FakeClient(max_model_len=ROOM, scripts={start: Script(TEXT) for start in BEGINNINGS}, **more)


def symptoms(engine: FakeClient, **config: Any) -> dict[str, Finding]:
    with live_server(engine, max_num_seqs=64, **config) as live:
        found = asyncio.run(visit(live.url, api_key="secret", timeout_s=10.0))
    # A fake computes nothing, and what else runs on this machine is not the test's: these have tests of their own.
    found.busy_share = found.foreign_cores = None
    return {finding.symptom: finding for finding in diagnose(found)}


def test_a_server_that_is_well_also_behind_a_key() -> None:
    assert symptoms(healthy(), api_key=("secret",)) == {}


class CutShort(FakeClient):
    """Promises more than it takes."""

    def check(self, prompt_token_ids: Any, params: Any) -> None:
        if len(prompt_token_ids) > ROOM // 2:
            raise RequestError(f"the context is {ROOM // 2} tokens", param="prompt")
        super().check(prompt_token_ids, params)


class Mortal(FakeClient):
    """Dies of long prompts."""

    def check(self, prompt_token_ids: Any, params: Any) -> None:
        super().check(prompt_token_ids, params)
        if len(prompt_token_ids) > ROOM // 2:
            self.dead = EngineDeadError("out of memory")


class Endless(FakeClient):
    """Takes every length."""

    def check(self, prompt_token_ids: Any, params: Any) -> None:
        return


@pytest.mark.parametrize(
    ("kind", "cause"),
    [(CutShort, "more tokens than it can hold"), (Mortal, "died or hangs"), (Endless, "cut or computed")],
)
def test_crash_on_long_text(kind: type[FakeClient], cause: str) -> None:
    found = symptoms(kind(max_model_len=ROOM, scripts=healthy().scripts))
    assert cause in found["crash on long text"].cause


def test_memory_that_grows_with_every_request() -> None:
    kept: list[bytearray] = []

    class Hoarding(FakeClient):
        def check(self, prompt_token_ids: Any, params: Any) -> None:
            super().check(prompt_token_ids, params)
            kept.append(bytearray(b"x" * 2**19))

    try:
        found = symptoms(Hoarding(max_model_len=ROOM, scripts=healthy().scripts))
    finally:
        kept.clear()
    assert set(found) == {"leak"}
    assert "of every request is kept" in found["leak"].cause


def test_sequences_that_nobody_waits_for() -> None:
    class Forgetful(FakeClient):
        def load(self) -> EngineLoad:
            return replace(super().load(), num_running=self.running + 2)

    found = symptoms(Forgetful(max_model_len=ROOM, scripts=healthy().scripts))
    assert found["leak"].evidence.startswith("2 sequences run")


def test_repetition() -> None:
    engine = healthy()
    engine.scripts |= {start: Script(b"the same words over and over again " * 8) for start in BEGINNINGS}
    assert set(symptoms(engine)) == {"repetition"}


def test_useless_drafts() -> None:
    class Guessing(FakeClient):
        """Drafts four tokens for each one, of which few are right."""

        counts = SpeculationCounts()

        def _labelled(self, output: RequestOutput, record: Any) -> RequestOutput:
            self.counts.add(drafted=4, accepted=int(self.num_steps % 8 == 0))
            return super()._labelled(output, record)

        def load(self) -> EngineLoad:
            return replace(super().load(), speculation=self.counts)

    found = symptoms(Guessing(max_model_len=ROOM, scripts=healthy().scripts))
    assert set(found) == {"acceptance under 1.5"}
    assert "triblade align" in found["acceptance under 1.5"].remedy


def test_a_queue_before_a_free_engine() -> None:
    class Narrow(FakeClient):
        """Says that it computes one sequence and lets the others wait."""

        def load(self) -> EngineLoad:
            running = min(1, self.running)
            return replace(super().load(), num_running=running, num_waiting=self.running - running)

    engine = Narrow(max_model_len=ROOM, scripts=healthy().scripts)
    engine.scripts |= {f"{number}. {SAMPLE}": Script(TEXT, pause_s=0.01) for number in range(8)}
    found = symptoms(engine)
    assert set(found) == {"slow"}
    assert "--max-num-seqs" in found["slow"].remedy


def test_a_stream_that_stalls_when_a_long_prompt_comes() -> None:
    class Blocking(FakeClient):
        """Answers nobody while it reads a long prompt."""

        def check(self, prompt_token_ids: Any, params: Any) -> None:
            super().check(prompt_token_ids, params)
            if len(prompt_token_ids) > ROOM // 2:
                time.sleep(0.3)

    engine = Blocking(max_model_len=ROOM, scripts=healthy().scripts)
    engine.scripts[SAMPLE] = Script(TEXT[:60], pause_s=0.004)
    found = symptoms(engine)
    assert set(found) == {"slow"}
    assert "--prefill-workers" in found["slow"].remedy


def test_a_real_server_is_well_and_scores_text(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome.")
    with real_server(smollm2_path, ["--port", "0", "--max-model-len", "512"]) as server:
        assert main(["doctor", server.url, "--text", str(text), "--expected-perplexity", "1.01"]) == 1
    out = capsys.readouterr().out
    (perplexity,) = map(float, re.findall(r"quality drop: perplexity (\S+) on the text, 1.01 expected", out))
    assert 1.0 < perplexity < 10.0
    assert "crash on long text" not in out
    assert "leak" not in out


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "http://127.0.0.1:9"]) == 2
    assert "no OpenAI server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_server_without_metrics_or_tokenizer_is_looked_at_all_the_same() -> None:
    """Other engines: what they do not show is no symptom."""
    assert diagnose(Visit(first_s=0.1, gaps_s=(0.01,) * 10, asked_at_once=8, repetition=0.0)) == []

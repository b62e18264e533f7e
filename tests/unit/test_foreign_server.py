"""Commands on a server that has the OpenAI API and nothing of ours: no metrics, health or tokens, and no field beyond OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_replica import replica
from routed import router

from triblade import cli
from triblade.bench.result import load_result
from triblade.deploy.openai_client import OpenAIClient
from triblade.sampling_params import SamplingParams

BENCH = [
    "--workload",
    "fixed",
    "--num-requests",
    "4",
    "--prompt-tokens",
    "20",
    "--output-tokens",
    "5",
    "--concurrency",
    "2",
]


@pytest.fixture(params=["direct", "routed"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of the server, or of a router in front of it."""
    with replica(is_foreign=True) as server:
        if request.param == "direct":
            yield server.url
            return
        with router(server.url) as routed:
            yield routed.url


def test_bench(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert cli.main(["bench", url, *BENCH, "--no-ignore-eos", "--output", str(out)]) == 0
    assert load_result(out).summary["output_tokens"] == 4 * 5
    assert cli.main(["bench", url, *BENCH]) == 1
    assert "Unrecognized request argument: ignore_eos" in capsys.readouterr().err


def test_doctor(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", url]) == 1
    found = capsys.readouterr().out
    assert "repetition" in found  # "word word word", which it has to get to see
    assert "memory" not in found


def test_doctor_of_a_server_without_completions(capsys: pytest.CaptureFixture[str]) -> None:
    with replica(is_foreign=True, status=404) as server:
        assert cli.main(["doctor", server.url]) == 2
    assert "completes no text: status 404" in capsys.readouterr().err


def test_tune_measures_what_it_starts(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", url, "--output", str(tmp_path / "t")]) == 2
    said = capsys.readouterr().err
    assert "tune starts the engines that it measures" in said
    assert "triblade simulate" in said


def test_an_engine_client_does_without_ids(url: str) -> None:
    async def text() -> tuple[str, int, int]:
        async with await OpenAIClient.connect(url) as client:
            outputs = [o async for o in client.generate([1, 2, 3], SamplingParams(max_tokens=3, temperature=0.0))]
            await client.refresh()
            return "".join(o.text for o in outputs), outputs[-1].num_output_tokens, client.load().num_running

    assert asyncio.run(text()) == ("word " * 3, 3, 0)

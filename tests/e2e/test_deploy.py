"""`triblade deploy` as a command, over a stand-in for vLLM in an environment of its own: printed, written, run, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import events, fake_vllm
from openai import OpenAI

from triblade.config import EngineConfig, Plan, TopologyConfig, WeightPlan, Workload, to_toml

WORKLOAD = Workload(name="chat", prompt_tokens=64, output_tokens=16, concurrency=2)
PATIENCE_S = 30.0
DRAIN_S = 600.0  # far beyond the patience: whoever waits for all of it fails
LONG = "x" * 400  # of about 100 tokens, so that a prefill engine gets it


@dataclass
class Place:
    """A plan, a fake environment, and the log of what ran in it."""

    folder: Path
    python: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def plan(self, *, workers: tuple[int, int] = (0, 0), **options: Any) -> Path:
        engine = EngineConfig(model="org/model", max_model_len=256, **{"kv_cache_memory_bytes": 1 << 30, **options})
        made = Plan(
            hardware="cpu-server",
            decode=engine,
            prefill=engine if workers[0] else None,
            topology=TopologyConfig(prefill_workers=workers[0], decode_workers=workers[1]),
            weights=WeightPlan(scheme="int4"),
            workload=WORKLOAD,
        )
        path = self.folder / "plan.toml"
        path.write_text(to_toml(made), encoding="utf-8")
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "FAKE_VLLM_LOG": str(self.log), **self.variables}
        return subprocess.Popen(
            [sys.executable, "-m", "triblade", "deploy", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def command(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, fake_vllm(tmp_path / "environment"))


@contextmanager
def running(place: Place, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The deployment once it is ready, and its address; it is ended with SIGTERM unless the block did it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--run", "--vllm-python", str(place.python), "--port", str(port), "--served-model-name", "fake")
    process = place.start(*arguments, *options, "--drain-timeout-s", str(DRAIN_S))
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready == f"ready: http://127.0.0.1:{port}/v1\n", process.communicate(timeout=PATIENCE_S)
        yield process, f"http://127.0.0.1:{port}/v1"
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=PATIENCE_S)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or ") Z " not in status.read_text(encoding="utf-8")


def text_of(url: str, prompt: str, **options: Any) -> str:
    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    return client.completions.create(model="fake", prompt=prompt, max_tokens=4, **options).choices[0].text


def test_what_would_be_run_is_printed(place: Place) -> None:
    plan = place.plan(quantization="int4", drafter="suffix", num_speculative_tokens=3, draft_policy="fixed")
    code, out, err = place.command(str(plan))
    assert code == 0
    assert "vllm serve --model org/model" in out
    assert '"method": "ngram"' in out
    assert "quantization = int4: weights are not rounded while loading" in out
    assert "quantization = int4" in err
    code, out, err = place.command(str(plan), "--strict")
    assert (code, out) == (2, "")
    assert "have no counterpart in vLLM: quantization = int4" in err


@pytest.mark.parametrize(("target", "name"), [("ray", "serve.yaml"), ("kubernetes", "kubernetes.yaml")])
def test_files_are_written(place: Place, target: str, name: str) -> None:
    options = ("--target", target, "--output", str(place.folder / "files"))
    plan = place.plan()
    plan.write_text(plan.read_text(encoding="utf-8").replace("cpu-server", "h200"), encoding="utf-8")
    code, out, _ = place.command(str(plan), *options)
    assert code == 0
    assert f"files/{name}" in out
    assert "org/model" in (place.folder / "files" / name).read_text(encoding="utf-8")


def test_one_engine(place: Place) -> None:
    with running(place, str(place.plan(max_num_seqs=3))) as (process, url):
        assert text_of(url, "hello") == "whole"
        process.terminate()
        process.wait(PATIENCE_S)
        assert process.returncode == 0
    (start,) = events(place.log, "start")
    assert start["words"][:2] == ["--max-model-len", "256"] or "--max-num-seqs" in start["words"]
    assert start["words"][start["words"].index("--max-num-seqs") + 1] == "3"
    assert start["bound"]
    assert len(events(place.log, "end")) == 1
    assert not is_alive(start["pid"])


def test_prefill_and_decode(place: Place) -> None:
    with running(place, str(place.plan(workers=(1, 1)))) as (_, url):
        assert text_of(url, LONG) == "kv_consumer"
        client = OpenAI(base_url=url, api_key="none")
        stream = client.completions.create(model="fake", prompt=LONG, max_tokens=3, stream=True)
        assert "".join(piece.choices[0].text for piece in stream) == "kv_consumer0 kv_consumer1 kv_consumer2 "
        assert text_of(url, "short") == "kv_consumer"
        assert client.models.list().data[0].id == "fake"
    requests = events(place.log, "request")
    assert [one["role"] for one in requests] == ["kv_producer", "kv_consumer"] * 2 + ["kv_consumer"]
    assert requests[1]["body"]["kv_transfer_params"]["remote_block_ids"] == [1]
    starts = events(place.log, "start")
    kept = [one["words"][one["words"].index("--kv-cache-memory-bytes") + 1] for one in starts]
    assert sorted(map(int, kept)) == [int((1 << 30) * 0.3), int((1 << 30) * 0.7)]


def test_both_engines_know_a_request_by_one_id(place: Place) -> None:  # G18
    """Also where the client gives two requests the same one."""
    with running(place, str(place.plan(workers=(1, 1)))) as (_, url):
        for headers in ({"X-Request-Id": "mine"}, {"X-Request-Id": "mine"}, {}):
            text_of(url, LONG, extra_headers=headers)
    ids = [one["id"] for one in events(place.log, "request")]
    assert ids[::2] == ids[1::2]
    assert len(set(ids)) == 3
    assert [one.startswith("mine-") for one in ids[::2]] == [True, True, False]


def test_a_running_answer_ends_before_its_engine(place: Place) -> None:
    with running(place, str(place.plan(workers=(1, 1)))) as (process, url):
        client = OpenAI(base_url=url, api_key="none", max_retries=0)
        stream = client.completions.create(model="fake", prompt=LONG, max_tokens=25, stream=True)
        pieces = [next(stream).choices[0].text]
        process.terminate()
        pieces += [piece.choices[0].text for piece in stream]
        assert "".join(pieces) == "".join(f"kv_consumer{number} " for number in range(25))
        process.wait(PATIENCE_S)
        assert process.returncode == 0
    assert len(events(place.log, "end")) == 2
    assert not events(place.log, "left")


def test_a_prefill_engine_that_fails(place: Place) -> None:
    place.variables["FAKE_VLLM_FAIL"] = "prefill"
    with running(place, str(place.plan(workers=(1, 1)))) as (_, url):
        assert text_of(url, LONG) == "kv_consumer"
    assert "kv_transfer_params" not in events(place.log, "request")[-1]["body"]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_client_that_leaves(place: Place, role: str) -> None:  # D08
    with running(place, str(place.plan(workers=(1, 1)))) as (_, url):
        with pytest.raises(Exception, match="timed out"):
            text_of(url, f"slow {role}" + LONG, timeout=0.5)
        eventually(lambda: [one["role"] for one in events(place.log, "left")] == [role])


def test_engines_end_with_a_command_that_is_killed(place: Place) -> None:
    with running(place, str(place.plan(workers=(1, 1)))) as (process, _):
        process.kill()
        process.wait(PATIENCE_S)
        pids = [one["pid"] for one in events(place.log, "start")]
        assert len(pids) == 2
        eventually(lambda: not any(map(is_alive, pids)))


def test_the_command_ends_with_an_engine_that_dies(place: Place) -> None:
    with running(place, str(place.plan(workers=(1, 1)))) as (process, _):
        pids = [one["pid"] for one in events(place.log, "start")]
        os.kill(pids[1], signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "ended with exit code -9" in err
        eventually(lambda: not any(map(is_alive, pids)))


def test_ray(place: Place) -> None:
    """What Ray runs is asked for an answer before it is said to be ready, and ends by an interrupt."""
    with running(place, str(place.plan()), "--target", "ray") as (process, url):
        (first,) = events(place.log, "request")
        assert first["body"] == {"model": "fake", "prompt": "ready?", "max_tokens": 1}
        assert text_of(url, "hello") == "whole"
        process.terminate()
        process.wait(PATIENCE_S)
        assert process.returncode == 0
    (end,) = events(place.log, "end")
    assert end["signal"] == signal.SIGINT


def test_ray_that_ends(place: Place) -> None:
    with running(place, str(place.plan()), "--target", "ray") as (process, _):
        (start,) = events(place.log, "start")
        os.kill(start["pid"], signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "ray serve ended with exit code -9" in err


def test_an_application_that_ray_refuses(place: Place) -> None:
    words = (str(place.plan(seed=13)), "--target", "ray", "--vllm-python", str(place.python))
    code, out, err = place.command(*words)
    assert (code, out) == (2, "")
    assert "does not take the application" in err
    assert "ValueError: Unknown engine argument: seed" in err
    code, out, err = place.command(*words, "--vllm-option", "seed=12")
    assert code == 0
    assert "Ray 2.60.0 takes the application" in err


def test_an_engine_that_does_not_know_an_option(place: Place) -> None:
    file = place.folder / "environment" / "vllm" / "engine" / "arg_utils.py"
    file.write_text(file.read_text(encoding="utf-8").replace("max_num_seqs", "max_sequences"), encoding="utf-8")
    code, out, err = place.command(str(place.plan()), "--vllm-python", str(place.python))
    assert (code, out) == (2, "")
    assert "unknown option of vLLM 0.32.0 on cpu: 'max_num_seqs'" in err
    assert "did you mean 'max_sequences'" in err


def test_an_environment_without_vllm(place: Place) -> None:
    code, _, err = place.command(str(place.plan()), "--vllm-python", sys.executable)
    assert code == 2
    assert "no vLLM that can be asked" in err


def test_a_plan_is_needed() -> None:
    done = subprocess.run([sys.executable, "-m", "triblade", "deploy"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "missing: the plan" in done.stderr


def test_the_plan_survives_its_file(place: Place) -> None:
    """What is printed as JSON in the flags can be read again."""
    plan = place.plan(workers=(1, 1))
    _, out, _ = place.command(str(plan))
    transfers = [line for line in out.splitlines() if "--kv-transfer-config" in line]
    found = [json.loads(line.split("--kv-transfer-config '")[1].split("'")[0])["kv_role"] for line in transfers]
    assert found == ["kv_producer", "kv_consumer"]

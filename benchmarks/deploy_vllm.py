#!/usr/bin/env python3
"""A plan carried out by vLLM (`triblade deploy`) and by our own engine (`triblade serve`): the same answers, the same load test.

    python benchmarks/deploy_vllm.py --vllm-python ENVIRONMENT/bin/python --output FILE.json NAME=PLAN.toml ...

Both are asked by the `openai` client at temperature 0: short prompts, and a long one, which prefill engines get where there
are such. Where answers part, the distance of the two tokens' log-probabilities tells a near tie from an error. `triblade bench`
then measures both with one command. One server at a time runs; records replace older ones of the same name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cpu_server import MODEL, free_port, serving
from openai import OpenAI
from vllm_parity import PROMPTS

from triblade.bench.http_target import parse_samples
from triblade.bench.result import load_result
from triblade.config import Plan, read_toml

END_S = 60
LOGPROBS = 5
SHORT_PROMPTS = 8
LONG_PROMPT = Path(__file__).resolve().parent / "prompts" / "edit.jsonl"
LONG_CHARACTERS = 2400
COUNTED = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "nixl_xfer_time_seconds_count",
    "nixl_xfer_time_seconds_sum",
    "nixl_bytes_transferred_sum",
    "nixl_num_failed_transfers_total",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one prompt: the text, its tokens, and at each of them the most likely ones with their log-probabilities."""

    text: str
    tokens: list[str]
    likely: list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one server did."""

    ready_s: float
    answers: list[Answer]
    load: dict[str, Any]
    counted: dict[str, float]


def main() -> None:
    """Measure one plan after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", help="NAME=PLAN.toml")
    parser.add_argument("--vllm-python", required=True, help="of the environment with vLLM")
    parser.add_argument("--deploy-option", action="append", default=[], help="NAME=VALUE of `deploy`, without dashes")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    for plan in args.plans:
        name, _, path = plan.partition("=")
        record = {"plan": name, **compare(args, Path(path))}
        content = json.loads(args.output.read_text()) if args.output.is_file() else {"runs": []}
        content["runs"] = [*(run for run in content["runs"] if run["plan"] != name), record]
        args.output.write_text(json.dumps(content, indent=1) + "\n")
        print(json.dumps(record), flush=True)


def compare(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """vLLM first, then our engine, by the same plan."""
    ask = partial(seen, new_tokens=args.new_tokens, load=bench_words(args))
    with deployed(path, args) as (url, ready_s, ending):
        theirs = ask(url, ready_s)
    plan = read_toml(Plan, path)
    with serving(plan.decode.model, ("--plan", str(path))) as (port, _, ready_s):
        ours = ask(f"http://127.0.0.1:{port}", ready_s)
    pairs = list(zip(theirs.answers, ours.answers, strict=True))
    return {
        "options": args.deploy_option,
        "equal": sum(their.tokens == our.tokens for their, our in pairs),
        "of": len(pairs),
        "partings": [parting(their, our) for their, our in pairs if their.tokens != our.tokens],
        "bench": " ".join(bench_words(args)),
        "vllm": {**described(theirs), "end_s": round(ending(), 1)},
        "triblade": described(ours),
        "vllm_texts": [answer.text for answer in theirs.answers],
    }


@contextmanager
def deployed(plan: Path, args: argparse.Namespace) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """The address of a deployment, the seconds until it was ready, and later those that its end took."""
    port, took = free_port(), 0.0
    words = ["--run", "--vllm-python", args.vllm_python, "--port", str(port), "--served-model-name", MODEL]
    for option in args.deploy_option:
        name, _, value = option.partition("=")
        words += [f"--{name}", value]
    start = time.perf_counter()
    command = [sys.executable, "-m", "triblade", "deploy", str(plan), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready"):
            raise SystemExit("the deployment did not become ready")
        yield f"http://127.0.0.1:{port}", time.perf_counter() - start, lambda: took
    finally:
        start = time.perf_counter()
        process.terminate()
        process.wait(END_S)
        took = time.perf_counter() - start


def seen(url: str, ready_s: float, *, new_tokens: int, load: Sequence[str]) -> Seen:
    """Answers first, then the load."""
    answers = [answer(url, prompt, new_tokens) for prompt in prompts()]
    found = bench(url, load)
    counted = parse_samples(httpx.get(f"{url}/metrics", timeout=END_S, trust_env=False).text)
    return Seen(ready_s, answers, found, {name: counted[name] for name in COUNTED if counted.get(name)})


def prompts() -> list[str]:
    """Short ones, and a long one last."""
    with LONG_PROMPT.open(encoding="utf-8") as lines:
        text = " ".join(json.loads(line)["turns"][0] for line in lines)
    return [*PROMPTS[:SHORT_PROMPTS], text[:LONG_CHARACTERS]]


def answer(url: str, prompt: str, new_tokens: int) -> Answer:
    """Through the official client."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    made = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=new_tokens,
        temperature=0,
        logprobs=LOGPROBS,
        extra_body={"ignore_eos": True},
    )
    choice = made.choices[0]
    if choice.logprobs is None or choice.logprobs.tokens is None or choice.logprobs.top_logprobs is None:
        raise SystemExit(f"no log-probabilities in the answer of {url}")
    return Answer(choice.text, choice.logprobs.tokens, choice.logprobs.top_logprobs)


def bench_words(args: argparse.Namespace) -> list[str]:
    """Options of the load test, the same for both."""
    sizes = {"num-requests": args.requests, "concurrency": args.users, "prompt-tokens": 128}
    return [f"--{name}={value}" for name, value in {**sizes, "output-tokens": args.new_tokens}.items()]


def bench(url: str, words: Sequence[str]) -> dict[str, Any]:
    """Figures of `triblade bench URL`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        command = [sys.executable, "-m", "triblade", "bench", url, *words, "--output", str(path)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        summary = load_result(path).summary
    return {
        "failed": summary["failed"],
        "output_tokens_per_s": round(summary["output_tokens_per_s"], 1),
        "ttft_ms_p50": round(summary["ttft_ms"]["quantiles"]["p50"], 1),
        "tpot_ms_p50": round(summary["tpot_ms"]["quantiles"]["p50"], 2),
    }


def parting(theirs: Answer, ours: Answer) -> dict[str, Any]:
    """The first token that differs, and how much less likely vLLM's one is than ours: to vLLM, and to our engine."""
    both = zip(theirs.tokens, ours.tokens, strict=True)
    place = next(place for place, (their, our) in enumerate(both) if their != our)
    their, our = theirs.tokens[place], ours.tokens[place]
    return {
        "token": place,
        "vllm": their,
        "triblade": our,
        "gap_in_vllm": gap(theirs.likely[place], their, our),
        "gap_in_triblade": gap(ours.likely[place], our, their),
    }


def gap(likely: dict[str, float], best: str, other: str) -> float | None:
    """Nats between two tokens; None: the other is not among the most likely."""
    return round(likely[best] - likely[other], 4) if other in likely else None


def described(server: Seen) -> dict[str, Any]:
    """Of one server, for the file."""
    return {"ready_s": round(server.ready_s, 1), **server.load, **server.counted}


if __name__ == "__main__":
    main()

"""A deployment in a process of its own (for `deploy_vllm.py` and `deploy_ways.py`), and greedy answers with log-probabilities.

Two answers to one prompt are equal, or part at a token; the distance of the two tokens' log-probabilities there tells a near tie
from an error. Knows no plan and no connector.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import httpx
from cpu_server import MODEL, free_port
from openai import OpenAI

from triblade.bench.http_target import parse_samples

END_S = 60
LOGPROBS = 5
LOG_PREFIX = re.compile(r"\(\w+ pid=\d+\) (?:\w+ [\d: -]+\[[^]]*\] )?")
SAID = re.compile(
    r"(?:[\w.]+\.)?\w*(?:Error|Exception|Timeout)\b(?: \[.*?\])?: .+|error: .+|.* ended with exit code .*"
)


class NotReadyError(Exception):
    """A deployment that did not come up; the message is the first error that one of its processes wrote."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one prompt: the text, its tokens, and at each of them the most likely ones with their log-probabilities."""

    text: str
    tokens: list[str]
    likely: list[dict[str, float]]


@dataclass(slots=True)
class Deployment:
    """One that answers.

    Attributes:
        ready_s: from its start until then.
        end_s: from SIGTERM until it had ended; 0 before.
    """

    url: str
    ready_s: float
    end_s: float = 0.0

    def counted(self, names: Sequence[str]) -> dict[str, float]:
        """Those of its metrics that are not zero; none where metrics are elsewhere, as Ray's are."""
        page = httpx.get(f"{self.url}/metrics", timeout=END_S, trust_env=False)
        found = parse_samples(page.text) if page.is_success else {}
        return {name: found[name] for name in names if found.get(name)}


@contextmanager
def deployed(plan: Path, python: str, options: Sequence[str], log: IO[str] | None = None) -> Iterator[Deployment]:
    """`triblade deploy PLAN --run`.

    Args:
        plan: its file.
        python: of the environment with vLLM.
        options: NAME=VALUE of the command, without dashes.
        log: gets what the processes write; default: standard error.

    Raises:
        NotReadyError: it ended before it answered.
    """
    port = free_port()
    words = ["--run", "--vllm-python", python, "--port", str(port), "--served-model-name", MODEL]
    for option in options:
        name, _, value = option.partition("=")
        words += [f"--{name}", value]
    start = time.perf_counter()
    command = [sys.executable, "-m", "triblade", "deploy", str(plan), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    found = Deployment(f"http://127.0.0.1:{port}", 0.0)
    try:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready"):
            raise NotReadyError(first_error(log))
        found.ready_s = time.perf_counter() - start
        yield found
    finally:
        start = time.perf_counter()
        process.terminate()
        process.wait(END_S)
        found.end_s = time.perf_counter() - start


def first_error(log: IO[str] | None) -> str:
    """Of a log: the first line that names an error; later ones are of those that waited for it."""
    if log is None:
        return "its messages stand above"
    lines = [LOG_PREFIX.sub("", line).strip() for line in Path(log.name).read_text(errors="replace").splitlines()]
    return next((line for line in lines if SAID.fullmatch(line)), "nothing was said")


def answer(url: str, prompt: str, new_tokens: int) -> Answer:
    """Greedy, through the official client."""
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


def stored(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [asdict(one) for one in answers]


def parting(first: Answer, second: Answer, names: tuple[str, str]) -> dict[str, Any] | None:
    """The token where two answers part, and how much less likely the other's token is to each of the two; None: they do not."""
    pairs = zip(first.tokens, second.tokens, strict=True)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return None
    one, other = first.tokens[place], second.tokens[place]
    return {
        "token": place,
        names[0]: one,
        names[1]: other,
        f"gap_in_{names[0]}": gap(first.likely[place], one, other),
        f"gap_in_{names[1]}": gap(second.likely[place], other, one),
    }


def gap(likely: dict[str, float], best: str, other: str) -> float | None:
    """Nats between two tokens; None: the other is not among the most likely."""
    return round(likely[best] - likely[other], 4) if other in likely else None

"""`triblade bench` beside GuideLLM and vLLM's `bench serve`: the same prompts to the same server, and what each tool reports of it.

    python benchmarks/bench_peers.py MODEL --guidellm PYTHON --vllm PYTHON --tokenizer FOLDER --users 1 4 --output FILE

PYTHON is the interpreter of an environment with the tool. Tools take turns, each round begins with another one, and every tool's
own report counts; the same command again adds rounds to the file. The server computes with one thread and keeps no prefixes, so
that a core is left for the tool and no run helps the next. Answers differ in length: users with equal ones move in waves, and
whether prompts of a wave share a step is chance. What is compared, and under which names:

    first token  request -> first piece with text  ttft / time_to_first_token / ttft (vLLM: first choice, with text or without)
    per token    (last - first) / (tokens - 1)     tpot / inter_token_latency / tpot
    whole        request -> last piece (GuideLLM: end) e2e / request_latency / e2el
    per piece    between pieces as they came       itl / (none) / itl
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from cpu_server import MODEL, serving

from triblade.bench.workload import WordText
from triblade.host import usable_cores

SERVER = ("--threads", "1", "--no-enable-prefix-caching")
WORDS = 120
SHORTEST, LONGEST = 32, 96  # answers, in tokens
RUN_S = 300
FIGURES = ("first_token", "per_token", "whole", "per_piece")
VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


@dataclass(frozen=True, slots=True)
class Report:
    """What a tool says of a run; times in ms, means and medians over requests (of `per_piece` over pieces)."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    first_token: tuple[float, float]
    per_token: tuple[float, float]
    whole: tuple[float, float]
    per_piece: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What every tool sends."""

    url: str
    prompts: Path  # JSON lines
    requests: int
    users: int


class Tool(Protocol):
    """Runs a load in a process of its own and reads its report from a folder."""

    def __call__(self, load: Load, folder: Path) -> Report:
        """Run it once."""
        ...


@dataclass(frozen=True, slots=True)
class Triblade:
    """Ours, by its command."""

    def __call__(self, load: Load, folder: Path) -> Report:
        """See `Tool`."""
        output = folder / "triblade.json"
        words = [sys.executable, "-m", "triblade", "bench", load.url, "--output", str(output)]
        words += ["--endpoint", "completions", "--workload", "replay", "--dataset", str(load.prompts)]
        words += ["--concurrency", str(load.users), "--num-requests", str(load.requests), "--warmup-requests", "0"]
        found = run(words, folder, output)["summary"]
        times = (found[f"{name}_ms"] for name in ("ttft", "tpot", "e2e", "itl"))
        answered = found["requests"] - found["failed"]
        pairs = ((time["mean"], time["quantiles"]["p50"]) for time in times)
        return Report(answered, found["prompt_tokens"], found["output_tokens"], *pairs)


@dataclass(frozen=True, slots=True)
class GuideLLM:
    """By its command, on plain completions over HTTP/1.1."""

    python: Path

    def __call__(self, load: Load, folder: Path) -> Report:
        """See `Tool`."""
        output = folder / "guidellm.json"
        backend = f"kind=openai_http,target={load.url},model={MODEL},request_format=/v1/completions,http2=false"
        words = [str(self.python.with_name("guidellm")), "run", "--disable-console"]
        words += ["--backend", f"{backend},extras.body.temperature=0"]
        words += ["--profile", f"kind=concurrent,streams={load.users}"]
        words += ["--constraint", f"kind=max_requests,count={load.requests}"]
        words += ["--data", f"kind=json_file,path={load.prompts}", "--output", f"kind=json,path={output}"]
        (found,) = run(words, folder, output)["benchmarks"]
        metrics = found["metrics"]
        totals = (round(metrics[f"{name}_token_count"]["successful"]["total_sum"]) for name in ("prompt", "output"))
        times = {"time_to_first_token_ms": 1, "inter_token_latency_ms": 1, "request_latency": 1000}  # the last in s
        good = ((metrics[name]["successful"], factor) for name, factor in times.items())
        pairs = ((factor * metric["mean"], factor * metric["median"]) for metric, factor in good)
        return Report(metrics["request_totals"]["successful"], *totals, *pairs)


@dataclass(frozen=True, slots=True)
class VLLMBench:
    """`vllm bench serve`, by its module, since packages of other names lack the command."""

    python: Path
    tokenizer: Path

    def __call__(self, load: Load, folder: Path) -> Report:
        """See `Tool`."""
        output = folder / "vllm.json"
        words = [str(self.python), "-c", VLLM_BENCH, "--backend", "openai", "--base-url", load.url, "--model", MODEL]
        words += ["--tokenizer", str(self.tokenizer), "--dataset-name", "custom", "--dataset-path", str(load.prompts)]
        words += ["--custom-output-len", "-1", "--skip-chat-template", "--disable-shuffle", "--ignore-eos"]
        words += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.users), "--temperature", "0"]
        words += ["--percentile-metrics", "ttft,tpot,itl,e2el"]
        words += ["--disable-tqdm", "--save-result", "--result-dir", str(folder), "--result-filename", output.name]
        found = run(words, folder, output)
        totals = (found[f"total_{name}_tokens"] for name in ("input", "output"))
        pairs = ((found[f"mean_{name}_ms"], found[f"median_{name}_ms"]) for name in ("ttft", "tpot", "e2el", "itl"))
        return Report(found["completed"], *totals, *pairs)


def run(words: Sequence[str], folder: Path, output: Path) -> dict[str, Any]:
    """The report that a command writes.

    Raises:
        SystemExit: it failed; what it said is above.
    """
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode or not output.exists():
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        raise SystemExit(f"{words[0]} ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    output.unlink()
    return found


def write_prompts(path: Path, count: int) -> Path:
    """Different prompts of one length, in words; each tool looks for the answer's length under a name of its own."""
    rng, text, lines = random.Random(0), WordText(), []
    for _ in range(count):
        prompt, length = text(rng, WORDS), rng.randint(SHORTEST, LONGEST)
        lines.append({"prompt": prompt} | dict.fromkeys(("max_tokens", "output_tokens_count", "output_tokens"), length))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def measure(tools: Mapping[str, Tool], load: Load, rounds: int, folder: Path) -> dict[str, list[Report]]:
    """Every tool's reports, one of each round."""
    found: dict[str, list[Report]] = {name: [] for name in tools}
    names = list(tools)
    tools["triblade"](load, folder)  # warms up the server
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(tools[name](load, folder))
            print(f"{load.users} users, round {number}: {name:9} {found[name][-1]}", flush=True)
    return found


def joined(runs: Mapping[str, Any], users: int, found: Mapping[str, Sequence[Report]]) -> dict[str, Any]:
    """The runs of so many users with new reports, and by how much ours says more than each of the others."""
    earlier = runs.get(str(users), {"reports": {}})["reports"]
    reports = {name: [*earlier.get(name, []), *map(asdict, new)] for name, new in found.items()}
    more = {name: differences(reports["triblade"], reports[name]) for name in reports if name != "triblade"}
    return {**runs, str(users): {"triblade_says_more": more, "reports": reports}}


def differences(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Ours over theirs, less one; of the medians over the rounds of what the tools call mean and median."""
    found = {}
    for figure in FIGURES:
        for place, kind in enumerate(("mean", "median")):
            if theirs[0][figure] is not None:
                our, their = (statistics.median(report[figure][place] for report in all) for all in (ours, theirs))
                found[f"{figure}_{kind}"] = round(our / their - 1, 4)
    return found


def arguments() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--guidellm", type=Path, required=True, help="interpreter of an environment with GuideLLM 0.8")
    parser.add_argument("--vllm", type=Path, help="the same with vLLM")
    parser.add_argument("--tokenizer", type=Path, help="the model's, for vLLM")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=16, help="in every run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Measure, beside what has been measured before."""
    options = arguments()
    tools: dict[str, Tool] = {"triblade": Triblade(), "guidellm": GuideLLM(options.guidellm)}
    if options.vllm is not None:
        tools["vllm"] = VLLMBench(options.vllm, options.tokenizer)
    record: dict[str, Any] = {"what": (__doc__ or "").partition("\n")[0], "users": {}}
    if options.output.exists():
        record = json.loads(options.output.read_text(encoding="utf-8"))
    record |= {"model": Path(options.model).name, "cores": usable_cores(), "server": SERVER}
    with tempfile.TemporaryDirectory() as folder, serving(options.model, SERVER) as (port, _, _):
        for users in options.users:
            prompts = write_prompts(Path(folder, "prompts.jsonl"), options.requests)
            load = Load(f"http://127.0.0.1:{port}", prompts, options.requests, users)
            record["users"] = joined(record["users"], users, measure(tools, load, options.rounds, Path(folder)))
            print(json.dumps(record["users"][str(users)]["triblade_says_more"], indent=1))
            options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

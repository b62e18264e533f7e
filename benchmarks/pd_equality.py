#!/usr/bin/env python3
"""Prefill and decode worker against one engine, token for token, on a real model: shared memory and TCP, under many conditions.

    python benchmarks/pd_equality.py --backend reference --output FILE.json [--model smollm2-135m] [--prompts 200]
        [--longest 4000] [--new-tokens 4] [--connectors shm tcp] [--conditions plain ...] [--seconds 240]

The prefill worker is a process of its own (`triblade worker`), the decode worker runs here; rows go raw. Lengths of the prompts are
spread evenly on a logarithmic scale from one token to the longest; conditions other than `plain` take every tenth of them. In
float32 (`--backend reference`, deterministic) tokens and log-probabilities must be equal. The native kernels compute one row in
another order than many, so there a token may differ where the two are less than 0.1 nats apart; how far they are is in the result.
A run stops after `--seconds` and goes on where it stopped when it is started again with the same output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from cpu import commit
from cpu_server import free_port
from speculation_runs import Tokens, first_difference, nats_behind

from triblade import __version__
from triblade.config import EngineConfig, TransferConfig, WorkerConfig, to_flags
from triblade.disagg.links import Connector
from triblade.disagg.remote import RemotePrefill, connect_prefill
from triblade.engine.build import build_engine
from triblade.engine.local import LocalClient
from triblade.llm import LLM, Completion
from triblade.models.loader import open_model
from triblade.models.tokenizer import Tokenizer
from triblade.registry import CONNECTORS
from triblade.sampling_params import SamplingParams

PROMPTS = Path(__file__).parent / "prompts"
NEAR_TIE_NATS = 0.1
EVERY = 10  # prompt, of conditions that do not take all
STRIDE = 47  # tokens of text between the beginnings of two prompts
BLOCKS, BLOCK = 600, 16
READY_S = 60.0
DRAFTS: dict[str, Any] = {"draft_policy": "fixed", "num_speculative_tokens": 4}
ENOUGH: dict[str, Any] = {"max_tokens": 24}  # to see how many guesses are right


@dataclass(frozen=True)
class Condition:
    """What is different from the plain case.

    Attributes:
        engines: options of all engines, the one that is compared with included.
        decode: of the decode worker alone.
        workers: of both workers.
        params: of the requests.
        before: share of each prompt that is asked for first, so that its rows are cached.
        stops_at_first: the first token of the plain answer ends the request.
    """

    engines: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    workers: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    before: float = 0.0
    stops_at_first: bool = False
    takes_all: bool = False


CONDITIONS = {
    "plain": Condition(takes_all=True),
    "prefix hits on P": Condition(before=0.75, decode={"enable_prefix_caching": False}),
    "prefix hits on D": Condition(before=0.5),
    "three choices": Condition(params={"n": 3, "temperature": 0.8, "seed": 3}),
    "stop at token one": Condition(stops_at_first=True),
    "suffix on D": Condition(decode={"drafter": "suffix", **DRAFTS}, params=ENOUGH),
    "eagle": Condition(workers={"drafter": "eagle", **DRAFTS}, params=ENOUGH),
    "self": Condition(workers={"drafter": "self", "draft_quantization": "int4", **DRAFTS}, params=ENOUGH),
    "int8 weights": Condition(engines={"quantization": "int8"}),
    "int4 weights, eagle": Condition(
        engines={"quantization": "int4"}, workers={"drafter": "eagle", **DRAFTS}, params=ENOUGH
    ),
}


class Workers:
    """A decode worker here with its prefill worker elsewhere."""

    def __init__(self, args: argparse.Namespace, condition: Condition, connector: str, address: str) -> None:
        transfer = TransferConfig(  # tokens are compared, not times: a busy machine may take its time
            connector=connector,  # type: ignore[arg-type]
            remote_prefill_tokens=1,
            remote_kv_share=1.0,
            transfer_timeout_s=600.0,
            lease_s=600.0,
        )
        prefill = config(args, **condition.engines, **condition.workers)
        worker = WorkerConfig(role="prefill", address=address)
        flags = [flag for part in (prefill, worker, transfer) for flag in to_flags(part)]
        command = [sys.executable, "-m", "triblade", "worker", *flags, "--log-level=warning"]
        self._process = subprocess.Popen(command)
        self._client = LocalClient(build_engine(replace(prefill, **condition.decode)))
        way: Connector = CONNECTORS[connector]()
        self.remote: RemotePrefill
        self.remote, self._fetcher = connect_prefill(
            self._client._engine,
            self._client.call_between_steps,
            transfer,
            way,
            [address],
        )

    def wait(self) -> None:
        """Until the prefill worker can be asked."""
        deadline = time.monotonic() + READY_S
        while not self._fetcher.num_ready:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"no prefill worker: {self._fetcher.refusals}")
            time.sleep(0.02)

    def answer(self, prompt: Tokens, params: SamplingParams) -> list[Completion]:
        """All choices."""

        async def whole() -> list[Completion]:
            found = [Completion(index) for index in range(params.n)]
            async for output in self._client.generate(prompt, params):
                found[output.index].add(output)
            return found

        return asyncio.run(whole())

    def accepted(self) -> tuple[int, int]:
        """Drafted and accepted tokens so far."""
        counts = self._client.load().speculation
        return counts.num_draft_tokens, counts.num_accepted_tokens

    def close(self) -> None:
        self._fetcher.close()
        self._client.close()
        self._process.terminate()
        if self._process.wait(READY_S):
            raise SystemExit(f"the prefill worker ended with exit code {self._process.returncode}")


class Equality:
    """What was compared so far; `figures` is the state and the result."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.stop_at: float = time.monotonic() + args.seconds
        self.figures: dict[str, Any] = {"rows": {}, "expected": {}}
        asked = [args.prompts, args.longest, args.new_tokens, args.backend]
        if args.output.exists():
            self.figures = json.loads(args.output.read_text())
            if self.figures["asked"] != asked:
                raise SystemExit(f"{args.output} was begun with {self.figures['asked']}; go on with these")
        self.figures["asked"] = asked
        self._single: tuple[str, LLM] | None = None
        self._drafting: tuple[str, LLM] | None = None
        self.prompts = made_prompts(open_model(config(args)).tokenizer, args)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.stop_at

    def run(self) -> None:
        """Everything that is left, as far as time goes."""
        for name in self.args.conditions:
            for connector in self.args.connectors:
                if self.is_over:
                    return
                try:
                    self.compare(name, connector)
                finally:  # whatever happened, known answers need not be computed again
                    self.save()

    def compare(self, name: str, connector: str) -> None:
        """One condition over one connector, from where it stopped."""
        condition = CONDITIONS[name]
        some = range(0, self.args.prompts, 1 if condition.takes_all else EVERY)
        row = self.figures["rows"].setdefault(f"{name}, {connector}", fresh_row())
        if row["prompts"] == len(some):
            return
        with workers(self.args, condition, connector) as pair:
            for number in some[row["prompts"] :]:
                if self.is_over:
                    break
                self.one(name, pair, number, row)
            count(row, pair)
        sys.stderr.write(f"{name}, {connector}: {row}\n")

    def one(self, name: str, pair: Workers, number: int, row: dict[str, Any]) -> None:
        """One prompt, both ways."""
        condition, prompt = CONDITIONS[name], self.prompts[number]
        params = SamplingParams(**{**self.params, **condition.params})
        expected = self.expected(condition, number, params)
        if condition.before and len(prompt) > 1:
            pair.answer(prompt[: max(1, int(condition.before * len(prompt)))], replace(params, max_tokens=1))
        if condition.stops_at_first:
            params = replace(params, stop_token_ids=(expected[0][0][0],))
            expected = [[expected[0][0][:1], expected[0][1][:1]]]
        found = [flattened(choice) for choice in pair.answer(prompt, params)]
        if condition.workers:
            self.draft_alone(condition, prompt, params, row)
        row["prompts"] += 1
        row["equal"] += [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        row["equal_logprobs"] += found == expected
        for (tokens, _), (wanted, _) in zip(found, expected, strict=True):
            at = first_difference(tokens, wanted)
            if at is not None:
                behind = nats_behind(self.single(condition), prompt, wanted[:at], tokens[at])
                row["nats"].append(round(behind, 5))

    def draft_alone(self, condition: Condition, prompt: Tokens, params: SamplingParams, row: dict[str, Any]) -> None:
        """How many guesses are right where the drafter and its rows never left one engine."""
        kind = json.dumps([condition.engines, condition.workers])
        if self._drafting is None or self._drafting[0] != kind:
            options = {"enable_prefix_caching": False, **condition.engines, **condition.workers}
            self._drafting = (kind, LLM(config(self.args, **options)))
        llm = self._drafting[1]
        before = llm.engine.load().speculation
        llm.generate([prompt], params)
        after = llm.engine.load().speculation
        row["drafted_alone"] += after.num_draft_tokens - before.num_draft_tokens
        row["accepted_alone"] += after.num_accepted_tokens - before.num_accepted_tokens

    @property
    def params(self) -> dict[str, Any]:
        return {"temperature": 0.0, "max_tokens": self.args.new_tokens, "ignore_eos": True, "logprobs": 1}

    def expected(self, condition: Condition, number: int, params: SamplingParams) -> list[Any]:
        """Tokens and log-probabilities of each choice by one engine without a drafter."""
        kind = json.dumps([condition.engines, condition.params])
        known = self.figures["expected"].setdefault(kind, {})
        if str(number) not in known:
            (choices,) = self.single(condition).generate([self.prompts[number]], params)
            known[str(number)] = [flattened(choice) for choice in choices]
        answers: list[Any] = known[str(number)]
        return answers

    def single(self, condition: Condition) -> LLM:
        """The engine that is compared with."""
        kind = json.dumps(condition.engines)
        if self._single is None or self._single[0] != kind:
            self._single = (kind, LLM(config(self.args, enable_prefix_caching=False, **condition.engines)))
        return self._single[1]

    def save(self) -> None:
        """The state, as a result."""
        self.figures |= {
            "what": __doc__.splitlines()[0] if __doc__ else "",
            "model": Path(self.args.model).name,
            "backend": self.args.backend,
            "lengths": [length_of(number, self.args) for number in range(self.args.prompts)],
            "commit": commit(),
            "versions": {"triblade": __version__, "torch": torch.__version__},
        }
        self.args.output.write_text(json.dumps(self.figures) + "\n")


def fresh_row() -> dict[str, Any]:
    """Nothing counted yet."""
    compared, moved = ("prompts", "equal", "equal_logprobs"), ("fetches", "complete", "row_tokens")
    guessed = ("drafted", "accepted", "drafted_alone", "accepted_alone")
    return {**dict.fromkeys((*compared, *moved, *guessed), 0), "nats": []}


def count(row: dict[str, Any], pair: Workers) -> None:
    """Add what the workers counted."""
    counts, (drafted, accepted) = pair.remote.counts, pair.accepted()
    row["fetches"] += counts.num_fetches
    row["complete"] += counts.num_complete
    row["row_tokens"] += counts.num_tokens
    row["drafted"] += drafted
    row["accepted"] += accepted


def flattened(choice: Completion) -> list[Any]:
    """Tokens, and the log-probability of each."""
    assert choice.logprobs is not None
    return [list(choice.token_ids), [each.logprob for each in choice.logprobs]]


@contextmanager
def workers(args: argparse.Namespace, condition: Condition, connector: str) -> Iterator[Workers]:
    """Both, ready; in the end the prefill worker must leave well."""
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder, "prefill")) if connector == "shm" else f"127.0.0.1:{free_port()}"
        pair = Workers(args, condition, connector, address)
        try:
            pair.wait()
            yield pair
        finally:
            pair.close()


def config(args: argparse.Namespace, **options: Any) -> EngineConfig:
    """Options of every engine."""
    common: dict[str, Any] = {"max_model_len": BLOCKS * BLOCK // 2, "num_kv_blocks": BLOCKS, "block_size": BLOCK}
    common |= {"backend": args.backend, "seed": 0}
    if args.backend == "reference":
        common |= {"dtype": "float32", "deterministic": True}
    return EngineConfig(model=args.model, **{**common, **options})


def length_of(number: int, args: argparse.Namespace) -> int:
    """Tokens of a prompt."""
    tokens: float = args.longest ** (number / max(1, args.prompts - 1))
    return round(tokens)


def made_prompts(tokenizer: Tokenizer, args: argparse.Namespace) -> list[Tokens]:
    """Pieces of questions and editing tasks, one behind the other, from places that no other begins at."""
    turns = [turn for name in ("chat", "edit") for line in lines_of(name) for turn in json.loads(line)["turns"]]
    text = tokenizer.encode("\n\n".join(turns), add_special_tokens=False)
    text *= 1 + (args.longest + args.prompts * STRIDE) // len(text)
    return [text[number * STRIDE :][: length_of(number, args)] for number in range(args.prompts)]


def lines_of(name: str) -> Sequence[str]:
    return (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def main() -> None:
    """Compare, and fail where tokens differ."""
    args = arguments()
    equality = Equality(args)
    equality.run()
    rows = equality.figures["rows"]
    allowed = NEAR_TIE_NATS if args.backend == "native" else 0.0
    wrong = {name: row["nats"] for name, row in rows.items() if any(nats >= allowed for nats in row["nats"])}
    sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"tokens differ: {wrong}")
    if lost := [name for name, row in rows.items() if row["complete"] < row["fetches"]]:
        raise SystemExit(f"not all rows came: {lost}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, GGUF file or alias")
    parser.add_argument("--backend", choices=["reference", "native"], required=True)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=4000, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--connectors", nargs="+", choices=["shm", "tcp"], default=["shm", "tcp"])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=["plain"])
    parser.add_argument("--seconds", type=float, default=240, help="after which nothing new is begun")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Are sampled tokens drawn from the target's distribution with every drafter? 200,000 draws each, through `Engine.step`.

    python benchmarks/speculation_draws.py --output FILE.json [--draws 200000] [--drafters suffix draft "drawn draft" self eagle]
        [--seconds 250]

A model of twelve tokens whose next token depends on the last one alone (`tests/support/markov.py`), so that every token of every
answer counts, with drafters that know it more or less, four tokens a step. Each draw is compared with its exact probabilities, by
its position in the step and the token before it: chi-square over all groups, p > 0.001. Two sets of options: plain sampling, and
all penalties and filters together. The suffix index is asked by one request at a time, which drafts little for many; the others
share steps of 128. A run stops after `--seconds` and goes on with what is missing when it is started again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from cpu import commit
from markov import DRAFTERS, markov_llm, sampled

from triblade import __version__
from triblade.sampling_params import SamplingParams

LENGTH = 4
LEAST_P = 0.001
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties and filters": {
        "temperature": 1.3,
        "top_k": 8,
        "top_p": 0.92,
        "min_p": 0.02,
        "repetition_penalty": 1.15,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.05,
    },
}


def main() -> None:
    """Every drafter with every set of options, as far as time goes."""
    args = arguments()
    stop_at = time.monotonic() + args.seconds
    rows: dict[str, Any] = json.loads(args.output.read_text())["rows"] if args.output.exists() else {}
    torch.set_num_threads(1)
    for drafter in args.drafters:
        for label in OPTIONS:
            name = f"{drafter}, {label}"
            if name not in rows and time.monotonic() < stop_at:
                rows[name] = measured(drafter, label, args.draws)
                sys.stderr.write(f"{name}: {rows[name]}\n")
                save(args.output, rows)
    wrong = [name for name, row in rows.items() if row["p"] <= LEAST_P or row["impossible"]]
    if wrong:
        raise SystemExit(f"not the target's distribution: {wrong}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200_000, help="tokens per drafter and set of options")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--seconds", type=float, default=250, help="after which nothing new is begun")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def measured(drafter: str, label: str, number: int) -> dict[str, Any]:
    """One drafter with one set of options."""
    alone = drafter == "suffix"
    sizes: dict[str, Any] = {"n": 1, "max_tokens": 240} if alone else {"n": 128, "max_tokens": 40}
    params = SamplingParams(ignore_eos=True, **sizes, **OPTIONS[label])
    llm = markov_llm(drafter, LENGTH, num_kv_blocks=4096, max_num_seqs=128, deterministic=False)
    start = time.monotonic()
    draws = sampled(llm, params, number)
    statistic, freedom, p = draws.chi_square()
    counts = llm.engine.load().speculation
    llm.engine.check_idle()
    shares = zip(counts.accepted_per_position, counts.drafted_per_position, strict=True)
    return {
        "draws": len(draws.tokens),
        "statistic": round(statistic, 2),
        "degrees_of_freedom": freedom,
        "p": round(p, 5),
        "impossible": draws.num_impossible,
        "drafted_per_position": counts.drafted_per_position,
        "accepted_share_per_position": [round(accepted / drafted, 4) for accepted, drafted in shares],
        "seconds": round(time.monotonic() - start, 1),
    }


def save(output: Path, rows: dict[str, Any]) -> None:
    """The result so far."""
    figures = {
        "what": "sampled tokens against exact probabilities, chi-square by position in the step and last token",
        "rows": rows,
        "length": LENGTH,
        "options": OPTIONS,
        "commit": commit(),
        "versions": {"triblade": __version__, "torch": torch.__version__},
    }
    output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

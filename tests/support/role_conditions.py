"""What prefill and decode are compared under, wherever the two roles live: prompts, drafters, kernels, a head."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from eagle_heads import WINDOW, random_weights, target
from tiny import prompts_of

from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams
from triblade.spec.eagle_files import save_eagle, target_facts
from triblade.spec.self_draft import rounded

LENGTHS = (1, 2, 4, 5, 9, 21, 48)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DRAFTS = {"draft_policy": "fixed", "num_speculative_tokens": 3}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "suffix": {"drafter": "suffix", **DRAFTS},
    "self": {"drafter": "self", **DRAFTS},
    "eagle": {"drafter": "eagle", "draft_confidence": 0.0, **DRAFTS},
}
NATIVE: dict[str, Any] = {
    "deterministic": False,
    "backend": "native",
    "quantization": "int4",
    "kv_cache_dtype": "int8",
    "block_size": 16,
    "num_kv_blocks": 64,
}


@cache
def model(weights: str = "as stored") -> OpenModel:
    """The target of tiny heads, or the same with its weights rounded to 4 bits."""
    return target() if weights == "as stored" else rounded(target(), 4)


def prompts() -> list[list[int]]:
    """One of each length."""
    return prompts_of(LENGTHS)


def saved_head(path: Path, bits: int = 4) -> Path:
    """A random head for `model`, in a folder."""
    weights = random_weights(model(), bits=bits, num_inner=0)
    save_eagle(path, target_facts(model()), weights, {"window": WINDOW, "inner_layers": []})
    return path

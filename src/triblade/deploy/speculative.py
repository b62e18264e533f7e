"""A plan's drafter as vLLM's `speculative_config`. Data from data: what a draft is on the disk comes in as `DraftFacts`.

Invariant: output stays that of the model alone in every case, so a drafter without a counterpart costs speed and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triblade.config import DeployConfig, EngineConfig
from triblade.deploy.accepted import Accepted

DRAFTS = (
    "drafter", "draft_model", "num_speculative_tokens", "draft_policy", "direct_prompt_tokens", "speculate_prompt_tokens",
    "draft_quantization", "draft_layers", "draft_temperature", "draft_confidence",
)  # fmt: skip
NGRAM = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}  # tokens that must repeat
SUFFIX_PACKAGE = "arctic_inference"
LOST = {
    "direct_prompt_tokens": "short prompts are drafted for like all others",
    "speculate_prompt_tokens": "long prompts are drafted for like all others",
    "draft_quantization": "the draft is not rounded while loading; convert it first (triblade convert)",
    "draft_layers": "belongs to drafter self",
    "draft_confidence": "guesses do not end where the head is unsure",
}

NO_DRAFTER = {
    "self": "vLLM does not draft with the model itself: nothing is drafted",
    "eagle": "heads of this project (triblade align) are in a format of their own: nothing is drafted",
}

DraftTable = tuple[tuple[int, int, int], ...]  # first and last batch size, draft length
Lose = Callable[[str, object, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """What is known of a plan's drafts.

    Attributes:
        table: draft lengths by batch size; empty: the plan's length always.
        head: vLLM's method for the folder of an eagle head, `eagle` or `eagle3`; None: a head of this project, or none.
    """

    table: DraftTable = ()
    head: str | None = None


def speculative_config(
    engine: EngineConfig, config: DeployConfig, accepted: Accepted, facts: DraftFacts, lose: Lose
) -> dict[str, Any]:
    """The configuration; empty where nothing is drafted.

    Args:
        engine: with the drafter.
        config: what `suffix` is to become.
        accepted: what this vLLM takes.
        facts: of the draft.
        lose: is told what has no counterpart.
    """
    if engine.drafter is None:
        return {}
    found = _method(engine, config, accepted, facts, lose)
    if not found:
        return {}
    found["num_speculative_tokens"] = engine.num_speculative_tokens
    if engine.draft_policy == "adaptive":
        found |= _adaptive(accepted, facts, lose)
    for name, why in LOST.items():
        if (value := getattr(engine, name)) != getattr(EngineConfig, name):
            lose(name, value, why)
    return found


def _method(
    engine: EngineConfig, config: DeployConfig, accepted: Accepted, facts: DraftFacts, lose: Lose
) -> dict[str, Any]:
    if engine.drafter == "suffix":
        return _suffix(config, accepted, lose)
    if engine.drafter == "draft":
        return {"method": "draft_model", "model": engine.draft_model, **_sampling(engine, lose)}
    if engine.drafter == "eagle" and facts.head is not None:
        return {"method": facts.head, "model": engine.draft_model, **_sampling(engine, lose)}
    lose("drafter", engine.drafter, NO_DRAFTER[str(engine.drafter)])
    return {}


def _suffix(config: DeployConfig, accepted: Accepted, lose: Lose) -> dict[str, Any]:
    method = config.suffix_method
    if method == "auto":
        method = "suffix" if SUFFIX_PACKAGE in accepted.packages else "ngram"
    if method == "suffix":
        return {"method": "suffix"}
    lose("drafter", "suffix", "ngram finds repeats of a request's own text only, not those of earlier answers")
    return {"method": "ngram", **NGRAM}


def _sampling(engine: EngineConfig, lose: Lose) -> dict[str, Any]:
    """Drawn guesses, where the plan wants some."""
    if engine.draft_temperature == 0:
        return {}
    if engine.draft_temperature != 1:
        lose("draft_temperature", engine.draft_temperature, "guesses are drawn at the request's temperature")
    return {"draft_sample_method": "probabilistic"}


def _adaptive(accepted: Accepted, facts: DraftFacts, lose: Lose) -> dict[str, Any]:
    """The policy's place is taken by lengths for batch sizes."""
    option = "num_speculative_tokens_per_batch_size"
    if facts.table and option in accepted.speculative:
        lose("draft_policy", "adaptive", "lengths follow the batch size by a table, not what is accepted")
        return {option: [list(row) for row in facts.table]}
    lose("draft_policy", "adaptive", "always as many tokens are drafted, also where that is slower")
    return {}

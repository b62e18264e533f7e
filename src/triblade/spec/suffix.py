"""The suffix drafter: proposes what followed when the text last ended like this. No model, no download.

It looks in the prompt and output of the request and in the outputs of ended ones; see `suffix_index`. Knows no logits. Invariant:
an index holds committed tokens only, each once, so that rejections, preemption and cached prefixes need no undoing; what an
ended request leaves is its output, within the fixed capacity of the shared text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module

from triblade.config import EngineConfig
from triblade.models.loader import OpenModel
from triblade.spec.drafter import Draft, DraftItem, DraftState
from triblade.spec.suffix_index import Index, SuffixIndex, SuffixOptions

LEAST_PROBABILITY = 0.3  # of a draft, where one request decodes alone
CONTEXT_TOKENS = 16  # end of the prompt, kept with an output so that its beginning can be found


def make_index(options: SuffixOptions) -> Index:
    """The native index, or its twin where the module was not built."""
    try:
        native = import_module("triblade._native")
    except ImportError:
        return SuffixIndex(options)
    index: Index = native.SuffixIndex(options)
    return index


def least_probability(batch: int) -> float:
    """How sure a draft must be that is verified in a step of so many requests.

    A step of one request mostly waits for weights, so that a few more tokens cost little. The more requests share a step, the more
    a verified token costs, and the less it is worth beside the whole step: with the step times of the native backend the best
    thresholds for 1, 2, 4, 8 and 16 requests are about 0.3, 0.45, 0.65, 0.8 and 0.85.
    """
    return 1 - (1 - LEAST_PROBABILITY) / math.sqrt(batch)


class SuffixDrafter:
    """Copies from earlier text.

    Args:
        index: a fresh one; None makes the best there is.
    """

    def __init__(self, index: Index | None = None) -> None:
        self._index = make_index(SuffixOptions()) if index is None else index
        self._indexed: dict[int, int] = {}  # request number -> tokens that the index knows

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        """The likely continuation of each item's text; empty where nothing is likely enough."""
        least = least_probability(len(items))
        return [Draft(self._continue(item.request, item.length, least) if item.length else []) for item in items]

    def forget(self, request: DraftState) -> None:
        """Keep an ended request's output for the others, and nothing else of it."""
        self._index.drop(request.number)
        self._indexed.pop(request.number, None)
        if request.output_token_ids:
            self._index.share(request.prompt_token_ids[-CONTEXT_TOKENS:] + request.output_token_ids)

    def _continue(self, request: DraftState, length: int, least: float) -> list[int]:
        """Index what was committed since the last call, then search."""
        tokens = request.token_ids
        known = self._indexed.get(request.number, 0)
        self._indexed[request.number] = len(tokens)
        return self._index.propose(request.number, tokens[known:], length, least)


class SuffixPlan:
    """Fits every model and takes no KV rows and no weights."""

    layers: None = None
    weight_bytes = 0

    def __init__(self, config: EngineConfig, model: OpenModel, *, kernels: str) -> None:
        """As every drafter is planned; nothing of the engine matters here."""

    def build(self, target: object) -> SuffixDrafter:
        """A drafter that has seen no text."""
        return SuffixDrafter()

"""One vector for a whole prompt: the hidden state of its last token, or the mean of all, scaled to length one.

Fed chunk by chunk, as prompts are computed; knows no model. Invariants: how a prompt is cut into chunks does not show, since sums
are float64, in which those of float32 states lose nothing that the result could hold; a request that lost its blocks is computed
from its first token on, and so is its sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triblade.engine.request import Request
from triblade.engine.scheduler import ScheduledRequest

SHORTEST = 1e-12  # a vector that is shorter has no direction


def pooled_rows(item: ScheduledRequest, first_row: int) -> range:
    """Rows of a step whose states belong to the vector of an item's prompt; none where no vector is wanted."""
    end = first_row + item.num_tokens
    if item.request.params.pooling == "mean":
        return range(first_row, end)
    return range(end - 1, end) if item.request.params.pooling == "last" and item.samples else range(0)


class PromptVectors:
    """The vectors of requests, as far as their prompts are computed. A mean is kept as a sum: both have one direction."""

    def __init__(self) -> None:
        self._sums: dict[Request, Tensor] = {}  # float64 [C]

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, request: Request, start: int, states: Tensor) -> None:
        """Add what `pooled_rows` of a chunk that begins at token `start` have together, float64 [C]."""
        before = self._sums.get(request) if start else None
        self._sums[request] = states if before is None else before + states

    def vector(self, request: Request) -> list[float] | None:
        """The vector of a prompt that is computed; None if it is not finite."""
        total = self._sums[request]
        unit = (total / torch.linalg.vector_norm(total).clamp_min(SHORTEST)).float()
        return unit.tolist() if bool(unit.isfinite().all()) else None

    def forget(self, request: Request) -> None:
        """A request ended."""
        self._sums.pop(request, None)

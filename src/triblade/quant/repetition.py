"""How much a text repeats itself: what badly quantized models do first when they write at length.

Knows no model: texts are lists of token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 4  # tokens of a piece that counts as said before


def repetition_rate(texts: Sequence[Sequence[int]]) -> float:
    """Share of the pieces of four tokens that occurred earlier in the same text, mean over texts; texts too short count 0."""
    return sum(map(_repeated, texts)) / len(texts) if texts else 0.0


def _repeated(ids: Sequence[int]) -> float:
    pieces = [tuple(ids[start : start + WINDOW]) for start in range(len(ids) - WINDOW + 1)]
    return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0

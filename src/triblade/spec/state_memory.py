"""States that a target computed and its head has not seen yet, by request and token.

Knows no model; a row may be one hidden state or several side by side. The slow twin of csrc/state_memory.cpp, for heads that torch
computes. Invariant: the states of a request stand here without a gap, `window` at most or those of one step; one that is not here
reads as zero.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class _Kept:
    """States of tokens [first, end) of one request."""

    first: int
    end: int
    parts: deque[Tensor] = field(default_factory=deque)  # [N, D] each


class StateMemory:
    """Rows [D] by request and token.

    Args:
        width: D.
        window: rows of a request that are worth keeping.
        like: type and device of what is taken out; default: float32 in main memory.
    """

    def __init__(self, width: int, window: int, like: Tensor | None = None) -> None:
        self._zero = torch.zeros(1, width) if like is None else like.new_zeros(1, width)
        self._window = window
        self._kept: dict[int, _Kept] = {}

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return len(self._kept)

    def extend(self, request: int, start: int, rows: Tensor) -> None:
        """Append the states [N, D] of tokens start, start + 1, ...; where they leave a gap, what was before is forgotten."""
        kept = self._kept.get(request)
        if kept is None or kept.end != start:
            kept = self._kept[request] = _Kept(start, start)
        kept.parts.append(rows)
        kept.end += len(rows)
        _drop(kept, min(kept.end - self._window, start))

    def first(self, request: int) -> int:
        """The first token whose state is here."""
        return self._kept[request].first

    def take(self, request: int, start: int, count: int) -> Tensor:
        """States [count, D] of tokens from `start` on, zero where they are not here; those before its end are forgotten."""
        return torch.cat([piece.to(self._zero) for piece in self.pieces(request, start, count)])

    def pieces(self, request: int, start: int, count: int) -> list[Tensor]:
        """The same, not joined yet: [N, D] each, views of what was remembered."""
        found, kept, end = [self.zeros(0)], self._kept[request], start
        at = kept.first
        for part in kept.parts:
            first, last = max(at, start), min(at + len(part), start + count)
            if first < last:
                found += [self.zeros(first - end), part[first - at : last - at]]
                end = last
            at += len(part)
        found.append(self.zeros(start + count - end))
        _drop(kept, start + count)
        return found

    def zeros(self, count: int) -> Tensor:
        """[count, D] of states that nobody knows."""
        return self._zero.expand(count, -1)

    def forget(self, request: int) -> None:
        """The request ended."""
        self._kept.pop(request, None)


def _drop(kept: _Kept, stop: int) -> None:
    """Forget the states of tokens before `stop`."""
    while kept.parts and kept.first < stop:
        part = kept.parts.popleft()
        size = min(len(part), stop - kept.first)
        kept.first += size
        if size < len(part):
            kept.parts.appendleft(part[size:])

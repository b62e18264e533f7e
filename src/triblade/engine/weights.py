"""Weights that several engines of one process hold together: the first one reads them, the others get the same tensors.

For engines of one model with equal options of its weights; threads, KV cache and sizes of steps may differ, since no step changes a
weight. Knows no kernels and no format. Invariant: a part is read once, however many engines ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")
Part = Literal["target", "draft"]


class SharedWeights:
    """Parts that were read; the engines that share them are built one after the other."""

    def __init__(self) -> None:
        self._parts: dict[Part, Any] = {}

    @property
    def are_loaded(self) -> bool:
        """Whether an engine after the first one finds them here."""
        return bool(self._parts)

    def once(self, part: Part, read: Callable[[], T]) -> T:
        """What `read` gave when this part was first asked for."""
        if part not in self._parts:
            self._parts[part] = read()
        return cast("T", self._parts[part])

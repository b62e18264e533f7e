"""A draft's checkpoint without tables of its own, completed by the embedding and head of its target.

Drafts that were trained on a target's embedding are often stored without it. Knows no executor: each model still holds its
tables in memory, as the kernels read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triblade.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SharedTables:
    """Implements `Checkpoint`.

    Args:
        draft: without an embedding.
        target: with the tables.
    """

    def __init__(self, draft: Checkpoint, target: Checkpoint) -> None:
        self._draft = draft
        self._target = target
        self._shared = frozenset({EMBEDDING, HEAD}) & target.names() - draft.names()

    @property
    def config(self) -> Mapping[str, Any]:
        return self._draft.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._draft.generation_config

    @property
    def dtype(self) -> torch.dtype:
        return self._draft.dtype

    @property
    def size_bytes(self) -> int:
        return (
            self._draft.size_bytes
            + sum(self._target.tensor(name).numel() for name in self._shared) * self.dtype.itemsize
        )

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return self._draft.names() | self._shared

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint`."""
        return (self._target if name in self._shared else self._draft).tensor(name)

    def release(self) -> None:
        """See `Checkpoint`."""
        self._draft.release()
        self._target.release()

    def fingerprint(self) -> str:
        """Of both, since the target's tables are part of it."""
        return f"{self._draft.fingerprint()}+{self._target.fingerprint()}"

"""What computes a step: the seam between the runner and a backend's way of running the decoder.

`forward` computes the scheduled tokens and keeps their hidden states until the next call; `logits` reads any of their rows. Rows
are in the order of the items. Knows no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from triblade.engine.attend import PagedAttend
from triblade.engine.batch import Batch
from triblade.engine.scheduler import ScheduledRequest
from triblade.kv.cache import KVCache
from triblade.models.decoder import Decoder


class StepExecutor(Protocol):
    """Computes steps over one cache."""

    name: str
    cache: KVCache

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as they are kept."""
        ...

    def forward(self, items: Sequence[ScheduledRequest]) -> None:
        """Compute the items' tokens; items of equal length stand together."""
        ...

    def logits(self, rows: Sequence[int]) -> Tensor:
        """[R, V] float32 of rows of the last `forward`; valid until the next call."""
        ...


class TorchExecutor:
    """The decoder, op by op."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.name = decoder.backend.name
        self.cache = cache
        self._decoder = decoder
        self._hidden = torch.empty(0)

    @property
    def weight_bytes(self) -> int:
        """See `StepExecutor`."""
        return self._decoder.config.num_parameters * self._decoder.dtype.itemsize

    def forward(self, items: Sequence[ScheduledRequest]) -> None:
        """See `StepExecutor`."""
        decoder = self._decoder
        batch = Batch.build(items, self.cache.layout.block_size, decoder.device)
        attend = PagedAttend(batch, self.cache, decoder.config, decoder.backend)
        self._hidden = decoder.forward(batch.input_ids, batch.positions, attend)  # [T, C]

    def logits(self, rows: Sequence[int]) -> Tensor:
        """See `StepExecutor`."""
        return self._decoder.logits(self._hidden[list(rows)])

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
from triblade.spec.sampler import best_tokens


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
        """[R, V] float32 of rows of the last `forward`, V tokens; valid until the next call."""
        ...

    def best(self) -> list[int]:
        """Of the logits last asked for: see `spec.sampler.best_tokens`."""
        ...


class TorchExecutor:
    """The decoder, op by op."""

    def __init__(self, decoder: Decoder, cache: KVCache, vocab_size: int) -> None:
        self.name = decoder.backend.name
        self.cache = cache
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._hidden = self._logits = torch.empty(0)

    @property
    def weight_bytes(self) -> int:
        """See `StepExecutor`."""
        return self._decoder.config.num_parameters * self._decoder.dtype.itemsize

    @torch.inference_mode()
    def forward(self, items: Sequence[ScheduledRequest]) -> None:
        """See `StepExecutor`."""
        decoder = self._decoder
        batch = Batch.build(items, self.cache.layout.block_size, decoder.device)
        attend = PagedAttend(batch, self.cache, decoder.config, decoder.backend)
        self._hidden = decoder.forward(batch.input_ids, batch.positions, attend)  # [T, C]

    @torch.inference_mode()
    def logits(self, rows: Sequence[int]) -> Tensor:
        """See `StepExecutor`."""
        self._logits = self._decoder.logits(self._hidden[list(rows)])[:, : self._vocab_size]
        return self._logits

    def best(self) -> list[int]:
        """See `StepExecutor`."""
        return best_tokens(self._logits)

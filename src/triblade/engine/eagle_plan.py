"""Drafter `eagle`: finds the head for a target, counts what it takes, and computes it over the target's own blocks.

A head is a folder that `triblade align` wrote; for some models the package brings one. Its keys and values are one more layer of
the target's rows, its embedding is the target's. Knows the head as a module, not how it was trained.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import triblade.spec
from triblade.config import EngineConfig
from triblade.engine.attend import PagedAttend
from triblade.engine.batch import Batch
from triblade.engine.drafters import TargetParts
from triblade.engine.executor import TorchExecutor
from triblade.errors import ConfigError, UnsupportedError
from triblade.kv.cache import KVCache
from triblade.kv.layout import LayerGroup
from triblade.models.loader import OpenModel
from triblade.spec.draft_model import DraftTokens
from triblade.spec.eagle import EagleHead, matrix_shapes
from triblade.spec.eagle_drafter import EagleDrafter
from triblade.spec.eagle_files import EagleCheckpoint, fits, load_eagle

log = logging.getLogger(__name__)

HEADS = Path(triblade.spec.__file__).parent / "heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class EaglePlan:
    """Implements `DrafterPlan`."""

    config: EngineConfig
    dtype: torch.dtype
    checkpoint: EagleCheckpoint

    @property
    def layers(self) -> LayerGroup:
        """See `DrafterPlan`."""
        head = self.checkpoint.config
        return LayerGroup(num_layers=1, num_kv_heads=head.num_kv_heads, head_dim=head.head_dim)

    @property
    def weight_bytes(self) -> int:
        """See `DrafterPlan`."""
        shapes = matrix_shapes(self.checkpoint.config, len(self.checkpoint.weights.token_ids))
        return sum(rows * columns for rows, columns in shapes.values()) * self.dtype.itemsize

    def build(self, target: TargetParts) -> EagleDrafter:
        """Load the head beside its target."""
        assert isinstance(target.executor, TorchExecutor)
        decoder = target.executor.decoder
        head = self.checkpoint.head(decoder.weights.embedding, decoder.backend, target.context_length)
        executor = TorchHeadExecutor(head, target.executor, target.cache.draft())
        return EagleDrafter(executor, self.config.block_size, target.context_length, self.config.max_num_batched_tokens)


def eagle(config: EngineConfig, model: OpenModel, *, is_native: bool) -> EaglePlan:
    """The plan of drafter `eagle`.

    Raises:
        ConfigError: no head is named and the package has none for this model, or the head is for another one.
        UnsupportedError: the native kernels do not compute heads.
    """
    if is_native:
        raise UnsupportedError("the native backend does not compute eagle heads", hint="use --backend reference")
    path = packaged_head(model) if config.draft_model is None else Path(config.draft_model)
    log.info("eagle head: %s", path)
    return EaglePlan(config=config, dtype=model.dtype, checkpoint=load_eagle(path, model))


def packaged_head(model: OpenModel) -> Path:
    """The head that the package brings for a model.

    Raises:
        ConfigError: there is none.
    """
    for folder in sorted(HEADS.iterdir()):
        if fits(folder, model):
            return folder
    raise ConfigError(
        f"the package has no eagle head for {model.name}",
        hint="train one: triblade align MODEL --output DIR, then --draft-model DIR",
        param="draft_model",
    )


class TorchHeadExecutor:
    """Implements `HeadExecutor`, op by op.

    Args:
        head: dense.
        target: whose hidden states the head reads.
        cache: the head's layer of the target's rows.
    """

    def __init__(self, head: EagleHead, target: TorchExecutor, cache: KVCache) -> None:
        self._head = head
        self._target = target
        self._cache = cache
        self._hidden = torch.empty(0)

    def catch_up(self, runs: Sequence[DraftTokens], rows: Sequence[int]) -> None:
        """See `HeadExecutor`."""
        hidden = self._target.hidden
        index = torch.tensor(rows, device=hidden.device)
        known = index >= 0
        self._forward(runs, hidden[index.clamp_min(0)] * known[:, None])

    def extend(self, runs: Sequence[DraftTokens], rows: Sequence[int]) -> None:
        """See `HeadExecutor`."""
        self._forward(runs, self._hidden[list(rows)])

    @torch.inference_mode()
    def best(self, rows: Sequence[int]) -> list[int]:
        """See `HeadExecutor`."""
        logits = self._head.logits(self._hidden[list(rows)])  # [R, N]
        tokens = self._head.weights.token_ids[logits.argmax(-1)]
        return torch.where(logits.isfinite().all(-1), tokens, -1).tolist()

    @torch.inference_mode()
    def _forward(self, runs: Sequence[DraftTokens], before: Tensor) -> None:
        head, device = self._head, before.device
        batch = Batch.build(runs, self._cache.layout.block_size, device)
        attend = PagedAttend(batch, self._cache, head.config, head.backend)
        self._hidden = head.forward(batch.input_ids, before, batch.positions, attend)  # [T, C]

"""What computes a step: the seam between the runner and a backend's way of running the decoder.

`forward` computes the scheduled tokens and keeps their hidden states until the next call; `score` reads any of their rows. Rows
are in the order of the items. Knows no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triblade.engine.attend import PagedAttend, StepAttention
from triblade.engine.batch import Batch, StepItem
from triblade.kv.cache import KVCache
from triblade.models.decoder import Decoder
from triblade.spec.sampler import best_tokens


@dataclass(frozen=True, slots=True)
class Scores:
    """What the head says about R rows.

    Attributes:
        best: the token of each row with the largest logit, -1 if the row is not finite; see `spec.sampler.best_tokens`.
        logits: [R, V] float32, valid until the next call; None unless asked for.
    """

    best: list[int]
    logits: Tensor | None


class StepExecutor(Protocol):
    """Computes steps over one cache."""

    name: str
    cache: KVCache

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as they are kept."""
        ...

    def forward(self, items: Sequence[StepItem], *, with_states: bool = False) -> None:
        """Compute the items' tokens; items of equal length stand together. `with_states` keeps `final_states`."""
        ...

    @property
    def max_rows(self) -> int | None:
        """Most rows of logits in one call of `score`; None is no limit. Without logits there is none."""
        ...

    def score(self, rows: Sequence[int], *, with_logits: bool) -> Scores:
        """Apply the head to rows of the last `forward`."""
        ...

    def final_states(self, rows: Sequence[int]) -> Tensor:
        """[R, C] float32: final-norm hidden states of rows of the last `forward`, which was to keep them."""
        ...


@dataclass(frozen=True, slots=True)
class Draw:
    """How a token is drawn from logits as they are, see `spec.distribution` and `spec.random_numbers`; temperature 0 is greedy."""

    seed: int
    position: int  # output tokens before it
    temperature: float
    min_p: float
    rows: int = (
        1  # at the item's end, each drawn as if one more output token were before it: more than one where drafts are
    )


GREEDY = Draw(0, 0, 0.0, 0.0)


@runtime_checkable
class DrawsTokens(Protocol):
    """An executor that can draw tokens itself."""

    def expect_draws(self, draws: Sequence[Draw] | None) -> None:
        """How each item of the next `forward` goes on; None if all are greedy. `score` without logits gives these tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """How the token of one row is chosen by whoever has the logits; temperature 0 takes the best token.

    Attributes:
        uniform: in [0, 1), for the draw; see `spec.random_numbers`.
        allowed: mask of the tokens that may be chosen (see `spec.token_mask`); None: all.
    """

    uniform: float
    temperature: float
    min_p: float
    allowed: Tensor | None


@runtime_checkable
class ChoosesTokens(Protocol):
    """An executor that chooses tokens of any rows itself once it knows their logits."""

    def choose(self, rows: Sequence[int], choices: Sequence[Choice | None]) -> Scores:
        """Like `score`, with the chosen token of each row as its best one; rows without a choice get the best one, and logits."""
        ...


class TorchExecutor:
    """The decoder, op by op."""

    max_rows = None

    def __init__(
        self, decoder: Decoder, cache: KVCache, vocab_size: int, attention: StepAttention | None = None
    ) -> None:
        self.name = decoder.backend.name
        self.cache = cache
        self.decoder = decoder
        self._vocab_size = vocab_size
        self._attention = attention  # None: the backend's
        self._hidden = torch.empty(0)
        self._kept: tuple[int, ...] = ()
        self._inner = dict[int, Tensor]()  # by layer, [T, C]

    @property
    def weight_bytes(self) -> int:
        """See `StepExecutor`."""
        return self.decoder.config.num_parameters * self.decoder.dtype.itemsize

    @torch.inference_mode()
    def forward(self, items: Sequence[StepItem], *, with_states: bool = False) -> None:
        """See `StepExecutor`."""
        decoder = self.decoder
        batch = Batch.build(items, self.cache.layout.block_size, decoder.device)
        attend = PagedAttend(batch, self.cache, decoder.config, decoder.backend, self._attention)
        watch = self._watch if self._kept else None
        self._hidden = decoder.forward(batch.input_ids, batch.positions, attend, watch)  # [T, C]

    @torch.inference_mode()
    def score(self, rows: Sequence[int], *, with_logits: bool) -> Scores:
        """See `StepExecutor`."""
        logits = self.decoder.logits(self._hidden[list(rows)])[:, : self._vocab_size]
        return Scores(best_tokens(logits), logits if with_logits else None)

    @torch.inference_mode()
    def final_states(self, rows: Sequence[int]) -> Tensor:
        """See `StepExecutor`."""
        return self._hidden[list(rows)].float()

    def keep_layers(self, layers: Sequence[int]) -> None:
        """From now on `states` has what these layers leave behind them, too."""
        self._kept = tuple(layers)

    @torch.inference_mode()
    def states(self, rows: Sequence[int]) -> Tensor:
        """[R, F * C] float32 of rows of the last `forward`: final-norm hidden states, then those of the layers that are kept."""
        index = list(rows)
        parts = (self._hidden, *(self._inner[layer] for layer in self._kept))
        return torch.cat([part[index] for part in parts], -1).float()

    def _watch(self, layer: int, x: Tensor) -> None:
        if layer in self._kept:
            self._inner[layer] = x

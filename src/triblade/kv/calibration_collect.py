"""Runs a model over text and gathers its keys and values, and how much it minds errors in them.

One sequence at a time: forward with the decoder as it is, then, for the metric, backward from the log-likelihood of tokens that the
model itself draws for every position (the Fisher information needs drawn ones, not those of the text). Knows no table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triblade.kv.calibration_statistics import KVStatistics
from triblade.kv.wire_rotation import Rotation
from triblade.models.decoder import Decoder, DenseAttend

LOGITS_AT_ONCE = 2**24  # numbers of the logits that are held at a time


class Collector:
    """Gathers from token sequences into `statistics`.

    Args:
        decoder: the model.
        rotation: of its layers.
        statistics: what is added to.
        skip: tokens at the beginning of a sequence that are left out: they travel as they are, and nothing else is like them.
        seed: of the drawn tokens.
    """

    def __init__(
        self, decoder: Decoder, rotation: Rotation, statistics: KVStatistics, *, skip: int = 4, seed: int = 0
    ) -> None:
        self._decoder = decoder
        self._rotation = rotation
        self._statistics = statistics
        self._skip = skip
        self._generator = torch.Generator(decoder.device).manual_seed(seed)

    def add(self, ids: Tensor, *, with_gradients: bool) -> None:
        """One sequence [S], which begins at position 0."""
        positions = torch.arange(len(ids), device=self._decoder.device)
        with torch.set_grad_enabled(with_gradients):
            taps = Taps(self._decoder, len(ids), is_differentiable=with_gradients)
            hidden = self._decoder.forward(ids.to(self._decoder.device), positions, taps)
        self._statistics.add(self._plain(taps.vectors(), positions, self._rotation.undo))
        if with_gradients:
            self._drawn_gradient(hidden)
            self._statistics.add_gradients(self._plain(taps.gradients(), positions, self._rotation.undo_gradient))

    def _plain(self, x: Tensor, positions: Tensor, turn: Callable[[Tensor, Tensor], None]) -> Tensor:
        """[L, 2, S, G, D] -> [L, 2, S - skip, C], keys turned back."""
        turn(x[:, 0], positions)
        return x[:, :, self._skip :].flatten(3).cpu()

    def _drawn_gradient(self, hidden: Tensor) -> None:
        """Backward from log p(drawn tokens), a few rows of logits at a time."""
        rows = max(1, LOGITS_AT_ONCE // self._decoder.config.vocab_size)
        pieces = []
        for piece in hidden.detach().split(rows):
            piece.requires_grad_()
            log_p = self._decoder.logits(piece).log_softmax(-1)
            drawn = torch.multinomial(log_p.detach().exp(), 1, generator=self._generator)
            log_p.gather(1, drawn).sum().backward()
            assert piece.grad is not None
            pieces.append(piece.grad)
        hidden.backward(torch.cat(pieces))


class Taps:
    """Attention of one sequence that keeps what it sees, and can tell the gradient by it.

    Args:
        decoder: whose attention this is.
        length: tokens of the sequence.
        is_differentiable: whether gradients will be asked for.
    """

    def __init__(self, decoder: Decoder, length: int, *, is_differentiable: bool = False) -> None:
        self._attend = DenseAttend(decoder.config, decoder.backend, length, decoder.device)
        self._is_differentiable = is_differentiable
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._leaves: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.decoder.Attend`."""
        self._kept.append((k.detach(), v.detach()))
        if self._is_differentiable:
            added = (torch.zeros_like(k, requires_grad=True), torch.zeros_like(v, requires_grad=True))
            self._leaves.append(added)
            k, v = k + added[0], v + added[1]
        return self._attend(layer, q, k, v)

    def vectors(self) -> Tensor:
        """Rotated keys, and values, [L, 2, S, G, D] float32."""
        return torch.stack([torch.stack(pair) for pair in self._kept]).float()

    def gradients(self) -> Tensor:
        """By rotated keys and by values, [L, 2, S, G, D] float32."""
        grads = [
            [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in pair] for pair in self._leaves
        ]
        return torch.stack([torch.stack(pair) for pair in grads]).float()

"""Random heads for tiny targets, and text with a rule that a head can learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_engine import open_tiny, plain_decoder
from torch import Tensor
from torch.nn.functional import pad

from triblade.models.decoder import DenseAttend
from triblade.models.loader import OpenModel
from triblade.ops.backend import Linear
from triblade.ops.packing import QuantizedMatrix
from triblade.quant.rtn import round_to_nearest
from triblade.spec.align.batches import target_hidden
from triblade.spec.align.unroll import Sequences
from triblade.spec.drafter import Draft, DraftItem
from triblade.spec.eagle import INNER_NORMS, NORMS, EagleHead, EagleWeights, head_config, matrix_shapes
from triblade.spec.eagle_files import load_eagle

SIZES = {"hidden_size": 64, "intermediate_size": 96}
WINDOW = 8


def target() -> OpenModel:
    """A tiny llama whose sizes groups of 32 divide."""
    return open_tiny("llama", **SIZES)


def random_weights(
    model: OpenModel, draft_vocab_size: int = 40, bits: int = 8, num_inner: int = 1
) -> EagleWeights[QuantizedMatrix]:
    """A head that knows nothing."""
    generator = torch.Generator().manual_seed(1)
    shapes = matrix_shapes(head_config(model.config, WINDOW), draft_vocab_size, num_inner)
    matrices = {
        name: round_to_nearest(torch.randn(shape, generator=generator) * 0.2, bits, 32)
        for name, shape in shapes.items()
    }
    norms = {name: torch.rand(model.config.hidden_size, generator=generator) + 0.5 for name in NORMS}
    norms[INNER_NORMS] = torch.rand(num_inner, model.config.hidden_size, generator=generator) + 0.5
    token_ids = torch.randperm(model.config.vocab_size, generator=generator)[:draft_vocab_size].sort().values
    return EagleWeights.from_parts(matrices, norms, token_ids)


def random_head(model: OpenModel, window: int | None = WINDOW) -> EagleHead:
    """The same as a module, in float32."""
    decoder = plain_decoder(model)
    weights = random_weights(model).mapped(lambda matrix: Linear(matrix.dequantize()))
    config = head_config(model.config, window)
    return EagleHead(config, weights, decoder.weights.embedding, decoder.backend, decoder.context_length)


def random_sequences(model: OpenModel, rows: int, length: int) -> Sequences:
    """Sequences without padding, with hidden states out of the air."""
    generator = torch.Generator().manual_seed(2)
    ids: Tensor = torch.randint(0, model.config.vocab_size, (rows, length), generator=generator)
    hidden = torch.randn(rows, length, 2 * model.config.hidden_size, generator=generator)
    return Sequences(ids=ids, hidden=hidden, first=torch.full((rows,), 2), lengths=torch.full((rows,), length))


class Spy:
    """A drafter that remembers what was proposed after which tokens."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        drafts: list[Draft] = self._drafter.propose(items)
        pairs = zip(items, drafts, strict=True)
        self.seen += [(list(i.request.token_ids), d.token_ids) for i, d in pairs if d.token_ids]
        return drafts

    def forget(self, request: Any) -> None:
        self._drafter.forget(request)


@torch.inference_mode()
def chain(model: OpenModel, folder: Path, tokens: list[int], length: int, unknown: Sequence[int] = ()) -> list[int]:
    """Guesses of a head from scratch in float32: everything computed again for each. For `unknown` tokens it sees no state."""
    decoder = plain_decoder(model)
    checkpoint = load_eagle(folder, model)
    head = checkpoint.head(decoder.weights.embedding, decoder.backend, decoder.context_length)
    hidden = target_hidden(decoder, torch.tensor([tokens]), checkpoint.inner_layers)[0]
    states = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
    states[list(unknown)] = 0
    guesses: list[int] = []
    while len(guesses) < length:
        ids = torch.tensor([*tokens, *guesses])
        attend = DenseAttend(head.config, head.backend, len(ids))
        own = head.forward(ids, states, torch.arange(len(ids)), attend)[-1:]
        guesses += head.greedy(own).tolist()
        states = torch.cat((states, pad(own, (0, states.shape[1] - own.shape[1]))))
    return guesses

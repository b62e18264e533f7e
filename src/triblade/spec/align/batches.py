"""Conversations as padded batches with the target's hidden states, computed when a batch is first used and kept while memory lasts.

A batch holds conversations of about the same length and is the same whenever it is made: hidden states are rounded to bfloat16,
kept or not, so that how much memory there was changes no bit of the training. Knows no head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from triblade.models.decoder import Decoder, window_mask
from triblade.ops.attention import unplanned
from triblade.spec.align.text import Conversation
from triblade.spec.align.unroll import Sequences

PADDING = 16  # batches are a multiple of it wide: few shapes are quick for allocators and kernels
LEAST_ANSWER = 2  # tokens; there is nothing to guess in fewer


class Batches:
    """All batches of a list of conversations.

    Args:
        decoder: the target.
        inner_layers: those whose states are wanted; see `target_hidden`.
        conversations: the text.
        batch_tokens: padded tokens of a batch, unless one conversation is longer.
        keep_bytes: memory for hidden states.
    """

    def __init__(
        self,
        decoder: Decoder,
        inner_layers: Sequence[int],
        conversations: Sequence[Conversation],
        batch_tokens: int,
        keep_bytes: int,
    ) -> None:
        self._decoder = decoder
        self._inner_layers = inner_layers
        self._members = _grouped(conversations, batch_tokens)
        self._kept: dict[int, Tensor] = {}
        self._keep_bytes = keep_bytes

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequences]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Sequences:
        if not 0 <= index < len(self._members):
            raise IndexError(index)
        members = self._members[index]
        lengths = [len(c.token_ids) for c in members]
        device = self._decoder.device
        width = _padded(max(lengths))
        rows = [[*c.token_ids, *[0] * (width - len(c.token_ids))] for c in members]
        ids = torch.tensor(rows, device=device)  # [B, L]
        hidden = self._kept.get(index)
        if hidden is None:
            hidden = target_hidden(self._decoder, ids, self._inner_layers).bfloat16()
            self._keep(index, hidden)
        return Sequences(
            ids=ids,
            hidden=hidden.to(self._decoder.dtype),
            first=torch.tensor([c.first for c in members], device=device),
            lengths=torch.tensor(lengths, device=device),
        )

    def _keep(self, index: int, hidden: Tensor) -> None:
        if hidden.nbytes <= self._keep_bytes:
            self._keep_bytes -= hidden.nbytes
            self._kept[index] = hidden


@torch.no_grad()
def target_hidden(decoder: Decoder, ids: Tensor, inner_layers: Sequence[int] = ()) -> Tensor:
    """States [B, L, F * C] of sequences [B, L]; padding on the right disturbs nobody.

    The first C are final-norm hidden states, then follows the residual stream behind each of `inner_layers`.
    """
    rows, length = ids.shape
    config, backend = decoder.config, decoder.backend
    positions = torch.arange(length, device=ids.device)
    masks = {layer.window: window_mask(positions[None], length, layer.window) for layer in config.layers}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, length)) for x in (q, k, v))
        mask = masks[config.layers[layer].window]
        return backend.attention(q, k, v, mask, config.attention_scale, config.attention_softcap).flatten(0, 1)

    inner = dict[int, Tensor]()
    watch = partial(_note, inner, frozenset(inner_layers))
    with unplanned():
        final = decoder.forward(ids.flatten(), positions.repeat(rows), attend, watch)
    hidden: Tensor = torch.cat((final, *(inner[layer] for layer in inner_layers)), -1).unflatten(0, (rows, length))
    return hidden


def _note(found: dict[int, Tensor], wanted: frozenset[int], layer: int, x: Tensor) -> None:
    if layer in wanted:
        found[layer] = x


def frequent_tokens(conversations: Sequence[Conversation], count: int, vocab_size: int) -> list[int]:
    """The `count` most frequent tokens of the answers, filled up with the others in order of their ids; ascending."""
    counts: Counter[int] = Counter()
    for conversation in conversations:
        counts.update(conversation.token_ids[conversation.first :])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:count]
    chosen = set(ranked)
    for token in range(vocab_size):
        if len(chosen) >= min(count, vocab_size):
            break
        chosen.add(token)
    return sorted(chosen)


def _padded(length: int) -> int:
    return -(-length // PADDING) * PADDING


def _grouped(conversations: Sequence[Conversation], batch_tokens: int) -> list[list[Conversation]]:
    """Conversations by length, as many together as fit."""
    usable = [c for c in conversations if len(c.token_ids) - c.first >= LEAST_ANSWER]
    groups: list[list[Conversation]] = []
    for conversation in sorted(usable, key=lambda c: len(c.token_ids), reverse=True):
        width = _padded(len(groups[-1][0].token_ids)) if groups else 0
        if groups and width * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(conversation)
        else:
            groups.append([conversation])
    return groups

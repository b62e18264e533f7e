"""One step as flat tensors: token ids, positions, KV slots, and groups of sequences that attention computes together.

Built from what the scheduler, or a draft model, wants computed; knows the model by nothing but its tokens. Sequences that compute
equally many tokens form a group, so a decode step is one attention call for all of them and speculation (k + 1 tokens each) is the
same case.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor


class OwnsBlocks(Protocol):
    """What a step must know of a request."""

    @property
    def block_table(self) -> array[int]:
        """Ids of its KV blocks, int32."""
        ...


class StepItem(Protocol):
    """Tokens [start, start + num_tokens) of one request; the scheduler's `ScheduledRequest` is one."""

    @property
    def request(self) -> OwnsBlocks: ...

    @property
    def start(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def token_ids(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class NobodysItem:
    """Implements `StepItem` and `OwnsBlocks` without a request, to try things with."""

    block_table: array[int]
    start: int
    num_tokens: int

    @property
    def request(self) -> NobodysItem:
        """Itself."""
        return self

    @property
    def token_ids(self) -> list[int]:
        """Some that every model has."""
        return [0] * self.num_tokens


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """S sequences of Q tokens each, which are rows [first_row, first_row + S * Q) of the batch."""

    first_row: int
    positions: Tensor  # [S, Q]
    block_table: Tensor  # [S, B], padded with block 0
    num_keys: int  # the longest sequence's keys, this step's included
    foreign: (
        Tensor | None
    )  # [S, L] keys beyond a shorter sequence's end: whatever a former owner left; None if there are none

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.positions.numel())


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step as tensors, T in all."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    groups: list[AttentionGroup]

    @classmethod
    def build(cls, items: Sequence[StepItem], block_size: int, device: torch.device) -> Batch:
        """Flatten a step whose items of equal length stand together."""
        ids, positions, slots = list[int](), list[int](), list[int]()
        for item in items:
            span, table = range(item.start, item.start + item.num_tokens), item.request.block_table
            ids += item.token_ids
            positions += span
            slots += [table[p // block_size] * block_size + p % block_size for p in span]
        flat = torch.tensor([ids, positions, slots], device=device)  # one transfer
        groups, row = [], 0
        for _, members in groupby(items, key=lambda item: item.num_tokens):
            group = _group(list(members), row, flat[1], block_size)
            groups.append(group)
            row = group.rows.stop
        return cls(flat[0], flat[1], flat[2], groups)


def _group(items: list[StepItem], first_row: int, positions: Tensor, block_size: int) -> AttentionGroup:
    """Items of equal length, as one attention call."""
    queries = items[0].num_tokens
    num_keys = max(item.start for item in items) + queries
    width = -(-num_keys // block_size)
    tables = [item.request.block_table[:width] for item in items]
    padded = [[*table, *([0] * (width - len(table)))] for table in tables]
    rows = positions[first_row : first_row + len(items) * queries].view(len(items), queries)
    foreign = None
    if any(item.start + queries < num_keys for item in items):
        foreign = torch.arange(num_keys, device=positions.device) > rows[:, -1:]
    return AttentionGroup(first_row, rows, torch.tensor(padded, device=positions.device), num_keys, foreign)

"""A table at work: keys and values to codes and back, and how far what comes back is from what went in.

    code  component y = basis (x - mean) in standard deviations -> bin -> code, for the components that have bits
    back  x = mean + basis^-1 y, y from the level of the code, 0 where there is none

Every token is rounded on its own. Knows no cache, no position and no bytes; keys come and go as they are before the rotary
embedding. L layers, 2 for keys and values, T tokens, C numbers, R components with bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triblade.errors import NumericalError
from triblade.kv.calibration_lloyd import BIN_WIDTH, BINS, REACH, codes_of_bins
from triblade.kv.wire_table import KVTable

_LEVELS = 256  # places of a row's levels: a code finds its level without knowing how many bits it has


@dataclass(frozen=True, slots=True)
class Errors:
    """What rounding does to sampled tokens."""

    nats: float  # expected change of the model's predictions per token, by second order; 0 where no table has a metric for it
    keys: float  # squared length of the error as a share of that of the keys
    values: float
    worst: float  # the largest of these shares in a single layer


@dataclass(frozen=True, slots=True)
class _Part:
    """Keys or values of one layer."""

    layer: int
    kind: int  # 0 keys, 1 values
    rows: slice  # of the codes
    to_bins: Tensor  # [R', C] from x to bins
    offset: Tensor  # [R', 1]
    back: Tensor  # [R', C]
    mean: Tensor  # [C]


class Components:
    """Codes and levels of one table, on one device."""

    def __init__(self, table: KVTable, device: torch.device) -> None:
        self._table = table
        self.row_bits = table.bits[table.bits > 0]  # [R]
        self._parts = self._made(table, device)
        levels = self._spread_levels(table.levels)
        self._codes = codes_by_bin(levels, self.row_bits).flatten().to(device)
        self._levels = levels.flatten().to(device)
        rows = torch.arange(len(self.row_bits), dtype=torch.int32, device=device)[:, None]
        self._code_rows, self._level_rows = rows * BINS, rows * _LEVELS

    def encode(self, x: Tensor) -> Tensor:
        """[L, 2, T, C] -> codes uint8 [R, T].

        Raises:
            NumericalError: there are numbers that are none.
        """
        bins = torch.empty(len(self.row_bits), x.shape[2], device=x.device)
        for part in self._parts:
            torch.addmm(part.offset, part.to_bins, x[part.layer, part.kind].T, out=bins[part.rows])
        bins.clamp_(0, BINS - 1)
        if bool(bins.sum().isnan()):
            raise NumericalError(
                "keys or values to be sent are not finite", hint="send them raw to see where they come from"
            )
        at = bins.to(torch.int32)
        at += self._code_rows
        return self._codes.index_select(0, at.view(-1)).view(at.shape)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes uint8 [R, T] -> [L, 2, T, C]."""
        at = codes.to(torch.int32)
        at += self._level_rows
        components = self._levels.index_select(0, at.view(-1)).view(at.shape)  # in standard deviations
        layers, _, width = self._table.mean.shape
        x = torch.empty(layers, 2, codes.shape[1], width, device=codes.device)
        for part in self._parts:
            torch.addmm(part.mean, components[part.rows].T, part.back, out=x[part.layer, part.kind])
        return x

    def errors(self, x: Tensor) -> Errors:
        """What `encode` and `decode` do to tokens [L, 2, T, C]."""
        error = self.decode(self.encode(x)) - x
        weighted = torch.matmul(error, self._table.basis.to(x.device).transpose(-1, -2))
        nats = float(weighted.double().square().sum()) / 2 / x.shape[2]
        return replace(shares_of(error, x), nats=nats)

    def _made(self, table: KVTable, device: torch.device) -> list[_Part]:
        inverse = torch.linalg.inv(table.basis.double())  # [L, 2, C, C]
        parts, start = [], 0
        for layer in range(table.model.num_layers):
            for kind in range(2):
                kept = (table.bits[layer, kind] > 0).nonzero().flatten()
                spread, mean = table.spread[layer, kind, kept, None], table.mean[layer, kind]
                to_bins = table.basis[layer, kind, kept] / (spread * BIN_WIDTH)
                offset = REACH / BIN_WIDTH - to_bins @ mean[:, None]
                back = (inverse[layer, kind, :, kept] * spread[:, 0]).T.float().contiguous()
                rows = slice(start, start + len(kept))
                parts.append(_Part(layer, kind, rows, *(t.to(device) for t in (to_bins, offset, back, mean))))
                start = rows.stop
        return parts

    def _spread_levels(self, levels: Tensor) -> Tensor:
        """[R, _LEVELS], padded with zeros."""
        counts = 2 ** self.row_bits.long()
        filled = torch.arange(_LEVELS) < counts[:, None]
        wide = torch.zeros(len(counts), _LEVELS)
        wide[filled] = levels
        return wide


def shares_of(error: Tensor, x: Tensor) -> Errors:
    """The errors of keys and values x [L, 2, ...], whose effect on predictions is not known."""
    lost, whole = (t.double().square().flatten(2).sum(2) for t in (error, x))  # [L, 2]
    keys, values = (lost.sum(0) / whole.sum(0).clamp_min(1e-30)).tolist()
    return Errors(0.0, keys, values, float((lost / whole.clamp_min(1e-30)).max()))


def codes_by_bin(levels: Tensor, bits: Tensor) -> Tensor:
    """Code of every bin [R, BINS] for padded levels [R, _LEVELS]."""
    codes = torch.empty(len(bits), BINS, dtype=torch.uint8)
    for count in torch.unique(bits).tolist():
        rows = (bits == count).nonzero().flatten()
        codes[rows] = codes_of_bins(levels[rows, : 2**count])
    return codes

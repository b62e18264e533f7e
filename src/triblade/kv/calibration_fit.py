"""From what was gathered of keys and values to a table: basis, bits and levels.

Where the metric is known, directions are sought in its square root's coordinates: there every error counts alike, in nats, in all
layers, for keys and values, so that one budget is spent over all of them (KVTC, arXiv 2511.01815, section 3, spends it on plain
variance). A refit on later samples keeps the metric, which cannot be measured without gradients. Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triblade.kv.calibration_bits import allocate
from triblade.kv.calibration_lloyd import MAX_BITS, histograms, lloyd_max
from triblade.kv.calibration_statistics import Moments
from triblade.kv.wire_table import KVTable, TableModel

# Share of the metric that is made equal in all directions, since errors of components with a bit or two are not small, and
# gradients are few. On SmolLM2-135M at 2.5 bits 0.002, 0.02, 0.1, 0.3 and 0.7 give a KL of 5.1, 4.8, 4.7, 4.3 and 4.8e-3.
METRIC_FLOOR = 0.3
PRIOR_TOKENS = 1024
_LEAST_VARIANCE = 1e-12  # of a component, as a share of the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """What a table is to cost.

    Attributes:
        bits: average bits per number of a token that is not exact.
        variance: keep only the first components, with this share of the (weighted) variance; None: bits decide.
        use_metric: weigh errors by what they do to predictions, else by plain variance.
    """

    bits: float = 2.0
    variance: float | None = None
    use_metric: bool = True
    exact_first: int = 4
    exact_last: int = 128


@dataclass(frozen=True, slots=True)
class Analysis:
    """What tables of any size are made from."""

    mean: Tensor  # [L, 2, C]
    basis: Tensor  # [L, 2, C, C]
    spread: Tensor  # [L, 2, C]
    shares: list[Tensor]  # histograms [C, BINS] of the components of every layer's keys and values
    errors: Tensor  # [R, MAX_BITS + 1] of all components with 0 .. MAX_BITS bits


def fit_table(model: TableModel, moments: Moments, options: FitOptions) -> KVTable:
    """Basis, bits and levels for tokens like those gathered."""
    return table_of(model, analyse(moments, use_metric=options.use_metric), options)


def analyse(moments: Moments, *, use_metric: bool) -> Analysis:
    """Components, and how well any number of bits does for them."""
    metric = moments.metric if use_metric else None
    basis, spread = _bases(moments.covariance, _plain_metric(moments) if metric is None else metric)
    mean = moments.mean.float()
    shares = [
        histograms(_standardised(moments.sample[i, j].float(), mean[i, j], basis[i, j], spread[i, j]))
        for i, j in _places(mean)
    ]
    errors = torch.cat([_errors(rows) for rows in shares]) * spread.flatten()[:, None] ** 2
    return Analysis(mean, basis, spread, shares, errors)


def table_of(model: TableModel, found: Analysis, options: FitOptions) -> KVTable:
    """Bits for the components, and levels."""
    bits = _bits(found, options)
    return KVTable(
        model=model,
        mean=found.mean,
        basis=found.basis,
        spread=found.spread,
        bits=bits,
        levels=_levels(found.shares, bits),
        exact_first=options.exact_first,
        exact_last=options.exact_last,
    )


def refit_table(table: KVTable, moments: Moments) -> KVTable:
    """A table of the same size, for other tokens, with the metric that `table` was made with.

    Few tokens do not say all about C directions, so the table's own covariance counts as `PRIOR_TOKENS` more.
    """
    basis = table.basis.double()
    back = torch.linalg.inv(basis)
    before = back @ torch.diag_embed(table.spread.double() ** 2) @ back.transpose(-1, -2)
    weight = PRIOR_TOKENS / (PRIOR_TOKENS + moments.num_tokens)
    moments = replace(
        moments,
        covariance=weight * before + (1 - weight) * moments.covariance,
        metric=basis.transpose(-1, -2) @ basis,  # y'y = x' basis' basis x
    )
    average = table.bits_per_token / table.mean.numel()
    options = FitOptions(bits=average, exact_first=table.exact_first, exact_last=table.exact_last)
    return fit_table(table.model, moments, options)


def _places(mean: Tensor) -> Iterator[tuple[int, int]]:
    """Layers, and keys or values."""
    return ((i, j) for i in range(mean.shape[0]) for j in range(2))


def _plain_metric(moments: Moments) -> Tensor:
    """Errors count by their share of a layer's variance."""
    width = moments.mean.shape[-1]
    total = moments.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(1e-30)
    return torch.eye(width, dtype=torch.float64) / total


def _bases(covariance: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """U' A [L, 2, C, C], with A'A = metric and U the eigenvectors of A cov A', and standard deviations [L, 2, C], largest first."""
    width = covariance.shape[-1]
    equal = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(width, dtype=torch.float64)
    values, vectors = torch.linalg.eigh((1 - METRIC_FLOOR) * metric + METRIC_FLOOR * equal)
    root = values.clamp_min(1e-30).sqrt()[..., None] * vectors.transpose(-1, -2)  # A
    variance, directions = torch.linalg.eigh(root @ covariance @ root.transpose(-1, -2))
    variance, directions = variance.flip(-1), directions.flip(-1)
    floor = variance[..., :1].clamp_min(1e-30) * _LEAST_VARIANCE
    return (directions.transpose(-1, -2) @ root).float(), torch.maximum(variance, floor).sqrt().float()


def _standardised(x: Tensor, mean: Tensor, basis: Tensor, spread: Tensor) -> Tensor:
    """Components [S, C] of tokens [S, C], in standard deviations."""
    return (x - mean) @ basis.T / spread


def _kept(spread: Tensor, share: float | None) -> Tensor:
    """Which components are needed for a share of the variance of their layer, [L, 2, C] bool."""
    if share is None:
        return torch.ones_like(spread, dtype=torch.bool)
    variance = spread.double() ** 2
    before = variance.cumsum(-1) - variance
    return before < share * variance.sum(-1, keepdim=True)


def _bits(found: Analysis, options: FitOptions) -> Tensor:
    """[L, 2, C] uint8."""
    errors = found.errors.double().numpy().copy()
    left_out = ~_kept(found.spread, options.variance).flatten().numpy()
    errors[left_out] = errors[left_out, :1]  # bits would gain nothing
    budget = round(options.bits * found.spread.numel())
    return torch.from_numpy(allocate(errors, budget)).view(found.spread.shape)


def _errors(shares: Tensor) -> Tensor:
    """Mean squared errors [C, MAX_BITS + 1] in units of the variance; without bits a component is rebuilt as its mean, 0."""
    return torch.stack([torch.ones(len(shares)), *(lloyd_max(shares, bits)[1] for bits in range(1, MAX_BITS + 1))], 1)


def _levels(shares: list[Tensor], bits: Tensor) -> Tensor:
    """Levels of all components that have bits, in order."""
    pieces: list[Tensor] = []
    for rows, of_rows in zip(shares, bits.flatten(0, 1), strict=True):
        found: dict[int, Tensor] = {}
        for count in set(of_rows.tolist()) - {0}:
            at = (of_rows == count).nonzero().flatten()
            found |= dict(zip(at.tolist(), lloyd_max(rows[at], count)[0].float(), strict=True))
        pieces += [found[row] for row in sorted(found)]
    return torch.cat(pieces) if pieces else torch.empty(0)

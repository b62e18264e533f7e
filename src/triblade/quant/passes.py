"""The steps that a quantization is composed of, and how they are applied to one matrix: `awq+gptq` is two of them.

A pass turns a `Work` into a better one. Passes run in the order of their stage, whatever order they were named in: channel
scales, the weights to aim at, the levels, the codes, the refinement. Between scales and the rest the caller folds the scales into
the model, because what is stored of a norm is rounded. Knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from triblade.errors import ConfigError
from triblade.quant.correct import corrected_weight
from triblade.quant.gptq import conditional_variances, round_with_feedback
from triblade.quant.ranges import Grid, plain_grid, search_grid
from triblade.quant.refine import refine
from triblade.quant.rescale import activation_scales, balanced_scales, migration_scales
from triblade.quant.scheme import QuantScheme
from triblade.quant.statistics import InputStatistics
from triblade.registry import PASSES


class Stage(IntEnum):
    """When a pass runs."""

    SCALES = 0
    TARGET = 1
    LEVELS = 2
    CODES = 3
    REFINEMENT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One matrix (all that share an input, stacked) on its way to codes."""

    name: str
    weight: Tensor  # [out, in] float32, in the channel scales decided so far
    scheme: QuantScheme
    scale_type: torch.dtype
    statistics: InputStatistics | None  # of the inputs that this matrix will meet; None: no calibration
    sharing: Tensor | None = None  # [in] number of the scale a channel takes
    scales: Tensor | None = None  # [in] channel scales found, not applied yet
    target: Tensor | None = None  # [out, in] float32 to round towards; None: the weight
    feedback: bool = False  # whether the codes will be chosen with feedback
    grid: Grid | None = None
    codes: Tensor | None = None  # [out, in] float32

    @property
    def aim(self) -> Tensor:
        """[out, in]: what to round towards."""
        return self.weight if self.target is None else self.target


@dataclass(frozen=True, slots=True)
class Pass:
    """A step by name; `calibrated` ones do nothing without statistics."""

    stage: Stage
    apply: Callable[[Work], Work]
    calibrated: bool = True
    compares: bool = False  # wants the original's inputs beside the quantized model's

    def __call__(self, work: Work) -> Work:
        """The work with this step done."""
        return work if self.calibrated and work.statistics is None else self.apply(work)


def _statistics(work: Work) -> InputStatistics:
    assert work.statistics is not None  # `Pass.__call__` saw to it
    return work.statistics


def _activation_scales(work: Work) -> Work:
    return replace(work, scales=activation_scales(work.weight, _statistics(work), work.scheme, work.sharing))


def _balanced_scales(work: Work) -> Work:
    return replace(work, scales=balanced_scales(work.weight, _statistics(work), work.scheme, work.sharing))


def _migration_scales(work: Work) -> Work:
    return replace(work, scales=migration_scales(work.weight, _statistics(work), work.scheme, work.sharing))


def _correct(work: Work) -> Work:
    return replace(work, target=corrected_weight(work.weight, _statistics(work)))


def _plain(work: Work) -> Work:
    return replace(work, grid=plain_grid(work.aim, work.scheme, work.scale_type))


def _search(work: Work) -> Work:
    """An error counts by the input's second moment, or, if feedback follows, by what feedback leaves of it."""
    importance = None
    if work.statistics is not None:
        hessian = work.statistics.hessian
        importance = conditional_variances(hessian) if work.feedback else hessian.diagonal()
    return replace(work, grid=search_grid(work.aim, importance, work.scheme, work.scale_type))


def _feedback(work: Work) -> Work:
    assert work.grid is not None  # a pass of the stage before always runs
    return replace(work, codes=round_with_feedback(work.aim, _statistics(work).hessian, work.grid, work.name))


def _refine(work: Work) -> Work:
    assert work.grid is not None
    codes = work.grid.codes(work.aim) if work.codes is None else work.codes
    grid, codes = refine(work.aim, _statistics(work).hessian, work.grid, codes, work.scale_type)
    return replace(work, grid=grid, codes=codes)


RTN = Pass(Stage.LEVELS, _plain, calibrated=False)
RANGE = Pass(Stage.LEVELS, _search, calibrated=False)
AWQ = Pass(Stage.SCALES, _activation_scales)
BALANCE = Pass(Stage.SCALES, _balanced_scales)
SMOOTH = Pass(Stage.SCALES, _migration_scales)
CORRECT = Pass(Stage.TARGET, _correct, compares=True)
GPTQ = Pass(Stage.CODES, _feedback)
REFINE = Pass(Stage.REFINEMENT, _refine)

# Names for combinations. Inputs that are rounded, too, are what 8-bit weights lose by, and AWQ's scales even them out best
# (benchmarks/results/quantization.json).
METHODS = {"best": "balance+correct+gptq+refine", "int8": "awq+gptq"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The passes of a method, in order; `name` spells them out."""

    name: str
    passes: tuple[Pass, ...]

    @property
    def calibrated(self) -> bool:
        """Whether anything in it needs calibration."""
        return any(step.calibrated for step in self.passes)

    @property
    def compares(self) -> bool:
        """Whether anything in it needs the original's inputs beside the quantized model's."""
        return any(step.compares for step in self.passes)

    def scaled(self, work: Work) -> Work:
        """The work with channel scales found."""
        return _run([step for step in self.passes if step.stage == Stage.SCALES], work)

    def rounded(self, work: Work) -> Work:
        """The work with levels and codes; channel scales have been applied by the caller."""
        feedback = any(step.stage == Stage.CODES for step in self.passes) and work.statistics is not None
        work = replace(work, feedback=feedback)
        work = _run([step for step in self.passes if step.stage != Stage.SCALES], work)
        assert work.grid is not None
        return work if work.codes is not None else replace(work, codes=work.grid.codes(work.aim))


def recipe(method: str) -> Recipe:
    """The passes of `awq+gptq` and the like.

    Raises:
        ConfigError: an unknown pass, or two of the same stage.
    """
    names = METHODS.get(method, method).split("+")
    passes = [PASSES[name] for name in names]
    if not any(step.stage == Stage.LEVELS for step in passes):
        passes.append(RANGE)  # under every method that does not say otherwise
    stages = [step.stage for step in passes]
    if len(set(stages)) != len(stages):
        raise ConfigError(
            f"two passes of {method!r} do the same step",
            hint="take one each of: awq, balance, smooth; correct; rtn, range; gptq; refine",
        )
    return Recipe("+".join(names), tuple(sorted(passes, key=lambda step: step.stage)))


def _run(passes: Sequence[Pass], work: Work) -> Work:
    for step in passes:
        work = step(work)
    return work

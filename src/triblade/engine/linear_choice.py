"""Whose kernels multiply: ours, or for some matrices those of a package; one line of the log says which, or why not.

A package never keeps a model from running: it is tried on a few random inputs against float32 before it is trusted, and left alone
where it is missing or fails. Knows no package by name; those are in the registry.
"""

from __future__ import annotations

import logging
from typing import cast

import torch
import torch.nn.functional as F

from triblade.engine.cuda import CudaExecutor
from triblade.engine.executor import StepExecutor
from triblade.ops.cuda.humming import HummingProducts, token_range
from triblade.ops.cuda.packing import DENSE_BITS, unpack
from triblade.registry import LINEAR_BACKENDS

log = logging.getLogger(__name__)

OWN = "triblade"
TRIAL_TOKENS = 65  # more than a launch of our kernels takes
TRIAL_ERROR = 1.5e-2  # of a result, in parts of the one in float32


def choose_products(wanted: str, executor: StepExecutor) -> None:
    """Have `executor` multiply by what is asked for, if that runs here."""
    if wanted == OWN:
        return
    try:
        products, reason = _made(wanted, executor)
    except Exception as error:  # whatever a package raises: the engine runs without it
        first = str(error).splitlines()[0] if str(error) else "no message"
        products, reason = None, f"it fails here ({type(error).__name__}: {first})"
    if products is None:
        log.warning("linear backend %s is not taken: %s; %s is taken instead", wanted, reason, OWN)
        return
    cast("CudaExecutor", executor).multiply_by(products)
    log.info("linear backend %s: asked for, for %d of the model's matrices", wanted, len(products.matrices))


def _made(wanted: str, executor: StepExecutor) -> tuple[HummingProducts | None, str]:
    """The package's products, or what speaks against them."""
    if not isinstance(executor, CudaExecutor):
        return None, f"it goes with the CUDA kernels, not with the {executor.name} ones"
    kind: type[HummingProducts] = LINEAR_BACKENDS[wanted]
    reason = kind.why_not(executor.capability)
    if reason is not None:
        return None, reason
    packed = [matrix for matrix in executor.matrices() if matrix.bits != DENSE_BITS]
    # Steps that it takes part in leave our kernels altogether, so it must be the faster one for all of them.
    strange = sum(token_range(matrix) is None for matrix in packed)
    if strange:
        return None, f"it was not measured to be faster for {strange} of the model's {len(packed)} packed matrices"
    if not packed:
        return None, "the model has no packed matrices"
    products = kind(packed, executor.dtype)
    off = _error(products, executor.dtype)
    return (products, "") if off < TRIAL_ERROR else (None, f"it computes something else (off by {off:.1%})")


def _error(products: HummingProducts, dtype: torch.dtype) -> float:
    """Of the smallest matrix and random inputs."""
    matrix = min(products.matrices, key=lambda m: m.nbytes)
    generator = torch.Generator(matrix.codes.device).manual_seed(0)
    x = torch.randn(TRIAL_TOKENS, matrix.inputs, generator=generator, device=matrix.codes.device).to(dtype)
    expected = F.linear(x.float(), unpack(matrix))
    return float((products.multiply(x, matrix).float() - expected).norm() / expected.norm())

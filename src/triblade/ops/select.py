"""Which kernels to use, and why: resolves device, dtype-independent backend and attention from what the user asked for.

Every automatic choice comes with its reason, which is logged once. Knows no model beyond whether it caps attention scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from triblade.errors import UnsupportedError
from triblade.ops.attention import AttentionFunction, eager_attention, sdpa_attention
from triblade.ops.backend import Backend
from triblade.registry import BACKENDS

_ATTENTION: Mapping[str, AttentionFunction] = {"sdpa": sdpa_attention, "eager": eager_attention}


def select_device(name: Literal["auto", "cpu", "cuda"]) -> tuple[torch.device, str]:
    """The device and the reason.

    Raises:
        UnsupportedError: cuda was asked for and is not there; the message carries the driver's reason.
    """
    if name == "cpu":
        return torch.device("cpu"), "asked for"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        if name == "auto":
            return torch.device("cpu"), "no CUDA device"
        raise UnsupportedError(
            f"no CUDA device: {error}", hint="use --device cpu, or install a CUDA build of torch"
        ) from error
    return torch.device(
        "cuda", torch.cuda.current_device()
    ), "asked for" if name == "cuda" else "a CUDA device is there"


def select_backend(attention: str, *, deterministic: bool, softcap: bool) -> tuple[Backend, str]:
    """The torch backend and the reason for its attention; what it has not is replaced."""
    if deterministic:
        return BACKENDS["deterministic"](), "deterministic mode has its own attention"
    name, reason = ("eager", "the model caps attention scores") if softcap else ("sdpa", "fastest that fits the model")
    if attention in ("eager", name):
        name, reason = attention, "asked for"
    return BACKENDS["reference"](_ATTENTION[name]), f"attention {name}: {reason}"

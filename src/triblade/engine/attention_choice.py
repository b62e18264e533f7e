"""Which attention an engine gets: the one asked for if it runs here, else the fastest that does; one line of the log says why.

A way that cannot be taken never keeps a model from running: what is missing is said, and what is taken instead. Optional packages
are tried on a few tokens against the formula before they are trusted. Knows no package by name; those are in the registry.
"""

from __future__ import annotations

import logging
from array import array
from typing import Any, Protocol, cast

import torch

from triblade.engine.attend import AttentionNeeds, EagerAttention, StepAttention
from triblade.engine.batch import Batch, NobodysItem
from triblade.kv.cache import KVCache
from triblade.models.config import ModelConfig
from triblade.registry import ATTENTION_BACKENDS

log = logging.getLogger(__name__)

OWN = "triblade"  # the kernels' own attention, which is no `StepAttention`
TRIAL_TOKENS = (19, 2)  # of two sequences: computed before, and in the step that is tried
TRIAL_ERROR = 3e-2  # of an output, in parts of the formula's in float32


class AttentionKind(Protocol):
    """An entry of `ATTENTION_BACKENDS`."""

    is_package: bool  # somebody else's, perhaps not installed

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """What keeps it from being taken, or None."""
        ...

    def __call__(self, cache: KVCache, config: ModelConfig) -> StepAttention: ...


def choose_attention(
    wanted: str, default: tuple[str, str], needs: AttentionNeeds, cache: KVCache
) -> StepAttention | None:
    """The attention over `cache`; None is that of the kernels themselves.

    Args:
        wanted: the option.
        default: the name that is taken by itself, and why.
        needs: see there.
        cache: of the engine.
    """
    name, reason = default
    if wanted not in ("auto", name):
        against = _against(wanted, needs, cache)
        if against is None:
            name, reason = wanted, "asked for"
        else:
            log.warning("attention %s is not taken: %s; %s is taken instead", wanted, against, name)
    elif wanted == name:
        reason = "asked for"
    log.info("attention %s: %s", name, reason)
    return None if name == OWN else cast("StepAttention", ATTENTION_BACKENDS[name](cache, needs.model))


def _against(name: str, needs: AttentionNeeds, cache: KVCache) -> str | None:
    if name == OWN:
        return "the reference backend computes with torch"
    kind: AttentionKind = ATTENTION_BACKENDS[name]
    reason = kind.why_not(needs)
    return _failure(kind, needs, cache) if reason is None and kind.is_package else reason


def _failure(kind: AttentionKind, needs: AttentionNeeds, engine_cache: KVCache) -> str | None:
    """What goes wrong with two sequences of random keys in a cache like the engine's, or None."""
    layout, device = engine_cache.layout, engine_cache.pool.device
    before, new = TRIAL_TOKENS
    width = layout.blocks_for(before + 1 + new)
    cache = KVCache(layout, 2 * width, engine_cache.dtype, device)
    generator = torch.Generator(device).manual_seed(0)

    def numbers(tokens: int, heads: int) -> torch.Tensor:
        shape = (tokens, heads, layout.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(engine_cache.dtype)

    slots = torch.arange(2 * width * layout.block_size, device=device)
    cache.write(0, slots, numbers(len(slots), layout.num_kv_heads), numbers(len(slots), layout.num_kv_heads))
    tables = array("i", range(width)), array("i", range(width, 2 * width))
    items = [NobodysItem(table, before + number, new) for number, table in enumerate(tables)]
    groups = Batch.build(items, layout.block_size, device).groups
    queries = numbers(2 * new, needs.model.num_heads)
    results = []
    for made in (EagerAttention, kind):
        try:
            attention = cast("Any", made)(cache, needs.model)
            attention.begin(groups)
            results.append(attention.attend(0, queries).float())
        except Exception as error:  # whatever a package raises: the engine runs without it
            return (
                f"it fails here ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
            )
    off = float((results[1] - results[0]).norm() / results[0].norm())
    return None if off < TRIAL_ERROR else f"it computes something else than the formula (off by {off:.1%})"

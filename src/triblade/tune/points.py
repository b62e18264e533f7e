"""Points of the tuning space, the design of nine, and the corners around a point. Pure enumeration.

A point says everything that trials differ in. Two points that would be served alike are equal once `plain` has put what does not
count (the length of drafts without a drafter, the wire without workers) to its default. Knows no model and no measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

from triblade.config import TuneConfig
from triblade.tune.candidates import SCHEMES, SPLITS

TOGETHER = "together"
NO_DRAFTER = "none"
TECHNIQUES = ("quantization", "drafts", "workers")
LONGEST_DRAFT = 8
DRAFT_LENGTH, PREFILL_TOKENS = 4, 128  # where they do not count
KV_DTYPES = ("bfloat16", "int8")
WIRE_CODECS = ("raw", "int8")
CHUNKS = (128, 256, 512, 1024)
REMOTE_PREFILL_TOKENS = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination.

    Attributes:
        weights: `bf16`, `int8`, `int4`, `int3`, or `stored`: as the checkpoint has them.
        smoothed: channels are rescaled before they are rounded, so that outliers lose less.
        placement: `together`, or the memory of a prefill to that of a decode worker.
        chunk: most tokens of a step.
        remote_prefill_tokens: prompts with fewer new tokens are computed where they are answered.
    """

    weights: str
    smoothed: bool = False
    kv_dtype: str = "bfloat16"
    drafter: str = NO_DRAFTER
    draft_length: int = DRAFT_LENGTH
    placement: str = TOGETHER
    wire_codec: str = "raw"
    chunk: int = 512
    remote_prefill_tokens: int = PREFILL_TOKENS

    @property
    def plain(self) -> Point:
        """The same combination with everything that does not count at its default."""
        found = self
        if self.drafter == NO_DRAFTER:
            found = replace(found, draft_length=DRAFT_LENGTH)
        if self.placement == TOGETHER:
            found = replace(found, wire_codec="raw", remote_prefill_tokens=PREFILL_TOKENS)
        return found if self.is_quantized else replace(found, smoothed=False)

    @property
    def is_quantized(self) -> bool:
        """Whether a checkpoint must be made for it."""
        return self.weights not in ("bf16", "stored")

    @property
    def techniques(self) -> tuple[str, ...]:
        """Those of the three that are on."""
        on = (self.is_quantized, self.drafter != NO_DRAFTER, self.placement != TOGETHER)
        return tuple(name for name, is_on in zip(TECHNIQUES, on, strict=True) if is_on)

    def __str__(self) -> str:
        drafts = "no drafts" if self.drafter == NO_DRAFTER else f"{self.drafter} k {self.draft_length}"
        parts = [f"{self.weights}{' smoothed' if self.smoothed else ''}", drafts]
        parts.append("one engine" if self.placement == TOGETHER else f"P/D {self.placement}")
        default = Point(weights=self.weights)
        for name, label in (("kv_dtype", "KV"), ("wire_codec", "wire"), ("chunk", "chunk")):
            if getattr(self, name) != getattr(default, name):
                parts.append(f"{label} {getattr(self, name)}")
        if self.plain.remote_prefill_tokens != PREFILL_TOKENS:
            parts.append(f"workers from {self.remote_prefill_tokens} tokens")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What each field of a point may be: a list of choices, or the smallest and the largest of whole numbers.

    Attributes:
        unquantized: the weights without any technique.
        quantized: the grid's weights.
        drafter: the grid's.
    """

    unquantized: str
    quantized: tuple[str, ...]
    drafter: str
    drafters: tuple[str, ...]
    draft_lengths: tuple[int, ...]
    splits: tuple[str, ...]

    @property
    def choices(self) -> Mapping[str, Sequence[Any]]:
        """Every field's values; those of one session hold for all trials of a study."""
        return {
            "weights": tuple(dict.fromkeys((self.unquantized, *self.quantized, *self._other_weights))),
            "smoothed": (False, True),
            "kv_dtype": KV_DTYPES,
            "drafter": (NO_DRAFTER, *self.drafters),
            "placement": tuple(dict.fromkeys((TOGETHER, *self.splits, *SPLITS))),
            "wire_codec": WIRE_CODECS,
            "chunk": CHUNKS,
            "remote_prefill_tokens": REMOTE_PREFILL_TOKENS,
        }

    @property
    def none(self) -> Point:
        """None of the three techniques."""
        return Point(weights=self.unquantized)

    @property
    def _other_weights(self) -> tuple[str, ...]:
        return () if self.unquantized == "stored" else tuple(SCHEMES)


def space_of(config: TuneConfig, stored_bits: int, drafters: Sequence[str], has_head: bool) -> Space:
    """The space of a model.

    Args:
        stored_bits: of its weights; below 16 they are taken as they are.
        drafters: those that can guess for it.
        has_head: an eagle head for it comes with the package.
    """
    default = "eagle" if has_head else "draft" if config.draft_model is not None else "suffix"
    is_stored = stored_bits < 16
    return Space(
        unquantized="stored" if is_stored else "bf16",
        quantized=("stored",) if is_stored else tuple(f"int{bits}" for bits in config.bits),
        drafter=config.drafter or default,
        drafters=tuple(dict.fromkeys((*drafters, config.drafter or default))),
        draft_lengths=config.draft_lengths,
        splits=config.splits,
    )


def nine(space: Space) -> list[Point]:
    """Nine combinations: of 27, every pair of values of two axes once (Taguchi's L9 without its fourth column).

    With weights that stay as they are, two axes are left, and nine are all of their combinations.
    """
    rows = [(a, b, (a + b) % 3) for a in range(3) for b in range(3)]
    return [
        Point(
            weights=space.quantized[a % len(space.quantized)],
            drafter=space.drafter,
            draft_length=space.draft_lengths[b],
            placement=space.splits[c],
        )
        for a, b, c in rows
    ]


def without(point: Point, technique: str, space: Space) -> Point:
    """A point with one technique less."""
    changes: dict[str, Callable[[], Point]] = {
        "quantization": lambda: replace(point, weights=space.unquantized, smoothed=False),
        "drafts": lambda: replace(point, drafter=NO_DRAFTER),
        "workers": lambda: replace(point, placement=TOGETHER),
    }
    return changes[technique]().plain


def only(point: Point, kept: Sequence[str], space: Space) -> Point:
    """A point with these techniques alone."""
    for technique in point.techniques:
        if technique not in kept:
            point = without(point, technique, space)
    return point.plain


def corners(point: Point, space: Space) -> list[Point]:
    """A point with every smaller set of its techniques: none, each alone, each left out."""
    names = point.techniques
    return [only(point, kept, space) for size in range(len(names)) for kept in combinations(names, size)]


def from_values(values: Mapping[str, Any]) -> Point:
    """What `asdict` made of a point, from a mapping that may hold more."""
    return Point(**{field.name: values[field.name] for field in fields(Point)})

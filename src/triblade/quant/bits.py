"""How many bits a quantized weight takes, scales and zero points included. Pure arithmetic; knows no tensor and no format."""

from __future__ import annotations

SCALE_BITS = 16  # of a scale; files of other tools may have float32


def bits_per_weight(bits: int, group: int, *, symmetric: bool) -> float:
    """The average over groups of `group` weights with a scale each, and a zero point unless symmetric."""
    return bits + (SCALE_BITS + (0 if symmetric else bits)) / group

"""Random numbers by address: a pure function of (seed, position, stream), with no generator to keep or to share.

Preemption, batching, replays and speculation never change a draw, because nothing is consumed: the number of a
token is found again from the seed of its choice and its position in the output. Mixing is SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # the odd integer closest to 2**64 / golden ratio
_FAMILY = 0x6368696C64736565  # keeps the seeds of choices apart from the states of draws


def child_seed(seed: int, index: int) -> int:
    """The 64-bit seed of choice `index` of a request; sisters and neighbouring request seeds get unrelated ones."""
    return _mix(_mix(seed ^ _FAMILY) + index)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits.

    Args:
        seed: of one choice, see `child_seed`.
        position: number of output tokens before the one to draw.
        stream: separates several numbers needed at one position (the draw itself, an acceptance test, ...).
    """
    return (_mix(_mix(_mix(seed) + stream) + position) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    """One step of SplitMix64: a bijection of 64-bit integers whose output bits all depend on all input bits."""
    state = (state + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)

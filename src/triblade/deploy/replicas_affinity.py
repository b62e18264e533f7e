"""Which replicas have which beginnings of prompts in their prefix caches, as far as one router can know.

A belief, not a fact: a replica may have dropped what it had. Invariant: at most `capacity` blocks are remembered, the ones that
were asked for last; believing wrongly costs time and never a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixMap:
    """Block digest -> the replicas that have it, as the bits of a number.

    Args:
        capacity: blocks to remember.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def depths(self, blocks: Sequence[bytes]) -> dict[int, int]:
        """How many blocks from the beginning each replica has; those without any are left out."""
        found: dict[int, int] = {}
        owners = self._owners.get(blocks[0], 0) if blocks else 0
        for depth, block in enumerate(blocks[1:], 1):
            still = owners & self._owners.get(block, 0)
            _set(found, owners & ~still, depth)
            owners = still
            if not owners:
                return found
        _set(found, owners, len(blocks))
        return found

    def add(self, blocks: Sequence[bytes], replica: int) -> None:
        """A replica computes a prompt with these blocks. The first block is used last: without it no other one is of use."""
        bit = 1 << replica
        for block in reversed(blocks):
            self._owners[block] = self._owners.get(block, 0) | bit
            self._owners.move_to_end(block)
        while len(self._owners) > self._capacity:
            self._owners.popitem(last=False)

    def forget(self, replica: int) -> None:
        """A replica is gone, and its cache with it."""
        others = ~(1 << replica)
        self._owners = OrderedDict((block, left) for block, owners in self._owners.items() if (left := owners & others))


def _set(found: dict[int, int], owners: int, depth: int) -> None:
    """Note a depth for all replicas whose bits are set."""
    while owners:
        lowest = owners & -owners
        found[lowest.bit_length() - 1] = depth
        owners ^= lowest

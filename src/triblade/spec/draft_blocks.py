"""Which tokens have keys and values of the draft model: a frontier per request, and what every block holds.

Knows ids and counts only. A drafter is told of neither preemptions nor cache hits, and blocks are published by steps after which
it was never called (the last one of a request). So it trusts nobody: a block is claimed by the hash of all tokens up to its end
when the draft has computed it, or received it from a worker whose draft had, and a request that got its blocks anew keeps the
leading ones whose claim is that of its tokens.

    request  | right: committed tokens that were computed | drafted: computed, then proposed | missing ...
                                                          ^ frontier; accepted tokens move it over `drafted`

Invariant: the KV before a frontier is that of the request's own tokens. A hash collision would only cost acceptance.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from triblade.spec.drafter import DraftState, ReceivedRows


@dataclass(slots=True)
class _Frontier:
    """What is known of one request's draft KV."""

    table: array[int]  # its block table; a preempted request comes back with another object
    digests: list[int]  # of the full blocks among the right tokens
    num_right: int = 0  # leading committed tokens whose KV is right
    drafted: list[int] = field(
        default_factory=list
    )  # tokens behind them whose KV was computed before they were verified


class DraftBlocks:
    """Frontiers and claims over one pool of blocks.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._claims: dict[int, int] = {}  # block -> digest of the tokens up to its end
        self._frontiers: dict[int, _Frontier] = {}  # by number of the request

    @property
    def num_requests(self) -> int:
        return len(self._frontiers)

    @property
    def numbers(self) -> Iterable[int]:
        """Of the requests that are remembered."""
        return self._frontiers.keys()

    @property
    def num_claims(self) -> int:
        return len(self._claims)

    def advance(self, request: DraftState, stop: int) -> int:
        """Leading tokens of the request whose draft KV is right, at most `stop`: the newest is always computed, for its logits."""
        frontier = self._frontiers.get(request.number)
        if frontier is None or frontier.table is not request.block_table:
            frontier = self._frontiers[request.number] = self._found(request, stop)
        known = request.token_ids
        for token in frontier.drafted:
            if frontier.num_right >= stop or token != known[frontier.num_right]:
                break
            frontier.num_right += 1
        frontier.drafted = []
        self._claim(frontier, known)
        return min(frontier.num_right, stop)

    def will_write(self, request: DraftState, start: int, stop: int) -> None:
        """KV of tokens [start, stop) is about to change: nobody may rely on it until `computed`."""
        for index in range(start // self.block_size, -(-stop // self.block_size)):
            self._claims.pop(request.block_table[index], None)

    def computed(self, request: DraftState, stop: int) -> None:
        """The KV of committed tokens [frontier, stop) is there now."""
        frontier = self._frontiers[request.number]
        frontier.num_right = max(frontier.num_right, stop)
        self._claim(frontier, request.token_ids)

    def drafted(self, request: DraftState, token_ids: list[int]) -> None:
        """The KV of proposed tokens behind the frontier is there now."""
        self._frontiers[request.number].drafted = token_ids

    def filled(self, request: DraftState) -> int:
        """Leading tokens of the request whose draft KV is known to be there."""
        frontier = self._frontiers.get(request.number)
        return frontier.num_right if frontier is not None and frontier.table is request.block_table else 0

    def received(self, request: DraftState, rows: ReceivedRows) -> None:
        """Rows came from elsewhere. Behind a gap they are of no use, because a frontier has none: both are computed here."""
        self.will_write(request, rows.start, rows.stop)
        frontier = self._frontiers.get(request.number)
        if frontier is None or frontier.table is not request.block_table:
            frontier = self._frontiers[request.number] = self._found(request, rows.start)
        if frontier.num_right == rows.start < rows.filled:
            frontier.num_right = rows.filled
            self._claim(frontier, request.token_ids)

    def forget(self, request: DraftState) -> None:
        """The request ended; what its blocks hold stays claimed while nobody writes there."""
        self._frontiers.pop(request.number, None)

    def _found(self, request: DraftState, stop: int) -> _Frontier:
        """Where a request stands that has got its blocks since it was last seen."""
        digests: list[int] = []
        for index, block in enumerate(request.block_table[: stop // self.block_size]):
            digest = self._digest(digests, request.token_ids, index)
            if self._claims.get(block) != digest:
                break
            digests.append(digest)
        return _Frontier(request.block_table, digests, len(digests) * self.block_size)

    def _claim(self, frontier: _Frontier, token_ids: Sequence[int]) -> None:
        """Claim the blocks that have become full of right tokens."""
        for index in range(len(frontier.digests), frontier.num_right // self.block_size):
            frontier.digests.append(self._digest(frontier.digests, token_ids, index))
            self._claims[frontier.table[index]] = frontier.digests[-1]

    def _digest(self, before: Sequence[int], token_ids: Sequence[int], index: int) -> int:
        """Hash of all tokens up to the end of a block, from those `before` it."""
        tokens = token_ids[index * self.block_size : (index + 1) * self.block_size]
        return hash((before[-1] if before else 0, *tokens))

"""Who owns which KV block, and which blocks hold a prefix that somebody may want again.

Knows ids, reference counts and tokens; no tensor, no request. Invariants, proved by `check()`: a block is free or referenced,
never both; a cached block is the answer to exactly one prefix; free + used = total.

Life of a block: allocated (private, being filled) -> published (full and computed: others may share it) -> free but still cached
(reference count 0, at the recent end of the free list) -> reassigned (its prefix is forgotten first). A free block that caches
nothing is reassigned before those, the last one freed first: the processor still has it near, and memory of the pool that was
never needed stays untouched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from triblade.errors import MemoryBudgetError

HashFunction = Callable[[bytes, Sequence[int]], bytes]


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Chained hash of a full block: 16 bytes that stand for all tokens up to its end."""
    return blake2b(parent + b"".join(token.to_bytes(4, "little") for token in tokens), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A published block. `uid` names this very publication and is never used again, so a chain of uids is a chain of tokens."""

    block_id: int
    uid: int
    parent_uid: int
    tokens: tuple[int, ...]
    digest: bytes


ROOT = CachedBlock(block_id=-1, uid=0, parent_uid=0, tokens=(), digest=b"")  # the empty prefix, which needs no block


class BlockPool:
    """Blocks 0 .. num_blocks - 1.

    Args:
        num_blocks: size of the pool.
        hash_function: replaced in tests; a hit is verified against the tokens, so even a constant hash is safe.
    """

    def __init__(self, num_blocks: int, hash_function: HashFunction = hash_block) -> None:
        self.num_blocks = num_blocks
        self._hash = hash_function
        self._references = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))  # in the order in which they are taken
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._next_uid = ROOT.uid + 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now; cached ones that nobody references are among them."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, those that cache nothing first, then the least recently used; what they cached is forgotten.

        Raises:
            MemoryBudgetError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise MemoryBudgetError(f"{count} KV blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        taken = [block for block, _ in zip(self._free, range(count), strict=False)]
        for block in taken:
            del self._free[block]
            self._forget(block)
            self._references[block] = 1
        return taken

    def share(self, blocks: Sequence[CachedBlock]) -> list[int]:
        """Reference the blocks of a `match` that is still true."""
        for cached in blocks:
            assert self._by_block.get(cached.block_id) is cached, "a matched block was reassigned before it was shared"
            if self._references[cached.block_id] == 0:
                del self._free[cached.block_id]
            self._references[cached.block_id] += 1
        return [cached.block_id for cached in blocks]

    def retain(self, blocks: Sequence[int]) -> None:
        """Reference blocks that somebody holds already once more."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each; the end of a sequence is evicted before its beginning."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._by_block)

    def publish(self, block: int, tokens: Sequence[int], parent: CachedBlock | None) -> CachedBlock:
        """Make a full, computed block findable; `parent` is the publication of the block before it.

        Returns the publication of this prefix, which is an earlier one if the prefix is cached already.
        """
        parent = parent or ROOT
        digest, found = self._look_up(tokens, parent)
        if found is not None:
            return found
        self._forget(block)  # a block stands for one prefix
        if (stale := self._by_digest.get(digest)) is not None:
            self._forget(stale.block_id)
        cached = CachedBlock(block, self._next_uid, parent.uid, tuple(tokens), digest)
        self._next_uid += 1
        self._by_digest[digest] = self._by_block[block] = cached
        return cached

    def match(self, tokens: Sequence[int], block_size: int, most: int) -> list[CachedBlock]:
        """The longest chain of cached blocks that `tokens` begin with, at most `most` of them."""
        chain: list[CachedBlock] = []
        for start in range(0, most * block_size, block_size):
            _, found = self._look_up(tokens[start : start + block_size], chain[-1] if chain else ROOT)
            if found is None:
                break
            chain.append(found)
        return chain

    def count_free(self, blocks: Sequence[CachedBlock]) -> int:
        """How many of these are free now, so that sharing them takes them from the free list."""
        return sum(self._references[cached.block_id] == 0 for cached in blocks)

    def check(self, owned: Sequence[int] = ()) -> None:
        """Assert the invariants; `owned` lists every reference held outside, with repetitions."""
        expected = [0] * self.num_blocks
        for block in owned:
            expected[block] += 1
        assert self._references == expected, "reference counts do not match the owners"
        free = {block for block, count in enumerate(self._references) if count == 0}
        assert free == set(self._free), "the free list does not match the reference counts"
        assert {c.block_id: c for c in self._by_digest.values()} == self._by_block, "hash table and blocks disagree"

    def _look_up(self, tokens: Sequence[int], parent: CachedBlock) -> tuple[bytes, CachedBlock | None]:
        """The digest of the prefix that ends with these tokens, and its publication, compared token by token."""
        digest = self._hash(parent.digest, tokens)
        found = self._by_digest.get(digest)
        if found is None or found.parent_uid != parent.uid or found.tokens != tuple(tokens):
            return digest, None
        return digest, found

    def _forget(self, block: int) -> None:
        cached = self._by_block.pop(block, None)
        if cached is not None:
            del self._by_digest[cached.digest]

"""Block ownership and the prefix cache, without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triblade.engine.block_pool import BlockPool, hash_block
from triblade.errors import MemoryBudgetError


def test_blocks_that_cache_nothing_are_taken_first_and_the_last_one_freed_before_the_others() -> None:
    pool = BlockPool(6)
    older, cached, newer = pool.allocate(1), pool.allocate(1), pool.allocate(2)
    pool.publish(cached[0], [1], None)
    for blocks in (older, cached, newer):
        pool.release(blocks)
    assert pool.allocate(5) == [*newer, *older, 4, 5]
    assert pool.match([1], 1, most=1), "what is cached stays while there is anything else"


def test_cached_blocks_are_taken_least_recently_used_first_and_the_end_of_a_sequence_before_its_beginning() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for number, blocks in enumerate((first, second)):
        parent = pool.publish(blocks[0], [number], None)
        pool.publish(blocks[1], [number], parent)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [*reversed(second), *reversed(first)]


def test_too_many_blocks_take_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(MemoryBudgetError, match="3 KV blocks asked for, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_published_block_is_found_and_shared() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    parent = pool.publish(blocks[0], [1, 2], None)
    pool.publish(blocks[1], [3, 4], parent)
    found = pool.match([1, 2, 3, 4, 5], 2, most=2)
    assert [cached.block_id for cached in found] == blocks
    assert pool.share(found) == blocks
    pool.check(blocks * 2)


def test_reassigned_block_is_forgotten() -> None:  # E03
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, [1, 2], None)
    pool.release([block])
    assert pool.match([1, 2], 2, most=1)
    pool.allocate(1)
    assert pool.match([1, 2], 2, most=1) == []
    pool.check([block])


def test_sharing_a_block_that_was_reassigned_after_the_match_is_refused() -> None:  # E19
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, [1, 2], None)
    pool.release([block])
    matched = pool.match([1, 2], 2, most=1)
    pool.allocate(1)  # an eviction between the look-up and the use
    with pytest.raises(AssertionError, match="reassigned"):
        pool.share(matched)


def test_same_tokens_under_another_prefix_do_not_match() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    parent = pool.publish(blocks[0], [1, 2], None)
    pool.publish(blocks[1], [3, 4], parent)
    assert pool.match([3, 4], 2, most=1) == []
    assert len(pool.match([1, 2, 9, 9], 2, most=2)) == 1


def test_publishing_the_same_prefix_twice_keeps_the_first() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    kept = pool.publish(first, [1, 2], None)
    assert pool.publish(second, [1, 2], None) is kept
    pool.check([first, second])


def test_a_block_stands_for_one_prefix() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, [1, 2], None)
    pool.publish(block, [3, 4], None)
    assert pool.match([1, 2], 2, most=1) == []
    assert len(pool.match([3, 4], 2, most=1)) == 1
    pool.check([block])


def test_constant_hash_never_confuses_prefixes() -> None:  # E01
    pool = BlockPool(4, hash_function=lambda parent, tokens: b"same")
    a, b, c, _ = pool.allocate(4)
    root_a = pool.publish(a, [1, 2], None)
    pool.publish(b, [7, 8], root_a)
    assert pool.match([1, 2, 7, 8], 2, most=2) == []  # the collision evicted the parent
    pool.publish(c, [7, 8], None)
    assert [x.block_id for x in pool.match([7, 8], 2, most=1)] == [c]
    pool.check([0, 1, 2, 3])


def test_hash_depends_on_parent_and_tokens() -> None:
    assert len({hash_block(b"", [1]), hash_block(b"x", [1]), hash_block(b"", [2]), hash_block(b"", [1, 0])}) == 4


def test_double_release_is_caught() -> None:  # E11
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


@given(st.lists(st.tuples(st.sampled_from("asrp"), st.integers(0, 5)), max_size=60))
def test_random_churn_keeps_the_invariants(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    owned: list[list[int]] = []
    for action, value in actions:
        if action == "a" and pool.num_free >= value:
            owned.append(pool.allocate(value))
        elif action == "r" and owned:
            pool.release(owned.pop(value % len(owned)))
        elif action == "p" and owned and owned[-1]:
            pool.publish(owned[-1][0], [value, value], None)
        elif action == "s" and (found := pool.match([value, value], 2, most=1)):
            owned.append(pool.share(found))
        pool.check([block for blocks in owned for block in blocks])

"""The block pool: examples with the free order written out, and a naive pool of dictionaries as oracle."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from enginehouse_backends.engine.blocks import ROOT_DIGEST, BlockDigest, BlockPool, Tail, block_digest
from enginehouse_backends.engine.step import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable


def chain(*blocks: tuple[int, ...], root: BlockDigest = ROOT_DIGEST) -> list[BlockDigest]:
    """Return the digests of consecutive full blocks."""
    return list(itertools.accumulate(blocks, block_digest, initial=root))[1:]


def hold(pool: BlockPool, digests: list[BlockDigest]) -> list[BlockId]:
    """Allocate and register one block for each digest."""
    block_ids = pool.allocate(len(digests))
    assert block_ids is not None
    for block_id, digest in zip(block_ids, digests, strict=True):
        pool.register(block_id, digest)
    return block_ids


def test_a_digest_depends_on_tokens_and_on_everything_before_them() -> None:
    """Equal blocks after different parents, or after another root, are different blocks."""
    other_root = block_digest(ROOT_DIGEST, (99,))
    digests = [*chain((1, 2), (3, 4)), *chain((5, 6), (3, 4)), *chain((1, 2), root=other_root), *chain((12,))]

    assert len(set(digests)) == len(digests)
    assert chain((1, 2), (3, 4)) == chain((1, 2), (3, 4))


def test_blank_blocks_go_first_then_cached_ones_longest_unused_first() -> None:
    """A walk through a pool of five blocks with the order of allocation written out."""
    pool = BlockPool(5, 2, enable_reuse=True)
    first, second = hold(pool, chain((1, 1), (2, 2))), hold(pool, chain((3, 3)))
    assert (first, second) == ([0, 1], [2])  # blank: 3 4

    pool.release(second)  # blank: 3 4, cached: 2
    pool.release(first)  # blank: 3 4, cached: 2 1 0 (a prefix outlives what continues it)
    assert pool.num_free_blocks == 5
    assert pool.num_cached_blocks == 3
    assert pool.match_prefix(chain((1, 1), (2, 2), (9, 9))) == [0, 1]

    assert pool.allocate(3) == [3, 4, 2]  # cached: 1 0
    assert pool.match_prefix(chain((3, 3))) == []
    assert pool.allocate(1) == [1]  # cached: 0
    assert pool.match_prefix(chain((1, 1), (2, 2))) == [0]
    pool.audit([[BlockId(i)] for i in (1, 2, 3, 4)])


def test_an_acquired_block_is_not_evicted() -> None:
    """Acquiring a free cached block takes it out of the free ones until the last holder releases it."""
    pool = BlockPool(2, 2, enable_reuse=True)
    digests = chain((1, 1))
    (block_id,) = hold(pool, digests)
    pool.acquire(pool.match_prefix(digests))
    pool.release([block_id])
    assert pool.num_free_among([block_id]) == 0
    assert pool.num_used_blocks == 1
    assert pool.allocate(2) is None

    pool.release([block_id])
    assert pool.num_free_among([block_id]) == 1
    pool.acquire(pool.match_prefix(digests))
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [1]
    pool.audit([[block_id], [BlockId(1)]])


def test_no_room_changes_nothing() -> None:
    """A refused allocation neither takes nor evicts blocks."""
    pool = BlockPool(3, 2, enable_reuse=True)
    digests = chain((1, 1), (2, 2))
    pool.release(hold(pool, digests))

    assert pool.allocate(4) is None
    assert pool.num_free_blocks == 3
    assert pool.match_prefix(digests) == [0, 1]


def test_the_first_block_of_a_digest_stays_the_one() -> None:
    """Two sequences that computed the same block both keep theirs; only the first is found, the other becomes blank."""
    pool = BlockPool(2, 2, enable_reuse=True)
    digests = chain((1, 1))
    first, second = hold(pool, digests), hold(pool, digests)

    assert pool.match_prefix(digests) == first
    pool.release(second)
    assert pool.num_cached_blocks == 1
    assert pool.allocate(1) == second
    pool.audit([first, second])


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool, _: pool.release([BlockId(1)]), "block 1 was released more often"),
        (lambda pool, digest: pool.register(BlockId(0), digest), "block 0 is registered twice"),
        (lambda pool, digest: pool.register(BlockId(1), digest), "block 1 is registered but held by nobody"),
    ],
)
def test_misuse_is_an_assertion(misuse: Callable[[BlockPool, BlockDigest], None], message: str) -> None:
    """Releasing or registering what is not held, or registering twice, is our bug."""
    pool = BlockPool(2, 2, enable_reuse=True)
    digests = chain((1, 1), (2, 2))
    hold(pool, digests[:1])

    with pytest.raises(AssertionError, match=message):
        misuse(pool, digests[1])


def test_the_audit_names_what_differs() -> None:
    """Lost holders, blocks lost or free twice, and a wrong index are each reported with numbers."""
    pool = BlockPool(3, 2, enable_reuse=True)
    (block_id,) = hold(pool, chain((1, 1)))
    pool.audit([[block_id]])

    with pytest.raises(AssertionError, match="block 0 counts 1 references but 0 tables hold it"):
        pool.audit([])
    with pytest.raises(AssertionError, match="names a block twice"):
        pool.audit([[block_id, block_id]])
    lost = pool._blank.pop()
    with pytest.raises(AssertionError, match=r"held 1 \+ free 1 != 3"):
        pool.audit([[block_id]])
    pool._blank += [lost, lost]
    with pytest.raises(AssertionError, match="1 blocks are free twice"):
        pool.audit([[block_id]])
    pool._blank.pop()
    pool._block_ids.clear()
    with pytest.raises(AssertionError, match="1 blocks carry digests but 0 are indexed"):
        pool.audit([[block_id]])


def test_a_tail_is_taken_over_by_whoever_continues_it() -> None:
    """Wholly or in part, by one; not where most of it is something else, and not after it was evicted."""
    pool = BlockPool(2, 4, enable_reuse=True)
    (block_id,) = pool.allocate(1) or ()
    pool.release([block_id], Tail(block_id, ROOT_DIGEST, (1, 2, 3)))

    assert pool.match_tail(ROOT_DIGEST, (1, 2, 3, 4)) == (block_id, 3)
    assert pool.match_tail(ROOT_DIGEST, (1, 2, 9)) == (block_id, 2)
    assert pool.match_tail(ROOT_DIGEST, (1, 9)) is None
    assert pool.match_tail(chain((1, 2, 3, 4))[0], (1, 2, 3)) is None
    pool.acquire([block_id])
    assert pool.match_tail(ROOT_DIGEST, (1, 2, 3)) is None
    pool.audit([[block_id]])
    pool.release([block_id], Tail(block_id, ROOT_DIGEST, (1, 2)))
    both = pool.allocate(2)
    assert both is not None
    assert pool.match_tail(ROOT_DIGEST, (1, 2)) is None
    pool.audit([both])


def test_the_latest_tail_of_a_prefix_is_the_one() -> None:
    """The older one becomes blank."""
    pool = BlockPool(2, 4, enable_reuse=True)
    first, second = pool.allocate(2) or ()
    pool.release([first], Tail(first, ROOT_DIGEST, (1,)))
    pool.release([second], Tail(second, ROOT_DIGEST, (2,)))

    assert pool.match_tail(ROOT_DIGEST, (1,)) is None
    assert pool.match_tail(ROOT_DIGEST, (2,)) == (second, 1)
    pool.audit([])
    assert pool.allocate(1) == [first]


class NaivePool:
    """The same pool by explicit search: every question is answered from the lists of holders and contents."""

    def __init__(self, num_blocks: int) -> None:
        self.holders: dict[BlockId, int] = {BlockId(i): 0 for i in range(num_blocks)}
        self.contents: dict[BlockId, BlockDigest | Tail] = {}
        self.freed_order = [BlockId(i) for i in reversed(range(num_blocks))]  # the most recently freed last

    def match_prefix(self, digests: list[BlockDigest]) -> list[BlockId]:
        """Find each block by looking through all contents."""
        found: list[BlockId] = []
        for digest in digests:
            candidates = [block_id for block_id, content in self.contents.items() if content == digest]
            if not candidates:
                break
            found += candidates
        return found

    def match_tail(self, parent: BlockDigest, token_ids: tuple[int, ...]) -> tuple[BlockId, int] | None:
        """Look through all contents for the tail of this parent."""
        for tail in self.contents.values():
            if isinstance(tail, Tail) and tail.parent == parent:
                common = [a for a, b in itertools.takewhile(lambda p: p[0] == p[1], zip(tail.token_ids, token_ids))]  # noqa: B905 - the shorter decides
                return (tail.block_id, len(common)) if common and len(common) >= len(tail.token_ids) / 2 else None
        return None

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Take the most recently freed blank blocks, then the longest unused cached ones."""
        blank = [block_id for block_id in self.freed_order if block_id not in self.contents]
        cached = [block_id for block_id in self.freed_order if block_id in self.contents]
        chosen = [*reversed(blank), *cached][:num_blocks]
        if len(chosen) < num_blocks:
            return None
        for block_id in chosen:
            self.contents.pop(block_id, None)
            self.acquire([block_id])
        return chosen

    def acquire(self, block_ids: list[BlockId]) -> None:
        """Add a holder."""
        for block_id in block_ids:
            self.holders[block_id] += 1
            if isinstance(self.contents.get(block_id), Tail):
                del self.contents[block_id]
            if block_id in self.freed_order:
                self.freed_order.remove(block_id)

    def release(self, block_ids: list[BlockId], tail: Tail | None) -> None:
        """Drop a holder, last block first; a tail of the same parent is forgotten, and freed just now."""
        if tail is not None:
            for block_id, other in list(self.contents.items()):
                if isinstance(other, Tail) and other.parent == tail.parent:
                    del self.contents[block_id]
                    self.freed_order.remove(block_id)
                    self.freed_order.append(block_id)
            self.contents[tail.block_id] = tail
        for block_id in block_ids[::-1]:
            self.holders[block_id] -= 1
            if self.holders[block_id] == 0:
                self.freed_order.append(block_id)

    def register(self, block_id: BlockId, digest: BlockDigest) -> None:
        """Note the content unless another block has it."""
        if digest not in self.contents.values():
            self.contents[block_id] = digest


@pytest.mark.parametrize("seed", range(100))
def test_the_pool_does_what_the_naive_pool_does(seed: int) -> None:
    """Random lives of block tables: the same ids, matches and counters after each operation, and a clean audit."""
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 16)
    pool, naive = BlockPool(num_blocks, 4, enable_reuse=True), NaivePool(num_blocks)
    tables: list[list[BlockId]] = []
    for _ in range(200):
        digests = chain(*((rng.randrange(2),) for _ in range(rng.randint(1, 6))))
        prefix = pool.match_prefix(digests)
        assert prefix == naive.match_prefix(digests)
        parent = rng.choice([ROOT_DIGEST, *digests])
        wanted = tuple(rng.randrange(2) for _ in range(rng.randrange(4)))
        found = pool.match_tail(parent, wanted)
        assert found == naive.match_tail(parent, wanted)
        if found is not None and rng.random() < 0.3:
            pool.acquire([found[0]])
            naive.acquire([found[0]])
            tables.append([found[0]])
        num_missing = len(digests) - len(prefix)
        if rng.random() < 0.6 and num_missing + pool.num_free_among(prefix) <= pool.num_free_blocks:
            pool.acquire(prefix)
            naive.acquire(prefix)
            fresh = pool.allocate(num_missing)
            assert fresh is not None
            assert fresh == naive.allocate(num_missing)
            for block_id, digest in list(zip(fresh, digests[len(prefix) :], strict=True))[: rng.randint(0, 6)]:
                pool.register(block_id, digest)
                naive.register(block_id, digest)
            tables.append(prefix + fresh)
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            tail = None
            if naive.holders[table[-1]] == 1 and table[-1] not in naive.contents and rng.random() < 0.7:
                tail = Tail(table[-1], parent, tuple(rng.randrange(2) for _ in range(rng.randint(1, 3))))
            pool.release(table, tail)
            naive.release(table, tail)
        pool.audit(tables)
        assert pool.num_free_blocks == len(naive.freed_order)
        assert pool.num_cached_blocks == sum(not isinstance(each, Tail) for each in naive.contents.values())
        assert pool.num_used_blocks == sum(count > 0 for count in naive.holders.values())

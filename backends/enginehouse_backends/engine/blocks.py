"""The pool of KV cache blocks: who holds which, and which prompts can be found in them again.

A full block is known by the digest of its tokens and of everything before them, so equal digests mean equal KV. A
block is always in exactly one of three states::

    held         by one sequence or more (reference count > 0); findable once it is full and registered
    free, cached not held, findable; taken for new content when nothing blank is left, longest unused first
    free, blank  not held, nothing worth finding in it

A sequence's last block is seldom full. When it is freed it is kept as a *tail*, known by the digest of what is before
it and by its own tokens: one per digest, the latest. Whoever continues those tokens takes it over, alone.

``None`` means *no room now*. The pool stores no KV: block ids name rows of the runner's cache tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple, NewType

from enginehouse_backends.engine.step import BlockId

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

BlockDigest = NewType("BlockDigest", bytes)

_DIGEST_BYTES = 16
ROOT_DIGEST = BlockDigest(bytes(_DIGEST_BYTES))
"""The parent of every first block. Prompts whose KV must not mix (a salt, an adapter) start from another root."""


def block_digest(parent: BlockDigest, token_ids: Seq[int]) -> BlockDigest:
    """Return the 128-bit BLAKE2b digest of one full block's tokens after *parent*: no accident makes two equal."""
    content = parent + array("i", token_ids).tobytes()
    return BlockDigest(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest())


class Tail(NamedTuple):
    """A partly filled block: what is before it, and the tokens whose KV it holds."""

    block_id: BlockId
    parent: BlockDigest
    token_ids: tuple[int, ...]


class BlockPool:
    """``num_blocks`` blocks of ``tokens_per_block`` slots, with reference counts and a prefix cache.

    Only :meth:`acquire`, :meth:`allocate`, :meth:`release` and :meth:`register` change anything.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, *, enable_reuse: bool) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.enable_reuse = enable_reuse
        self._num_references = [0] * num_blocks
        self._digests: list[BlockDigest | None] = [None] * num_blocks  # of the registered blocks
        self._block_ids: dict[BlockDigest, BlockId] = {}  # the inverse of _digests
        self._tails: dict[BlockDigest, Tail] = {}  # by parent; all of them free
        self._tail_parents: dict[BlockId, BlockDigest] = {}  # the inverse
        self._blank = [BlockId(index) for index in reversed(range(num_blocks))]  # taken from the end
        self._cached_free: OrderedDict[BlockId, None] = OrderedDict()  # longest unused first

    @property
    def num_free_blocks(self) -> int:
        """Blocks that :meth:`allocate` can hand out now, cached ones included."""
        return len(self._blank) + len(self._cached_free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by at least one sequence."""
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found by prefix, held or free."""
        return len(self._block_ids)

    def match_prefix(self, digests: Iterable[BlockDigest]) -> list[BlockId]:
        """Return the blocks of the longest cached prefix of *digests*; changes nothing, not even their age."""
        block_ids: list[BlockId] = []
        for digest in digests:
            block_id = self._block_ids.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def match_tail(self, parent: BlockDigest, token_ids: Seq[int]) -> tuple[BlockId, int] | None:
        """Return the block that holds how many of the *token_ids* after *parent*; changes nothing.

        None also where most of what it holds is something else: it is worth more to who continues that.
        """
        tail = self._tails.get(parent)
        if tail is None:
            return None
        num_equal = 0
        for held, wanted in zip(tail.token_ids, token_ids, strict=False):
            if held != wanted:
                break
            num_equal += 1
        return (tail.block_id, num_equal) if 2 * num_equal >= len(tail.token_ids) and num_equal else None

    def num_free_among(self, block_ids: Iterable[BlockId]) -> int:
        """Return how many of *block_ids* are free: acquiring them takes that much from :attr:`num_free_blocks`."""
        return sum(not self._num_references[block_id] for block_id in block_ids)

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """Add a holder to each of these cached blocks, as :meth:`match_prefix` and :meth:`match_tail` found them."""
        for block_id in block_ids:
            if block_id in self._tail_parents:
                self._forget_tail(block_id)
            if not self._num_references[block_id]:
                del self._cached_free[block_id]
            self._num_references[block_id] += 1

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Return *num_blocks* blocks with one holder each and no content, or None when fewer are free."""
        if num_blocks > self.num_free_blocks:
            return None
        block_ids = [self._blank.pop() if self._blank else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_references[block_id] = 1
        return block_ids

    def release(self, block_ids: Seq[BlockId], tail: Tail | None = None) -> None:
        """Drop one holder of each block of a sequence, given in the sequence's order; *tail* is its partly filled one.

        They become free last block first, so that a prefix outlives what continues it.
        """
        if tail is not None:
            self._keep_tail(tail)
        for block_id in reversed(block_ids):
            self._num_references[block_id] -= 1
            assert self._num_references[block_id] >= 0, f"block {block_id} was released more often than acquired"
            if not self._num_references[block_id]:
                if self._digests[block_id] is None and block_id not in self._tail_parents:
                    self._blank.append(block_id)
                else:
                    self._cached_free[block_id] = None

    def register(self, block_id: BlockId, digest: BlockDigest) -> None:
        """Make a held block findable now that all its KV is computed; the first block of a digest stays the one."""
        assert self._num_references[block_id], f"block {block_id} is registered but held by nobody"
        assert self._digests[block_id] is None, f"block {block_id} is registered twice"
        if digest not in self._block_ids:
            self._block_ids[digest] = block_id
            self._digests[block_id] = digest

    def _keep_tail(self, tail: Tail) -> None:
        assert self._num_references[tail.block_id] == 1, f"tail {tail.block_id} is not its sequence's own"
        assert self._digests[tail.block_id] is None, f"tail {tail.block_id} is full"
        older = self._tails.get(tail.parent)
        if older is not None:
            self._forget_tail(older.block_id)
            del self._cached_free[older.block_id]
            self._blank.append(older.block_id)
        self._tails[tail.parent] = tail
        self._tail_parents[tail.block_id] = tail.parent

    def _forget_tail(self, block_id: BlockId) -> None:
        del self._tails[self._tail_parents.pop(block_id)]

    def _evict(self) -> BlockId:
        block_id, _ = self._cached_free.popitem(last=False)
        if block_id in self._tail_parents:
            self._forget_tail(block_id)
            return block_id
        digest = self._digests[block_id]
        assert digest is not None, f"block {block_id} is cached without a digest"
        del self._block_ids[digest]
        self._digests[block_id] = None
        return block_id

    def audit(self, live: Iterable[Seq[BlockId]]) -> None:
        """Recompute everything from *live*, the block tables of all holders; raise AssertionError on a difference."""
        references: Counter[BlockId] = Counter()
        for block_ids in live:
            assert len(set(block_ids)) == len(block_ids), f"a block table names a block twice: {block_ids}"
            references.update(block_ids)
        for index, count in enumerate(self._num_references):
            held = references[BlockId(index)]
            assert count == held, f"block {index} counts {count} references but {held} tables hold it"
        free = [*self._blank, *self._cached_free]
        assert len(set(free)) == len(free), f"{len(free) - len(set(free))} blocks are free twice"
        overlap = references.keys() & set(free)
        assert not overlap, f"blocks {sorted(overlap)} are free and held"
        num_held = len(references)
        assert num_held + len(free) == self.num_blocks, (
            f"held {num_held} + free {len(free)} != {self.num_blocks} blocks of the pool"
        )
        registered = {digest: index for index, digest in enumerate(self._digests) if digest is not None}
        assert registered == self._block_ids, (
            f"{len(registered)} blocks carry digests but {len(self._block_ids)} are indexed, or they differ"
        )
        tails = {tail.block_id: parent for parent, tail in self._tails.items()}
        assert tails == self._tail_parents, (
            f"{len(tails)} tails, but {len(self._tail_parents)} blocks are said to be one"
        )
        for block_id in self._blank:
            assert block_id not in tails, f"blank block {block_id} is a tail"
            assert self._digests[block_id] is None, f"blank block {block_id} is still registered"
        for block_id in self._cached_free:
            is_findable = (self._digests[block_id] is not None) != (block_id in tails)
            assert is_findable, f"free block {block_id} is called cached but is not registered"
        assert tails.keys() <= self._cached_free.keys(), "a tail is held by a sequence"

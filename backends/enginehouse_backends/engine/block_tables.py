"""The block tables of sequences: filling them from the prefix cache and the pool, and giving them back.

The only code that knows how tokens map to blocks: position *p* of a sequence lies in slot ``p % tokens_per_block`` of
``block_ids[p // tokens_per_block]``. When to take blocks, and from whom, is the scheduler's to decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from enginehouse_backends.engine.blocks import ROOT_DIGEST, Tail

if TYPE_CHECKING:
    from collections.abc import Iterable

    from enginehouse_backends.engine.blocks import BlockPool
    from enginehouse_backends.engine.sequence import Sequence
    from enginehouse_backends.engine.step import BlockId


class Prefix(NamedTuple):
    """Cached blocks that a sequence can start from, the last perhaps in part, and how many of its tokens they hold."""

    block_ids: list[BlockId]
    num_tokens: int


class BlockTables:
    """Reads and changes ``block_ids`` of sequences over one pool; nothing else may."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._tokens_per_block = pool.tokens_per_block

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold *num_tokens* tokens."""
        return -(-num_tokens // self._tokens_per_block)

    def num_blocks_to_come(self, *sequences: Sequence) -> int:
        """Return how many blocks these sequences may still need, all told, beyond those they hold."""
        return sum(self.num_blocks_for(each.max_computed_tokens) - len(each.block_ids) for each in sequences)

    def num_slots_within_reach(self, sequence: Sequence) -> int:
        """Return how many uncomputed tokens its own and all free blocks could store."""
        num_blocks = len(sequence.block_ids) + self.pool.num_free_blocks
        return num_blocks * self._tokens_per_block - sequence.num_computed_tokens

    def num_shareable_tokens(self, num_tokens: int) -> int:
        """Return how many of *num_tokens* could come from the cache: full blocks, with one token left to compute."""
        return (num_tokens - 1) // self._tokens_per_block * self._tokens_per_block

    def match_prefix(self, sequence: Sequence) -> Prefix:
        """Return what it can start from: nothing for context logits, which need every token computed."""
        if not self.pool.enable_reuse or sequence.request.return_context_logits:
            return Prefix([], 0)
        num_blocks = self.num_shareable_tokens(sequence.num_tokens) // self._tokens_per_block
        digests = sequence.block_digests(num_blocks, self._tokens_per_block)
        block_ids = self.pool.match_prefix(digests)
        num_tokens = len(block_ids) * self._tokens_per_block
        parent = digests[len(block_ids) - 1] if block_ids else ROOT_DIGEST
        end = min(num_tokens + self._tokens_per_block, sequence.num_tokens) - 1  # one token is left to compute
        tail = self.pool.match_tail(parent, sequence.token_ids[num_tokens:end])
        return Prefix(block_ids, num_tokens) if tail is None else Prefix([*block_ids, tail[0]], num_tokens + tail[1])

    def start(self, sequence: Sequence, prefix: Prefix) -> None:
        """Begin its table with the blocks that :meth:`match_prefix` found, whose tokens need no computing."""
        self.pool.acquire(prefix.block_ids)
        sequence.block_ids = prefix.block_ids
        num_tokens = prefix.num_tokens
        sequence.num_computed_tokens = num_tokens
        sequence.num_cached_prompt_tokens += max(0, num_tokens - sequence.peak_computed_tokens)
        sequence.peak_computed_tokens = max(num_tokens, sequence.peak_computed_tokens)
        sequence.num_reused_blocks += len(prefix.block_ids)

    def take_slots(self, sequence: Sequence, num_tokens: int) -> None:
        """Make its table cover *num_tokens* after the computed ones; the caller has seen that they fit."""
        end = sequence.num_computed_tokens + num_tokens
        assert end <= sequence.max_computed_tokens, f"{end} slots wanted of at most {sequence.max_computed_tokens}"
        num_missing = self.num_blocks_for(end) - len(sequence.block_ids)
        if num_missing > 0:
            block_ids = self.pool.allocate(num_missing)
            assert block_ids is not None, f"{num_missing} blocks wanted, {self.pool.num_free_blocks} free"
            sequence.block_ids += block_ids
            sequence.num_new_blocks += num_missing

    def register_full_blocks(self, sequence: Sequence, num_computed_before: int) -> None:
        """Make the blocks findable that became full since *num_computed_before* tokens were computed."""
        first = num_computed_before // self._tokens_per_block
        num_full = sequence.num_computed_tokens // self._tokens_per_block
        if num_full == first or not self.pool.enable_reuse:
            return
        digests = sequence.block_digests(num_full, self._tokens_per_block)
        for index in range(first, num_full):
            self.pool.register(sequence.block_ids[index], digests[index])

    def release(self, sequence: Sequence) -> None:
        """Give all its blocks back; those it shared or registered, and the last with KV in it, stay findable."""
        tail = self._tail_of(sequence)
        block_ids, sequence.block_ids = sequence.block_ids, []
        self.pool.release(block_ids, tail)

    def _tail_of(self, sequence: Sequence) -> Tail | None:
        num_full, num_in_tail = divmod(sequence.num_computed_tokens, self._tokens_per_block)
        if not num_in_tail or not self.pool.enable_reuse:
            return None
        digests = sequence.block_digests(num_full, self._tokens_per_block)
        tokens = sequence.token_ids[sequence.num_computed_tokens - num_in_tail : sequence.num_computed_tokens]
        return Tail(sequence.block_ids[num_full], digests[-1] if digests else ROOT_DIGEST, tuple(tokens))

    def audit(self, sequences: Iterable[Sequence]) -> None:
        """Recompute the pool from the tables of all holders; raise AssertionError with what differs."""
        tables = []
        for sequence in sequences:
            held, computed = len(sequence.block_ids), sequence.num_computed_tokens
            assert held >= self.num_blocks_for(computed), f"{computed} tokens are said to lie in {held} blocks"
            assert self.num_blocks_to_come(sequence) >= 0, f"sequence {sequence.sequence_id} holds {held} blocks"
            tables.append(sequence.block_ids)
        self.pool.audit(tables)

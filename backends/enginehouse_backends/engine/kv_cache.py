"""The memory of the KV cache: how large a block is, how many fit, where they lie, and copying them.

The runtime decides how a block looks (its type, and scales inside it where values are quantized); here a block of one
layer is so many bytes.
"""

from __future__ import annotations

import mmap
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import openvino as ov

from enginehouse_backends.engine.paged_graph import CACHE_PREFIXES
from enginehouse_contract.errors import ConfigurationError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from enginehouse_backends.engine.step import BlockId

_SLOT_AXIS = 1  # of a value block: [heads, slots, bytes or values of a slot]


class KvCacheLayout:
    """The caches a compiled model wants as inputs: one of keys and one of values for each layer."""

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self.ports = [port for port in compiled.inputs if port.get_any_name().startswith(CACHE_PREFIXES)]
        self.tokens_per_block = block_shape(compiled.input("value_cache.0"))[_SLOT_AXIS]
        self.bytes_per_block = sum(bytes_per_block(port) for port in self.ports)

    def num_blocks_within(self, memory_bytes: int, max_tokens: int | None) -> int:
        """Return how many blocks *memory_bytes* hold, at most *max_tokens* slots.

        Raises :class:`ConfigurationError` when that is none.
        """
        num_blocks = memory_bytes // self.bytes_per_block
        if num_blocks < 1:
            msg = refusal(
                "kv_cache_memory_budget_bytes",
                f"times `kv_cache_free_gpu_mem_fraction` does not hold one block of {self.tokens_per_block} tokens",
                limit=f"at least {self.bytes_per_block} bytes",
                given=f"{memory_bytes} bytes",
            )
            raise ConfigurationError(msg)
        if max_tokens is None:
            return num_blocks
        if max_tokens < self.tokens_per_block:
            msg = refusal(
                "max_tokens_in_paged_kv_cache",
                "does not fill one KV block",
                limit=f"at least {self.tokens_per_block}",
                given=max_tokens,
            )
            raise ConfigurationError(msg)
        return min(num_blocks, max_tokens // self.tokens_per_block)


class KvCache:
    """*num_blocks* blocks of every layer, given to *request* once; the host gives memory as blocks are first written.

    Raises :class:`ConfigurationError` when the address space holds no such cache.
    """

    def __init__(self, request: ov.InferRequest, layout: KvCacheLayout, num_blocks: int) -> None:
        self._caches: list[NDArray[np.uint8]] = []  # each [blocks, bytes of a block]
        for port in layout.ports:
            shape = (num_blocks, bytes_per_block(port))
            try:
                cache = np.frombuffer(mmap.mmap(-1, prod(shape)), np.uint8).reshape(shape)
            except OSError as error:
                msg = refusal(
                    "kv_cache_memory_budget_bytes",
                    "cannot be had from this host",
                    given=f"{num_blocks * layout.bytes_per_block} bytes",
                    hint=f"Lower it ({error.strerror}).",
                )
                raise ConfigurationError(msg) from error
            request.set_tensor(port, ov.Tensor(cache, (num_blocks, *block_shape(port)), port.get_element_type()))
            self._caches.append(cache)

    def copy_blocks(self, block_copies: Iterable[tuple[BlockId, BlockId]]) -> None:
        """Copy (source, destination) pairs in every layer; no source is a destination."""
        sources, destinations = np.array(block_copies, np.intp).T
        for cache in self._caches:
            cache[destinations] = cache[sources]


def block_shape(port: ov.ConstOutput) -> tuple[int, ...]:
    """Return the shape of one block of a cache input, in values of its type."""
    return tuple(dimension.get_length() for dimension in list(port.get_partial_shape())[1:])


def bytes_per_block(port: ov.ConstOutput) -> int:
    """Return the size of one block of a cache input."""
    return prod(block_shape(port)) * int(port.get_element_type().size)

"""GGML's quantized blocks taken apart, so that they can be kept as they are (``block_q4_0`` etc., ggml-common.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from gguf.quants import Q4_K

from enginehouse_builders.cpu.source import QuantizedMatrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]  # [rows, blocks, bytes per block]


def split_blocks(raw: NDArray[np.uint8], kind: str) -> QuantizedMatrix:
    """Return the matrix whose rows of blocks of *kind* (one of :data:`KNOWN_BLOCKS`) are *raw*, [rows, bytes]."""
    num_bytes, split = _SPLITTERS[kind]
    return split(raw.reshape(raw.shape[0], -1, num_bytes))


def _q4_0(blocks: Bytes) -> QuantizedMatrix:
    scales = _halves(blocks[..., 0:2])
    return QuantizedMatrix(4, _nibbles(blocks[..., 2:], 16), scales, scales * -8)


def _q4_1(blocks: Bytes) -> QuantizedMatrix:
    return QuantizedMatrix(4, _nibbles(blocks[..., 4:], 16), _halves(blocks[..., 0:2]), _halves(blocks[..., 2:4]))


def _q5_0(blocks: Bytes) -> QuantizedMatrix:
    quants = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return QuantizedMatrix(8, quants.astype(np.int8) - np.int8(16), _halves(blocks[..., 0:2]))


def _q5_1(blocks: Bytes) -> QuantizedMatrix:
    quants = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return QuantizedMatrix(8, quants, _halves(blocks[..., 0:2]), _halves(blocks[..., 2:4]))


def _q8_0(blocks: Bytes) -> QuantizedMatrix:
    return QuantizedMatrix(8, np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _halves(blocks[..., 0:2]))


def _q4_k(blocks: Bytes) -> QuantizedMatrix:
    scales, offsets = _k_scales(blocks)
    return QuantizedMatrix(4, _in_blocks(_nibbles(blocks[..., 16:], 32), 32), scales, offsets)


def _q5_k(blocks: Bytes) -> QuantizedMatrix:
    scales, offsets = _k_scales(blocks)
    bit = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [rows, blocks, 8, 32]
    quants = _in_blocks(_nibbles(blocks[..., 48:], 32), 32) | _in_blocks(bit << 4, 32)
    return QuantizedMatrix(8, quants, scales, offsets)


def _q6_k(blocks: Bytes) -> QuantizedMatrix:
    low = _nibbles(blocks[..., :128], 64)
    halves = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = (halves >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    quants = _in_blocks(low, 16) | _in_blocks(high << 4, 16)
    scales = _halves(blocks[..., 208:210]) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return QuantizedMatrix(8, quants.astype(np.int8) - np.int8(32), _in_blocks(scales, 1))


_SPLITTERS: Final[dict[str, tuple[int, Callable[[Any], QuantizedMatrix]]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
KNOWN_BLOCKS: Final = tuple(_SPLITTERS)
"""GGML types that can be kept as in the file."""


def _halves(raw: Bytes) -> NDArray[np.float32]:
    """Two bytes of each block as a float16, [rows, blocks, 1]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes, run: int) -> Bytes:
    """Four-bit values: of each run of bytes the lower halves first, then the upper ones."""
    runs = raw.reshape(*raw.shape[:2], -1, 1, run)
    shifts = np.array([0, 4], np.uint8)[:, None]
    return ((runs >> shifts) & np.uint8(0x0F)).astype(np.uint8).reshape(*raw.shape[:2], -1)


def _fifth_bits(raw: Bytes) -> Bytes:
    """Bit 4 of 32 values, from 4 bytes."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little") * np.uint8(16)


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and offsets of the eight groups of 32 in a super-block, [rows, groups, 1]."""
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    shape = (*blocks.shape[:2], 8)
    scales, minima = scales.reshape(shape).astype(np.float32), minima.reshape(shape).astype(np.float32)
    return _in_blocks(_halves(blocks[..., 0:2]) * scales, 1), _in_blocks(_halves(blocks[..., 2:4]) * -minima, 1)


def _in_blocks(values: NDArray[Any], block: int) -> NDArray[Any]:
    return values.reshape(values.shape[0], -1, block)

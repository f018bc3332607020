"""What a build is made from: an architecture, its weights by canonical name, and tokenizer files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from enginehouse_builders.cpu.architecture import Architecture

FloatType = Literal["f32", "f16", "bf16"]

INT4_GROUP_SIZE: Final = 32
"""Inputs that share a scale, unless a build asks for another number."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix in blocks along its rows: value = scale * quant + offset, each scale and offset for one block.

    ``quants`` is [rows, blocks, values per block], int8 or uint8 (0 to 15 where ``num_bits`` is 4); ``scales`` and
    ``offsets`` are float32 [rows, blocks, 1]; no offsets means none.
    """

    num_bits: Literal[4, 8]
    quants: NDArray[Any]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        num_rows, num_blocks, block = self.quants.shape
        return num_rows, num_blocks * block


class ModelSource(Protocol):
    """A model to build from. Weights have Hugging Face's names and are read when asked for, one at a time."""

    kind: str
    name: str
    sha256: str
    why_not_by_hand: str | None  # why the hand-built graph does not do for it, if it does not

    @property
    def architecture(self) -> Architecture:
        """The architecture."""
        ...

    def weight_names(self) -> set[str]:
        """Return the names of all weights that a graph must use."""
        ...

    def weight(self, name: str) -> NDArray[np.float32]:
        """Return one weight in float32; matrices are [outputs, inputs]."""
        ...

    def stored_weight(self, name: str) -> QuantizedMatrix | FloatType:
        """Return a matrix as it is quantized in the source, or else the type of its numbers."""
        ...

    def tokenizer_files(self) -> dict[str, str]:
        """Return the texts of ``tokenizer.json`` and ``tokenizer_config.json``."""
        ...

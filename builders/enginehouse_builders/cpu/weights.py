"""Weights as OpenVINO constants that the CPU plugin keeps compressed.

Compressed constants are decompressed inside the matrix product: ``convert -> (subtract zero point) -> multiply scale ->
(reshape) -> convert`` is the chain that the plugin recognizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import openvino as ov
from openvino import opset16 as ops

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from enginehouse_builders.cpu.source import QuantizedMatrix

WeightPrecision = Literal["as_in_file", "int8", "int4", "f16", "f32"]
WEIGHT_PRECISIONS: Final = ("as_in_file", "int8", "int4", "f16", "f32")

INT4_GROUP_SIZE: Final = 64
_INT8_MAX: Final = 127
_INT4_MIN: Final = -8


def encode(weight: NDArray[np.float32], precision: WeightPrecision) -> ov.Node:
    """Return a node that gives *weight* [outputs, inputs] in float32, stored in *precision*.

    int8 is symmetric with a scale per output. int4 is symmetric with a scale per group of 64 inputs (all inputs where
    64 does not divide them), whose sign lets the whole range of -8 to 7 be used.
    """
    if precision == "f32":
        return ops.constant(weight)
    if precision in {"f16", "as_in_file"}:
        return _decompressed(ops.convert(ops.constant(weight.astype(np.float16)), "f32"))
    if precision == "int8":
        scales = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-12) / _INT8_MAX
        quants = np.round(weight / scales).astype(np.int8)
        return _dequantize(ops.constant(quants), scales.astype(np.float16), None, None)
    num_outputs, num_inputs = weight.shape
    group = INT4_GROUP_SIZE if num_inputs % INT4_GROUP_SIZE == 0 else num_inputs
    grouped = weight.reshape(num_outputs, num_inputs // group, group)
    low, high = grouped.min(axis=2, keepdims=True), grouped.max(axis=2, keepdims=True)
    scales = np.where(-low >= high, low / _INT4_MIN, high / _INT4_MIN)
    scales = np.where(scales == 0.0, 1e-12, scales)
    quants = np.clip(np.round(grouped / scales), _INT4_MIN, -_INT4_MIN - 1).astype(np.int8)
    constant = _packed_constant(quants, ov.Type.i4)
    return _dequantize(constant, scales.astype(np.float16), None, weight.shape)


def encode_quantized(matrix: QuantizedMatrix) -> ov.Node:
    """Return a node that gives a matrix exactly as its file quantizes it.

    value = scale * quant + offset is stored as scale * (quant - zero point), zero point = -offset / scale in float16.
    """
    num_rows, num_blocks, block = matrix.quants.shape
    shape = (num_rows, num_blocks * block)
    if matrix.num_bits == 8:  # noqa: PLR2004 - the other width
        return _dequantize(ops.constant(matrix.quants), matrix.scales, None, shape)
    constant = _packed_constant(matrix.quants, ov.Type.u4)
    if matrix.offsets is None:
        return _dequantize(constant, matrix.scales, None, shape)
    scales = matrix.scales.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero_points = np.where(scales != 0.0, -matrix.offsets.astype(np.float32) / scales, 0.0)
    return _dequantize(constant, matrix.scales, zero_points.astype(np.float16), shape)


def _packed_constant(quants: NDArray[Any], element_type: ov.Type) -> ov.Node:
    """Two values a byte, the first in the lower half."""
    nibbles = quants.reshape(-1).view(np.uint8) & 0x0F
    packed = nibbles[0::2] | (nibbles[1::2] << 4)
    tensor = ov.Tensor(element_type, ov.Shape(list(quants.shape)))
    tensor.data.reshape(-1).view(np.uint8)[:] = packed
    return ov.op.Constant(tensor)


def _dequantize(
    quants: ov.Node, scales: NDArray[np.float16], zero_points: NDArray[np.float16] | None, shape: tuple[int, ...] | None
) -> ov.Node:
    node = ops.convert(quants, "f16")
    if zero_points is not None:
        node = ops.subtract(node, ops.constant(zero_points))
    node = ops.multiply(node, ops.constant(scales))
    if shape is not None:
        node = ops.reshape(node, ops.constant(np.array(shape, np.int64)), special_zero=False)
    return _decompressed(ops.convert(node, "f32"))


def _decompressed(node: ov.Node) -> ov.Node:
    """Mark a conversion as decompression, so that it is not folded into a float32 constant."""
    node.get_rt_info()["decompression"] = True
    return node

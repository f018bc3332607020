"""Weights as OpenVINO constants that the CPU plugin keeps compressed.

Quantized constants are decompressed inside the matrix product: ``convert -> (subtract zero point) -> multiply scale ->
(reshape)`` is the chain that the plugin recognizes. Scales and zero points are float32: a Q4_1 block is then exact, and
the plugin widens them anyway.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import openvino as ov
from openvino import opset16 as ops
from openvino._offline_transformations import compress_model_transformation

from enginehouse_builders.cpu.source import INT4_GROUP_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from enginehouse_builders.cpu.source import FloatType, QuantizedMatrix

WeightPrecision = Literal["as_in_file", "int8", "int4", "f16", "f32"]
WEIGHT_PRECISIONS: Final = ("as_in_file", "int8", "int4", "f16", "f32")

_INT8_MAX: Final = 127
_INT4_MAX: Final = 15
_MAX_F16: Final = 65504.0
_DECOMPRESSION: Final = "decompression_0"


def encode_float(weight: NDArray[np.float32], float_type: FloatType) -> ov.Node:
    """Return a node that gives *weight* in float32, stored in *float_type*.

    bfloat16 must be what the weight came from: it takes float32's upper half.
    """
    if float_type == "f32":
        return ops.constant(weight)
    if float_type == "f16":
        return _widened(ops.constant(np.clip(weight, -_MAX_F16, _MAX_F16).astype(np.float16)))
    return _widened(_constant(ov.Type.bf16, weight.shape, (weight.view(np.uint32) >> 16).astype(np.uint16)))


def encode_int8(weight: NDArray[np.float32]) -> ov.Node:
    """Return a node that gives *weight* [outputs, inputs] in float32, stored in 8 bits with a scale per output."""
    scales = _nonzero(np.abs(weight).max(axis=1, keepdims=True) / _INT8_MAX)
    return _dequantized(ops.constant(np.round(weight / scales).astype(np.int8)), scales, None, None)


def encode_int4(weight: NDArray[np.float32], group_size: int = INT4_GROUP_SIZE) -> ov.Node:
    """Return a node that gives *weight* [outputs, inputs] in float32, stored in 4 bits with scale and offset per group.

    A group is *group_size* inputs, or all of them where it does not divide them; its 16 levels lie evenly from its
    least to its greatest value, as in GGUF's Q4_1. On small models that is worth ten times the divergence of levels
    around zero: SmolLM2-135M's mean KL from float32 is 0.41 nats with those in groups of 64.
    """
    num_outputs, num_inputs = weight.shape
    group = group_size if num_inputs % group_size == 0 else num_inputs
    grouped = weight.reshape(num_outputs, num_inputs // group, group)
    low, high = grouped.min(axis=2, keepdims=True), grouped.max(axis=2, keepdims=True)
    is_flat = high == low  # stored as (0 - -1) * low
    scales = np.where(is_flat, low, (high - low) / _INT4_MAX).astype(np.float32)
    divisors = np.where(is_flat, np.float32(1), scales)
    quants = np.where(is_flat, 0, np.clip(np.round((grouped - low) / divisors), 0, _INT4_MAX)).astype(np.uint8)
    zero_points = np.where(is_flat, np.float32(-1), -low / divisors)
    return _dequantized(_packed(ov.Type.u4, quants), scales, zero_points, weight.shape)


def encode_quantized(matrix: QuantizedMatrix) -> ov.Node:
    """Return a node that gives a matrix exactly as its file quantizes it.

    value = scale * quant + offset is stored as scale * (quant - zero point), zero point = -offset / scale.
    """
    quants, scales, zero_points = matrix.quants, matrix.scales, None
    if matrix.offsets is not None:
        is_flat = scales == 0.0  # every value of such a block is its offset: store (0 - -1) * offset
        quants = np.where(is_flat, quants.dtype.type(0), quants)
        zero_points = np.where(is_flat, np.float32(-1), -matrix.offsets / np.where(is_flat, np.float32(1), scales))
        scales = np.where(is_flat, matrix.offsets, scales)
    is_packed = matrix.num_bits == 4  # noqa: PLR2004 - two values a byte
    constant = _packed(ov.Type.u4, quants) if is_packed else ops.constant(np.ascontiguousarray(quants))
    return _dequantized(constant, scales, zero_points, matrix.shape)


def _nonzero(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(scales == 0.0, np.float32(1), scales).astype(np.float32)


def _packed(element_type: ov.Type, quants: NDArray[Any]) -> ov.Node:
    """Two values a byte, the first in the lower half; a last one without a partner has an empty upper half."""
    nibbles = quants.reshape(-1).view(np.uint8) & 0x0F
    if nibbles.size % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    return _constant(element_type, quants.shape, nibbles[0::2] | (nibbles[1::2] << 4))


def _constant(element_type: ov.Type, shape: tuple[int, ...], raw: NDArray[Any]) -> ov.Node:
    """Return a constant of a type that numpy does not have, from its bytes."""
    tensor = ov.Tensor(element_type, ov.Shape(list(shape)))
    tensor.data.reshape(-1).view(np.uint8)[:] = raw.reshape(-1).view(np.uint8)
    return ov.op.Constant(tensor)


def _dequantized(
    quants: ov.Node, scales: NDArray[np.float32], zero_points: NDArray[np.float32] | None, shape: tuple[int, ...] | None
) -> ov.Node:
    node = ops.convert(quants, "f32")
    if zero_points is not None:
        node = ops.subtract(node, ops.constant(zero_points.astype(np.float32)))
    node = ops.multiply(node, ops.constant(scales.astype(np.float32)))
    return node if shape is None else ops.reshape(node, ops.constant(np.array(shape, np.int64)), special_zero=False)


def _widened(constant: ov.Node) -> ov.Node:
    """Convert to float32 where it is used, rather than once and for all when the model is compiled."""
    node = ops.convert(constant, "f32")
    node.set_rt_info(_decompression_mark(), _DECOMPRESSION)
    return node


@cache
def _decompression_mark() -> Any:
    """Take the mark from a conversion that OpenVINO's own pass made: Python cannot make one."""
    model = ov.Model([ops.result(ops.constant(np.ones((2, 2), np.float32)))], [], "mark")
    compress_model_transformation(model)
    conversion = next(node for node in model.get_ordered_ops() if node.get_type_name() == "Convert")
    return conversion.get_rt_info()[_DECOMPRESSION]

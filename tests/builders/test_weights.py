"""Weights as constants: what they give back, and that the plugin keeps them small."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import openvino as ov
import pytest
from openvino import opset16 as ops

from enginehouse_builders.cpu.gguf_blocks import KNOWN_BLOCKS, split_blocks
from enginehouse_builders.cpu.source import QuantizedMatrix
from enginehouse_builders.cpu.weights import encode_float, encode_int4, encode_int8, encode_quantized

if TYPE_CHECKING:
    from numpy.typing import NDArray

F32 = {"INFERENCE_PRECISION_HINT": "f32"}


def values_of(node: ov.Node) -> NDArray[np.float32]:
    """What a constant expression gives."""
    model = ov.Model([ops.result(node)], [], "weight")
    return np.array(ov.Core().compile_model(model, "CPU", F32)([])[0])


def matrix(seed: int = 0, shape: tuple[int, int] = (48, 128)) -> NDArray[np.float32]:
    """A random matrix with a row of zeros and rows of very different sizes."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=shape) * 10.0 ** rng.integers(-7, 2, (shape[0], 1))
    weight[1] = 0.0
    return weight.astype(np.float32)


def random_blocks(kind: str, num_rows: int, num_blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of random bytes, with float16 numbers that are finite where the type keeps its scales."""
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_rows, num_blocks, num_bytes)).astype(np.uint8)
    scales = rng.normal(size=(num_rows, num_blocks, 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        raw[..., 208:210] = scales[..., :2]
    else:
        num_header_bytes = 4 if kind.endswith("_1") or kind in {"Q4_K", "Q5_K"} else 2
        raw[..., :num_header_bytes] = scales[..., :num_header_bytes]
    return raw.reshape(num_rows, -1)


def test_floats_come_back_as_stored() -> None:
    """float32 and bfloat16 weights come back exactly, float16 rounded once and never infinite."""
    weight = matrix()
    halved = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    large = np.full((2, 2), 1e6, np.float32)
    assert np.array_equal(values_of(encode_float(weight, "f32")), weight)
    assert np.array_equal(values_of(encode_float(halved, "bf16")), halved)
    assert np.array_equal(values_of(encode_float(weight, "f16")), weight.astype(np.float16).astype(np.float32))
    assert np.isfinite(values_of(encode_float(large, "f16"))).all()


def test_int8_is_within_half_a_step() -> None:
    """Each value is off by half of 1/127 of its row's largest, whatever the row's size; zeros stay zeros."""
    weight = matrix()
    error = np.abs(values_of(encode_int8(weight)) - weight)
    assert (error <= np.abs(weight).max(axis=1, keepdims=True) / 127 / 2 * 1.001).all()
    assert not error[1].any()


@pytest.mark.parametrize(("num_inputs", "group"), [(128, 32), (96, 32), (7, 7)])
def test_int4_is_within_half_a_step_of_its_group(num_inputs: int, group: int) -> None:
    """A step is a 15th of the group's range, also where 32 does not divide the inputs; a flat group is exact."""
    weight = matrix(shape=(5, num_inputs))
    weight[2] = np.float32(0.3)
    weight[3] = 0
    error = np.abs(values_of(encode_int4(weight)) - weight).reshape(5, -1, group)
    grouped = weight.reshape(5, -1, group)
    steps = (grouped.max(axis=2, keepdims=True) - grouped.min(axis=2, keepdims=True)) / 15
    assert (error <= steps / 2 * 1.001 + 1e-6).all()
    assert not error[2:4].any()


@pytest.mark.parametrize("kind", KNOWN_BLOCKS)
def test_blocks_are_kept_exactly(kind: str) -> None:
    """Random blocks of every known type give what the `gguf` package dequantizes them to."""
    raw = random_blocks(kind, 6, 3)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    given = values_of(encode_quantized(split_blocks(raw, kind)))
    assert given.shape == expected.shape
    assert np.abs(given - expected).max() <= 1e-5 * np.abs(expected).max()


def test_flat_blocks_give_their_offset() -> None:
    """A block without a scale is its offset throughout, also where its quants are not zero."""
    quants = np.arange(64, dtype=np.uint8).reshape(1, 2, 32) % 16
    scales = np.array([0.0, 0.5], np.float32).reshape(1, 2, 1)
    offsets = np.array([0.25, 0.0], np.float32).reshape(1, 2, 1)
    given = values_of(encode_quantized(QuantizedMatrix(4, quants, scales, offsets)))
    assert np.array_equal(given[0, :32], np.full(32, 0.25, np.float32))
    assert np.array_equal(given[0, 32:], quants[0, 1] * np.float32(0.5))


@pytest.mark.parametrize("kind", ["f16", "bf16", "int8", "int4", "Q4_1", "Q8_0", "Q6_K"])
def test_stays_compressed_in_the_plugin(kind: str) -> None:
    """The compiled product reads the constant in its small type: nothing was widened when the model was compiled."""
    weight = matrix(shape=(256, 512))
    if kind in KNOWN_BLOCKS:
        num_blocks = 512 // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        node = encode_quantized(split_blocks(random_blocks(kind, 256, num_blocks), kind))
    elif kind in {"int8", "int4"}:
        node = encode_int8(weight) if kind == "int8" else encode_int4(weight)
    else:
        node = encode_float(weight, kind)  # type: ignore[arg-type]  # one of the two
    rows = ops.parameter([-1, 512], np.float32)
    model = ov.Model([ops.result(ops.matmul(rows, node, transpose_a=False, transpose_b=True))], [rows], "product")
    compiled = ov.Core().compile_model(model, "CPU", F32)
    expected = {"f16": "f16", "bf16": "bf16", "int8": "i8", "int4": "u4", "Q4_1": "u4", "Q8_0": "i8", "Q6_K": "i8"}[
        kind
    ]
    sizes = {
        node.get_output_element_type(0).get_type_name(): node.get_output_shape(0)
        for node in compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) in {"Const", "Input"}
        and node.get_output_partial_shape(0).is_static
    }
    assert expected in sizes
    assert "f32" not in sizes or int(np.prod(sizes["f32"])) < weight.size

"""Bytes of weights: what a quantization makes of a model's matrices, and how ranks divide them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from enginehouse_builders.spec.model import WeightQuantization

if TYPE_CHECKING:
    from enginehouse_builders.plan.request import MemoryRequest
    from enginehouse_builders.plan.shape import ModelShape

COMPUTE_BYTES: Final = {"f32": 4, "f16": 2, "bf16": 2}


def weights_bytes_per_rank(shape: ModelShape, request: MemoryRequest) -> tuple[int, ...]:
    """Return the bytes of weights of one rank of each pipeline stage.

    Tensor ranks divide the layers and the head; each has the whole embedding. The first stage has the embedding, the
    last one the head (which is the embedding's copy where they are tied and the stages differ).
    """
    tensor, pipeline = request.parallelism.tensor, request.parallelism.pipeline
    matrix_bits, vocab_bits = weight_bits(shape, request)
    layer_bytes = shape.layers_params * matrix_bits / 8 / shape.num_layers / tensor
    vocab_bytes = shape.embedding_params * vocab_bits / 8
    stages = []
    for stage in range(pipeline):
        num_layers = shape.num_layers // pipeline + (stage < shape.num_layers % pipeline)
        num_bytes = num_layers * layer_bytes
        if stage == 0:
            num_bytes += vocab_bytes
        if stage == pipeline - 1 and not (shape.is_tied and pipeline == 1):
            num_bytes += vocab_bytes / tensor
        stages.append(round(num_bytes))
    return tuple(stages)


def weight_bits(shape: ModelShape, request: MemoryRequest) -> tuple[float, float]:
    """Return bits per value, scales included, of the layers' matrices and of embedding and head."""
    plain = 8.0 * COMPUTE_BYTES[request.dtype.value]
    method, group = request.weights, request.group_size
    per_row = 32 / shape.hidden_size
    if method is WeightQuantization.AS_IN_FILE and shape.stored is not None:
        stored = shape.stored
        if request.target == "cpu" and stored.cpu_matrix_bits is not None and stored.cpu_vocab_bits is not None:
            return stored.cpu_matrix_bits, stored.cpu_vocab_bits
        return stored.matrix_bits, stored.vocab_bits
    if request.target == "cpu":  # embedding and head are quantized too, to int8; scales and zero points are f32
        int8, int4 = 8 + per_row, 4 + 2 * 32 / group
        return {
            WeightQuantization.INT8: (int8, int8),
            WeightQuantization.INT4: (int4, int8),
            WeightQuantization.INT4_AWQ: (int4, int8),
            WeightQuantization.INT4_GPTQ: (int4, int8),
        }.get(method, (plain, plain))
    matrix = {  # embedding and head stay in the compute type; scales are f16, for nvfp4 fp8 per 16 values
        WeightQuantization.INT8: 8 + per_row / 2,
        WeightQuantization.INT8_SMOOTHQUANT: 8 + per_row,
        WeightQuantization.INT4: 4 + per_row / 2,
        WeightQuantization.INT4_AWQ: 4 + 16 / group,
        WeightQuantization.INT4_GPTQ: 4 + 32 / group,  # a scale and a zero point
        WeightQuantization.FP8: 8.0,
        WeightQuantization.NVFP4: 4 + 8 / 16,
    }.get(method, plain)
    return matrix, plain

"""The decoder graph of the Llama family, in the stateful form that OpenVINO's tools expect.

Inputs ``input_ids``, ``attention_mask``, ``position_ids`` [batch, length] and ``beam_idx`` [batch]; output ``logits``
[batch, length, vocab]; keys and values are variables. The engine turns this attention with state into paged attention;
OpenVINO GenAI reads the same file. Sources: Touvron et al. 2023 (Llama 2), Su et al. 2021 (RoPE), Qwen 2 and 3 reports.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import openvino as ov
from openvino import opset16 as ops
from openvino.op import util as op_util

from enginehouse_builders.cpu.source import INT4_GROUP_SIZE, QuantizedMatrix
from enginehouse_builders.cpu.weights import encode_float, encode_int4, encode_int8, encode_quantized
from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from enginehouse_builders.cpu.architecture import Architecture
    from enginehouse_builders.cpu.source import ModelSource
    from enginehouse_builders.cpu.weights import WeightPrecision

_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_HIDDEN_SCORE: Final = -65504.0  # finite, so that a row that sees nothing is still made of numbers


def build_decoder(
    source: ModelSource,
    precision: WeightPrecision,
    progress: Callable[[float], None] | None = None,
    *,
    int4_group_size: int = INT4_GROUP_SIZE,
) -> ov.Model:
    """Return the decoder of *source* with weights stored in *precision*; *progress* gets the share of layers done.

    With ``int4``, *int4_group_size* inputs share a scale, and embedding and head are int8: they lose most by 4 bits.

    Raises:
        ModelSourceError: A weight is missing, has another shape than the architecture says, cannot be kept as in the
            file, or is one that this graph has no use for.
    """
    return _DecoderBuilder(source, precision, int4_group_size).build(progress)


class _DecoderBuilder:
    def __init__(self, source: ModelSource, precision: WeightPrecision, int4_group_size: int) -> None:
        self._source = source
        self._arch = source.architecture
        self._precision = precision
        self._int4_group_size = int4_group_size
        self._sinks: list[Any] = []
        self._variables: list[Any] = []
        self._weight_names = source.weight_names()
        self._unused_weight_names = set(self._weight_names)

    def build(self, progress: Callable[[float], None] | None) -> ov.Model:
        arch = self._arch
        self._input_ids = _parameter("input_ids", [-1, -1], ov.Type.i64)
        attention_mask = _parameter("attention_mask", [-1, -1], ov.Type.i64)
        position_ids = _parameter("position_ids", [-1, -1], ov.Type.i64)
        self._beam_idx = _parameter("beam_idx", [-1], ov.Type.i32)
        self._batch = ops.gather(ops.shape_of(self._input_ids), _ints([0]), _ints(0))
        self._cos, self._sin = self._rope(position_ids)
        self._mask = _causal_mask(self._input_ids, attention_mask)
        embedding = self._matrix(_EMBEDDING, arch.vocab_size, arch.hidden_size)
        hidden = ops.gather(embedding, self._input_ids, _ints(0))
        for layer in range(arch.num_layers):
            hidden = self._layer(layer, hidden)
            if progress is not None:
                progress((layer + 1) / arch.num_layers)
        hidden = self._norm(hidden, "model.norm.weight", arch.hidden_size)
        head = embedding if arch.is_tied else self._matrix(_HEAD, arch.vocab_size, arch.hidden_size)
        self._check_all_used()
        logits = ops.result(ops.matmul(hidden, head, transpose_a=False, transpose_b=True))
        logits.output(0).get_tensor().set_names({"logits"})
        parameters = [self._input_ids, attention_mask, position_ids, self._beam_idx]
        model = ov.Model([logits], self._sinks, parameters, self._variables, f"{arch.name}_decoder")
        model.validate_nodes_and_infer_types()
        return model

    def _layer(self, index: int, hidden: ov.Node) -> ov.Node:
        arch, prefix = self._arch, f"model.layers.{index}"
        query_size, kv_size = arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
        normed = self._norm(hidden, f"{prefix}.input_layernorm.weight", arch.hidden_size)
        query, key, value = (
            self._linear(
                normed, f"{prefix}.self_attn.{name}_proj", size, arch.hidden_size, needs_bias=arch.has_qkv_bias
            )
            for name, size in (("q", query_size), ("k", kv_size), ("v", kv_size))
        )
        query, key, value = self._heads(query), self._heads(key), self._heads(value)
        if arch.has_qk_norm:
            query = self._norm(query, f"{prefix}.self_attn.q_norm.weight", arch.head_size)
            key = self._norm(key, f"{prefix}.self_attn.k_norm.weight", arch.head_size)
        query, key = self._rotate(query), self._rotate(key)
        key = self._with_past(key, f"past_key_values.{index}.keypresent.{index}.key")
        value = self._with_past(value, f"past_key_values.{index}.valuepresent.{index}.value")
        scale = ops.constant(np.array(1.0 / math.sqrt(arch.head_size), np.float32))
        attended = ops.scaled_dot_product_attention(
            query, self._repeated(key), self._repeated(value), self._mask, scale, causal=False
        )
        merged = ops.reshape(ops.transpose(attended, _ints([0, 2, 1, 3])), _ints([0, 0, query_size]), special_zero=True)
        hidden = ops.add(hidden, self._linear(merged, f"{prefix}.self_attn.o_proj", arch.hidden_size, query_size))
        normed = self._norm(hidden, f"{prefix}.post_attention_layernorm.weight", arch.hidden_size)
        gate = ops.swish(self._linear(normed, f"{prefix}.mlp.gate_proj", arch.intermediate_size, arch.hidden_size))
        up = self._linear(normed, f"{prefix}.mlp.up_proj", arch.intermediate_size, arch.hidden_size)
        down = self._linear(ops.multiply(gate, up), f"{prefix}.mlp.down_proj", arch.hidden_size, arch.intermediate_size)
        return ops.add(hidden, down)

    def _matrix(self, name: str, num_outputs: int, num_inputs: int) -> ov.Node:
        self._unused_weight_names.discard(name)
        stored = self._source.stored_weight(name) if self._precision == "as_in_file" else None
        if isinstance(stored, QuantizedMatrix):
            num_rows, num_blocks, num_block_values = stored.quants.shape
            _check_shape(name, (num_rows, num_blocks * num_block_values), (num_outputs, num_inputs))
            return encode_quantized(stored)
        weight = self._weight(name, (num_outputs, num_inputs))
        if stored is not None:
            return encode_float(weight, stored)
        if self._precision == "int8" or (self._precision == "int4" and name in {_EMBEDDING, _HEAD}):
            return encode_int8(weight)
        if self._precision == "int4":
            return encode_int4(weight, self._int4_group_size)
        return encode_float(weight, "f32" if self._precision == "f32" else "f16")

    def _weight(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        self._unused_weight_names.discard(name)
        weight = self._source.weight(name)
        _check_shape(name, weight.shape, shape)
        return weight

    def _check_all_used(self) -> None:
        """Refuse a model with weights that this graph has no use for: it would be computed wrongly."""
        unused = sorted(self._unused_weight_names - {_HEAD})
        if unused:
            names = ", ".join(unused[:4]) + (f" and {len(unused) - 4} more" if unused[4:] else "")
            msg = f"{self._source.name} is a variant of `{self._arch.name}` that is not known: it has {names}."
            raise ModelSourceError(msg)

    def _linear(
        self, hidden: ov.Node, name: str, num_outputs: int, num_inputs: int, *, needs_bias: bool = False
    ) -> ov.Node:
        matrix = self._matrix(f"{name}.weight", num_outputs, num_inputs)
        product = ops.matmul(hidden, matrix, transpose_a=False, transpose_b=True)
        product.set_friendly_name(name)
        if not needs_bias and f"{name}.bias" not in self._weight_names:
            return product
        bias = self._weight(f"{name}.bias", (num_outputs,))
        return ops.add(product, ops.constant(bias.reshape(1, 1, -1)))

    def _norm(self, hidden: ov.Node, name: str, size: int) -> ov.Node:
        """Root mean square normalization over the last axis (Zhang and Sennrich 2019)."""
        weight = self._weight(name, (size,))
        rank = hidden.output(0).get_partial_shape().rank.get_length()
        ones = (1,) * (rank - 1)
        square = ops.power(hidden, ops.constant(np.full((*ones, 1), 2.0, np.float32)))
        mean = ops.reduce_mean(square, _ints([-1]), keep_dims=True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.full((*ones, 1), self._arch.rms_norm_eps, np.float32))))
        inverse = ops.divide(ops.constant(np.ones((*ones, 1), np.float32)), root)
        return ops.multiply(ops.multiply(inverse, hidden), ops.constant(weight.reshape(*ones, -1)))

    def _heads(self, projected: ov.Node) -> ov.Node:
        """[batch, length, heads * size] -> [batch, heads, length, size]."""
        split = ops.reshape(projected, _ints([0, 0, -1, self._arch.head_size]), special_zero=True)
        return ops.transpose(split, _ints([0, 2, 1, 3]))

    def _rope(self, position_ids: ov.Node) -> tuple[ov.Node, ov.Node]:
        """Cosines and sines of every position, [batch, 1, length, head size]."""
        positions = ops.convert(ops.unsqueeze(position_ids, _ints(2)), "f32")
        angles = ops.multiply(positions, ops.constant(_rope_frequencies(self._arch).reshape(1, 1, -1)))
        both = ops.concat([angles, angles], axis=-1)
        return ops.unsqueeze(ops.cos(both), _ints(1)), ops.unsqueeze(ops.sin(both), _ints(1))

    def _rotate(self, heads: ov.Node) -> ov.Node:
        half, axis, step = self._arch.head_size // 2, _ints([3]), _ints([1])
        upper = ops.slice(heads, _ints([half]), _ints([np.iinfo(np.int64).max]), step, axis)
        lower = ops.slice(heads, _ints([0]), _ints([half]), step, axis)
        negated = ops.multiply(upper, ops.constant(np.full((1, 1, 1, 1), -1.0, np.float32)))
        turned = ops.concat([negated, lower], axis=-1)
        return ops.add(ops.multiply(heads, self._cos), ops.multiply(turned, self._sin))

    def _with_past(self, heads: ov.Node, variable_id: str) -> ov.Node:
        """Append to a variable and return all it holds, [batch, kv heads, past + length, size]."""
        arch = self._arch
        shape = ov.PartialShape([-1, arch.num_kv_heads, -1, arch.head_size])
        info = op_util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = shape, ov.Type.f32, variable_id
        variable = op_util.Variable(info)
        empty = ops.concat([self._batch, _ints([arch.num_kv_heads]), _ints([0]), _ints([arch.head_size])], axis=0)
        initial = ops.broadcast(ops.constant(np.array(0.0, np.float32)), empty)
        past = ops.gather(ops.read_value(initial, variable), self._beam_idx, _ints(0))
        present = ops.concat([past, heads], axis=2)
        self._variables.append(variable)
        self._sinks.append(ops.assign(present, variable))
        return present

    def _repeated(self, heads: ov.Node) -> ov.Node:
        """Each key or value head once for every query head that shares it."""
        arch = self._arch
        num_shared = arch.num_heads // arch.num_kv_heads
        if num_shared == 1:
            return heads
        target = ops.concat(
            [self._batch, _ints([arch.num_kv_heads]), _ints([num_shared]), _ints([0]), _ints([arch.head_size])], axis=0
        )
        spread = ops.broadcast(ops.unsqueeze(heads, _ints(2)), target, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(spread, _ints([0, arch.num_heads, -1, arch.head_size]), special_zero=True)


def _rope_frequencies(arch: Architecture) -> NDArray[np.float32]:
    """The rotation frequency of each pair of dimensions, [head size / 2]."""
    exponents = np.arange(0, arch.head_size, 2, dtype=np.float64) / arch.head_size
    frequencies = arch.rope_theta**-exponents
    if arch.rope_divisors is not None:
        _check_shape("the rotary scaling", (len(arch.rope_divisors),), frequencies.shape)
        frequencies /= np.array(arch.rope_divisors)
    return frequencies.astype(np.float32)


def _check_shape(name: str, given: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if given != expected:
        raise ModelSourceError(f"{name} has the shape {given}, the architecture says {expected}; the model is damaged.")


def _causal_mask(input_ids: ov.Node, attention_mask: ov.Node) -> ov.Node:
    """What is added to scores so that a token looks neither ahead nor at padding, [batch, 1, length, past + length].

    A token's place among the keys, not its position id, says what is ahead: padding on the left moves them apart.
    """
    num_new = ops.gather(ops.shape_of(input_ids), _ints(1), _ints(0))
    num_all = ops.gather(ops.shape_of(attention_mask), _ints(1), _ints(0))
    keys = ops.range(_ints(0), num_all, _ints(1), output_type="i64")
    queries = ops.range(ops.subtract(num_all, num_new), num_all, _ints(1), output_type="i64")
    not_ahead = ops.less_equal(ops.unsqueeze(keys, _ints([0, 1, 2])), ops.unsqueeze(queries, _ints([0, 1, 3])))
    not_padding = ops.not_equal(ops.unsqueeze(attention_mask, _ints([1, 2])), _ints(0))
    shown, hidden = (ops.constant(np.array(score, np.float32)) for score in (0.0, _HIDDEN_SCORE))
    return ops.select(ops.logical_and(not_ahead, not_padding), shown, hidden)


def _parameter(name: str, shape: list[int], element_type: ov.Type) -> ov.Node:
    parameter = ops.parameter(ov.PartialShape(shape), element_type, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def _ints(values: Any) -> ov.Node:
    return ops.constant(np.array(values, np.int64))

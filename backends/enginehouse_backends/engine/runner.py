"""Computes steps on the CPU: OpenVINO's paged attention over a KV cache that is allocated once.

The runner knows token ids, positions and blocks, nothing of requests. It is not thread-safe: one step at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import openvino as ov

from enginehouse_backends.engine.kv_cache import KvCache, KvCacheLayout
from enginehouse_backends.engine.paged_graph import SAMPLING_OUTPUTS, STEP_INPUTS, read_paged_decoder
from enginehouse_backends.engine.request import SequenceId
from enginehouse_backends.engine.step import BlockId, SequenceSlice
from enginehouse_contract.errors import ConfigurationError, EngineFailureError, refusal
from enginehouse_contract.manifest import MODEL_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from typing_extensions import Self

    from enginehouse_backends.engine.step import StepPlan

ExecutionMode = Literal["accuracy", "performance"]
KV_PRECISIONS: Final = ("u8", "f16", "f32")


class OpenVinoStepLogits:
    """A step's rows as views of the runner's memory, valid until its next :meth:`OpenVinoRunner.run`."""

    def __init__(self, request: ov.InferRequest, num_rows: int) -> None:
        logits, top_values, top_ids, log_sum_exp = (
            request.get_output_tensor(index).data[:num_rows] for index in range(len(SAMPLING_OUTPUTS))
        )
        self._logits: NDArray[np.float32] = logits
        self.top_values: NDArray[np.float32] = top_values
        self.top_ids: NDArray[np.int32] = top_ids
        self.log_sum_exp: NDArray[np.float32] = log_sum_exp

    def full_row(self, row: int) -> NDArray[np.float32]:
        """Return a writable copy of one row, [vocab]."""
        return np.array(self._logits[row])


class OpenVinoRunner:
    """A compiled build with its KV cache; implements :class:`~enginehouse_backends.engine.step.Runner`.

    The runtime's product of a matrix and a single row rounds differently from that with two rows or more, whose rows do
    not depend on each other. So that a sequence gets the same tokens alone as in a batch, single rows are padded in
    ``accuracy`` mode: a token alone in its step is joined by one in a block that no sequence has.
    """

    def __init__(
        self, compiled: ov.CompiledModel, layout: KvCacheLayout, num_blocks: int, *, pad_single_rows: bool
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = layout.tokens_per_block
        self.bytes_per_block = layout.bytes_per_block
        self.vocab_size: int = compiled.output("logits").get_partial_shape()[1].get_length()
        self._request = compiled.create_infer_request()
        self._kv_cache = KvCache(self._request, layout, num_blocks + 1)
        self._pad_single_rows = pad_single_rows
        self._padding = SequenceSlice(SequenceId(-1), (0,), 0, (BlockId(num_blocks),), 0)
        self._inputs = {name: self._allocate_input(compiled.input(name)) for name in STEP_INPUTS}

    @classmethod
    def load(
        cls,
        build_dir: Path,
        *,
        kv_memory_bytes: int,
        kv_precision: str,
        max_kv_tokens: int | None = None,
        num_threads: int | None = None,
        execution_mode: ExecutionMode = "accuracy",
        top_k: int = 64,
    ) -> Self:
        """Compile the build in *build_dir* and allocate as many blocks as *kv_memory_bytes* hold.

        Args:
            build_dir: Folder of the build.
            kv_memory_bytes: Memory of the KV cache.
            kv_precision: One of :data:`KV_PRECISIONS`.
            max_kv_tokens: Slots wanted at most; ``None`` means as many as the memory holds.
            num_threads: Threads that compute; ``None`` leaves it to OpenVINO (all cores).
            execution_mode: ``accuracy`` computes in f32, and a row does not depend on what else its step computes.
                ``performance`` lets OpenVINO take the host's fastest arithmetic (bfloat16, or activations in 8 bits),
                which rounds differently at other batch sizes.
            top_k: Columns of ``top_values`` and ``top_ids``.

        Raises:
            BuildIntegrityError: The model cannot be read or is not a decoder with KV state.
            ConfigurationError: The memory holds no block, or a precision cannot be had.
        """
        if kv_precision not in KV_PRECISIONS:
            raise ConfigurationError(refusal("kv_precision", "is not known", limit=KV_PRECISIONS, given=kv_precision))
        properties: dict[str, object] = {
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": kv_precision,
            "KEY_CACHE_QUANT_MODE": "BY_TOKEN",  # by channel, a slot's value changes when later ones are written
        }
        if execution_mode == "accuracy":  # EXECUTION_MODE_HINT would also make the KV cache f32
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        if execution_mode == "accuracy" or kv_precision == "f32":  # bfloat16 attention reads no f32 cache
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        if num_threads is not None:
            properties["INFERENCE_NUM_THREADS"] = num_threads
        model = read_paged_decoder(build_dir / MODEL_FILE, top_k)
        try:
            compiled = ov.Core().compile_model(model, "CPU", properties)
        except RuntimeError as error:
            msg = f"{build_dir} cannot be compiled with {properties}: {error}"
            raise ConfigurationError(msg) from error
        layout = KvCacheLayout(compiled)
        num_blocks = layout.num_blocks_within(kv_memory_bytes, max_kv_tokens)
        return cls(compiled, layout, num_blocks, pad_single_rows=execution_mode == "accuracy")

    def run(self, plan: StepPlan) -> OpenVinoStepLogits:
        """Copy ``plan.block_copies``, compute the slices, and answer the wanted rows.

        Raises :class:`EngineFailureError` when the runtime fails.
        """
        if plan.block_copies:
            self._kv_cache.copy_blocks(plan.block_copies)
        self._write_inputs(plan)
        try:
            self._request.infer(share_inputs=True, share_outputs=True)
        except RuntimeError as error:
            msg = f"the forward pass of {plan.num_tokens} tokens failed: {error}"
            raise EngineFailureError(msg) from error
        return OpenVinoStepLogits(self._request, plan.num_logit_rows)

    def _write_inputs(self, plan: StepPlan) -> None:
        token_ids: list[int] = []
        positions: list[int] = []
        block_ids: list[int] = []
        logit_rows: list[int] = []
        token_begins, block_begins = [0], [0]
        max_context_len = 0
        slices = plan.slices
        if self._pad_single_rows and plan.num_tokens == 1:
            slices += (self._padding,)
        for piece in slices:
            context_len = piece.num_past_tokens + len(piece.token_ids)
            token_ids += piece.token_ids
            positions += range(piece.num_past_tokens, context_len)
            block_ids += piece.block_ids
            token_begins.append(len(token_ids))
            block_begins.append(len(block_ids))
            logit_rows += range(len(token_ids) - piece.num_logit_rows, len(token_ids))
            max_context_len = max(max_context_len, context_len)
        if self._pad_single_rows and len(logit_rows) == 1:
            logit_rows *= 2
        values = {
            "input_ids": token_ids,
            "position_ids": positions,
            "past_lens": [piece.num_past_tokens for piece in slices],
            "subsequence_begins": token_begins,
            "block_indices": block_ids,
            "block_indices_begins": block_begins,
            "logit_rows": logit_rows,
        }
        for name, numbers in values.items():
            tensor = self._inputs[name]
            tensor.shape = (len(numbers),)
            tensor.data[:] = numbers
        self._inputs["max_context_len"].data[()] = max_context_len

    def _allocate_input(self, port: ov.ConstOutput) -> ov.Tensor:
        """Give the request an input tensor that grows when a step needs more room."""
        tensor = ov.Tensor(port.get_element_type(), [1] * port.get_partial_shape().rank.get_length())
        self._request.set_tensor(port, tensor)
        return tensor

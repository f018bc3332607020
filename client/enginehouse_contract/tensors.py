"""The wire contract: every tensor of the five models, declared once.

The tensors are those of NVIDIA's ``inflight_batcher_llm`` model repository (tensorrtllm_backend v0.19.0, the last
release that carried it there) together with what TensorRT-LLM's own copies added up to 1.2.1: two inputs gained a
second name (``random_seed`` -> ``seed``, ``min_length`` -> ``min_tokens``; both accepted:
:data:`RENAMED_INPUTS`) and token counts became outputs. ``config.pbtxt`` files, documentation, request parsing and the
client are derived from here; nothing else may spell a tensor's type or shape.

Shapes are without the leading batch dimension that Triton adds where ``max_batch_size`` > 0; -1 means "any length".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

DataType = Literal["BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64", "STRING"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output of a model.

    ``reshaped`` is Triton's ``reshape { shape: [] }``: clients send [batch, 1], the backend sees [batch].
    ``ragged`` is ``allow_ragged_batch``: requests of different lengths may be batched without padding.
    """

    name: str
    data_type: DataType
    dims: tuple[int, ...]
    optional: bool = False
    reshaped: bool = False
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step of the ensemble: ``inputs``/``outputs`` map the step's tensor names to the ensemble's names."""

    model: str
    inputs: dict[str, str]
    outputs: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModelContract:
    """What one model accepts and answers, and the ``parameters`` keys its config may carry."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: tuple[str, ...] = ()
    steps: tuple[EnsembleStep, ...] = ()

    def input(self, name: str) -> Tensor:
        """Return the input called *name*; raise :class:`KeyError` when the contract has none."""
        return _find(self.inputs, name)

    def output(self, name: str) -> Tensor:
        """Return the output called *name*; raise :class:`KeyError` when the contract has none."""
        return _find(self.outputs, name)


def _find(tensors: tuple[Tensor, ...], name: str) -> Tensor:
    for tensor in tensors:
        if tensor.name == name:
            return tensor
    raise KeyError(name)


def _t(name: str, data_type: DataType, dims: tuple[int, ...], flags: str = "") -> Tensor:
    """Make one row of a table below; flags: O optional, R reshaped to scalar, G ragged."""
    return Tensor(name, data_type, dims, optional="O" in flags, reshaped="R" in flags, ragged="G" in flags)


RENAMED_INPUTS: Final[dict[str, str]] = {"random_seed": "seed", "min_length": "min_tokens"}
"""Old input name -> new name. A request may use either; both with different values is refused."""

_PREPROCESSING_INPUTS: Final = (
    _t("QUERY", "STRING", (1,)),
    _t("DECODER_QUERY", "STRING", (1,), "O"),
    _t("IMAGE_BYTES", "UINT8", (-1, -1, -1, -1), "O"),
    _t("IMAGE_URL", "STRING", (-1,), "O"),
    _t("VIDEO_BYTES", "UINT8", (-1, -1, -1, -1), "O"),
    _t("REQUEST_OUTPUT_LEN", "INT32", (1,)),
    _t("BAD_WORDS_DICT", "STRING", (-1,), "O"),
    _t("STOP_WORDS_DICT", "STRING", (-1,), "O"),
    _t("EMBEDDING_BIAS_WORDS", "STRING", (-1,), "O"),
    _t("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,), "O"),
    _t("END_ID", "INT32", (1,), "O"),
    _t("PAD_ID", "INT32", (1,), "O"),
    _t("PROMPT_TABLE_EXTRA_ID", "UINT64", (1,), "O"),
    _t("IMAGE_SIZES", "INT64", (-1, 2), "O"),
)

_PREPROCESSING_OUTPUTS: Final = (
    _t("INPUT_ID", "INT32", (-1,)),
    _t("REQUEST_INPUT_LEN", "INT32", (1,)),
    _t("DECODER_INPUT_ID", "INT32", (-1,)),
    _t("REQUEST_DECODER_INPUT_LEN", "INT32", (1,)),
    _t("BAD_WORDS_IDS", "INT32", (2, -1)),
    _t("STOP_WORDS_IDS", "INT32", (2, -1)),
    _t("EMBEDDING_BIAS", "FP32", (-1,)),
    _t("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    _t("OUT_END_ID", "INT32", (1,)),
    _t("OUT_PAD_ID", "INT32", (1,)),
    _t("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,)),
    _t("PIXEL_VALUES", "FP16", (-1, -1, -1, -1)),
    _t("ASPECT_RATIO_IDS", "INT64", (-1,)),
    _t("ASPECT_RATIO_MASK", "INT64", (-1, -1)),
    _t("CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1)),
    _t("IMAGE_SIZES", "INT64", (-1, 2)),
    _t("IS_VIDEO_INPUT", "BOOL", (1,)),
    _t("ATTENTION_MASK", "INT64", (-1,)),
    _t("IMAGE_GRID_THW", "INT64", (3,)),
    _t("VISION_INPUT_ID", "INT32", (-1,)),
)

_TENSORRT_LLM_INPUTS: Final = (
    _t("input_ids", "INT32", (-1,), "OG"),
    _t("encoder_input_features", "FP32", (-1, -1), "OG"),
    _t("encoder_output_lengths", "INT32", (1,), "OR"),
    _t("input_lengths", "INT32", (1,), "R"),
    _t("request_output_len", "INT32", (1,), "R"),
    _t("num_return_sequences", "INT32", (1,), "OR"),
    _t("draft_input_ids", "INT32", (-1,), "OG"),
    _t("decoder_input_ids", "INT32", (-1,), "OG"),
    _t("decoder_input_lengths", "INT32", (1,), "OR"),
    _t("draft_logits", "FP32", (-1, -1), "OG"),
    _t("draft_acceptance_threshold", "FP32", (1,), "OR"),
    _t("end_id", "INT32", (1,), "OR"),
    _t("pad_id", "INT32", (1,), "OR"),
    _t("stop_words_list", "INT32", (2, -1), "OG"),
    _t("bad_words_list", "INT32", (2, -1), "OG"),
    _t("embedding_bias", "FP32", (-1,), "OG"),
    _t("beam_width", "INT32", (1,), "OR"),
    _t("temperature", "FP32", (1,), "OR"),
    _t("runtime_top_k", "INT32", (1,), "OR"),
    _t("runtime_top_p", "FP32", (1,), "OR"),
    _t("runtime_top_p_min", "FP32", (1,), "OR"),
    _t("runtime_top_p_decay", "FP32", (1,), "OR"),
    _t("runtime_top_p_reset_ids", "INT32", (1,), "OR"),
    _t("len_penalty", "FP32", (1,), "OR"),
    _t("early_stopping", "BOOL", (1,), "OR"),
    _t("repetition_penalty", "FP32", (1,), "OR"),
    _t("min_length", "INT32", (1,), "OR"),
    _t("min_tokens", "INT32", (1,), "OR"),
    _t("beam_search_diversity_rate", "FP32", (1,), "OR"),
    _t("presence_penalty", "FP32", (1,), "OR"),
    _t("frequency_penalty", "FP32", (1,), "OR"),
    _t("random_seed", "UINT64", (1,), "OR"),
    _t("seed", "UINT64", (1,), "OR"),
    _t("return_log_probs", "BOOL", (1,), "OR"),
    _t("return_context_logits", "BOOL", (1,), "OR"),
    _t("return_generation_logits", "BOOL", (1,), "OR"),
    _t("return_perf_metrics", "BOOL", (1,), "OR"),
    _t("exclude_input_in_output", "BOOL", (1,), "OR"),
    _t("stop", "BOOL", (1,), "OR"),
    _t("streaming", "BOOL", (1,), "OR"),
    _t("prompt_embedding_table", "FP16", (-1, -1), "OG"),
    _t("prompt_table_extra_ids", "UINT64", (-1,), "OG"),
    _t("prompt_vocab_size", "INT32", (1,), "OR"),
    _t("cross_attention_mask", "BOOL", (-1, -1), "OG"),
    _t("mrope_rotary_cos_sin", "FP32", (-1,), "O"),
    _t("mrope_position_deltas", "INT64", (1,), "O"),
    _t("lora_task_id", "UINT64", (1,), "OR"),
    _t("lora_weights", "FP16", (-1, -1), "OG"),
    _t("lora_config", "INT32", (-1, 3), "OG"),
    _t("context_phase_params", "UINT8", (-1,), "OG"),
    _t("skip_cross_attn_blocks", "BOOL", (1,), "OG"),
    _t("retention_token_range_starts", "INT32", (-1,), "OG"),
    _t("retention_token_range_ends", "INT32", (-1,), "OG"),
    _t("retention_token_range_priorities", "INT32", (-1,), "OG"),
    _t("retention_token_range_durations_ms", "INT32", (-1,), "OG"),
    _t("retention_decode_priority", "INT32", (1,), "OG"),
    _t("retention_decode_duration_ms", "INT32", (1,), "OG"),
    _t("guided_decoding_guide_type", "STRING", (1,), "OG"),
    _t("guided_decoding_guide", "STRING", (1,), "OG"),
    _t("lookahead_window_size", "INT32", (1,), "OG"),
    _t("lookahead_ngram_size", "INT32", (1,), "OG"),
    _t("lookahead_verification_set_size", "INT32", (1,), "OG"),
    _t("return_num_input_tokens", "BOOL", (1,), "OR"),
    _t("return_num_output_tokens", "BOOL", (1,), "OR"),
)

_TENSORRT_LLM_OUTPUTS: Final = (
    _t("output_ids", "INT32", (-1, -1)),
    _t("sequence_length", "INT32", (-1,)),
    _t("cum_log_probs", "FP32", (-1,)),
    _t("output_log_probs", "FP32", (-1, -1)),
    _t("context_logits", "FP32", (-1, -1)),
    _t("generation_logits", "FP32", (-1, -1, -1)),
    _t("batch_index", "INT32", (1,)),
    _t("sequence_index", "INT32", (1,)),
    _t("context_phase_params", "UINT8", (-1,)),
    _t("kv_cache_alloc_new_blocks", "INT32", (1,)),
    _t("kv_cache_reused_blocks", "INT32", (1,)),
    _t("kv_cache_alloc_total_blocks", "INT32", (1,)),
    _t("arrival_time_ns", "INT64", (1,)),
    _t("first_scheduled_time_ns", "INT64", (1,)),
    _t("first_token_time_ns", "INT64", (1,)),
    _t("last_token_time_ns", "INT64", (1,)),
    _t("acceptance_rate", "FP32", (1,)),
    _t("total_accepted_draft_tokens", "INT32", (1,)),
    _t("total_draft_tokens", "INT32", (1,)),
    _t("num_input_tokens", "INT32", (1,)),
    _t("num_output_tokens", "INT32", (1,)),
)

_POSTPROCESSING_INPUTS: Final = (
    _t("TOKENS_BATCH", "INT32", (-1, -1)),
    _t("SEQUENCE_LENGTH", "INT32", (-1,)),
)

_POSTPROCESSING_OUTPUTS: Final = (_t("OUTPUT", "STRING", (-1,)),)

_ENSEMBLE_INPUTS: Final = (
    _t("text_input", "STRING", (1,)),
    _t("decoder_text_input", "STRING", (1,), "O"),
    _t("max_tokens", "INT32", (1,)),
    _t("num_return_sequences", "INT32", (1,), "O"),
    _t("bad_words", "STRING", (-1,), "O"),
    _t("stop_words", "STRING", (-1,), "O"),
    _t("exclude_input_in_output", "BOOL", (1,), "O"),
    _t("end_id", "INT32", (1,), "O"),
    _t("pad_id", "INT32", (1,), "O"),
    _t("top_k", "INT32", (1,), "O"),
    _t("top_p", "FP32", (1,), "O"),
    _t("temperature", "FP32", (1,), "O"),
    _t("length_penalty", "FP32", (1,), "O"),
    _t("repetition_penalty", "FP32", (1,), "O"),
    _t("min_length", "INT32", (1,), "O"),
    _t("min_tokens", "INT32", (1,), "O"),
    _t("presence_penalty", "FP32", (1,), "O"),
    _t("frequency_penalty", "FP32", (1,), "O"),
    _t("random_seed", "UINT64", (1,), "O"),
    _t("seed", "UINT64", (1,), "O"),
    _t("return_log_probs", "BOOL", (1,), "O"),
    _t("return_context_logits", "BOOL", (1,), "O"),
    _t("return_generation_logits", "BOOL", (1,), "O"),
    _t("return_perf_metrics", "BOOL", (1,), "O"),
    _t("beam_width", "INT32", (1,), "O"),
    _t("stream", "BOOL", (1,), "O"),
    _t("prompt_embedding_table", "FP16", (-1, -1), "O"),
    _t("prompt_table_extra_id", "UINT64", (1,), "O"),
    _t("prompt_vocab_size", "INT32", (1,), "O"),
    _t("embedding_bias_words", "STRING", (-1,), "O"),
    _t("embedding_bias_weights", "FP32", (-1,), "O"),
    _t("lora_task_id", "UINT64", (1,), "O"),
    _t("lora_weights", "FP16", (-1, -1), "OG"),
    _t("lora_config", "INT32", (-1, 3), "OG"),
    _t("guided_decoding_guide_type", "STRING", (1,), "OG"),
    _t("guided_decoding_guide", "STRING", (1,), "OG"),
    _t("return_num_input_tokens", "BOOL", (1,), "O"),
    _t("return_num_output_tokens", "BOOL", (1,), "O"),
)

_ENSEMBLE_OUTPUTS: Final = (
    _t("text_output", "STRING", (-1,)),
    _t("cum_log_probs", "FP32", (-1,)),
    _t("output_log_probs", "FP32", (-1, -1)),
    _t("context_logits", "FP32", (-1, -1)),
    _t("generation_logits", "FP32", (-1, -1, -1)),
    _t("batch_index", "INT32", (1,)),
    _t("sequence_index", "INT32", (1,)),
    _t("kv_cache_alloc_new_blocks", "INT32", (1,)),
    _t("kv_cache_reused_blocks", "INT32", (1,)),
    _t("kv_cache_alloc_total_blocks", "INT32", (1,)),
    _t("arrival_time_ns", "INT64", (1,)),
    _t("first_scheduled_time_ns", "INT64", (1,)),
    _t("first_token_time_ns", "INT64", (1,)),
    _t("last_token_time_ns", "INT64", (1,)),
    _t("acceptance_rate", "FP32", (1,)),
    _t("total_accepted_draft_tokens", "INT32", (1,)),
    _t("total_draft_tokens", "INT32", (1,)),
    _t("num_input_tokens", "INT32", (1,)),
    _t("num_output_tokens", "INT32", (1,)),
)

_TENSORRT_LLM_BLS_INPUTS: Final = (
    _t("text_input", "STRING", (1,)),
    _t("decoder_text_input", "STRING", (1,), "O"),
    _t("image_input", "FP16", (-1, 3, -1, -1), "O"),
    _t("image_bytes_input", "UINT8", (-1, -1, -1, -1), "O"),
    _t("image_url_input", "STRING", (1,), "O"),
    _t("video_bytes_input", "UINT8", (-1, -1, -1, -1), "O"),
    _t("max_tokens", "INT32", (1,)),
    _t("bad_words", "STRING", (-1,), "O"),
    _t("stop_words", "STRING", (-1,), "O"),
    _t("exclude_input_in_output", "BOOL", (1,), "O"),
    _t("end_id", "INT32", (1,), "O"),
    _t("pad_id", "INT32", (1,), "O"),
    _t("top_k", "INT32", (1,), "O"),
    _t("top_p", "FP32", (1,), "O"),
    _t("temperature", "FP32", (1,), "O"),
    _t("length_penalty", "FP32", (1,), "O"),
    _t("repetition_penalty", "FP32", (1,), "O"),
    _t("min_length", "INT32", (1,), "O"),
    _t("min_tokens", "INT32", (1,), "O"),
    _t("presence_penalty", "FP32", (1,), "O"),
    _t("frequency_penalty", "FP32", (1,), "O"),
    _t("random_seed", "UINT64", (1,), "O"),
    _t("seed", "UINT64", (1,), "O"),
    _t("return_log_probs", "BOOL", (1,), "OR"),
    _t("return_context_logits", "BOOL", (1,), "OR"),
    _t("return_generation_logits", "BOOL", (1,), "OR"),
    _t("num_return_sequences", "INT32", (1,), "OR"),
    _t("beam_width", "INT32", (1,), "O"),
    _t("stream", "BOOL", (1,), "O"),
    _t("prompt_embedding_table", "FP16", (-1, -1), "O"),
    _t("prompt_vocab_size", "INT32", (1,), "O"),
    _t("prompt_table_extra_id", "UINT64", (1,), "O"),
    _t("embedding_bias_words", "STRING", (-1,), "O"),
    _t("embedding_bias_weights", "FP32", (-1,), "O"),
    _t("num_draft_tokens", "INT32", (1,), "O"),
    _t("use_draft_logits", "BOOL", (1,), "OR"),
    _t("lora_task_id", "UINT64", (1,), "OR"),
    _t("lora_weights", "FP16", (-1, -1), "OG"),
    _t("lora_config", "INT32", (-1, 3), "OG"),
    _t("return_perf_metrics", "BOOL", (1,), "OR"),
    _t("guided_decoding_guide_type", "STRING", (1,), "O"),
    _t("guided_decoding_guide", "STRING", (1,), "O"),
    _t("return_num_input_tokens", "BOOL", (1,), "OR"),
    _t("return_num_output_tokens", "BOOL", (1,), "OR"),
)

_TENSORRT_LLM_BLS_OUTPUTS: Final = (
    _t("text_output", "STRING", (-1,)),
    _t("cum_log_probs", "FP32", (-1,)),
    _t("output_log_probs", "FP32", (-1, -1)),
    _t("context_logits", "FP32", (-1, -1)),
    _t("generation_logits", "FP32", (-1, -1, -1)),
    _t("batch_index", "INT32", (1,)),
    _t("sequence_index", "INT32", (1,)),
    _t("kv_cache_alloc_new_blocks", "INT32", (1,)),
    _t("kv_cache_reused_blocks", "INT32", (1,)),
    _t("kv_cache_alloc_total_blocks", "INT32", (1,)),
    _t("arrival_time_ns", "INT64", (1,)),
    _t("first_scheduled_time_ns", "INT64", (1,)),
    _t("first_token_time_ns", "INT64", (1,)),
    _t("last_token_time_ns", "INT64", (1,)),
    _t("acceptance_rate", "FP32", (1,)),
    _t("total_accepted_draft_tokens", "INT32", (1,)),
    _t("total_draft_tokens", "INT32", (1,)),
    _t("num_input_tokens", "INT32", (1,)),
    _t("num_output_tokens", "INT32", (1,)),
)

_ENGINE_USAGE_OUTPUTS: Final = (
    _t("num_cached_input_tokens", "INT32", (1,)),
    _t("num_recomputed_tokens", "INT32", (1,)),
    _t("machine_time_ns", "INT64", (1,)),
    _t("energy_uj", "INT64", (1,)),
    _t("is_energy_estimated", "BOOL", (1,)),
)
"""What our engine answers beyond NVIDIA's, with a sequence's last response when `return_perf_metrics` is set: exact
counts, and the sequence's part of the machine's time and energy."""

ENGINE_USAGE_NAMES: Final = tuple(tensor.name for tensor in _ENGINE_USAGE_OUTPUTS)

_PREPROCESSING_PARAMETERS: Final = (
    "add_special_tokens",
    "gpt_model_path",
    "max_num_images",
    "multimodal_model_path",
    "tokenizer_dir",
)

_TENSORRT_LLM_PARAMETERS: Final = (
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    "batch_scheduler_policy",
    "cancellation_check_period_ms",
    "cross_kv_cache_fraction",
    "cuda_graph_cache_size",
    "cuda_graph_mode",
    "decoding_mode",
    "eagle_choices",
    "enable_chunked_context",
    "enable_context_fmha_fp32_acc",
    "enable_kv_cache_reuse",
    "encoder_model_path",
    "exclude_input_in_output",
    "executor_worker_path",
    "gpt_model_path",
    "gpt_model_type",
    "gpu_device_ids",
    "gpu_weights_percent",
    "guided_decoding_backend",
    "iter_stats_max_iterations",
    "kv_cache_free_gpu_mem_fraction",
    "kv_cache_host_memory_bytes",
    "kv_cache_onboard_blocks",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "lookahead_window_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_cache_max_adapter_size",
    "lora_cache_optimal_adapter_size",
    "lora_prefetch_dir",
    "max_attention_window_size",
    "max_beam_width",
    "max_tokens_in_paged_kv_cache",
    "medusa_choices",
    "multi_block_mode",
    "normalize_log_probs",
    "num_nodes",
    "participant_ids",
    "request_stats_max_iterations",
    "sink_token_length",
    "speculative_decoding_fast_logits",
    "stats_check_period_ms",
    "tokenizer_dir",
    "xgrammar_tokenizer_info_path",
)

_POSTPROCESSING_PARAMETERS: Final = (
    "skip_special_tokens",
    "tokenizer_dir",
)

_FRONT_DOOR_INPUTS: Final = (
    _t("messages", "STRING", (1,), "O"),
    _t("tenant", "STRING", (1,), "O"),
    _t("priority", "INT32", (1,), "O"),
    _t("timeout_ms", "INT32", (1,), "O"),
    _t("include_stop", "BOOL", (1,), "O"),
    _t("speculate", "STRING", (1,), "O"),
    _t("service", "STRING", (1,), "O"),
    _t("probe", "BOOL", (1,), "O"),
)
"""What our front door takes beyond NVIDIA's: chat messages (JSON) in place of text_input, who asks, how urgently (1 =
highest, 0 = default), how long it may take, whether stop strings stay in the text, off / ngram / draft, and which of
the host's services answers (default: the release in production). `probe` alone asks whether the engines answer, which
Triton's own readiness does not tell: nothing is generated, queued or billed."""

_FRONT_DOOR_OUTPUTS: Final = (
    _t("finish_reason", "STRING", (-1,)),
    _t("stop_reason", "STRING", (-1,)),
    _t("num_cached_input_tokens", "INT32", (1,)),
    _t("request_id", "STRING", (1,)),
    _t("build_id", "STRING", (1,)),
    _t("num_draft_tokens", "INT32", (1,)),
    _t("num_accepted_draft_tokens", "INT32", (1,)),
    _t("cost", "STRING", (1,)),
    _t("currency", "STRING", (1,)),
    _t("price_book_id", "STRING", (1,)),
    _t("energy_joules", "FP64", (1,)),
    _t("is_energy_estimated", "BOOL", (1,)),
    _t("budget_warnings", "STRING", (-1,)),
)
"""What our front door answers beyond NVIDIA's, with the last response of each sequence. Cost (a decimal string), price
book and energy are the whole row's and come with the last response of its last sequence; a tensor that is not there is
unknown, not 0."""

_FRONT_DOOR_PARAMETERS: Final = ("gpt_model_path", "skip_special_tokens", "tokenizer_dir")
"""Known from the other models; our front door tokenizes itself."""

_TENSORRT_LLM_BLS_PARAMETERS: Final = (
    "accumulate_tokens",
    "multimodal_encoders_name",
    "tensorrt_llm_draft_model_name",
    "tensorrt_llm_model_name",
)

_ENSEMBLE_STEPS: Final = (
    EnsembleStep(
        "preprocessing",
        inputs={
            "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
            "QUERY": "text_input",
            "PAD_ID": "pad_id",
            "REQUEST_OUTPUT_LEN": "max_tokens",
            "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
            "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
            "DECODER_QUERY": "decoder_text_input",
            "STOP_WORDS_DICT": "stop_words",
            "BAD_WORDS_DICT": "bad_words",
            "END_ID": "end_id",
        },
        outputs={
            "OUT_END_ID": "_PREPROCESSOR_END_ID",
            "OUT_PROMPT_TABLE_EXTRA_IDS": "_OUT_PROMPT_TABLE_EXTRA_IDS",
            "INPUT_ID": "_INPUT_ID",
            "BAD_WORDS_IDS": "_BAD_WORDS_IDS",
            "DECODER_INPUT_ID": "_DECODER_INPUT_ID",
            "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID",
            "REQUEST_OUTPUT_LEN": "_REQUEST_OUTPUT_LEN",
            "REQUEST_DECODER_INPUT_LEN": "_REQUEST_DECODER_INPUT_LEN",
            "REQUEST_INPUT_LEN": "_REQUEST_INPUT_LEN",
            "STOP_WORDS_IDS": "_STOP_WORDS_IDS",
            "EMBEDDING_BIAS": "_EMBEDDING_BIAS",
        },
    ),
    EnsembleStep(
        "tensorrt_llm",
        inputs={
            "random_seed": "random_seed",
            "lora_task_id": "lora_task_id",
            "input_lengths": "_REQUEST_INPUT_LEN",
            "embedding_bias": "_EMBEDDING_BIAS",
            "end_id": "_PREPROCESSOR_END_ID",
            "prompt_vocab_size": "prompt_vocab_size",
            "guided_decoding_guide": "guided_decoding_guide",
            "input_ids": "_INPUT_ID",
            "exclude_input_in_output": "exclude_input_in_output",
            "stop_words_list": "_STOP_WORDS_IDS",
            "prompt_embedding_table": "prompt_embedding_table",
            "presence_penalty": "presence_penalty",
            "return_perf_metrics": "return_perf_metrics",
            "temperature": "temperature",
            "runtime_top_k": "top_k",
            "beam_width": "beam_width",
            "prompt_table_extra_ids": "_OUT_PROMPT_TABLE_EXTRA_IDS",
            "return_context_logits": "return_context_logits",
            "decoder_input_ids": "_DECODER_INPUT_ID",
            "frequency_penalty": "frequency_penalty",
            "request_output_len": "_REQUEST_OUTPUT_LEN",
            "repetition_penalty": "repetition_penalty",
            "guided_decoding_guide_type": "guided_decoding_guide_type",
            "num_return_sequences": "num_return_sequences",
            "return_generation_logits": "return_generation_logits",
            "len_penalty": "length_penalty",
            "streaming": "stream",
            "return_log_probs": "return_log_probs",
            "lora_weights": "lora_weights",
            "pad_id": "_PREPROCESSOR_PAD_ID",
            "min_length": "min_length",
            "runtime_top_p": "top_p",
            "lora_config": "lora_config",
            "bad_words_list": "_BAD_WORDS_IDS",
            "decoder_input_lengths": "_REQUEST_DECODER_INPUT_LEN",
            "seed": "seed",
            "min_tokens": "min_tokens",
            "return_num_input_tokens": "return_num_input_tokens",
            "return_num_output_tokens": "return_num_output_tokens",
        },
        outputs={
            "last_token_time_ns": "last_token_time_ns",
            "acceptance_rate": "acceptance_rate",
            "generation_logits": "generation_logits",
            "output_ids": "_TOKENS_BATCH",
            "output_log_probs": "output_log_probs",
            "kv_cache_alloc_total_blocks": "kv_cache_alloc_total_blocks",
            "context_logits": "context_logits",
            "first_scheduled_time_ns": "first_scheduled_time_ns",
            "cum_log_probs": "cum_log_probs",
            "total_draft_tokens": "total_draft_tokens",
            "batch_index": "batch_index",
            "sequence_index": "sequence_index",
            "sequence_length": "_SEQUENCE_LENGTH",
            "kv_cache_reused_blocks": "kv_cache_reused_blocks",
            "arrival_time_ns": "arrival_time_ns",
            "first_token_time_ns": "first_token_time_ns",
            "kv_cache_alloc_new_blocks": "kv_cache_alloc_new_blocks",
            "total_accepted_draft_tokens": "total_accepted_draft_tokens",
            "num_input_tokens": "num_input_tokens",
            "num_output_tokens": "num_output_tokens",
        },
    ),
    EnsembleStep(
        "postprocessing",
        inputs={
            "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH",
            "TOKENS_BATCH": "_TOKENS_BATCH",
        },
        outputs={
            "OUTPUT": "text_output",
        },
    ),
)

PREPROCESSING: Final = ModelContract(
    "preprocessing", _PREPROCESSING_INPUTS, _PREPROCESSING_OUTPUTS, _PREPROCESSING_PARAMETERS
)
TENSORRT_LLM: Final = ModelContract(
    "tensorrt_llm", _TENSORRT_LLM_INPUTS, (*_TENSORRT_LLM_OUTPUTS, *_ENGINE_USAGE_OUTPUTS), _TENSORRT_LLM_PARAMETERS
)
POSTPROCESSING: Final = ModelContract(
    "postprocessing", _POSTPROCESSING_INPUTS, _POSTPROCESSING_OUTPUTS, _POSTPROCESSING_PARAMETERS
)
ENSEMBLE: Final = ModelContract("ensemble", _ENSEMBLE_INPUTS, _ENSEMBLE_OUTPUTS, steps=_ENSEMBLE_STEPS)
TENSORRT_LLM_BLS: Final = ModelContract(
    "tensorrt_llm_bls",
    (
        *(
            replace(tensor, optional=True) if tensor.name == "text_input" else tensor
            for tensor in _TENSORRT_LLM_BLS_INPUTS
        ),
        *_FRONT_DOOR_INPUTS,
    ),
    (*_TENSORRT_LLM_BLS_OUTPUTS, *_FRONT_DOOR_OUTPUTS),
    (*_TENSORRT_LLM_BLS_PARAMETERS, *_FRONT_DOOR_PARAMETERS),
)

MODELS: Final[dict[str, ModelContract]] = {
    model.name: model for model in (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, ENSEMBLE, TENSORRT_LLM_BLS)
}
"""The five models by name, in the order a request meets them, front doors last."""

PERF_METRIC_NAMES: Final = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
"""Outputs that come with a sequence's last response when `return_perf_metrics` is set."""

"""What the embedded CPU engine does with the contract's inputs and parameters: honour, refuse by name, or ignore.

Everything of :data:`enginehouse_contract.tensors.TENSORRT_LLM` that is not listed here is honoured; a test proves that
the engine's request parser reads it. NVIDIA's engine on a GPU host is not bound by this table.
"""

from __future__ import annotations

from typing import Final

_ENCODER_DECODER = "encoder-decoder models are not served by the CPU engine"
_PROMPT_TABLE = "prompt tables need multimodal or p-tuned models, which the CPU engine does not serve"
_CROSS_ATTENTION = "cross attention needs multimodal models, which the CPU engine does not serve"
_MROPE = "multimodal rotary embeddings are not served by the CPU engine"
_LORA = "LoRA adapters are not served by the CPU engine"
_RETENTION = "KV retention priorities are not offered; the CPU engine evicts least recently used blocks"
_GUIDED = "guided decoding is not offered by the CPU engine"
_LOOKAHEAD = "lookahead decoding is not offered by the CPU engine"

REFUSED_INPUTS: Final[dict[str, str]] = {
    "encoder_input_features": _ENCODER_DECODER,
    "encoder_output_lengths": _ENCODER_DECODER,
    "decoder_input_ids": _ENCODER_DECODER,
    "decoder_input_lengths": _ENCODER_DECODER,
    "prompt_embedding_table": _PROMPT_TABLE,
    "prompt_table_extra_ids": _PROMPT_TABLE,
    "prompt_vocab_size": _PROMPT_TABLE,
    "cross_attention_mask": _CROSS_ATTENTION,
    "skip_cross_attn_blocks": _CROSS_ATTENTION,
    "mrope_rotary_cos_sin": _MROPE,
    "mrope_position_deltas": _MROPE,
    "lora_task_id": _LORA,
    "lora_weights": _LORA,
    "lora_config": _LORA,
    "context_phase_params": "disaggregated serving is not offered by the CPU engine",
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
    "guided_decoding_guide_type": _GUIDED,
    "guided_decoding_guide": _GUIDED,
    "lookahead_window_size": _LOOKAHEAD,
    "lookahead_ngram_size": _LOOKAHEAD,
    "lookahead_verification_set_size": _LOOKAHEAD,
}
"""Engine input -> why the CPU engine refuses a request that carries it."""

INERT_INPUTS: Final[dict[str, str]] = {
    "len_penalty": "weighs beams by length; with one beam there is nothing to weigh",
    "early_stopping": "ends beam search early; with one beam there is no search",
    "beam_search_diversity_rate": "spreads beams; with one beam there is nothing to spread",
    "pad_id": "fills short rows; responses of the CPU engine hold one row each",
}
"""Engine input -> why it is accepted and, with beam width 1, changes nothing."""

REFUSED_PREPROCESSING_INPUTS: Final[dict[str, str]] = {
    "DECODER_QUERY": _ENCODER_DECODER,
    "IMAGE_BYTES": "image input is not served",
    "IMAGE_URL": "image input is not served",
    "IMAGE_SIZES": "image input is not served",
    "VIDEO_BYTES": "video input is not served",
}
"""Preprocessing input -> why it is refused. `PROMPT_TABLE_EXTRA_ID` is handed on: the engine decides."""

GPU_ONLY_PARAMETERS: Final[dict[str, str]] = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "inputs are always in CPU memory here",
    "cross_kv_cache_fraction": "encoder-decoder models only",
    "cuda_graph_cache_size": "CUDA graphs",
    "cuda_graph_mode": "CUDA graphs",
    "enable_context_fmha_fp32_acc": "a CUDA kernel choice",
    "executor_worker_path": "MPI workers",
    "gpu_device_ids": "GPU placement",
    "gpu_weights_percent": "weight streaming from host memory",
    "iter_stats_max_iterations": "the C++ executor's statistics buffer",
    "kv_cache_host_memory_bytes": "KV offload to host memory; here the KV cache is in host memory",
    "kv_cache_onboard_blocks": "KV offload to host memory",
    "lora_cache_gpu_memory_fraction": "LoRA",
    "lora_cache_host_memory_bytes": "LoRA",
    "lora_cache_max_adapter_size": "LoRA",
    "lora_cache_optimal_adapter_size": "LoRA",
    "multi_block_mode": "a CUDA kernel choice",
    "normalize_log_probs": "beam search",
    "num_nodes": "MPI",
    "participant_ids": "MPI",
    "request_stats_max_iterations": "the C++ executor's statistics buffer",
    "speculative_decoding_fast_logits": "MPI transfer of draft logits",
    "tokenizer_dir": "the build's own tokenizer is used",
    "xgrammar_tokenizer_info_path": "guided decoding",
}
"""Engine parameter -> what it is about; a GPU host reads it, the CPU engine does not, so one repository serves both."""

REFUSED_PARAMETERS: Final[dict[str, str]] = {
    "encoder_model_path": _ENCODER_DECODER,
    "lora_prefetch_dir": _LORA,
    "guided_decoding_backend": _GUIDED,
    "medusa_choices": "Medusa heads are not served by the CPU engine",
    "eagle_choices": "EAGLE heads are not served by the CPU engine",
    "lookahead_window_size": _LOOKAHEAD,
    "lookahead_ngram_size": _LOOKAHEAD,
    "lookahead_verification_set_size": _LOOKAHEAD,
    "sink_token_length": "StreamingLLM attention sinks are not offered by the CPU engine",
}
"""Engine parameter -> why the model does not load on a CPU host when it is set."""

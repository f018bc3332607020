"""The engine model's Prometheus metrics, under TensorRT-LLM's official names, plus latency histograms.

``nv_trt_llm_*`` gauges follow ``create_metrics`` of NVIDIA's Python engine model (TensorRT-LLM 1.2.1);
``nv_llm_input_token_len`` and ``nv_llm_output_token_len`` its histograms with their buckets. The time-to-first-token
and inter-token histograms have no counterpart there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from enginehouse_backends.engine.blocks import BlockPool
    from enginehouse_backends.engine.request import SequenceStats
    from enginehouse_backends.engine.scheduler import IterationStats
    from enginehouse_backends.triton.fence import MetricRegistry

_TOKEN_BUCKETS: Final = (10.0, 50.0, 100.0, 500.0, 1000.0)
FIRST_TOKEN_BUCKETS_MS: Final = (10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0)
INTER_TOKEN_BUCKETS_MS: Final = (2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)
_NS_PER_MS: Final = 1e6


class EngineMetrics:
    """Reports iteration statistics as gauges and finished sequences as histogram observations."""

    def __init__(self, registry: MetricRegistry, *, max_requests: int, memory_bytes: int) -> None:
        self._registry = registry
        self._max_requests = max_requests
        self._memory_bytes = memory_bytes
        self._num_iterations = 0

    def report_iteration(self, stats: IterationStats, pool: BlockPool) -> None:
        """Set every gauge from the last step's statistics."""
        self._gauges(
            "nv_trt_llm_request_metrics",
            "TRT LLM request metrics",
            "request_type",
            {
                "active": stats.num_active_sequences,
                "max": self._max_requests,
                "scheduled": stats.num_scheduled_sequences,
                "context": stats.num_context_sequences,
                "waiting": stats.num_waiting_sequences,
            },
        )
        self._gauges(
            "nv_trt_llm_runtime_memory_metrics",
            "TRT LLM runtime memory metrics",
            "memory_type",
            {"cpu": self._memory_bytes, "gpu": 0, "pinned": 0},
        )
        self._gauges(
            "nv_trt_llm_kv_cache_block_metrics",
            "TRT LLM KV cache block metrics",
            "kv_cache_block_type",
            {
                "max": pool.num_blocks,
                "free": pool.num_free_blocks,
                "used": pool.num_used_blocks,
                "tokens_per": pool.tokens_per_block,
                "fraction": pool.num_used_blocks / pool.num_blocks,
            },
        )
        self._gauges(
            "nv_trt_llm_inflight_batcher_metrics",
            "TRT LLM inflight_batcher-specific metrics",
            "inflight_batcher_specific_metric",
            {
                "total_context_tokens": stats.num_context_tokens,
                "generation_requests": stats.num_generation_sequences,
                "micro_batch_id": 0,
                "paused_requests": stats.num_paused_sequences,
            },
        )
        self._gauges(
            "nv_trt_llm_general_metrics",
            "General TRT LLM metrics",
            "general_type",
            {"timestamp": int(time.time()), "iteration_counter": stats.iteration},
        )

    def report_sequence(self, stats: SequenceStats) -> None:
        """Observe the lengths and latencies of a finished sequence."""
        observe = self._registry.observe
        observe(
            "nv_llm_input_token_len",
            "Histogram of input token lengths",
            stats.num_prompt_tokens,
            _TOKEN_BUCKETS,
            response_metric_type="total_input_tokens",
        )
        observe(
            "nv_llm_output_token_len",
            "Histogram of output token lengths",
            stats.num_output_tokens,
            _TOKEN_BUCKETS,
            response_metric_type="total_output_tokens",
        )
        if stats.num_draft_tokens:
            accepted = stats.num_accepted_draft_tokens
            for outcome, count in (("accepted", accepted), ("rejected", stats.num_draft_tokens - accepted)):
                description = "Draft tokens verified by the engine"
                self._registry.increment("nv_llm_draft_tokens_total", description, count, outcome=outcome)
        if stats.first_token_time_ns:
            first_token_ms = (stats.first_token_time_ns - stats.arrival_time_ns) / _NS_PER_MS
            observe("nv_llm_time_to_first_token_ms", "Arrival to first token", first_token_ms, FIRST_TOKEN_BUCKETS_MS)
        if stats.num_output_tokens > 1:
            span_ms = (stats.last_token_time_ns - stats.first_token_time_ns) / _NS_PER_MS
            mean_ms = span_ms / (stats.num_output_tokens - 1)
            observe(
                "nv_llm_inter_token_latency_ms",
                "Mean time between a sequence's tokens",
                mean_ms,
                INTER_TOKEN_BUCKETS_MS,
            )

    def _gauges(self, name: str, description: str, label: str, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._registry.set_gauge(name, description, value, **{label: key})

"""The front door's Prometheus metrics: requests, tokens, money, energy and latency, by release.

Labels are bounded: releases, finish reasons, token classes, currencies. Tenants are the ledger's business. The label of
token counters is OpenTelemetry's `gen_ai.token.type`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from enginehouse_backends.triton.engine_metrics import FIRST_TOKEN_BUCKETS_MS, INTER_TOKEN_BUCKETS_MS
from enginehouse_contract.money import PICO_PER_UNIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from enginehouse_backends.front_door.door import FrontDoor, Job
    from enginehouse_backends.triton.fence import MetricRegistry

_MS: Final = 1000.0
_UJ_PER_J: Final = 1e6


class FrontDoorMetrics:
    """Counts every job once, when it ends."""

    def __init__(self, registry: MetricRegistry, meter_counts: Callable[[], dict[str, int]]) -> None:
        self._registry = registry
        self._meter_counts = meter_counts

    def report_door(self, door: FrontDoor) -> None:
        """Set the gauges: what runs and waits, and what became of requests in the ledger."""
        gauge = self._registry.set_gauge
        for state, count in (("active", door.num_active), ("waiting", door.num_waiting)):
            gauge("nv_llm_front_door_rows", "Rows in the front door", count, state=state)
        for fate, count in self._meter_counts().items():
            gauge("nv_llm_ledger_requests", "What became of requests in the ledger since start", count, fate=fate)

    def report_open_rows(self, counts: dict[str, int]) -> None:
        """Set the gauge of rows that a release still has to answer; a promotion waits for 0 before it unloads."""
        for release, count in counts.items():
            self._registry.set_gauge(
                "nv_llm_front_door_open_rows", "Rows accepted and not yet ended", count, release=release
            )

    def report_job(self, job: Job) -> None:
        """Count one ended row."""
        release = job.route.release
        reason = job.finish_reason or "error"
        self._registry.increment(
            "nv_llm_front_door_requests_total", "Rows answered", 1, release=release, finish_reason=reason
        )
        self._report_tokens(job, release)
        self._report_money(job, release)
        self._report_latency(job, release)

    def _report_tokens(self, job: Job, release: str) -> None:
        usage = job.usage.tokens()
        for kind, count in (
            ("input", usage.num_input_uncached_tokens),
            ("input_cached", usage.num_input_cached_tokens),
            ("output", usage.num_output_tokens),
            ("draft_rejected", usage.num_draft_rejected_tokens),
            ("recomputed", usage.num_recomputed_tokens),
            ("discarded", usage.num_discarded_tokens),
        ):
            if count:
                self._registry.increment(
                    "gen_ai_token_usage_total", "Tokens by class", count, release=release, gen_ai_token_type=kind
                )

    def _report_money(self, job: Job, release: str) -> None:
        record = job.record
        if record is not None and record.amount:
            amount = record.amount / PICO_PER_UNIT  # Prometheus has nothing but floats; the ledger has the exact sum
            self._registry.increment(
                "nv_llm_cost_total", "Money billed", amount, release=release, currency=record.currency or ""
            )
        share = job.usage.share()
        if share is not None:
            seconds = share.machine_ns / 1e9
            self._registry.increment("nv_llm_machine_seconds_total", "Machine time used", seconds, release=release)
            if job.usage.tells_energy:
                joules, estimated = share.energy_uj / _UJ_PER_J, str(share.is_estimated).lower()
                self._registry.increment(
                    "nv_llm_energy_joules_total", "Energy used", joules, release=release, estimated=estimated
                )

    def _report_latency(self, job: Job, release: str) -> None:
        if job.first_token_s is None:
            return
        first_ms = _MS * (job.first_token_s - job.accepted_s)
        observe = self._registry.observe
        observe(
            "nv_llm_front_door_time_to_first_token_ms",
            "Arrival to first token",
            first_ms,
            FIRST_TOKEN_BUCKETS_MS,
            release=release,
        )
        num_tokens = job.usage.tokens().num_output_tokens // job.row.num_sequences
        if num_tokens > 1:
            mean_ms = _MS * (time.monotonic() - job.first_token_s) / (num_tokens - 1)
            observe(
                "nv_llm_front_door_inter_token_latency_ms",
                "Mean time between a row's tokens",
                mean_ms,
                INTER_TOKEN_BUCKETS_MS,
                release=release,
            )

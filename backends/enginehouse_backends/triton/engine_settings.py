"""From the engine model's ``parameters`` and its build's limits to an engine: every value checked at load.

The keys are NVIDIA's (facts of ``model_instance_state.cc``, TensorRT-LLM 1.2.1); unlike the original, a bad value is an
error, not a warning and a default. Parameters that only concern a GPU are accepted and not read, so that one
config.pbtxt serves both kinds of host (:data:`enginehouse_contract.support.GPU_ONLY_PARAMETERS`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from enginehouse_backends.accounting.energy import PowerModel
from enginehouse_backends.engine.engine import EngineConfig
from enginehouse_backends.engine.scheduler import SchedulerConfig
from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.support import REFUSED_PARAMETERS

if TYPE_CHECKING:
    from enginehouse_backends.engine.runner import ExecutionMode
    from enginehouse_backends.engine.words import WordMatching
    from enginehouse_backends.triton.model_parameters import ModelParameters
    from enginehouse_contract.manifest import BuildLimits

SchedulerPolicy = Literal["guaranteed_no_evict", "max_utilization"]

_BATCHING_TYPES = ("inflight_batching", "inflight_fused_batching")
_DECODING_MODES = ("auto", "top_k", "top_p", "top_k_top_p")
_DEFAULT_MEMORY_BUDGET_SHARE = 0.25  # of the host's memory, where no budget is stated
_MAX_WATTS = 1e6
_DEFAULT_MEMORY_FRACTION = 0.9  # NVIDIA's default of kv_cache_free_gpu_mem_fraction


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything the engine model was told, in the engine's own terms."""

    build_dir: Path
    engine: EngineConfig
    kv_memory_bytes: int
    max_kv_tokens: int | None  # None = as many as the memory holds
    num_threads: int | None  # None = all cores
    execution_mode: ExecutionMode
    declared_power: PowerModel | None
    exclude_input_in_output: bool
    cancellation_check_period_s: float
    stats_check_period_s: float


def read_engine_dir(parameters: ModelParameters) -> Path:
    """Return the build folder that ``gpt_model_path`` names."""
    path = Path(parameters.required("gpt_model_path"))
    if not path.is_dir():
        msg = refusal(
            "gpt_model_path",
            "is not a folder",
            given=str(path),
            hint="Build with `enginehouse build`, or correct the path.",
        )
        raise ConfigurationError(msg)
    return path


def read_engine_settings(parameters: ModelParameters, limits: BuildLimits) -> EngineSettings:
    """Check every parameter that concerns a CPU host; raise :class:`ConfigurationError` for the first that is wrong."""
    for name, reason in REFUSED_PARAMETERS.items():
        if name in parameters:
            raise ConfigurationError(refusal(name, f"cannot be set: {reason}", given=parameters.text(name)))
    parameters.choice("gpt_model_type", _BATCHING_TYPES[0], _BATCHING_TYPES)
    parameters.choice("decoding_mode", "auto", _DECODING_MODES)
    if (max_beam_width := parameters.integer("max_beam_width", 1, 1)) > 1:
        raise ConfigurationError(
            refusal("max_beam_width", "must be 1: the CPU engine does not search beams", given=max_beam_width)
        )
    _check_attention_window(parameters, limits)
    policy = parameters.choice(
        "batch_scheduler_policy", "guaranteed_no_evict", ("guaranteed_no_evict", "max_utilization")
    )
    max_num_tokens = parameters.integer("max_num_tokens", limits.max_num_tokens, 1)
    scheduler = SchedulerConfig(
        max_num_tokens=max_num_tokens,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        policy=cast("SchedulerPolicy", policy),
        enable_chunked_context=parameters.flag("enable_chunked_context", default=True),
    )
    max_kv_tokens = parameters.integer("max_tokens_in_paged_kv_cache", 0, 1)
    num_threads = parameters.integer("num_threads", 0, 1)
    return EngineSettings(
        build_dir=read_engine_dir(parameters),
        engine=EngineConfig(
            scheduler=scheduler,
            enable_kv_cache_reuse=parameters.flag("enable_kv_cache_reuse", default=True),
            max_queue_size=parameters.integer("max_queue_size", 0, 0),
            word_matching=cast("WordMatching", parameters.choice("word_matching", "text", ("text", "tokens"))),
            speculate_ngram=parameters.choice("speculation", "off", ("off", "ngram")) == "ngram",
        ),
        kv_memory_bytes=_kv_memory_bytes(parameters),
        max_kv_tokens=max_kv_tokens or None,
        num_threads=num_threads or None,
        execution_mode=cast(
            "ExecutionMode", parameters.choice("execution_mode", "accuracy", ("accuracy", "performance"))
        ),
        declared_power=_declared_power(parameters),
        exclude_input_in_output=parameters.flag("exclude_input_in_output", default=False),
        cancellation_check_period_s=parameters.integer("cancellation_check_period_ms", 100, 1) / 1000,
        stats_check_period_s=parameters.integer("stats_check_period_ms", 100, 1) / 1000,
    )


def _declared_power(parameters: ModelParameters) -> PowerModel | None:
    names = ("machine_idle_watts", "machine_active_watts")
    if not any(name in parameters for name in names):
        return None
    for name in names:
        parameters.required(name)
    idle, active = (Decimal(str(parameters.number(name, 0, 0, _MAX_WATTS))) for name in names)
    if active < idle:
        raise ConfigurationError(refusal(names[1], f"must be at least `{names[0]}`", limit=idle, given=active))
    return PowerModel(idle, active)


def _check_attention_window(parameters: ModelParameters, limits: BuildLimits) -> None:
    """A window that never cuts is fine; one that would is a sliding window, which this engine does not have."""
    text = parameters.text("max_attention_window_size")
    for part in text.split(",") if text else ():
        if not part.strip().isdigit() or int(part) < limits.max_seq_len:
            msg = refusal(
                "max_attention_window_size",
                "would cut the context: sliding windows are not offered by the CPU engine",
                limit=f"at least {limits.max_seq_len}",
                given=text,
            )
            raise ConfigurationError(msg)


def _kv_memory_bytes(parameters: ModelParameters) -> int:
    """The KV cache's memory: a fraction of a stated budget (default: a quarter of the host's memory)."""
    fraction = parameters.number("kv_cache_free_gpu_mem_fraction", _DEFAULT_MEMORY_FRACTION, 0.0, 1.0)
    budget = parameters.integer("kv_cache_memory_budget_bytes", 0, 1)
    if budget == 0:
        budget = int(_host_memory_bytes() * _DEFAULT_MEMORY_BUDGET_SHARE)
    return int(budget * fraction)


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""Triton model configs, rendered from the tensor contract.

A config is complete, so the server need not ask the model for it (``--disable-auto-complete-config``). Parameters that
a host must fill in hold NVIDIA's own template placeholders (``${engine_dir}``) in the checked-in repository; an empty
text or a placeholder means unset, as in NVIDIA's backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from enginehouse_contract.tensors import (
    ENSEMBLE,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    TENSORRT_LLM_BLS,
    EnsembleStep,
    ModelContract,
    Tensor,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

ENGINEHOUSE_PARAMETERS: Final = {
    "build_digest": "build id of what the model serves; read back after a promotion",
    "engine_reports_usage": "front door: whether the engine model's config lists our own outputs (machine_time_ns "
    "and others); set false before an engine model that is not from this repository",
    "execution_mode": "CPU engine: accuracy computes in float32, the same bits alone and in any batch; performance "
    "takes the host's fastest arithmetic, which rounds differently at other batch sizes",
    "inter_token_timeout_ms": "front door: give up on an engine that is silent for this long",
    "kv_cache_memory_budget_bytes": "CPU engine: memory of which kv_cache_free_gpu_mem_fraction is taken",
    "machine_active_watts": "CPU engine: declared power of the machine while it computes, where no counter can be read",
    "machine_idle_watts": "CPU engine: declared power of the machine while it does not",
    "max_active_requests": "front door: rows generated at a time",
    "max_num_tokens": "CPU engine: tokens computed per step, at most the build's",
    "max_queue_size": "front door and CPU engine: requests that may wait; 0 in the engine means unbounded",
    "num_threads": "CPU engine: threads that compute; unset means all cores",
    "release": "name of the release the model belongs to",
    "speculation": "CPU engine: off, or ngram for requests that do not say",
    "word_matching": "CPU engine: text matches stop and bad words across token boundaries, tokens by ids alone",
}
"""Config parameters of our own, beyond NVIDIA's, and what they are for."""

_PLACEHOLDERS: Final[dict[str, dict[str, str]]] = {
    PREPROCESSING.name: {"tokenizer_dir": "${tokenizer_dir}", "gpt_model_path": "${engine_dir}"},
    TENSORRT_LLM.name: {"gpt_model_type": "inflight_fused_batching", "gpt_model_path": "${engine_dir}"},
    POSTPROCESSING.name: {"tokenizer_dir": "${tokenizer_dir}"},
    TENSORRT_LLM_BLS.name: {
        "tensorrt_llm_model_name": TENSORRT_LLM.name,
        "tokenizer_dir": "${tokenizer_dir}",
        "gpt_model_path": "${engine_dir}",
    },
}

MAX_BATCH_SIZE: Final = 64
MODEL_VERSION: Final = 1  # the only one: another release has models of other names, so a pinned step never mixes


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model as Triton is to serve it. ``step_models`` renames the ensemble's steps (a release's own names)."""

    contract: ModelContract
    name: str
    backend: str | None  # None for the ensemble
    max_batch_size: int = MAX_BATCH_SIZE
    is_decoupled: bool = False
    is_batched: bool = False  # Triton's dynamic batcher gathers requests before a call
    parameters: Mapping[str, str] = field(default_factory=dict)
    step_models: Mapping[str, str] = field(default_factory=dict)

    def render(self) -> str:
        """Return the text of ``config.pbtxt``."""
        lines = [f'name: "{self.name}"']
        lines.append(f'backend: "{self.backend}"' if self.backend else 'platform: "ensemble"')
        lines.append(f"max_batch_size: {self.max_batch_size}")
        if self.is_decoupled:
            lines.append("model_transaction_policy { decoupled: true }")
        if self.is_batched:
            lines.append("dynamic_batching { }")
        lines += [_render_tensor("input", tensor) for tensor in self.contract.inputs]
        lines += [_render_tensor("output", tensor) for tensor in self.contract.outputs]
        if self.backend:
            lines.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
        else:
            lines.append("ensemble_scheduling {")
            lines += [_render_step(step, self.step_models) for step in self.contract.steps]
            lines.append("}")
        lines += [
            f'parameters {{ key: "{name}" value {{ string_value: {_quote(value)} }} }}'
            for name, value in sorted(self.parameters.items())
        ]
        return "\n".join(lines) + "\n"


def make_config(model: str, parameters: Mapping[str, str] | None = None) -> ModelConfig:
    """Return the config of one of the five models; *parameters* override and add to the placeholders."""
    contract = MODELS[model]
    merged = {**_PLACEHOLDERS.get(model, {}), **(parameters or {})}
    if model == ENSEMBLE.name:
        return ModelConfig(contract, model, None, parameters=merged)
    if model == TENSORRT_LLM.name:
        return ModelConfig(contract, model, "tensorrtllm", is_decoupled=True, parameters=merged)
    if model == TENSORRT_LLM_BLS.name:
        return ModelConfig(contract, model, "python", is_decoupled=True, parameters=merged)
    return ModelConfig(contract, model, "python", is_batched=True, parameters=merged)


def _render_tensor(kind: str, tensor: Tensor) -> str:
    dims = ", ".join(map(str, tensor.dims))
    parts = [f'name: "{tensor.name}"', f"data_type: TYPE_{tensor.data_type}", f"dims: [ {dims} ]"]
    if tensor.reshaped:
        parts.append("reshape { shape: [ ] }")
    if tensor.optional:
        parts.append("optional: true")
    if tensor.ragged:
        parts.append("allow_ragged_batch: true")
    return f"{kind} [ {{ {' '.join(parts)} }} ]"


def _render_step(step: EnsembleStep, step_models: Mapping[str, str]) -> str:
    maps = [
        *(f'    input_map {{ key: "{name}" value: "{value}" }}' for name, value in step.inputs.items()),
        *(f'    output_map {{ key: "{name}" value: "{value}" }}' for name, value in step.outputs.items()),
    ]
    model = step_models.get(step.model, step.model)
    return "\n".join(
        ["  step [ {", f'    model_name: "{model}"', f"    model_version: {MODEL_VERSION}", *maps, "  } ]"]
    )


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

"""A good spec to start from, with comments: what a model's config and a device's plan suggest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import yaml

from enginehouse_builders.plan.memory import plan_memory
from enginehouse_builders.plan.request import memory_request
from enginehouse_builders.spec.loading import parse_spec
from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from enginehouse_builders.plan.devices import Device
    from enginehouse_builders.plan.shape import ModelShape

_FP8_SM: Final = 89
_FP4_SM: Final = 100
_TENSOR_RANKS: Final = (1, 2, 4, 8, 16)
_SEQ_LENS: Final = (8192, 4096, 2048)
_MIN_SEQUENCES: Final = 4  # fewer at full length is no service
_CPU_BATCH: Final = 32  # beyond it a CPU only makes each sequence slower
_BATCHES: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)

_WEIGHTS_COMMENT: Final = {
    "as_in_file": "as the file has them, exactly",
    "int8": "half of 16 bits, nearly exact; int4 takes about half of that again",
    "int4": "a quarter of 16 bits; pass the numeric gate before you promote it",
    "fp8": "half of 16 bits, and its products are twice as fast on this GPU",
    "nvfp4": "a quarter of 16 bits, for Blackwell; pass the numeric gate before you promote it",
    "int4_awq": "a quarter of 16 bits; this GPU has no fp8",
    "none": "stored in the compute type",
}


def starting_spec(model: Path, shape: ModelShape, device: Device, name: str | None = None) -> str:
    """Return the text of a spec for *model* on *device*: the most precise weights and fewest GPUs that serve well.

    Raises :class:`ConfigurationError` when no combination fits the device.
    """
    for tensor in _TENSOR_RANKS[:1] if device.is_cpu else _TENSOR_RANKS:
        if shape.num_heads % tensor:
            continue
        for weights in _weights_to_try(shape, device):
            for seq_len in _SEQ_LENS:
                text = _render(model, shape, device, name, weights, tensor, min(seq_len, shape.max_position_embeddings))
                found = _fitted(text, shape, device)
                if found is not None:
                    return found
    raise ConfigurationError(
        f"`{model.name}` does not fit `{device.name}` with any weights; "
        f"see `enginehouse plan {model} --device {device.name}`."
    )


def _weights_to_try(shape: ModelShape, device: Device) -> list[str]:
    if shape.stored is not None:
        return ["as_in_file"] if not device.is_cpu or shape.stored.cpu_matrix_bits is not None else ["int8", "int4"]
    if device.is_cpu:
        return ["int8", "int4"]
    if device.sm is not None and device.sm >= _FP4_SM:
        return ["fp8", "nvfp4"]
    return ["fp8", "int4_awq"] if device.sm is not None and device.sm >= _FP8_SM else ["none", "int4_awq"]


def _fitted(text: str, shape: ModelShape, device: Device) -> str | None:
    """The text with the largest batch that fits, or None where too few sequences do."""
    spec = parse_spec(text)
    memory = plan_memory(shape, memory_request(spec, shape, spec.targets[0]), device.memory_bytes)
    if memory.num_full_sequences < _MIN_SEQUENCES:
        return None
    typical = max(memory.max_seq_len // 2, 1)  # few sequences are as long as they may be
    fit = memory.num_sequences_of(typical)
    batch = next(batch for batch in _BATCHES if batch <= fit and (not device.is_cpu or batch <= _CPU_BATCH))
    return text.replace("max_batch_size: 1 ", f"max_batch_size: {batch} ")


def _render(
    model: Path, shape: ModelShape, device: Device, name: str | None, weights: str, tensor: int, seq_len: int
) -> str:
    target = "cpu" if device.is_cpu else "tensorrt_llm"
    kv = "u8" if device.is_cpu else ("fp8" if weights in {"fp8", "nvfp4"} else "auto")
    source = yaml.safe_dump(str(model), width=10_000).splitlines()[0]
    price = device.price
    hour = (
        f'machine_hour: "{price.per_hour}"  # of one {device.name}; {price.source}: put your own here'
        if price
        else '# machine_hour: "1.00"  # what one hour of this machine costs; without it, the cost of a token is unknown'
    )
    lines = [
        f"# A spec for {shape.architecture}, {shape.num_params / 1e9:.2f} billion values, on {device.name}.",
        "# `enginehouse plan FILE` says what it needs, `enginehouse spec check FILE` what is wrong with it.",
        "# All keys: docs/spec.schema.json. What is left out has a good default.",
        "spec_version: 1",
        f"name: {name or _name_of(model)}",
        "model:",
        f"  source: {source}  # relative paths start at this file's folder",
        f"targets: [{target}]",
        f"device: {device.name}",
        "quantization:",
        f"  weights: {weights}  # {_WEIGHTS_COMMENT[weights]}",
    ]
    if tensor > 1:
        lines += ["parallelism:", f"  tensor: {tensor}  # GPUs that share every layer; fewer do not hold the model"]
    lines += [
        "limits:",
        "  max_batch_size: 1  # sequences generated at a time: as many as fit at half their full length",
        f"  max_seq_len: {seq_len}  # prompt and answer; the model was trained for {shape.max_position_embeddings}",
        "kv_cache:",
        f"  dtype: {kv}  # {'half of 16 bits' if kv in {'u8', 'fp8'} else 'the compute type'}",
        "  reuse: true  # prompts that begin alike share blocks",
        "scheduling:",
        "  policy: guaranteed_no_evict  # max_utilization admits more, and pauses some when memory runs out",
        "  chunked_context: true  # long prompts do not stop the answers of others",
    ]
    if device.is_cpu:
        lines += [
            "speculation:",
            "  method: ngram  # pays where answers repeat the prompt; switches itself off elsewhere",
        ]
    lines += [
        "gates:",
        "  numeric: {min_token_agreement: 0.85, max_mean_kl_divergence: 0.1}  # beside the reference build",
        "costs:",
        f"  {hour}",
        "  currency: USD",
    ]
    return "\n".join(lines) + "\n"


def _name_of(model: Path) -> str:
    name = model.stem if model.is_file() else model.resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._").lower() or "model"

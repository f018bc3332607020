"""The memory gate: do weights, activations and the KV cache of one full sequence fit here, and how many more do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.gates.record import GateResult
from enginehouse_contract.errors import BuildIntegrityError
from enginehouse_contract.manifest import CONFIG_FILE

if TYPE_CHECKING:
    from enginehouse_builders.gates.host import Host
    from enginehouse_builders.gates.record import Value
    from enginehouse_contract.manifest import Manifest

_F32_BYTES: Final = 4
_KV_BYTES: Final = {"u8": 1, "int8": 1, "fp8": 1, "f16": 2, "bf16": 2, "f32": 4}
_U8_SCALE_BYTES: Final = 8  # OpenVINO keeps a scale and a zero point in f32 beside each head's 8-bit vector


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that serving a build takes, of one rank."""

    weights_bytes: int
    activations_bytes: int
    kv_bytes_per_token: int
    max_seq_len: int

    @property
    def least_bytes(self) -> int:
        """With room for one sequence of full length."""
        return self.weights_bytes + self.activations_bytes + self.kv_bytes_per_token * self.max_seq_len


def memory_need(manifest: Manifest, config: dict[str, Any]) -> MemoryNeed:
    """Compute what a build takes from its record and its engine's shape.

    Raises :class:`BuildIntegrityError` when ``config.json`` does not tell the shape.
    """
    try:
        shape = config["pretrained_config"]
        world_size = int(shape.get("mapping", {}).get("world_size", 1))
        heads_and_layers = int(shape["num_hidden_layers"]) * int(shape["num_key_value_heads"])
        bytes_per_vector = int(shape["head_size"]) * _KV_BYTES.get(manifest.kv_precision, 2)
        widest = 3 * int(shape["intermediate_size"]) + 4 * int(shape["hidden_size"])
        logits_bytes = manifest.limits.max_batch_size * int(shape["vocab_size"]) * _F32_BYTES
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BuildIntegrityError(f"{CONFIG_FILE} does not say the engine's shape ({error!r}); rebuild.") from error
    if manifest.kv_precision == "u8":
        bytes_per_vector += _U8_SCALE_BYTES
    files_bytes = sum(record.num_bytes for record in manifest.files.values())
    return MemoryNeed(
        weights_bytes=files_bytes // world_size,
        activations_bytes=manifest.limits.max_num_tokens * widest * _F32_BYTES // world_size + logits_bytes,
        kv_bytes_per_token=2 * heads_and_layers * bytes_per_vector // world_size,
        max_seq_len=manifest.limits.max_seq_len,
    )


def available_bytes(manifest: Manifest, host: Host) -> int:
    """Memory that a build of this target could have here: the host's, or the smallest GPU's."""
    if manifest.target == "cpu" or not host.gpus:
        return host.available_bytes
    return min(gpu.memory_bytes for gpu in host.gpus)


def memory_gate(need: MemoryNeed, available: int) -> GateResult:
    """Judge whether a build fits into *available* bytes."""
    kv_bytes_per_sequence = need.kv_bytes_per_token * need.max_seq_len
    left = available - need.weights_bytes - need.activations_bytes
    num_sequences = max(left // kv_bytes_per_sequence, 0)
    numbers: dict[str, Value] = {
        "weights_bytes": need.weights_bytes,
        "activations_bytes": need.activations_bytes,
        "kv_bytes_per_token": need.kv_bytes_per_token,
        "least_bytes": need.least_bytes,
        "num_full_sequences": num_sequences,
    }
    thresholds: dict[str, Value] = {"available_bytes": available}
    if num_sequences >= 1:
        reason = f"{num_sequences} sequences of {need.max_seq_len} tokens fit"
        return GateResult("memory", "passed", reason, numbers, thresholds)
    reason = (
        f"it needs {_mb(need.least_bytes)} (weights {_mb(need.weights_bytes)}, activations "
        f"{_mb(need.activations_bytes)}, KV of one sequence {_mb(kv_bytes_per_sequence)}) and {_mb(available)} are "
        "available: free some, or build with smaller weights, KV or max_seq_len"
    )
    return GateResult("memory", "failed", reason, numbers, thresholds)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"

"""What a CPU build is asked for: options as plain values, and how a spec becomes them and they a spec."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from enginehouse_builders.cpu.source import INT4_GROUP_SIZE
from enginehouse_builders.spec.model import (
    Calibration,
    ComputeType,
    KvType,
    Limits,
    ModelSource,
    Quantization,
    Spec,
    WeightQuantization,
)
from enginehouse_contract.errors import ConfigurationError, refusal

DATA_AWARE: Final = ("int4_awq", "int4_gptq")
"""Precisions whose quantization looks at what flows through the model."""

BUILD_PRECISIONS: Final = ("as_in_file", "int8", "int4", *DATA_AWARE, "f16", "f32")
KV_PRECISIONS: Final = ("u8", "f16", "f32")
DEFAULT_MAX_NUM_TOKENS: Final = 512
_GROUPED: Final = ("int4", *DATA_AWARE)
_SERVED: Final = ("scheduling", "speculation", "kv_cache")  # parts of a spec that say how the build is to be served
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


def _served(spec: Spec) -> dict[str, Any]:
    parts = spec.model_dump(mode="json", include=set(_SERVED))
    for decided_elsewhere in ("dtype", "tokens_per_block"):
        del parts["kv_cache"][decided_elsewhere]
    if draft := parts["speculation"]["draft_model"]:
        parts["speculation"]["draft_model"] = Path(draft).name
    return parts


def _default_served() -> dict[str, Any]:
    return _served(Spec(name="default", model=ModelSource(source="default")))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What to build. Checked when made; raises :class:`ConfigurationError` naming the field."""

    model: Path
    weight_precision: str = "as_in_file"
    group_size: int | None = None  # inputs that share a scale, for int4; None: 32
    calibration: Calibration = field(default_factory=Calibration)  # what data-aware precisions look at
    kv_precision: str = "u8"
    max_batch_size: int = 64
    max_seq_len: int | None = None  # None: the model's window, at most 8192
    max_input_len: int | None = None  # None: one less than max_seq_len
    max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS
    name: str | None = None  # None: the model's own
    source_sha256: str | None = None  # the digest that the model must have
    served: dict[str, Any] = field(default_factory=_default_served)  # recorded with the build

    def __post_init__(self) -> None:
        for name, value, known in (
            ("weight_precision", self.weight_precision, BUILD_PRECISIONS),
            ("kv_precision", self.kv_precision, KV_PRECISIONS),
        ):
            if value not in known:
                raise ConfigurationError(refusal(name, f"must be one of {', '.join(known)}", given=value))
        for name, least in (
            ("max_batch_size", 1),
            ("max_seq_len", 2),
            ("max_input_len", 1),
            ("max_num_tokens", 1),
            ("group_size", 16),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(refusal(name, f"must be at least {least}", given=value))
        if self.group_size is not None and self.weight_precision not in _GROUPED:
            problem = f"is for {', '.join(_GROUPED)} weights"
            raise ConfigurationError(
                refusal("group_size", problem, given=f"{self.group_size} with {self.weight_precision}")
            )
        if self.max_num_tokens < self.max_batch_size:
            problem = "is less than a token for each sequence of a full batch"
            raise ConfigurationError(
                refusal("max_num_tokens", problem, limit=self.max_batch_size, given=self.max_num_tokens)
            )

    @property
    def is_data_aware(self) -> bool:
        """Whether quantization needs the ``export`` extra and calibration data."""
        return self.weight_precision in DATA_AWARE

    @property
    def int4_group_size(self) -> int | None:
        """The group size where weights are int4, the default filled in; else None."""
        return (self.group_size or INT4_GROUP_SIZE) if self.weight_precision in _GROUPED else None


def options_of(spec: Spec) -> BuildOptions:
    """Return what a spec, with absolute paths, asks of the target ``cpu``."""
    limits, quantization = spec.limits, spec.quantization
    kv = spec.kv_cache.dtype
    return BuildOptions(
        model=Path(spec.model.source),
        weight_precision=_precision(spec),
        group_size=quantization.group_size,
        calibration=quantization.calibration,
        kv_precision="u8" if kv is KvType.AUTO else kv.value,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_input_len=limits.max_input_len,
        max_num_tokens=limits.max_num_tokens or max(DEFAULT_MAX_NUM_TOKENS, limits.max_batch_size),
        name=spec.name,
        source_sha256=spec.model.sha256,
        served=_served(spec),
    )


def spec_of(options: BuildOptions, *, name: str, source: str, sha256: str | None, limits: Limits) -> Spec:
    """Return the spec that asks for *options*, with what they leave open filled in."""
    precision = options.weight_precision
    is_float = precision in {"f16", "f32"}
    calibration = options.calibration if options.is_data_aware else Calibration()
    return Spec(
        name=_NO_NAME.sub("-", name).strip("-._")[:100] or "model",
        model=ModelSource(source=source, sha256=sha256),
        dtype=ComputeType(precision) if is_float else ComputeType.AUTO,
        quantization=Quantization(
            weights=WeightQuantization.NONE if is_float else WeightQuantization(precision),
            group_size=options.int4_group_size,
            calibration=calibration,
        ),
        limits=limits,
        kv_cache={**options.served["kv_cache"], "dtype": options.kv_precision},  # type: ignore[arg-type]  # pydantic reads mappings
        scheduling=options.served["scheduling"],
        speculation=options.served["speculation"],
    )


def _precision(spec: Spec) -> str:
    """The precision of weights: the file's own where the spec says nothing, the compute type where it says `none`."""
    weights, dtype = spec.quantization.weights, spec.dtype
    if weights not in {None, WeightQuantization.NONE}:
        return str(weights.value)
    is_folder = Path(spec.model.source).is_dir()
    if dtype is ComputeType.AUTO:
        return "f16" if weights is WeightQuantization.NONE and not is_folder else "as_in_file"
    return dtype.value if weights is WeightQuantization.NONE or is_folder else "as_in_file"

"""Building an engine for the CPU: from a GGUF file or a Hugging Face folder to a folder in the store."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, cast

import openvino as ov

from enginehouse_builders.cpu.export import export_decoder
from enginehouse_builders.cpu.gguf_source import GgufSource
from enginehouse_builders.cpu.graph import build_decoder
from enginehouse_builders.cpu.huggingface_source import HuggingFaceSource
from enginehouse_builders.cpu.weights import WEIGHT_PRECISIONS, WeightPrecision
from enginehouse_builders.digests import source_digest
from enginehouse_builders.store import folder_of, publishing
from enginehouse_contract.errors import BuildError, ConfigurationError, ModelSourceError, refusal
from enginehouse_contract.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    BuildLimits,
    FileRecord,
    Manifest,
    read_manifest,
    sha256_of_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from enginehouse_builders.cpu.source import ModelSource

    Progress = Callable[[str, float], None]

KV_PRECISIONS: Final = ("u8", "f16", "f32")
TOKENS_PER_BLOCK: Final = 32  # fixed by OpenVINO's CPU kernels
_DEFAULT_MAX_SEQ_LEN: Final = 8192
_QUANT_ALGOS: Final = {"int8": "W8A16", "int4": "W4A16"}
_RECIPE: Final = 1  # raised when the builder changes what bytes it makes of the same input


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What to build. Checked when made; raises :class:`ConfigurationError` naming the field."""

    model: Path
    weight_precision: str = "as_in_file"
    kv_precision: str = "u8"
    max_batch_size: int = 64
    max_seq_len: int | None = None  # None: the model's window, at most 8192
    max_input_len: int | None = None  # None: one less than max_seq_len
    max_num_tokens: int = 512
    name: str | None = None  # None: the model's own

    def __post_init__(self) -> None:
        for field, value, known in (
            ("weight_precision", self.weight_precision, WEIGHT_PRECISIONS),
            ("kv_precision", self.kv_precision, KV_PRECISIONS),
        ):
            if value not in known:
                raise ConfigurationError(refusal(field, f"must be one of {', '.join(known)}", given=value))
        for field in ("max_batch_size", "max_seq_len", "max_input_len", "max_num_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigurationError(refusal(field, "must be at least 1", given=value))


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A build in the store, and whether it was there before."""

    build_dir: Path
    manifest: Manifest
    cached: bool


def build_engine(options: BuildOptions, store_dir: Path, progress: Progress | None = None) -> BuildResult:
    """Build *options* into *store_dir*, or find it there.

    Raises :class:`ModelSourceError` for a model that cannot be built from, :class:`ConfigurationError` for limits that
    it cannot have, :class:`BuildError` when the build cannot be written.
    """
    report = progress or (lambda _stage, _fraction: None)
    report("reading", 0.0)
    if not options.model.exists():
        raise ModelSourceError(f"{options.model} does not exist; give a GGUF file or a Hugging Face folder.")
    sha256 = source_digest(options.model, store_dir.parent / "cache" / "digests.json")
    build_id = _build_id(options, sha256)
    build_dir = folder_of(store_dir, build_id)
    if (build_dir / MANIFEST_FILE).is_file():
        report("cached", 1.0)
        return BuildResult(build_dir, read_manifest(build_dir), cached=True)
    source = _open_source(options.model, sha256)
    limits = _limits(options, source)
    precision = _precision(options, source)
    with publishing(store_dir, build_id) as scratch:
        if source.why_not_by_hand is None:
            model = build_decoder(source, precision, lambda fraction: report("converting", 0.1 + 0.6 * fraction))
        else:
            report("converting with optimum-intel", 0.1)
            model = export_decoder(options.model, precision, source.why_not_by_hand)
        report("writing", 0.75)
        try:
            ov.save_model(model, scratch / MODEL_FILE, compress_to_fp16=False)
        except RuntimeError as error:
            raise BuildError(f"the model cannot be written to {store_dir} ({_last_line(error)}).") from error
        for name, text in source.tokenizer_files().items():
            (scratch / name).write_text(text, encoding="utf-8")
        config = _engine_config(source, precision, options.kv_precision, limits)
        (scratch / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        report("recording", 0.9)
        manifest = _manifest(build_id, options, source, limits, scratch)
        (scratch / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    report("done", 1.0)
    return BuildResult(build_dir, read_manifest(build_dir), cached=False)


def _open_source(path: Path, sha256: str) -> ModelSource:
    return HuggingFaceSource(path, sha256) if path.is_dir() else GgufSource(path, sha256)


def _precision(options: BuildOptions, source: ModelSource) -> WeightPrecision:
    if options.weight_precision == "as_in_file" and source.kind == "huggingface":
        return "f16"  # a checkpoint's own 16 bits
    return cast("WeightPrecision", options.weight_precision)


def _tool_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("enginehouse", "openvino", "tokenizers")}


def _build_id(options: BuildOptions, sha256: str) -> str:
    """The digest of everything that decides the bytes."""
    decisive = {
        "recipe": _RECIPE,
        "target": "cpu",
        "source": sha256,
        "tools": _tool_versions(),
        "weight_precision": options.weight_precision,
        "kv_precision": options.kv_precision,
        "max_batch_size": options.max_batch_size,
        "max_seq_len": options.max_seq_len,
        "max_input_len": options.max_input_len,
        "max_num_tokens": options.max_num_tokens,
        "name": options.name,
    }
    return "sha256:" + hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _limits(options: BuildOptions, source: ModelSource) -> BuildLimits:
    window = source.architecture.max_position_embeddings
    max_seq_len = options.max_seq_len or min(window, _DEFAULT_MAX_SEQ_LEN)
    if max_seq_len > window:
        raise ConfigurationError(
            refusal("max_seq_len", "is beyond the model's window", limit=window, given=max_seq_len)
        )
    max_input_len = options.max_input_len or max(1, max_seq_len - 1)
    if max_input_len >= max_seq_len:
        problem = "leaves no room for an answer"
        raise ConfigurationError(refusal("max_input_len", problem, limit=max_seq_len - 1, given=max_input_len))
    return BuildLimits(options.max_batch_size, max_input_len, max_seq_len, options.max_num_tokens)


def _engine_config(source: ModelSource, precision: str, kv_precision: str, limits: BuildLimits) -> dict[str, Any]:
    """The engine folder's ``config.json``, in TensorRT-LLM's shape."""
    arch = source.architecture
    return {
        "version": f"enginehouse-{metadata.version('enginehouse')}",
        "pretrained_config": {
            "architecture": arch.name,
            "dtype": "float16" if precision == "f16" else "float32",
            "vocab_size": arch.vocab_size,
            "hidden_size": arch.hidden_size,
            "intermediate_size": arch.intermediate_size,
            "num_hidden_layers": arch.num_layers,
            "num_attention_heads": arch.num_heads,
            "num_key_value_heads": arch.num_kv_heads,
            "head_size": arch.head_size,
            "max_position_embeddings": arch.max_position_embeddings,
            "quantization": {
                "quant_algo": _QUANT_ALGOS.get(precision),
                "kv_cache_quant_algo": "INT8" if kv_precision == "u8" else None,
            },
        },
        "build_config": {
            "max_batch_size": limits.max_batch_size,
            "max_input_len": limits.max_input_len,
            "max_seq_len": limits.max_seq_len,
            "max_num_tokens": limits.max_num_tokens,
            "max_beam_width": 1,
            "kv_cache_type": "PAGED",
            "plugin_config": {"tokens_per_block": TOKENS_PER_BLOCK},
        },
    }


def _manifest(
    build_id: str, options: BuildOptions, source: ModelSource, limits: BuildLimits, scratch: Path
) -> Manifest:
    tokenizer_config = json.loads((scratch / TOKENIZER_CONFIG_FILE).read_text(encoding="utf-8"))
    template = tokenizer_config.get("chat_template")
    return Manifest(
        build_id=build_id,
        target="cpu",
        model_name=options.name or source.name,
        source={"kind": source.kind, "name": options.model.name, "sha256": source.sha256},
        weight_precision=options.weight_precision,
        kv_precision=options.kv_precision,
        limits=limits,
        tool_versions={**_tool_versions(), "python": platform.python_version()},
        tokenizer_sha256=sha256_of_file(scratch / TOKENIZER_FILE),
        chat_template_sha256=hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None,
        files={
            path.name: FileRecord(path.stat().st_size, sha256_of_file(path))
            for path in sorted(scratch.iterdir())
            if path.name != MANIFEST_FILE
        },
        created_at=datetime.now(tz=timezone.utc).isoformat(timespec="seconds"),
    )


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__

"""Building an engine for the CPU: from a GGUF file or a Hugging Face folder to a folder in the store."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from dataclasses import asdict, dataclass
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
from enginehouse_builders.store import folder_of, is_sound, publishing
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

    from enginehouse_builders.cpu.architecture import Architecture
    from enginehouse_builders.cpu.source import ModelSource

    Progress = Callable[[str, float], None]

KV_PRECISIONS: Final = ("u8", "f16", "f32")
TOKENS_PER_BLOCK: Final = 32  # fixed by OpenVINO's CPU kernels
_DEFAULT_MAX_SEQ_LEN: Final = 8192
_QUANT_ALGOS: Final = {"int8": "W8A16", "int4": "W4A16"}
_RECIPE: Final = 3  # raised when the builder changes what bytes it makes of the same input
_TARGET: Final = "cpu"
_DIGESTS_FILE: Final = ".source-digests.json"
_GRAPH_BYTES: Final = 16 << 20  # room for what is written beside the weights


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
        for field, least in (("max_batch_size", 1), ("max_seq_len", 2), ("max_input_len", 1), ("max_num_tokens", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ConfigurationError(refusal(field, f"must be at least {least}", given=value))
        if self.max_num_tokens < self.max_batch_size:
            problem = "is less than a token for each sequence of a full batch"
            raise ConfigurationError(
                refusal("max_num_tokens", problem, limit=self.max_batch_size, given=self.max_num_tokens)
            )


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
    source = _open_source(options.model, source_digest(options.model, store_dir / _DIGESTS_FILE))
    limits = _limits(options, source.architecture)
    build_id = _build_id(options, source, limits)
    build_dir = folder_of(store_dir, build_id)
    if is_sound(build_dir):
        report("cached", 1.0)
        return BuildResult(build_dir, read_manifest(build_dir), cached=True)
    with publishing(store_dir, build_id) as scratch:
        for name, text in source.tokenizer_files().items():
            (scratch / name).write_text(text, encoding="utf-8")
        config = _engine_config(options, source.architecture, limits)
        (scratch / CONFIG_FILE).write_text(_to_json(config), encoding="utf-8")
        _write_model(_convert(options, source, report), scratch / MODEL_FILE, report)
        report("recording", 0.9)
        manifest = _manifest(build_id, options, source, limits, scratch)
        (scratch / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    report("done", 1.0)
    return BuildResult(build_dir, read_manifest(build_dir), cached=False)


def _open_source(path: Path, sha256: str) -> ModelSource:
    return HuggingFaceSource(path, sha256) if path.is_dir() else GgufSource(path, sha256)


def _convert(options: BuildOptions, source: ModelSource, report: Progress) -> ov.Model:
    report("converting", 0.05)
    precision = cast("WeightPrecision", options.weight_precision)
    if source.why_not_by_hand is not None:
        return export_decoder(options.model, precision, source.why_not_by_hand)
    return build_decoder(source, precision, lambda fraction: report("converting", 0.05 + 0.65 * fraction))


def _write_model(model: ov.Model, path: Path, report: Progress) -> None:
    """Write a model and read it back: a full disk does not stop the writer from returning."""
    report("writing", 0.75)
    num_bytes = sum(node.get_byte_size() for node in _name_by_order(model) if node.get_type_name() == "Constant")
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes + _GRAPH_BYTES:
        needed = f"{(num_bytes + _GRAPH_BYTES) >> 20} MiB are needed in {path.parent.parent}, {free >> 20} MiB are free"
        raise BuildError(f"there is no space for the build: {needed}; free some and build again.")
    try:
        ov.save_model(model, path, compress_to_fp16=False)
        ov.Core().read_model(path)
    except RuntimeError as error:
        raise BuildError(f"the model cannot be written to {path.parent.parent} ({_last_line(error)}).") from error


def _name_by_order(model: ov.Model) -> list[ov.Node]:
    """Name nodes by their place in the graph; a name that OpenVINO counts out differs from build to build."""
    nodes: list[ov.Node] = model.get_ordered_ops()
    for index, node in enumerate(nodes):
        if node.get_friendly_name() == node.get_name():
            node.set_friendly_name(f"{node.get_type_name()}_{index}")
    return nodes


def _tool_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("enginehouse", "gguf", "numpy", "openvino", "tokenizers")}


def _build_id(options: BuildOptions, source: ModelSource, limits: BuildLimits) -> str:
    """The digest of everything that decides the bytes."""
    decisive = {
        "recipe": _RECIPE,
        "target": _TARGET,
        "source": source.sha256,
        "tools": _tool_versions(),
        "name": options.name or source.name,
        "weight_precision": options.weight_precision,
        "kv_precision": options.kv_precision,
        **asdict(limits),
    }
    return "sha256:" + hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _limits(options: BuildOptions, arch: Architecture) -> BuildLimits:
    window = arch.max_position_embeddings
    max_seq_len = options.max_seq_len or min(window, _DEFAULT_MAX_SEQ_LEN)
    if max_seq_len > window:
        problem = "is beyond the model's window"
        raise ConfigurationError(refusal("max_seq_len", problem, limit=window, given=max_seq_len))
    max_input_len = options.max_input_len or max_seq_len - 1
    if max_input_len >= max_seq_len:
        problem = "leaves no room for an answer"
        raise ConfigurationError(refusal("max_input_len", problem, limit=max_seq_len - 1, given=max_input_len))
    return BuildLimits(options.max_batch_size, max_input_len, max_seq_len, options.max_num_tokens)


def _engine_config(options: BuildOptions, arch: Architecture, limits: BuildLimits) -> dict[str, Any]:
    """The engine folder's ``config.json``, in TensorRT-LLM's shape."""
    return {
        "version": f"enginehouse-{metadata.version('enginehouse')}",
        "pretrained_config": {
            "architecture": arch.class_name,
            "dtype": "float32",
            "vocab_size": arch.vocab_size,
            "hidden_size": arch.hidden_size,
            "intermediate_size": arch.intermediate_size,
            "num_hidden_layers": arch.num_layers,
            "num_attention_heads": arch.num_heads,
            "num_key_value_heads": arch.num_kv_heads,
            "head_size": arch.head_size,
            "max_position_embeddings": arch.max_position_embeddings,
            "quantization": {
                "quant_algo": _QUANT_ALGOS.get(options.weight_precision),
                "kv_cache_quant_algo": "INT8" if options.kv_precision == "u8" else None,
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
        target=_TARGET,
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


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__

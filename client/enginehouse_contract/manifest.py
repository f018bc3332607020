"""What a build says of itself: `manifest.json`, written last and read first.

The engine folder keeps TensorRT-LLM's shape (``config.json`` with ``version``, ``pretrained_config``,
``build_config``); the manifest beside it records what that format does not: where the bytes came from, which tools made
them, what the tokenizer and chat template are, and a digest of every file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from enginehouse_contract.errors import BuildIntegrityError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT_VERSION: Final = 1
MANIFEST_FILE: Final = "manifest.json"
CONFIG_FILE: Final = "config.json"
MODEL_FILE: Final = "openvino_model.xml"
WEIGHTS_FILE: Final = "openvino_model.bin"
TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"

Target = Literal["cpu", "tensorrt_llm", "tensorrt_llm_pytorch"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 (hex) of one file of the build."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """What the engine was built to hold; serving may lower these, never raise them."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one build. ``build_id`` is the digest of everything that decides the bytes."""

    build_id: str  # "sha256:<64 hex>"
    target: Target
    model_name: str
    source: dict[str, str]  # kind ("gguf", "huggingface"), name, sha256
    weight_precision: str
    kv_precision: str
    limits: BuildLimits
    tool_versions: dict[str, str]
    tokenizer_sha256: str
    chat_template_sha256: str | None
    files: dict[str, FileRecord]
    created_at: str = ""  # ISO 8601, UTC; not part of the build id
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Return the manifest as JSON with sorted keys and a final newline."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST_FILE) -> Manifest:
        """Parse :meth:`to_json`'s output; raise :class:`BuildIntegrityError` naming *where* when it is not one."""
        try:
            raw: dict[str, Any] = json.loads(text)
            version = raw.get("format_version")
            if version != FORMAT_VERSION:
                msg = (
                    f"{where}: format_version {version!r} is not {FORMAT_VERSION}; another Enginehouse made this build."
                )
                raise BuildIntegrityError(msg)
            raw["limits"] = BuildLimits(**raw["limits"])
            raw["files"] = {name: FileRecord(**record) for name, record in raw["files"].items()}
            return cls(**raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            msg = (
                f"{where} is not a build manifest ({error}); rebuild, or point at a folder made by `enginehouse build`."
            )
            raise BuildIntegrityError(msg) from error


def read_manifest(build_dir: Path) -> Manifest:
    """Read the manifest of *build_dir*; raise :class:`BuildIntegrityError` when there is none or it is damaged."""
    path = build_dir / MANIFEST_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{build_dir} has no readable {MANIFEST_FILE} ({error}); it is not a finished build."
        raise BuildIntegrityError(msg) from error
    return Manifest.from_json(text, str(path))


def verify_build(build_dir: Path, *, digests: bool = True) -> Manifest:
    """Check that every recorded file is there with its size (and digest) and return the manifest.

    Raises :class:`BuildIntegrityError` naming the first file that is missing, truncated or changed.
    """
    manifest = read_manifest(build_dir)
    for name, record in sorted(manifest.files.items()):
        path = build_dir / name
        if not path.is_file():
            msg = f"{build_dir}: {name} is missing; the build is incomplete, rebuild it."
            raise BuildIntegrityError(msg)
        if (num_bytes := path.stat().st_size) != record.num_bytes:
            msg = (
                f"{path}: {num_bytes} bytes, the manifest says {record.num_bytes}; the file was truncated or replaced."
            )
            raise BuildIntegrityError(msg)
        if digests and (sha256 := sha256_of_file(path)) != record.sha256:
            msg = f"{path}: SHA-256 {sha256}, the manifest says {record.sha256}; the file was changed after the build."
            raise BuildIntegrityError(msg)
    return manifest


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

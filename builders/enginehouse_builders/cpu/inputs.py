"""What decides the bytes of a CPU build: the model, the tools, the options, and what quantization looks at."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.cpu.gguf_source import GgufSource
from enginehouse_builders.cpu.huggingface_source import HuggingFaceSource
from enginehouse_builders.spec.model import ModelSource as ModelOfSpec
from enginehouse_builders.spec.model import Quantization, Spec
from enginehouse_contract.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from enginehouse_builders.cpu.options import BuildOptions
    from enginehouse_builders.cpu.source import ModelSource
    from enginehouse_contract.manifest import BuildLimits

TARGET: Final = "cpu"
_RECIPE: Final = 5  # raised when the builder changes what bytes it makes of the same input
_TOOLS: Final = ("enginehouse", "gguf", "numpy", "openvino", "tokenizers")
_EXPORT_TOOLS: Final = ("nncf", "optimum-intel", "torch", "transformers")


def nncf_version() -> str:
    """Return NNCF's version; raise :class:`BuildError` saying what to install when it is not there."""
    try:
        return metadata.version("nncf")
    except metadata.PackageNotFoundError as error:
        msg = (
            "AWQ and GPTQ weights are made by NNCF, which is not installed: pip install 'enginehouse[export]'; "
            "or build with int4 or int8 weights, which need no data."
        )
        raise BuildError(msg) from error


def open_source(path: Path, sha256: str) -> ModelSource:
    """Return a GGUF file or a Hugging Face folder as a source; raise :class:`ModelSourceError` for a damaged one."""
    return HuggingFaceSource(path, sha256) if path.is_dir() else GgufSource(path, sha256)


def calibration_samples(options: BuildOptions) -> list[str]:
    """Return the texts that quantization looks at.

    Raises :class:`BuildError` when what quantizes is not installed, before anything is made, and
    :class:`ConfigurationError` for a file that cannot be read.
    """
    from enginehouse_builders.targets.calibration import calibration_samples as samples_of  # noqa: PLC0415 - rarely

    nncf_version()
    quantization = Quantization(calibration=options.calibration)
    return samples_of(Spec(name="calibration", model=ModelOfSpec(source=str(options.model)), quantization=quantization))


def samples_sha256(samples: Sequence[str]) -> str:
    """Return the digest of calibration texts."""
    return hashlib.sha256("\0".join(samples).encode()).hexdigest()


def tool_versions(options: BuildOptions, source: ModelSource) -> dict[str, str]:
    """Return the versions of the packages that make the bytes of this build."""
    versions = {name: metadata.version(name) for name in _TOOLS}
    if options.is_data_aware:
        versions["nncf"] = nncf_version()
    if source.why_not_by_hand is not None:
        for name in _EXPORT_TOOLS:
            with suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
    return versions


def deciding_inputs(
    options: BuildOptions,
    source: ModelSource,
    name: str,
    limits: BuildLimits,
    versions: Mapping[str, str],
    samples: Sequence[str],
) -> dict[str, Any]:
    """Return all that decides the bytes, as JSON values; nothing of the host that makes them."""
    inputs: dict[str, Any] = {
        "recipe": _RECIPE,
        "target": TARGET,
        "source": {"kind": source.kind, "name": options.model.name, "sha256": source.sha256},
        "tools": dict(versions),
        "name": name,
        "weight_precision": options.weight_precision,
        "int4_group_size": options.int4_group_size,
        "kv_precision": options.kv_precision,
        "limits": asdict(limits),
        "served": options.served,
    }
    if options.is_data_aware:
        inputs["calibration"] = {
            "samples_sha256": samples_sha256(samples),
            "max_sample_tokens": options.calibration.max_sample_tokens,
        }
    return inputs

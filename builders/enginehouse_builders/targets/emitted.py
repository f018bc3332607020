"""What is written for a GPU target, and what every target's plan has in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from enginehouse_contract.manifest import BuildLimits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from enginehouse_builders.spec.model import Spec
    from enginehouse_builders.targets.source import Source
    from enginehouse_contract.manifest import Target

ENGINE_VERSION: Final = "1.2.1"
"""The last TensorRT-LLM with an engine path; upstream removed it in 1.3."""

OLDEST_LLM_API: Final = (1, 2)
CONTAINER_IMAGE: Final = "nvcr.io/nvidia/tritonserver:26.04-trtllm-python-py3"
"""Triton with TensorRT-LLM 1.2.1 and TensorRT 10.14 (its Dockerfile pins both)."""

SCRIPT_FILE: Final = "build_engine.py"
SERVING_FILE: Final = "serving_parameters.json"
TRITON_MODEL: Final = "triton/tensorrt_llm"
"""Where a build holds its Triton model."""

DEFAULT_MAX_NUM_TOKENS: Final = 8192
DEFAULT_TOKENS_PER_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class EmittedTarget:
    """A folder that builds one target by itself on the right host."""

    target: Target
    folder: Path
    files: tuple[str, ...]  # by their paths within the folder
    script_arguments: tuple[str, ...]  # of this host's paths; the engine is written to `<folder>/engine`
    container_image: str
    container_command: str  # for a shell
    serving_parameters: Mapping[str, str]  # of the Triton model `tensorrt_llm`

    @property
    def script(self) -> Path:
        """The script that builds."""
        return self.folder / SCRIPT_FILE

    @property
    def engine_dir(self) -> Path:
        """Where the script puts the build."""
        return self.folder / "engine"


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """The resolved arguments of one build. ``settings`` is what the generated script is made of, as plain values."""

    target: Target
    settings: dict[str, Any]
    fragments: dict[str, str]  # parts of the script by their placeholder: names of template files
    limits: BuildLimits
    weight_precision: str
    kv_precision: str
    serving: dict[str, str]
    needs_calibration: bool = False
    packages: tuple[str, ...] = ()  # whose versions are part of the build, beside TensorRT-LLM's
    files: dict[str, str] = field(default_factory=dict)  # written into the build as they are
    folders: dict[str, Path] = field(default_factory=dict)  # option of the script -> folder on this host


def resolve_limits(spec: Spec, source: Source) -> BuildLimits:
    """Return the spec's limits with those left out filled in."""
    limits = spec.limits
    max_seq_len = limits.max_seq_len or source.window
    return BuildLimits(
        max_batch_size=limits.max_batch_size,
        max_input_len=limits.max_input_len or max_seq_len - 1,
        max_seq_len=max_seq_len,
        max_num_tokens=limits.max_num_tokens or max(DEFAULT_MAX_NUM_TOKENS, limits.max_batch_size),
    )

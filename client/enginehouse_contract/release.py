"""A release: a build plus serving settings, numbered, under Triton model names of its own.

NVIDIA's engine path is one per model config, so two versions of one Triton model cannot hold two engines. Each release
therefore has models of its own (``tensorrt_llm-r12``), and the names that clients call point at one release.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, get_args

from enginehouse_contract.tensors import ENSEMBLE, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Stage = Literal["staging", "production"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)

RELEASE_MODELS: Final = (PREPROCESSING.name, TENSORRT_LLM.name, POSTPROCESSING.name, ENSEMBLE.name)
"""Stable names of the models that each release has of its own, in the order in which they load."""

_MODEL: Final = re.compile(r"(.+)-r([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Release:
    """One release. ``parameters`` are the serving settings of its models; the build decides the rest."""

    number: int
    build_id: str
    build_dir: Path
    model_name: str
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Short name: ``r12``."""
        return release_name(self.number)

    def model(self, stable_name: str) -> str:
        """Return the release's own name of a model: ``tensorrt_llm-r12`` for ``tensorrt_llm``."""
        return f"{stable_name}-{self.name}"

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all its models, parts first, the ensemble over them last."""
        return tuple(map(self.model, RELEASE_MODELS))


def release_name(number: int) -> str:
    """Return ``r12`` for 12."""
    return f"r{number}"


def release_of_model(model: str) -> int | None:
    """Return the number of the release that a Triton model belongs to; None for a stable name or another's model."""
    match = _MODEL.fullmatch(model)
    return int(match[2]) if match and match[1] in RELEASE_MODELS else None

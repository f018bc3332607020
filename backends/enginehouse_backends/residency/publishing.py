"""Writing the services of a host: one engine model each in a Triton repository of their own, and ``residency.json``.

A folder is published by rename and never edited: its name holds a digest of the build and the settings. Nothing is
loaded here; the front door reads the file and loads what is asked for.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse_backends.residency.services import SERVICES_FILE
from enginehouse_backends.server.repository import check_parameters, write_model
from enginehouse_contract.errors import BuildError
from enginehouse_contract.model_config import ENGINEHOUSE_PARAMETERS, make_config
from enginehouse_contract.tensors import TENSORRT_LLM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from enginehouse_backends.residency.records import ResidencyLimits

_NUM_DIGEST_CHARS = 8


@dataclass(frozen=True, slots=True)
class Service:
    """One service as it is to be served; *num_bytes* is what its engine takes when loaded."""

    name: str
    build_id: str
    build_dir: Path
    num_bytes: int
    is_pinned: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def engine_model(self) -> str:
        """The Triton model that runs it; another build or other settings have another one."""
        content = json.dumps([self.build_id, str(self.build_dir), sorted(self.parameters.items())])
        digest = hashlib.sha256(content.encode()).hexdigest()[:_NUM_DIGEST_CHARS]
        return f"{TENSORRT_LLM.name}-{self.name}-{digest}"


def publish_services(
    services_dir: Path, services: Sequence[Service], limits: ResidencyLimits, grpc_url: str | None = None
) -> None:
    """Put the services' engine models and the file that names them in place, each by one rename.

    Engine models of services that are gone stay until the next call, since the front door may still have to unload
    them. Raises :class:`ConfigurationError` for a parameter that no model has, :class:`BuildError` when the folder
    cannot be written.
    """
    for service in services:
        check_parameters(service.parameters)
    try:
        services_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".publishing-", dir=services_dir.parent) as scratch:
            for service in services:
                if not (services_dir / service.engine_model).exists():
                    _write_engine(Path(scratch), service)
                    Path(scratch, service.engine_model).rename(services_dir / service.engine_model)
            kept = {service.engine_model for service in services} | _engines_in_force(services_dir)
            fresh = Path(scratch, SERVICES_FILE)
            fresh.write_text(_file_text(services, limits, grpc_url), encoding="utf-8")
            fresh.replace(services_dir / SERVICES_FILE)
        for folder in services_dir.glob(f"{TENSORRT_LLM.name}-*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise BuildError(f"the services cannot be written to {services_dir} ({error.strerror or error}).") from error


def _write_engine(parent: Path, service: Service) -> None:
    own = {
        **service.parameters,
        "gpt_model_path": str(service.build_dir),
        "tokenizer_dir": str(service.build_dir),
        "build_digest": service.build_id,
        "release": service.name,
    }
    known = {*TENSORRT_LLM.parameters, *ENGINEHOUSE_PARAMETERS}
    config = make_config(TENSORRT_LLM.name, {name: value for name, value in own.items() if name in known})
    write_model(parent / service.engine_model, TENSORRT_LLM.name, replace(config, name=service.engine_model))


def _engines_in_force(services_dir: Path) -> set[str]:
    try:
        raw: dict[str, Any] = json.loads((services_dir / SERVICES_FILE).read_text(encoding="utf-8"))
        return {str(service["engine_model"]) for service in raw["services"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _file_text(services: Sequence[Service], limits: ResidencyLimits, grpc_url: str | None) -> str:
    content = {
        "memory_budget_bytes": limits.memory_budget_bytes,
        "max_wait_s": limits.max_wait_s,
        "idle_unload_s": limits.idle_unload_s,
        "grpc_url": grpc_url,
        "services": [
            {
                "name": service.name,
                "engine_model": service.engine_model,
                "num_bytes": service.num_bytes,
                "pinned": service.is_pinned,
                "tokenizer_dir": str(service.build_dir),
                "engine_dir": str(service.build_dir),
                "build_id": service.build_id,
            }
            for service in services
        ],
    }
    return json.dumps(content, indent=2) + "\n"

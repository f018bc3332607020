"""The live repository by releases: each release's own models, and the stable names that point at one of them.

::

    repository/
      preprocessing-r12/ tensorrt_llm-r12/ postprocessing-r12/ ensemble-r12/      one release, never changed
      ensemble/                    steps pinned to one release's models
      tensorrt_llm/                an ensemble of one step: the stable name of a release's engine
      tensorrt_llm_bls/            the front door; routes.json says which releases answer

A release is published by rename and never edited. A stable name moves by replacing its config.pbtxt in one rename.
Triton sees a change only when the newest time in a model's folder grows, so the new file's time is made to, even where
the clock was set back.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from enginehouse_backends.server.repository import check_parameters, write_model
from enginehouse_contract.errors import ConfigurationError, PromotionError, refusal
from enginehouse_contract.model_config import ENGINEHOUSE_PARAMETERS, ModelConfig, make_config
from enginehouse_contract.release import RELEASE_MODELS
from enginehouse_contract.tensors import ENSEMBLE, MODELS, TENSORRT_LLM, TENSORRT_LLM_BLS, EnsembleStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from enginehouse_contract.release import Release
    from enginehouse_contract.tensors import ModelContract

ROUTES_FILE: Final = "routes.json"
ALIASES: Final = (TENSORRT_LLM.name, ENSEMBLE.name)
"""Stable names that point at one release by pinned steps; the front door (`tensorrt_llm_bls`) reads its route table."""

_FRONT_DOOR_ONLY: Final = frozenset(
    {"accumulate_tokens", "engine_reports_usage", "inter_token_timeout_ms", "max_active_requests"}
)
_FRONT_DOOR_TOO: Final = frozenset({"max_queue_size", "skip_special_tokens"})

_NOT_SETTINGS: Final = frozenset(
    {
        "build_digest",
        "gpt_model_path",
        "release",
        "tensorrt_llm_draft_model_name",
        "tensorrt_llm_model_name",
        "tokenizer_dir",
    }
)


def render_live(destination: Path, release: Release, others: Sequence[Release], front_door: Mapping[str, str]) -> None:
    """Write the whole repository of a server that starts with *release* behind the stable names.

    *others* are published too, so that they can be loaded later. Replaces what was there by rename. Raises
    :class:`PromotionError` when it cannot be written.
    """
    with _writing(destination.parent) as scratch:
        fresh = scratch / "repository"
        fresh.mkdir()
        for each in (release, *others):
            for stable_name in RELEASE_MODELS:
                _write_release_model(fresh, each, stable_name)
        for stable_name in (*ALIASES, TENSORRT_LLM_BLS.name):
            config = stable_config(stable_name, release, front_door)
            write_model(fresh / stable_name, stable_name, config)
        (fresh / TENSORRT_LLM_BLS.name / ROUTES_FILE).write_text(routes_text([(release, 1.0)]), encoding="utf-8")
        if destination.exists():
            destination.rename(scratch / "old")
        fresh.rename(destination)


def publish_release(repository: Path, release: Release) -> None:
    """Put a release's own models into the live repository, each by one rename; those already there are left alone.

    Raises :class:`PromotionError` when they cannot be written; nothing that serves is touched.
    """
    with _writing(repository.parent) as scratch:
        for stable_name in RELEASE_MODELS:
            folder = repository / release.model(stable_name)
            if not folder.exists():
                _write_release_model(scratch, release, stable_name)
                (scratch / folder.name).rename(folder)


def retract_release(repository: Path, release: Release) -> None:
    """Take a release's models, which must not be loaded, out of the live repository, and its route of share 0."""
    folder = repository / TENSORRT_LLM_BLS.name
    table = _read_table(folder)
    left = [route for route in table["routes"] if route["release"] != release.name or route["weight"] > 0]
    if left != table["routes"]:
        _replace_file(folder, ROUTES_FILE, json.dumps({**table, "routes": left}, indent=2) + "\n")
    with _writing(repository.parent) as scratch:
        for model in release.models:
            if (repository / model).exists():
                (repository / model).rename(scratch / model)


def point_stable_name(repository: Path, stable_name: str, release: Release, front_door: Mapping[str, str]) -> None:
    """Make a stable name's config point at *release*; the server follows when it loads that name."""
    folder = repository / stable_name
    _replace_file(folder, "config.pbtxt", stable_config(stable_name, release, front_door).render())


def write_routes(repository: Path, shares: Sequence[tuple[Release, float]], *, by: str = "tenant") -> None:
    """Replace the front door's route table in one rename; it reads it again within 50 ms."""
    _replace_file(repository / TENSORRT_LLM_BLS.name, ROUTES_FILE, routes_text(shares, by=by))


def add_routes(repository: Path, releases: Sequence[Release]) -> None:
    """List more releases in the route table with share 0, and leave the shares as they are."""
    folder = repository / TENSORRT_LLM_BLS.name
    table = _read_table(folder)
    table["routes"] = [*table["routes"], *json.loads(routes_text([(release, 0.0) for release in releases]))["routes"]]
    _replace_file(folder, ROUTES_FILE, json.dumps(table, indent=2) + "\n")


def read_routes(repository: Path) -> dict[str, float]:
    """Return the share of each release by name, as the front door's table has it; empty where there is none."""
    table = _read_table(repository / TENSORRT_LLM_BLS.name)
    return {route["release"]: float(route["weight"]) for route in table["routes"]}


def routes_text(shares: Sequence[tuple[Release, float]], *, by: str = "tenant") -> str:
    """Return a route table: shares of the requests, sticky by tenant or by request."""
    routes = [
        {
            "release": release.name,
            "weight": share,
            "engine_model": release.model(TENSORRT_LLM.name),
            "draft_model": None,
            "tokenizer_dir": str(release.build_dir),
            "engine_dir": str(release.build_dir),
            "build_id": release.build_id,
        }
        for release, share in shares
    ]
    return json.dumps({"by": by, "routes": routes}, indent=2) + "\n"


def stable_config(stable_name: str, release: Release, front_door: Mapping[str, str]) -> ModelConfig:
    """Return the config with which a stable name answers from *release*."""
    own = {"release": release.name, "build_digest": release.build_id}
    if stable_name == TENSORRT_LLM_BLS.name:
        paths = {"tokenizer_dir": str(release.build_dir), "gpt_model_path": str(release.build_dir)}
        engine = {"tensorrt_llm_model_name": release.model(TENSORRT_LLM.name)}
        return make_config(stable_name, {**front_door, **own, **paths, **engine})
    step_models = {name: release.model(name) for name in RELEASE_MODELS}
    if stable_name == ENSEMBLE.name:
        return replace(make_config(stable_name, own), step_models=step_models)
    return ModelConfig(_alias(stable_name), stable_name, None, parameters=own, step_models=step_models)


def split_parameters(parameters: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings of a release's models and those of the front door, which serves every release.

    Raises :class:`ConfigurationError` for one that no model has, or that a release decides itself.
    """
    check_parameters(parameters)
    for name in parameters:
        if name in _NOT_SETTINGS:
            raise ConfigurationError(refusal(name, "cannot be set: the release and its build decide it"))
    of_front_door = {n: value for n, value in parameters.items() if n in _FRONT_DOOR_ONLY | _FRONT_DOOR_TOO}
    of_release = {name: value for name, value in parameters.items() if name not in _FRONT_DOOR_ONLY}
    return of_release, of_front_door


def release_parameters(release: Release) -> dict[str, str]:
    """Return every parameter of a release's models."""
    return {
        **release.parameters,
        "tokenizer_dir": str(release.build_dir),
        "gpt_model_path": str(release.build_dir),
        "build_digest": release.build_id,
        "release": release.name,
    }


def _read_table(folder: Path) -> dict[str, Any]:
    """The route table; an empty one where there is none that can be read."""
    try:
        table: dict[str, Any] = json.loads((folder / ROUTES_FILE).read_text("utf-8"))
        for route in table["routes"]:
            float(route["weight"]), str(route["release"])
    except (OSError, ValueError, KeyError, TypeError):
        return {"by": "tenant", "routes": []}
    return table


def _alias(stable_name: str) -> ModelContract:
    """A contract of the same tensors that hands everything to one step: the stable name of a release's own model.

    Within an ensemble a name is one tensor, so an output that shares an input's name (`context_phase_params`, for
    disaggregated serving) is left to the release's own name.
    """
    contract = MODELS[stable_name]
    taken = {tensor.name for tensor in contract.inputs}
    inputs = tuple(replace(tensor, reshaped=False, ragged=False) for tensor in contract.inputs)
    outputs = tuple(replace(t, reshaped=False, ragged=False) for t in contract.outputs if t.name not in taken)
    step = EnsembleStep(
        stable_name,
        inputs={tensor.name: tensor.name for tensor in inputs},
        outputs={tensor.name: tensor.name for tensor in outputs},
    )
    return replace(contract, inputs=inputs, outputs=outputs, steps=(step,))


def _write_release_model(parent: Path, release: Release, stable_name: str) -> None:
    known = {*MODELS[stable_name].parameters, *ENGINEHOUSE_PARAMETERS}
    own = {name: value for name, value in release_parameters(release).items() if name in known}
    config = make_config(stable_name, own)
    config = replace(config, name=release.model(stable_name), step_models={n: release.model(n) for n in RELEASE_MODELS})
    write_model(parent / config.name, stable_name, config)


def _replace_file(folder: Path, name: str, text: str) -> None:
    """Replace one file in one rename, its time later than that of anything in the folder."""
    with _writing(folder.parent.parent) as scratch:
        fresh = scratch / name
        fresh.write_text(text, encoding="utf-8")
        newest_ns = max(path.stat().st_mtime_ns for path in (folder, *folder.rglob("*")))
        changed_ns = max(time.time_ns(), newest_ns + 1_000_000)
        os.utime(fresh, ns=(changed_ns, changed_ns))
        fresh.replace(folder / name)


@contextmanager
def _writing(home: Path) -> Iterator[Path]:
    """A scratch folder beside the repository, on the same file system; errors say what could not be written."""
    scratch = None
    try:
        home.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".publishing-", dir=home))
        yield scratch
    except OSError as error:
        hint = " Free some space and try again." if error.errno in {errno.ENOSPC, errno.EDQUOT} else ""
        msg = f"the live repository in {home} cannot be written ({error.strerror or error}).{hint}"
        raise PromotionError(msg) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

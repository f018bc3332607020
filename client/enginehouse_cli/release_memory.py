"""Whether a release fits into memory beside the one that serves."""

from __future__ import annotations

import json
from typing import Final

from enginehouse_backends.server.release_models import release_parameters
from enginehouse_backends.triton.engine_settings import read_engine_settings
from enginehouse_backends.triton.model_parameters import ModelParameters
from enginehouse_builders.gates.host import describe_host
from enginehouse_builders.gates.memory import plan_of
from enginehouse_builders.promotion.live import Memory
from enginehouse_builders.store import StoredBuild
from enginehouse_contract.errors import BuildIntegrityError
from enginehouse_contract.manifest import CONFIG_FILE, read_manifest
from enginehouse_contract.release import Release

_DEFAULT_KV_FRACTION: Final = 0.9  # NVIDIA's default of kv_cache_free_gpu_mem_fraction


def plan_memory(release: Release) -> Memory:
    """Compare what a release needs when loaded with what there is beside a release like it that serves.

    On a CPU host that is what the host (or container) has free now. On a GPU the serving engine has taken a fraction
    of all free memory for its KV cache, whatever it needs; what is left of the device is what counts.

    Raises :class:`ConfigurationError` for a setting that the engine would refuse, and :class:`BuildIntegrityError` for
    a build that is gone.
    """
    manifest = read_manifest(release.build_dir)
    try:
        config = json.loads((release.build_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildIntegrityError(f"{release.build_dir / CONFIG_FILE} cannot be read ({error}).") from error
    plan = plan_of(StoredBuild(release.build_dir, manifest), config, describe_host())
    parameters = ModelParameters(release_parameters(release))
    if manifest.target == "cpu":
        kv_bytes = read_engine_settings(parameters, manifest.limits).kv_memory_bytes
        needed, available = plan.fixed_bytes + kv_bytes, plan.available_bytes
    else:
        fraction = parameters.number("kv_cache_free_gpu_mem_fraction", _DEFAULT_KV_FRACTION, 0.0, 1.0)
        needed, available = plan.least_bytes, int((plan.available_bytes - plan.fixed_bytes) * (1 - fraction))
    return Memory(needed <= available, needed, available)

"""`enginehouse services`: several services on one host, loaded on demand within a memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginehouse_cli.console import progress_bar, stdout
from enginehouse_cli.ledger import print_rows
from enginehouse_cli.options import JsonFlag, show
from enginehouse_contract.errors import ConfigurationError, EnginehouseError, refusal
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from enginehouse_backends.residency.publishing import Service
    from enginehouse_builders.residency.service_file import ServiceEntry
    from enginehouse_contract.settings import Settings

app = typer.Typer(help="Several services on one host, loaded on demand within a memory budget.", no_args_is_help=True)


@app.command("apply")
def services_apply(
    file: Annotated[Path, typer.Argument(help="YAML: memory_budget, and services by name.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Put the services of a file in force; a running server follows within a second, without a restart."""
    from enginehouse_backends.residency.policy import ResidencyPolicy  # noqa: PLC0415 - commands import what they use
    from enginehouse_backends.residency.publishing import publish_services  # noqa: PLC0415
    from enginehouse_backends.residency.records import ManagedEngine, ResidencyLimits  # noqa: PLC0415
    from enginehouse_builders.residency.service_file import read_services  # noqa: PLC0415

    settings = load_settings()
    wanted = read_services(file)
    with progress_bar("services") as progress:
        services = [_service(settings, name, entry, progress) for name, entry in wanted.services.items()]
    limits = ResidencyLimits(wanted.memory_budget, wanted.max_wait_s, wanted.idle_unload_s)
    ResidencyPolicy(limits, [ManagedEngine(each.name, each.num_bytes, each.is_pinned) for each in services])
    publish_services(settings.services_dir, services, limits, wanted.grpc_url)
    rows = [_row(service) for service in services]
    lines = [f"{row['service']:20} {row['num_bytes'] / 1e6:6.0f} MB  {row['build_id'][:19]}" for row in rows]
    total = f"{len(rows)} services share {limits.memory_budget_bytes / 1e6:.0f} MB"
    show(rows, as_json=as_json, text="\n".join([total, *lines]))


@app.command("show")
def services_show(*, as_json: JsonFlag = False) -> None:
    """Show the services in force, and which are loaded."""
    from enginehouse_backends.residency.services import SERVICES_FILE, ServiceTable  # noqa: PLC0415

    settings = load_settings()
    table = ServiceTable(settings.services_dir / SERVICES_FILE)
    services = table.current()
    if table.last_error is not None:
        raise ConfigurationError(table.last_error)
    states = _states(settings, services.grpc_url)
    rows: list[dict[str, Any]] = [
        {
            "service": name,
            "state": states.get(engine.name, "not loaded") if states is not None else "no server",
            "num_bytes": engine.num_bytes,
            "pinned": engine.is_pinned,
            "build_id": route.build_id,
        }
        for (name, route), engine in zip(services.routes.items(), services.engines, strict=True)
    ]
    print_rows(rows, as_json=as_json, as_csv=False, if_none="no services; put some in force with `services apply`.")
    if rows and not as_json:
        loaded = sum(row["num_bytes"] for row in rows if row["state"] in {"ready", "loading", "unloading"})
        stdout.print(f"loaded {loaded / 1e6:.0f} of {services.limits.memory_budget_bytes / 1e6:.0f} MB")


def _service(settings: Settings, name: str, entry: ServiceEntry, progress: Any) -> Service:
    from enginehouse_backends.residency.publishing import Service  # noqa: PLC0415
    from enginehouse_backends.server.release_models import split_parameters  # noqa: PLC0415
    from enginehouse_builders.remote.local import ensure_local  # noqa: PLC0415
    from enginehouse_cli.release_memory import plan_memory  # noqa: PLC0415
    from enginehouse_contract.manifest import verify_build  # noqa: PLC0415
    from enginehouse_contract.release import Release  # noqa: PLC0415

    build_dir = ensure_local(entry.build, settings.home, progress)
    manifest = verify_build(build_dir)
    bounded = {"kv_cache_memory_budget_bytes": str(entry.kv_memory), "kv_cache_free_gpu_mem_fraction": "1.0"}
    parameters, of_front_door = split_parameters({**bounded, **entry.parameters})
    if of_front_door:
        raise ConfigurationError(refusal(next(iter(of_front_door)), "is the front door's, not a service's"))
    release = Release(0, manifest.build_id, build_dir, manifest.model_name, parameters)
    needed = plan_memory(release).needed_bytes
    num_bytes = needed if entry.memory is None else entry.memory
    return Service(name, manifest.build_id, build_dir, num_bytes, entry.pinned, parameters)


def _row(service: Service) -> dict[str, Any]:
    return {
        "service": service.name,
        "engine_model": service.engine_model,
        "num_bytes": service.num_bytes,
        "pinned": service.is_pinned,
        "build_id": service.build_id,
    }


def _states(settings: Settings, grpc_url: str | None) -> dict[str, str] | None:
    """Triton's state of each model by name; None where no server answers."""
    from enginehouse_backends.server.administration import TritonAdministration  # noqa: PLC0415
    from enginehouse_backends.server.supervisor import read_state  # noqa: PLC0415

    if grpc_url is None:
        state = read_state(settings.home)
        grpc_url = None if state is None else state.grpc_url
    if grpc_url is None:
        return None
    try:
        with TritonAdministration(grpc_url) as server:
            return {name: model.state.lower() for name, model in server.models().items() if model.holds_memory}
    except EnginehouseError:
        return None

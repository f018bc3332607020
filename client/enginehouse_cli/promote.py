"""`enginehouse promote` and `enginehouse rollback`: changing what the running server answers from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, cast

import typer

from enginehouse_cli.console import stderr
from enginehouse_cli.options import JsonFlag, show
from enginehouse_cli.serve import parse_parameters
from enginehouse_contract.errors import ConfigurationError, PromotionError, refusal
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from enginehouse_builders.promotion.book import ReleaseBook
    from enginehouse_builders.promotion.journal import Swap
    from enginehouse_cli.promoting import Promotion
    from enginehouse_contract.release import Release, Stage
    from enginehouse_contract.settings import Settings

WhyOption = Annotated[str, typer.Option("--why", help="For the history.")]
KeepFlag = Annotated[bool, typer.Option("--keep-loaded", help="Leave the release before loaded: rollback at once.")]
DrainOption = Annotated[
    float, typer.Option("--drain-timeout", help="Seconds to wait for requests of the old release.", min=0)
]
SwapOption = Annotated[
    str,
    typer.Option("--swap", help="overlap (load beside the old), unload-first, or auto: as memory allows."),
]


def promote(
    build: Annotated[str, typer.Argument(help="Build id, the start of one, a name, a folder, or a release (r12).")],
    stage: Annotated[str, typer.Option("--stage", help="staging or production.")] = "production",
    override: Annotated[
        Optional[str], typer.Option("--override", help="Pass over the gates, for this reason; it is recorded.")
    ] = None,
    parameter: Annotated[
        Optional[list[str]],
        typer.Option("--parameter", help="NAME=VALUE for the release's models; others stay as in production."),
    ] = None,
    why: WhyOption = "",
    swap: SwapOption = "auto",
    drain_timeout: DrainOption = 300.0,
    *,
    keep_loaded: KeepFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a build serve, without failing a request: load, check, switch, drain."""
    from enginehouse_builders.promotion.book import parse_stage  # noqa: PLC0415 - commands import what they use
    from enginehouse_builders.promotion.journal import Operation  # noqa: PLC0415
    from enginehouse_builders.promotion.promoter import current_routing, require_agreement  # noqa: PLC0415
    from enginehouse_cli.promoting import promoting, who_asks  # noqa: PLC0415

    settings = load_settings()
    wanted, how = parse_stage(stage), parse_swap(swap)
    if override is not None and not override.strip():
        raise ConfigurationError(refusal("--override", "must give a reason"))
    with promoting(settings, f"promote {build}", drain_timeout_s=drain_timeout) as promotion:
        release = release_to_promote(settings, promotion.book, build, parse_parameters(parameter or []))
        require_agreement(promotion.book, promotion.server)
        before = current_routing(promotion.book)
        gates = gate_summaries(settings, release, wanted, override)
        operation = Operation(
            action="promote" if wanted == "production" else "stage",
            stage=wanted,
            target=release.number,
            before=before,
            after=replace(before, stable=release.number, canary=None, share=0.0) if wanted == "production" else before,
            who=who_asks(),
            why=why,
            override=override or "",
            gates=gates,
            keep_loaded=keep_loaded,
        )
        pointed = promotion.book.stage(wanted)
        if pointed == release and before.canary is None and promotion.server.is_ready(release):
            _show_nothing_to_do(release, wanted, promotion, as_json=as_json)
            return
        _run(promotion, operation, release, how, as_json=as_json)


def rollback(
    to: Annotated[Optional[str], typer.Option("--to", help="Release (r11). Default: the one before.")] = None,
    why: WhyOption = "",
    swap: SwapOption = "auto",
    drain_timeout: DrainOption = 300.0,
    *,
    keep_loaded: KeepFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Put production back to the release before, or another; a canary ends. Repairs what was changed by hand."""
    from enginehouse_builders.promotion.journal import Operation, Routing  # noqa: PLC0415
    from enginehouse_builders.promotion.promoter import current_routing  # noqa: PLC0415
    from enginehouse_cli.promoting import promoting, who_asks  # noqa: PLC0415

    settings, how = load_settings(), parse_swap(swap)
    with promoting(settings, "rollback", drain_timeout_s=drain_timeout) as promotion:
        book = promotion.book
        before = current_routing(book)
        if to is not None:
            release = book.find_release(to)
        elif before.canary is not None:
            release = book.release(before.stable)  # rolling back a canary leaves what the rest of the requests have
        elif (previous := book.previous_release("production")) is not None:
            release = previous
        else:
            raise PromotionError("production has had one release only; there is nothing to roll back to.")
        ends_canary = before.canary is not None and release.number == before.stable
        operation = Operation(
            action="canary_end" if ends_canary else "rollback",
            stage="production",
            target=release.number,
            before=before,
            after=Routing(release.number),
            who=who_asks(),
            why=why,
            keep_loaded=keep_loaded,
        )
        _run(promotion, operation, release, how, as_json=as_json)


def parse_swap(text: str) -> Literal["auto", "overlap", "unload_first"]:
    """Read --swap; raise :class:`ConfigurationError` for a word it does not know."""
    swap = text.replace("-", "_")
    if swap not in {"auto", "overlap", "unload_first"}:
        raise ConfigurationError(refusal("--swap", "must be auto, overlap or unload-first", given=text))
    return cast("Literal['auto', 'overlap', 'unload_first']", swap)


def release_to_promote(settings: Settings, book: ReleaseBook, reference: str, parameters: dict[str, str]) -> Release:
    """Return the release that *reference* names, or a new one of the build that it names.

    Settings not given stay as in production; an empty value takes one back. Raises :class:`BuildIntegrityError` when
    the release's build is no longer there or was changed.
    """
    from enginehouse_backends.server.release_models import split_parameters  # noqa: PLC0415
    from enginehouse_builders.store import find_build  # noqa: PLC0415
    from enginehouse_cli.promoting import who_asks  # noqa: PLC0415
    from enginehouse_cli.release_memory import plan_memory  # noqa: PLC0415
    from enginehouse_contract.manifest import verify_build  # noqa: PLC0415
    from enginehouse_contract.release import Release  # noqa: PLC0415

    if reference.startswith("r") and reference[1:].isdecimal():
        release = book.release(int(reference[1:]))
        if parameters:
            raise ConfigurationError(refusal("--parameter", "cannot change a release; name its build instead"))
        verify_build(release.build_dir)
        return release
    of_release, of_front_door = split_parameters(parameters)
    if of_front_door:
        name = next(iter(of_front_door))
        raise ConfigurationError(
            refusal(name, "is the front door's, which serves every release", hint="Set it with `enginehouse serve`.")
        )
    production = book.stage("production")
    inherited = {} if production is None else dict(production.parameters)
    merged = {name: value for name, value in {**inherited, **of_release}.items() if value}
    found = find_build(settings.store_dir, reference)
    manifest = verify_build(found.build_dir)
    plan_memory(Release(0, manifest.build_id, found.build_dir, manifest.model_name, merged))  # refuses wrong settings
    return book.add_release(manifest.build_id, found.build_dir, manifest.model_name, merged, who_asks())


def gate_summaries(
    settings: Settings, release: Release, stage: Stage, override: str | None
) -> tuple[dict[str, Any], ...]:
    """Return what the history keeps of the build's gates on this kind of host.

    Raises :class:`PromotionError` for production when they did not pass here and there is no reason to pass over them.
    """
    from enginehouse_builders.gates.host import describe_host  # noqa: PLC0415
    from enginehouse_builders.gates.records import latest_record  # noqa: PLC0415

    kind = describe_host().kind
    record = latest_record(settings.home, release.build_id, kind)
    if stage == "production" and override is None and (record is None or not record.passed):
        why = f"its gates never ran on this kind of host ({kind})" if record is None else record.why_not
        msg = (
            f"build {release.build_id[:19]} may not go to production: {why}. "
            f"Run `enginehouse gate {release.build_id[7:19]}`, or pass over it with --override REASON."
        )
        raise PromotionError(msg)
    if record is None:
        return ()
    return (
        {
            "record": record.number,
            "passed": record.passed,
            "host_kind": record.host_kind,
            "against_build_id": record.against_build_id,
            "started_at": record.started_at,
            "results": {result.gate: result.status for result in record.results},
        },
    )


def _run(
    promotion: Promotion,
    operation: Any,
    release: Release,
    swap: Literal["auto", "overlap", "unload_first"],
    *,
    as_json: bool,
) -> None:
    from enginehouse_cli.promoting import outcome_row  # noqa: PLC0415

    outcome = promotion.promoter.run(replace(operation, swap=_decide_swap(promotion, release, swap)))
    row = outcome_row(outcome, release.build_id, promotion.recovered)
    loaded = "was loaded" if outcome.load_s is None else f"loaded in {outcome.load_s:.1f} s"
    switched = "" if outcome.switch_s is None else f", switched in {1000 * outcome.switch_s:.0f} ms"
    lines = [f"{operation.stage}: {release.name} ({release.model_name}, {release.build_id[:19]}), {loaded}{switched}"]
    lines += [f"  unloaded {', '.join(row['unloaded'])} after {outcome.drain_s:.1f} s"] if outcome.drain_s else []
    lines += [
        f"  {name} still has {count} open requests and stays loaded; the next change unloads it"
        for name, count in row["still_open"].items()
    ]
    show(row, as_json=as_json, text="\n".join(lines))


def _decide_swap(promotion: Promotion, release: Release, swap: Literal["auto", "overlap", "unload_first"]) -> Swap:
    """Ask the memory plan where the caller did not decide, and say what it means."""
    if promotion.server.is_ready(release):
        return "overlap"
    memory = promotion.server.memory_for(release)
    if swap == "auto":
        swap = "overlap" if memory.fits else "unload_first"
    if swap == "unload_first":
        expected_s = promotion.book.expected_load_s()
        gap = "unknown, as nothing was loaded yet" if expected_s is None else f"about {expected_s:.0f} s"
        stderr.print(
            f"note: {release.name} needs {memory.needed_bytes >> 20} MiB, {memory.available_bytes >> 20} MiB are free: "
            f"the old release is unloaded first. Nobody answers in between: {gap}.",
            markup=False,
            style="yellow",
        )
    return swap


def _show_nothing_to_do(release: Release, stage: str, promotion: Promotion, *, as_json: bool) -> None:
    row = {"action": "none", "stage": stage, "release": release.name, "build_id": release.build_id}
    show(row | {"recovered": promotion.recovered}, as_json=as_json, text=f"{stage} is {release.name} already.")

"""`enginehouse promote` and `enginehouse rollback`: changing what the running server answers from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, cast

import typer

from enginehouse_cli.console import stderr
from enginehouse_cli.options import JsonFlag, show
from enginehouse_cli.serve import parse_parameters
from enginehouse_contract.errors import ConfigurationError, PromotionError, refusal
from enginehouse_contract.release import release_name
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from enginehouse_builders.promotion.journal import Operation, Routing, Swap
    from enginehouse_cli.promoting import Promotion
    from enginehouse_contract.release import Release, Stage
    from enginehouse_contract.settings import Settings

SwapChoice = Literal["auto", "overlap", "unload_first"]
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
    build: Annotated[
        str, typer.Argument(help="Build id, the start of one, a name, a folder, a URL, or a release (r12).")
    ],
    stage: Annotated[str, typer.Option("--stage", help="staging or production.")] = "production",
    override: Annotated[
        Optional[str], typer.Option("--override", help="Pass over the gates, for this reason; it is recorded.")
    ] = None,
    parameter: Annotated[
        Optional[list[str]],
        typer.Option("--parameter", help="NAME=VALUE for the release's models; others stay as in production."),
    ] = None,
    canary: Annotated[
        Optional[str], typer.Option("--canary", help="Give it this share of the requests (10%) and judge it.")
    ] = None,
    by: Annotated[str, typer.Option("--by", help="With --canary: what sticks to a release: tenant or request.")] = (
        "tenant"
    ),
    min_requests: Annotated[
        int, typer.Option("--min-requests", min=10, help="With --canary: requests that it ends before the first look.")
    ] = 50,
    why: WhyOption = "",
    swap: SwapOption = "auto",
    drain_timeout: DrainOption = 300.0,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="With --canary: show it until it is judged.")] = False,
    complete: Annotated[
        bool, typer.Option("--complete", help="With --canary: watch, and give it all requests once it has passed.")
    ] = False,
    keep_loaded: KeepFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a build serve, without failing a request: load, check, switch, drain."""
    from enginehouse_builders.promotion.records import parse_stage  # noqa: PLC0415 - commands import what they use
    from enginehouse_cli import canary as canaries  # noqa: PLC0415
    from enginehouse_cli.remote import fetch_if_remote  # noqa: PLC0415

    settings = load_settings()
    wanted, share = parse_stage(stage), None if canary is None else canaries.parse_share(canary)
    if override is not None and not override.strip():
        raise ConfigurationError(refusal("--override", "must give a reason"))
    if share is not None and wanted != "production":
        raise ConfigurationError(refusal("--canary", "needs `--stage production`: staging gets no requests"))
    if share is None and (watch or complete):
        raise ConfigurationError(refusal("--watch and --complete", "need --canary"))
    request = _Request(
        reference=fetch_if_remote(build),
        stage=wanted,
        parameters=parse_parameters(parameter or []),
        swap=parse_swap(swap),
        override=override,
        why=why,
        share=share,
        by=canaries.parse_by(by),
        min_requests=min_requests,
        keep_loaded=keep_loaded,
        drain_timeout_s=drain_timeout,
    )
    row, text = _promote(settings, request)
    if watch or complete:
        stderr.print(text, markup=False)
        row = canaries.watch(settings, int(row["release"][1:]))
        text = f"the canary {row['release']} has {row['verdict']}."
        if complete and row["verdict"] == "passed":
            done = replace(request, reference=row["release"], parameters={}, share=None, why=why or "its canary passed")
            row, text = _promote(settings, done)
    show(row, as_json=as_json, text=text)


@dataclass(frozen=True, slots=True)
class _Request:
    """One call of `promote`, its options read and checked."""

    reference: str
    stage: Stage
    parameters: dict[str, str]
    swap: SwapChoice
    override: str | None
    why: str
    share: float | None  # of a canary
    by: str
    min_requests: int
    keep_loaded: bool
    drain_timeout_s: float


def _promote(settings: Settings, request: _Request) -> tuple[dict[str, Any], str]:
    """Carry out a promotion, or begin a canary; return what it came to, and the same in words."""
    from enginehouse_builders.promotion.journal import Operation  # noqa: PLC0415
    from enginehouse_builders.promotion.promoter import current_routing, require_agreement  # noqa: PLC0415
    from enginehouse_cli.candidate import gate_summaries, release_to_promote  # noqa: PLC0415
    from enginehouse_cli.promoting import promoting, who_asks  # noqa: PLC0415

    with promoting(settings, f"promote {request.reference}", drain_timeout_s=request.drain_timeout_s) as promotion:
        book = promotion.book
        release = release_to_promote(settings, book, request.reference, request.parameters)
        require_agreement(book, promotion.server)
        before = current_routing(book)
        pointed = book.stage(request.stage)
        if (
            pointed == release
            and request.share is None
            and before.canary is None
            and promotion.server.is_ready(release)
        ):
            row = {"action": "none", "stage": request.stage, "release": release.name, "build_id": release.build_id}
            return row | {"recovered": promotion.recovered}, f"{request.stage} is {release.name} already."
        operation = Operation(
            action="stage" if request.stage == "staging" else "promote" if request.share is None else "canary_start",
            stage=request.stage,
            target=release.number,
            before=before,
            after=_routing_after(request, before, release),
            who=who_asks(),
            why=request.why,
            override=request.override or "",
            gates=gate_summaries(settings, release, request.stage, request.override),
            keep_loaded=request.keep_loaded,
        )
        return _run(promotion, operation, release, request.swap)


def _routing_after(request: _Request, before: Routing, release: Release) -> Routing:
    """Return which releases answer after the promotion; raise :class:`PromotionError` for two canaries at once."""
    from enginehouse_builders.promotion.journal import Routing  # noqa: PLC0415

    if request.stage == "staging":
        return before
    if request.share is None:
        return Routing(release.number)
    if release.number == before.stable:
        raise PromotionError(f"{release.name} is in production already; a canary is another release.")
    if before.canary not in {None, release.number}:
        name = release_name(before.canary or 0)
        raise PromotionError(f"the canary of {name} is on; end it with `enginehouse rollback`, or promote {name}.")
    return Routing(before.stable, release.number, request.share, request.by, request.min_requests)


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
    from enginehouse_cli.candidate import require_build  # noqa: PLC0415
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
        if not promotion.server.is_ready(release):
            require_build(release)
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
        row, text = _run(promotion, operation, release, how)
    show(row, as_json=as_json, text=text)


def parse_swap(text: str) -> SwapChoice:
    """Read --swap; raise :class:`ConfigurationError` for a word it does not know."""
    swap = text.replace("-", "_")
    if swap not in {"auto", "overlap", "unload_first"}:
        raise ConfigurationError(refusal("--swap", "must be auto, overlap or unload-first", given=text))
    return cast("SwapChoice", swap)


def _run(promotion: Promotion, operation: Operation, release: Release, swap: SwapChoice) -> tuple[dict[str, Any], str]:
    from enginehouse_cli.canary_guard import baseline_of  # noqa: PLC0415
    from enginehouse_cli.promoting import outcome_row  # noqa: PLC0415

    operation = replace(operation, swap=_decide_swap(promotion, release, swap))
    outcome = promotion.promoter.run(operation, lambda: baseline_of(promotion.server.metrics(), operation.after))
    row = outcome_row(outcome, release.build_id, promotion.recovered)
    loaded = "was loaded" if outcome.load_s is None else f"loaded in {outcome.load_s:.1f} s"
    switched = "" if outcome.switch_s is None else f", switched in {1000 * outcome.switch_s:.0f} ms"
    where: str = operation.stage
    if operation.after.canary is not None and operation.action == "canary_start":
        where = f"canary at {operation.after.share:.0%} by {operation.after.by}"
    lines = [f"{where}: {release.name} ({release.model_name}, {release.build_id[:19]}), {loaded}{switched}"]
    lines += [f"  unloaded {', '.join(row['unloaded'])} after {outcome.drain_s:.1f} s"] if outcome.drain_s else []
    lines += [
        f"  {name} still has {count} open requests and stays loaded; the next change unloads it"
        for name, count in row["still_open"].items()
    ]
    return row, "\n".join(lines)


def _decide_swap(promotion: Promotion, release: Release, swap: SwapChoice) -> Swap:
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

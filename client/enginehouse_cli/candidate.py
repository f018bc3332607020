"""Which release a promotion is about, and whether its build's gates let it into production."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginehouse_contract.errors import BuildIntegrityError, ConfigurationError, PromotionError, refusal

if TYPE_CHECKING:
    from enginehouse_builders.promotion.book import ReleaseBook
    from enginehouse_contract.release import Release, Stage
    from enginehouse_contract.settings import Settings


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
        require_build(release)
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


def require_build(release: Release, *, digests: bool = True) -> None:
    """Check a release's build before it is loaded; every byte of it unless told otherwise.

    Raises :class:`BuildIntegrityError` when it was deleted or changed, or its folder holds another build now.
    """
    from enginehouse_contract.manifest import verify_build  # noqa: PLC0415

    if not release.build_dir.is_dir():
        msg = (
            f"the build of {release.name} was deleted ({release.build_dir}); build {release.build_id[:19]} again, "
            "or fetch it from a remote store."
        )
        raise BuildIntegrityError(msg)
    if (found := verify_build(release.build_dir, digests=digests).build_id) != release.build_id:
        msg = f"{release.build_dir} holds build {found[:19]} now, not {release.build_id[:19]} of {release.name}."
        raise BuildIntegrityError(msg)


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

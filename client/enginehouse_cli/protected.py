"""Builds that must stay in the store: those that releases at work point at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_contract.release import STAGES

if TYPE_CHECKING:
    from enginehouse_contract.settings import Settings


def protected_builds(settings: Settings) -> dict[str, str]:
    """Return build id -> why it stays: stages, what a rollback returns to, canary, loaded."""
    from enginehouse_builders.promotion.book import FILE_NAME, ReleaseBook  # noqa: PLC0415 - commands import what they use

    if not (settings.home / FILE_NAME).exists():
        return {}
    found: dict[str, str] = {}
    with ReleaseBook(settings.home) as book:
        reasons = [(book.release(number), "is loaded") for number in book.loaded()]
        canary = book.canary()
        if canary is not None:
            reasons.append((book.release(canary.release), "is the canary"))
        for stage in STAGES:
            for release, why in (
                (book.previous_release(stage), f"is what a rollback of {stage} returns to"),
                (book.stage(stage), f"is {stage}"),
            ):
                if release is not None:
                    reasons.append((release, why))
    for release, why in reasons:
        found[release.build_id] = f"{release.name} {why}"
    return found

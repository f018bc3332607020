"""A server in memory for promotions: it holds what Triton would, with its hazards; and a book that dies when told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from enginehouse_builders.promotion.book import ReleaseBook
from enginehouse_builders.promotion.live import Memory, Served
from enginehouse_contract.errors import PromotionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from enginehouse_builders.promotion.journal import Routing
    from enginehouse_contract.release import Release


class KilledError(BaseException):
    """The promoting process is gone; nothing of it runs on."""


class Fuse:
    """Counts the moments at which a kill may fall, and kills at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.num_passed = 0

    def burn(self) -> None:
        """One more moment."""
        if self.num_passed == self.at:
            raise KilledError
        self.num_passed += 1


class MemoryServer:
    """Releases are published, loaded and pointed at; dropping what the stable names are pinned to takes them away."""

    def __init__(self, serving: int) -> None:
        self.published = {serving}
        self.held = {serving}
        self.stable: int | None = serving
        self.shares: dict[int, float] = {serving: 1.0}
        self.fuse = Fuse()
        self.broken: set[int] = set()  # releases that do not load
        self.mute: set[int] = set()  # releases that fail their check
        self.switch_fails = 0  # how many of the next switches fail half-way
        self.open_requests: dict[int, list[int]] = {}  # what `num_open` answers, one by one
        self.log: list[str] = []

    def require_ours(self) -> None:
        """It always is."""

    def loaded(self) -> set[int]:
        return set(self.held)

    def is_ready(self, release: Release) -> bool:
        return release.number in self.held

    def memory_for(self, release: Release) -> Memory:
        return Memory(fits=True, needed_bytes=0, available_bytes=1)

    def publish(self, release: Release) -> None:
        self._act(f"publish {release.name}", lambda: self.published.add(release.number))

    def retract(self, release: Release) -> None:
        assert release.number not in self.held, "Triton would serve what is no longer there"
        self._act(f"retract {release.name}", lambda: self.published.discard(release.number))

    def load(self, release: Release) -> float:
        assert release.number in self.published, "only what is published can be loaded"
        if release.number in self.broken:
            raise PromotionError(f"{release.name} does not load")
        self._act(f"load {release.name}", lambda: self.held.add(release.number))
        return 2.5

    def unload(self, release: Release) -> None:
        self._act(f"unload {release.name}", lambda: self.held.discard(release.number))

    def check(self, release: Release) -> None:
        if release.number in self.mute:
            raise PromotionError(f"{release.name} does not answer")
        self._act(f"check {release.name}", lambda: None)

    def switch(self, routing: Routing, releases: Mapping[int, Release]) -> float:
        assert set(routing.releases) <= self.held, "a pin on what is not loaded would unload the stable names"
        self._act("point", lambda: setattr(self, "stable", routing.stable))
        if self.switch_fails:
            self.switch_fails -= 1
            raise PromotionError("the front door did not follow")
        share = routing.share if routing.canary is not None else 0.0
        shares = {routing.stable: 1.0 - share} | ({routing.canary: share} if routing.canary is not None else {})
        self._act("route", lambda: setattr(self, "shares", shares))
        return time.perf_counter()

    def served(self) -> Served:
        stable = self.stable if self.stable in self.held else None
        return Served(stable, f"sha256:{self.stable}", self.shares, f"r{self.stable} and {self.shares} answer")

    def num_open(self, release: Release) -> int:
        left = self.open_requests.get(release.number, [])
        return left.pop(0) if left else 0

    def _act(self, what: str, effect: Any) -> None:
        """Do something that a kill may come before or after."""
        self.fuse.burn()
        effect()
        self.log.append(what)
        self.fuse.burn()


class MortalBook(ReleaseBook):
    """A book whose every write may be the last thing before or after a kill."""

    def __init__(self, home: Path, fuse: Fuse) -> None:
        super().__init__(home)
        self._database.execute("PRAGMA synchronous = OFF")  # only the process dies here
        self._fuse = fuse
        for name in ("begin", "advance", "commit", "end", "set_loaded", "set_unloaded", "set_kept", "set_fact"):
            setattr(self, name, self._mortal(getattr(self, name)))

    def _mortal(self, write: Any) -> Any:
        def written(*arguments: Any, **options: Any) -> Any:
            self._fuse.burn()
            result = write(*arguments, **options)
            self._fuse.burn()
            return result

        return written

"""What a promotion needs of a running server. The real one talks to Triton; tests have one in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from enginehouse_builders.promotion.journal import Routing
    from enginehouse_contract.release import Release


@dataclass(frozen=True, slots=True)
class Served:
    """What a server answers from, read back from it: build ids, not names, are the proof."""

    stable: int | None  # None: the stable names do not answer, or from different releases
    build_id: str
    shares: Mapping[int, float]  # the front door's
    problem: str = ""  # what does not fit together

    def matches(self, routing: Routing) -> bool:
        """Whether this is *routing*."""
        shares = {routing.stable: 1.0}
        if routing.canary is not None:
            shares = {routing.stable: 1.0 - routing.share, routing.canary: routing.share}
        close = set(shares) == set(self.shares) and all(abs(self.shares[k] - shares[k]) < 1e-6 for k in shares)  # noqa: PLR2004 - shares went through JSON
        return self.stable == routing.stable and close


@dataclass(frozen=True, slots=True)
class Memory:
    """Whether a release fits beside what is loaded."""

    fits: bool
    needed_bytes: int
    available_bytes: int


class LiveServer(Protocol):
    """One server and its live repository. Every method may raise errors of our tree."""

    def require_ours(self) -> None:
        """Raise unless the server is up and serves this home's repository."""
        ...

    def loaded(self) -> set[int]:
        """Return the releases of which some model is loaded, loading or unloading."""
        ...

    def is_ready(self, release: Release) -> bool:
        """Whether every model of the release answers."""
        ...

    def memory_for(self, release: Release) -> Memory:
        """Compare what the release needs with what is free."""
        ...

    def publish(self, release: Release) -> None:
        """Put the release's models into the live repository; nothing happens where they are."""
        ...

    def retract(self, release: Release) -> None:
        """Take the release's models, not loaded, out of the live repository."""
        ...

    def load(self, release: Release) -> float:
        """Load the release's models and return the seconds it took; whatever loaded of a failed one is unloaded."""
        ...

    def unload(self, release: Release) -> None:
        """Unload the release's models; requests in flight end first."""
        ...

    def check(self, release: Release) -> None:
        """Send a request through the release's own pipeline; raise when it does not answer as it should."""
        ...

    def switch(self, routing: Routing, releases: Mapping[int, Release]) -> float:
        """Point the stable names at the routing's releases, and see that the server answers so.

        Returns since when it does, in seconds of ``time.perf_counter``.
        """
        ...

    def served(self) -> Served:
        """Read back what answers."""
        ...

    def num_open(self, release: Release) -> int:
        """Return the requests accepted and not yet ended that a release answers."""
        ...

"""The seam of this package: what a client needs of a way to a server. Tests pass their own; nothing needs patching."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from enginehouse_contract.errors import ConfigurationError, DeadlineExceededError, InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from enginehouse_client._request import GenerationRequest
    from enginehouse_client._results import GenerationChunk, ModelState

CONNECT_TIMEOUT_S: Final = 5.0

_GRPC_ADDRESS: Final = re.compile(r"(grpc://)?(?P<target>(\[[0-9a-fA-F:.]+\]|[^\s/:@\[\]]+):\d{1,5})")
_HTTP_ADDRESS: Final = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^\s/:@\[\]]+)(:\d{1,5})?(/[^\s?#]*)?")


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a call must be over, retries included."""

    timeout_s: float | None
    ends_s: float | None

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """Start one; raise :class:`InvalidRequestError` unless it lies ahead (None: there is none)."""
        if timeout_s is not None and not timeout_s > 0:
            raise InvalidRequestError(
                refusal("timeout_s", "must be greater than 0, or None for no limit", given=timeout_s)
            )
        return cls(timeout_s, None if timeout_s is None else time.monotonic() + timeout_s)

    def remaining_s(self) -> float | None:
        """Seconds left; raise :class:`DeadlineExceededError` when there are none."""
        if self.ends_s is None:
            return None
        left_s = self.ends_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceededError(f"no complete answer within {self.timeout_s:g} s (`timeout_s`).")
        return left_s

    def allows(self, pause_s: float) -> bool:
        """Return whether there is time for a pause."""
        return self.ends_s is None or time.monotonic() + pause_s < self.ends_s


class Transport(Protocol):
    """A blocking way to a server. Raises errors of our tree only."""

    def stream(self, request: GenerationRequest, deadline: Deadline) -> Generator[GenerationChunk, None, None]:
        """Yield the request's chunks; closing the iterator early cancels the request on the server."""
        ...

    def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Return whether the server, or one model of it, answers requests."""
        ...

    def models(self, timeout_s: float) -> tuple[ModelState, ...]:
        """Return the models of the server's repository."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


class AsyncTransport(Protocol):
    """The same for asyncio."""

    def stream(self, request: GenerationRequest, deadline: Deadline) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the request's chunks; closing the iterator early cancels the request on the server."""
        ...

    async def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Return whether the server, or one model of it, answers requests."""
        ...

    async def models(self, timeout_s: float) -> tuple[ModelState, ...]:
        """Return the models of the server's repository."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


def parse_address(address: str) -> tuple[bool, str]:
    """Return whether an address is an HTTP one, and the address as its library wants it.

    Raises :class:`ConfigurationError` for what is neither ``host:port`` nor ``http(s)://host:port``.
    """
    if _HTTP_ADDRESS.fullmatch(address):
        return True, address.rstrip("/")
    if match := _GRPC_ADDRESS.fullmatch(address):
        return False, match["target"]
    problem = "must be host:port for gRPC or http://host:port for HTTP"
    raise ConfigurationError(refusal("address", problem, given=address))

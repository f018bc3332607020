"""Servers killed under load, in every part: the books are whole afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.server_faults import VICTIMS, run_faults

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.slow]


def test_whatever_is_killed_every_request_is_accounted_for_once(smollm2_build: Path, tmp_path: Path) -> None:
    """Hundreds of requests, each process killed once: none lost, none twice, none open, tokens as the engine's own."""
    result = run_faults(smollm2_build, tmp_path, len(VICTIMS), seed=7)

    assert result.pop("requests") > 100
    assert result == {"lost": 0, "double": 0, "open": 0, "wrong_tokens": 0, "wrong_totals": 0}

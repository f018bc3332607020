"""The file of services: what it may say, and what is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from enginehouse_builders.residency.service_file import read_services
from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_read_with_sizes_in_bytes(tmp_path: Path) -> None:
    """Sizes may be written with units; what is left out has its default."""
    file = tmp_path / "services.yaml"
    file.write_text("memory_budget: 2GiB\nservices: {chat: {build: small, pinned: true}, b: {build: x, memory: 5 MB}}")

    found = read_services(file)

    assert found.memory_budget == 2 << 30
    assert found.idle_unload_s is None
    assert found.services["chat"].pinned
    assert found.services["chat"].kv_memory == 256 << 20
    assert found.services["b"].memory == 5_000_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory_budget: lots\nservices: {}", "`memory_budget`: must be a size such as 2GiB"),
        ("memory_budget: 0\nservices: {}", "`memory_budget`: Input should be greater than 0"),
        ("services: {}", "`memory_budget`: Field required"),
        ("memory_budget: 1GiB\nservices: {A b: {build: x}}", "`services.A b"),
        ("memory_budget: 1GiB\nservices: {a: {build: x, pined: true}}", "`services.a.pined`: Extra inputs"),
        ("memory_budget: 1GiB\nservices: {a: {}}", "`services.a.build`: Field required"),
        ("- a", "`the file`: Input should be"),
        ("a: [", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    """One line, with the field."""
    file = tmp_path / "services.yaml"
    file.write_text(text)

    with pytest.raises(ConfigurationError) as refused:
        read_services(file)

    assert words in str(refused.value)
    assert "\n" not in str(refused.value)

"""The public face of the client."""

from __future__ import annotations

import inspect
from importlib import resources

import enginehouse_client


def test_all_is_exactly_the_public_names() -> None:
    """``__all__`` is sorted as isort sorts it and names every public name and no other."""
    public = {name for name, value in vars(enginehouse_client).items() if _is_public(name, value)}

    assert set(enginehouse_client.__all__) == public
    assert len(set(enginehouse_client.__all__)) == len(enginehouse_client.__all__)


def _is_public(name: str, value: object) -> bool:
    return not name.startswith("_") and name != "annotations" and not inspect.ismodule(value)


def test_the_package_is_typed() -> None:
    """Type checkers of users read our annotations."""
    assert resources.files(enginehouse_client).joinpath("py.typed").is_file()


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    """What works with one client works with the other."""
    for name, method in inspect.getmembers(enginehouse_client.Client, inspect.isfunction):
        if not name.startswith("_"):
            other = getattr(enginehouse_client.AsyncClient, name)
            assert list(inspect.signature(method).parameters) == list(inspect.signature(other).parameters), name

"""Fixtures shared by all tests: the small real model, its builds, and a server that serves one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.demo_model import fetch_demo_model
from enginehouse_contract.settings import Settings, load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.servers import RunningServer


# A shell starts background jobs with interrupts ignored, and children inherit that: tests that interrupt could not.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore_glob = ["benchmarks/*", "data/*"]  # run by make targets and by hand, not by pytest


@pytest.fixture(scope="session")
def machine_settings() -> Settings:
    """The state folder that keeps the model and its builds between runs."""
    return load_settings()


@pytest.fixture(scope="session")
def smollm2_gguf(machine_settings: Settings) -> Path:
    """SmolLM2-135M-Instruct, downloaded once per machine."""
    return fetch_demo_model(machine_settings.cache_dir)


def _build(settings: Settings, model: Path, **options: str) -> Path:
    return build_engine(BuildOptions(model=model, **options), settings.store_dir).build_dir  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def smollm2_build(machine_settings: Settings, smollm2_gguf: Path) -> Path:
    """The demo's build: weights as in the file, 8-bit KV."""
    return _build(machine_settings, smollm2_gguf)


@pytest.fixture(scope="session")
def smollm2_f32_build(machine_settings: Settings, smollm2_gguf: Path) -> Path:
    """A build without any loss: float32 weights and KV."""
    return _build(machine_settings, smollm2_gguf, weight_precision="f32", kv_precision="f32")


@pytest.fixture(scope="session")
def server(smollm2_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A real tritonserver with the demo's build, shared by the integration tests that leave it healthy."""
    from tests.support.servers import running_server  # noqa: PLC0415 - only integration tests pay for it

    with running_server(smollm2_build, tmp_path_factory.mktemp("home")) as running:
        yield running

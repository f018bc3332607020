"""This CPU as a device: memory bandwidth and matrix products, measured once and cached in the state folder."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Final

from enginehouse_builders.gates.host import describe_host
from enginehouse_builders.plan.devices import CPU, Device

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_READ_BYTES: Final = 96 << 20  # beyond any cache that a plan's host shares out
_MATRIX: Final = 768
_ROUNDS: Final = 8
_VERSION: Final = 3


def measure_cpu(cache_dir: Path) -> Device:
    """Return this CPU: its memory now, and its rates from *cache_dir* or measured (under a second) and put there.

    A cache folder that cannot be written costs a measurement each time, nothing else.
    """
    host = describe_host()
    path = cache_dir / "devices" / f"{host.kind}.json"
    rates = _read(path)
    if rates is None:
        rates = {"version": _VERSION, "bytes_per_s": _bandwidth(), "f16_flops": _matmul_flops()}
        _write(path, rates)
    return Device(
        name=CPU,
        memory_bytes=host.available_bytes,
        bytes_per_s=rates["bytes_per_s"],
        f16_flops=rates["f16_flops"],
        source=f"measured on {host.cpu_name}, {host.num_cores} cores, in f32",
    )


def _bandwidth() -> float:
    """Bytes of weights read per second by a product with one row: what a decode step waits for."""
    num_columns = _READ_BYTES // 4 // _MATRIX
    return _READ_BYTES / _product_s(1, num_columns)


def _matmul_flops() -> float:
    """Operations per second of a product with many rows."""
    return 2 * _MATRIX**3 / _product_s(_MATRIX, _MATRIX)


def _product_s(num_rows: int, num_columns: int) -> float:
    """Seconds of a float32 product by OpenVINO, which is what the engine computes with."""
    import numpy as np  # noqa: PLC0415 - slow to import, and only measured once
    import openvino as ov  # noqa: PLC0415
    from openvino import opset16 as ops  # noqa: PLC0415

    rows = ops.parameter([num_rows, _MATRIX], np.float32)
    weights = ops.constant(np.ones((num_columns, _MATRIX), np.float32))
    model = ov.Model([ops.matmul(rows, weights, False, True)], [rows], "probe")  # noqa: FBT003 - its signature
    request = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    values = np.ones((num_rows, _MATRIX), np.float32)
    return _fastest_s(lambda: request.infer([values], share_inputs=True))


def _fastest_s(work: Callable[[], object]) -> float:
    """The fastest of some rounds: others who use the machine make rounds slower, never faster."""
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return max(min(times), 1e-9)


def _read(path: Path) -> dict[str, float] | None:
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))
        if rates["version"] != _VERSION or min(rates["bytes_per_s"], rates["f16_flops"]) <= 0:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {name: float(value) for name, value in rates.items()}


def _write(path: Path, rates: dict[str, float]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(rates) + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError:
        return

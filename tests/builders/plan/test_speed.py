"""The roofline against NVIDIA's published throughput: TensorRT-LLM's performance overview, releases 0.17 and 1.2."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.model_configs import write_config

from enginehouse_builders.plan.devices import Device, gpu
from enginehouse_builders.plan.memory import plan_memory
from enginehouse_builders.plan.reading import read_shape
from enginehouse_builders.plan.request import memory_request
from enginehouse_builders.plan.shape import ModelShape
from enginehouse_builders.plan.speed import Roofline, Workload, plan_speed
from enginehouse_builders.spec.model import Spec

if TYPE_CHECKING:
    from pathlib import Path

_V017 = ("h200", "h100", "l40s", "a100")  # columns; fp8, and 16 bits on the A100
_V12 = ("b200", "gb200", "h200", "h100")  # per GPU; nvfp4 on one Blackwell, fp8 on two Hoppers
_TENSORRT = [  # model, tensor ranks, input, output, tokens/s by column
    ("llama-3.1-8b", 1, 128, 128, (29526, 28837, 9105, 6627)),
    ("llama-3.1-8b", 1, 128, 2048, (25399, 21109, 5366, 5256)),
    ("llama-3.1-8b", 1, 128, 4096, (17371, 13594, 3026, 3454)),
    ("llama-3.1-8b", 1, 500, 2000, (21021, 16501, 4274, 4277)),
    ("llama-3.1-8b", 1, 1000, 1000, (17538, 15245, 4055, 3787)),
    ("llama-3.1-8b", 1, 2048, 128, (3794, 3557, 1067, 800)),
    ("llama-3.1-8b", 1, 2048, 2048, (11969, 9488, 2225, 2424)),
    ("llama-3.1-8b", 1, 5000, 500, (3988, 3559, 981, 825)),
    ("llama-3.1-8b", 1, 20000, 2000, (1804, 1401, 328, 330)),
    ("mistral-7b", 1, 1000, 1000, (18426, 16036, 4178, 3897)),
    ("llama-3.1-70b", 1, 128, 128, (4021, 3378)),
    ("llama-3.1-70b", 1, 1000, 1000, (2823, 840)),
    ("llama-3.1-70b", 2, 128, 128, (6823, 6645)),
    ("llama-3.1-70b", 2, 128, 2048, (8290, 6170)),
    ("llama-3.1-70b", 2, 1000, 1000, (5165, 4391)),
    ("llama-3.1-70b", 2, 2048, 2048, (4184, 2898)),
    ("llama-3.1-70b", 4, 1000, 1000, (8911, 7431, 1209, 1922)),
    ("llama-3.1-70b", 8, 1000, 1000, (13181, 11451)),
]
_PYTORCH = [  # input, output, tokens/s per GPU by column; Llama-3.3-70B
    (1000, 1000, (6920, 7769, 2587, 2209)),
    (1024, 8192, (3242, 3805, 2009)),
    (8192, 1024, (1362, 1491, 537, 398)),
    (32768, 1024, (274, 302, 120)),
]
PUBLISHED = [
    (model, tensor, device, num_input, num_output, "none" if device == "a100" else "fp8", rate)
    for model, tensor, num_input, num_output, rates in _TENSORRT
    for device, rate in zip(_V017, rates, strict=False)
] + [
    ("llama-3.1-70b", tensor, device, num_input, num_output, weights, rate * tensor)
    for num_input, num_output, rates in _PYTORCH
    for device, tensor, weights, rate in zip(_V12, (1, 1, 2, 2), ("nvfp4", "nvfp4", "fp8", "fp8"), rates, strict=False)
]


def _rate(folder: Path, row: tuple[Any, ...]) -> float:
    model, tensor, device, num_input, num_output, weights, _ = row
    shape = read_shape(write_config(folder, model))
    spec = Spec.model_validate(
        {
            "name": "m",
            "model": {"source": "m"},
            "targets": ["tensorrt_llm"],
            "quantization": {"weights": weights},
            "kv_cache": {"dtype": "auto" if weights == "none" else "fp8"},
            "parallelism": {"tensor": tensor},
            "limits": {"max_batch_size": 2048},
        }
    )
    request = memory_request(spec, shape, "tensorrt_llm")
    found = gpu(device)
    memory = plan_memory(shape, request, found.memory_bytes)
    return plan_speed(shape, request, memory, found, Workload(num_input, num_output)).output_tokens_per_s


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: "-".join(map(str, row[:5])))
def test_within_a_factor_of_1_5_of_what_is_published(tmp_path: Path, row: tuple[Any, ...]) -> None:
    """Each predicted throughput lies between two thirds and one and a half times the published one."""
    assert abs(math.log(_rate(tmp_path, row) / row[-1])) <= math.log(1.5)


def test_typically_within_a_sixth(tmp_path: Path) -> None:
    """Half of all predictions are within 17 % of what is published."""
    errors = [abs(math.log(_rate(tmp_path, row) / row[-1])) for row in PUBLISHED]
    assert statistics.median(errors) <= math.log(1.17)


_SMOLLM2 = ModelShape("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, dtype="f32", is_tied=True)
_TWO_CORES = Device("cpu", 16 << 30, 17e9, 72e9, "two cores of an EPYC (Zen 1), quiet, by stream and product")
_ON_TWO_CORES = [  # weights, sequences (None: prefill), tokens/s that the engine's own graph reached there
    ("int8", 1, 55),
    ("int8", 8, 145),
    ("int8", 32, 210),
    ("int8", None, 296),
    ("int4", 1, 48),
    ("int4", 32, 214),
    ("none", 1, 40),
    ("none", 8, 171),
    ("none", 32, 224),
    ("none", None, 340),
]


@pytest.mark.parametrize(("weights", "num_sequences", "measured"), _ON_TWO_CORES)
def test_a_cpu_within_a_factor_of_1_7(weights: str, num_sequences: int | None, measured: float) -> None:
    """SmolLM2-135M with prompts of 100 and answers of 40 tokens, measured on a known machine."""
    parts = {"quantization": {"weights": weights}, "dtype": "f32"}
    spec = Spec.model_validate({"name": "m", "model": {"source": "m"}, "targets": ["cpu"], **parts})
    request = memory_request(spec, _SMOLLM2, "cpu")
    memory = plan_memory(_SMOLLM2, request, _TWO_CORES.memory_bytes)
    speed = plan_speed(_SMOLLM2, request, memory, _TWO_CORES, Workload(100, 40, num_sequences))
    predicted = speed.prefill_tokens_per_s if num_sequences is None else speed.decode_tokens_per_s
    assert abs(math.log(predicted / measured)) <= math.log(1.7)


def test_more_sequences_never_slow_the_whole_down(tmp_path: Path) -> None:
    """Tokens per second rise with the batch, and the step gets longer; a longer context costs more."""
    shape = read_shape(write_config(tmp_path, "mixtral-8x7b"))
    spec = Spec.model_validate({"name": "m", "model": {"source": "m"}, "targets": ["tensorrt_llm"]})
    roofline = Roofline(shape, memory_request(spec, shape, "tensorrt_llm"), gpu("b200"))
    steps = [roofline.step_s(batch, 1000) for batch in (1, 2, 4, 8, 16, 32, 64)]
    assert steps == sorted(steps)
    rates = [batch / step for batch, step in zip((1, 2, 4, 8, 16, 32, 64), steps, strict=True)]
    assert rates == sorted(rates)
    assert roofline.step_s(8, 8000) > roofline.step_s(8, 1000)
    assert roofline.prefill_s(8000) > 8 * roofline.prefill_s(1000) * 0.9

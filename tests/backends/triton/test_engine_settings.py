"""Config parameters of the engine model: every key of the contract has one fate, bad values do not load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

import pytest

from enginehouse_backends.triton.engine_settings import EngineSettings, read_engine_settings
from enginehouse_backends.triton.model_parameters import ModelParameters
from enginehouse_contract.errors import ConfigurationError
from enginehouse_contract.manifest import BuildLimits
from enginehouse_contract.model_config import ENGINEHOUSE_PARAMETERS
from enginehouse_contract.support import GPU_ONLY_PARAMETERS, REFUSED_PARAMETERS
from enginehouse_contract.tensors import TENSORRT_LLM

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = BuildLimits(max_batch_size=16, max_input_len=100, max_seq_len=128, max_num_tokens=64)
READ_PARAMETERS = {
    "gpt_model_path",
    "gpt_model_type",
    "decoding_mode",
    "max_beam_width",
    "max_attention_window_size",
    "batch_scheduler_policy",
    "enable_chunked_context",
    "enable_kv_cache_reuse",
    "max_tokens_in_paged_kv_cache",
    "kv_cache_free_gpu_mem_fraction",
    "exclude_input_in_output",
    "cancellation_check_period_ms",
    "stats_check_period_ms",
}


class ReadSettings(Protocol):
    """Reads settings from parameters given as keywords."""

    def __call__(self, **values: str) -> EngineSettings:
        """Read the settings of *values*."""
        ...


@pytest.fixture
def read(tmp_path: Path) -> ReadSettings:
    """Read settings with a good ``gpt_model_path`` unless another is given."""

    def read_with(**values: str) -> EngineSettings:
        parameters = ModelParameters({"gpt_model_path": str(tmp_path), **values})
        return read_engine_settings(parameters, LIMITS)

    return read_with


def test_every_parameter_of_the_contract_is_read_refused_or_for_gpus() -> None:
    """The three groups are disjoint and together are the contract's list."""
    groups = [READ_PARAMETERS, set(REFUSED_PARAMETERS), set(GPU_ONLY_PARAMETERS)]

    assert set().union(*groups) == set(TENSORRT_LLM.parameters)
    assert sum(map(len, groups)) == len(TENSORRT_LLM.parameters)


def test_defaults_follow_the_build_and_nvidia(read: ReadSettings) -> None:
    """Unset parameters give the build's limits and NVIDIA's default policy; placeholders count as unset."""
    settings = read(batch_scheduler_policy="${batch_scheduler_policy}", max_beam_width="")

    assert settings.engine.scheduler.policy == "guaranteed_no_evict"
    assert settings.engine.scheduler.max_num_tokens == 64
    assert settings.engine.scheduler.max_seq_len == 128
    assert settings.engine.enable_kv_cache_reuse
    assert settings.cancellation_check_period_s == 0.1
    assert settings.max_kv_tokens is None


def test_stated_values_are_read(read: ReadSettings) -> None:
    """Each stated value reaches its setting."""
    settings = read(
        batch_scheduler_policy="max_utilization",
        enable_chunked_context="false",
        enable_kv_cache_reuse="no",
        max_tokens_in_paged_kv_cache="4096",
        kv_cache_free_gpu_mem_fraction="0.5",
        kv_cache_memory_budget_bytes="1000000",
        exclude_input_in_output="True",
        max_queue_size="7",
    )

    assert settings.engine.scheduler.policy == "max_utilization"
    assert not settings.engine.scheduler.enable_chunked_context
    assert not settings.engine.enable_kv_cache_reuse
    assert settings.max_kv_tokens == 4096
    assert settings.kv_memory_bytes == 500_000
    assert settings.exclude_input_in_output
    assert settings.engine.max_queue_size == 7


@pytest.mark.parametrize("name", sorted(REFUSED_PARAMETERS))
def test_parameters_that_cannot_be_served_stop_the_load(read: ReadSettings, name: str) -> None:
    """A parameter this engine cannot honour is refused by name."""
    with pytest.raises(ConfigurationError, match=f"`{name}` cannot be set"):
        read(**{name: "1"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_scheduler_policy", "fastest", "must be one of guaranteed_no_evict, max_utilization; given fastest"),
        ("gpt_model_type", "V1", "`gpt_model_type` must be one of"),
        ("decoding_mode", "medusa", "`decoding_mode` must be one of"),
        ("max_beam_width", "4", "`max_beam_width` must be 1"),
        ("enable_chunked_context", "maybe", "must be true or false; given maybe"),
        ("kv_cache_free_gpu_mem_fraction", "1.5", "must be a number from 0 to 1; given 1.5"),
        ("kv_cache_free_gpu_mem_fraction", "nan", "must be a number from 0 to 1"),
        ("max_tokens_in_paged_kv_cache", "0", "must be an integer of at least 1"),
        ("max_tokens_in_paged_kv_cache", "many", "must be an integer of at least 1; given many"),
        ("max_attention_window_size", "64", "would cut the context"),
        ("cancellation_check_period_ms", "0", "must be an integer of at least 1"),
        ("gpt_model_path", "/nowhere/at/all", "is not a folder"),
    ],
)
def test_a_bad_value_is_an_error_at_load(read: ReadSettings, name: str, value: str, message: str) -> None:
    """A malformed or out-of-range value names the parameter and what it may be; it never falls to a default."""
    with pytest.raises(ConfigurationError) as caught:
        read(**{name: value})

    assert message in str(caught.value)


def test_an_attention_window_that_never_cuts_is_accepted(read: ReadSettings) -> None:
    """A list of windows of at least the maximum length changes nothing."""
    assert read(max_attention_window_size="128, 4096") == read()


def test_unknown_parameters_are_named_with_the_nearest() -> None:
    """A misspelt parameter is an error that suggests the right one."""
    config = {"parameters": {"enable_kv_cache_resue": {"string_value": "true"}}}
    parameters = ModelParameters.from_model_config(json.dumps(config))
    with pytest.raises(ConfigurationError, match="Did you mean `enable_kv_cache_reuse`"):
        parameters.check_names((*TENSORRT_LLM.parameters, *ENGINEHOUSE_PARAMETERS))

"""Generated files are what the contract says, and Triton's own parser reads the configs so."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from enginehouse_contract.model_config import make_config
from enginehouse_contract.render import generated_files
from enginehouse_contract.tensors import MODELS, ModelContract, Tensor

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(generated_files()))
def test_checked_in_files_are_up_to_date(name: str) -> None:
    """Each generated file in the tree is what the generator writes now."""
    assert (ROOT / name).read_text(encoding="utf-8") == generated_files()[name]


def test_the_repository_holds_nothing_that_is_not_generated() -> None:
    """No stray file lies in the model repository."""
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "model_repository").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert found == {name for name in generated_files() if name.startswith("model_repository/")}


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_configs_parse_back_to_the_contract(model: ModelContract) -> None:
    """Parsed as protobuf, a rendered config holds exactly the contract's tensors, flags and steps."""
    config = text_format.Parse(make_config(model.name).render(), model_config_pb2.ModelConfig())

    assert config.name == model.name
    assert [_read(tensor) for tensor in config.input] == list(model.inputs)
    assert [_read(tensor) for tensor in config.output] == list(model.outputs)
    steps = config.ensemble_scheduling.step
    assert [(step.model_name, dict(step.input_map), dict(step.output_map)) for step in steps] == [
        (step.model, step.inputs, step.outputs) for step in model.steps
    ]


def test_parameters_are_quoted() -> None:
    """A parameter with quotes, backslashes and line breaks survives rendering."""
    value = 'C:\\dir "x"\nnext'
    config = text_format.Parse(
        make_config("preprocessing", {"tokenizer_dir": value}).render(), model_config_pb2.ModelConfig()
    )

    assert config.parameters["tokenizer_dir"].string_value == value


def _read(tensor: model_config_pb2.ModelInput | model_config_pb2.ModelOutput) -> Tensor:
    data_type = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return Tensor(
        tensor.name,
        data_type,  # type: ignore[arg-type] # compared with the contract's literal below
        tuple(tensor.dims),
        optional=getattr(tensor, "optional", False),
        reshaped=tensor.HasField("reshape"),
        ragged=getattr(tensor, "allow_ragged_batch", False),
    )

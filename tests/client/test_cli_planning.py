"""`enginehouse spec` and `enginehouse plan` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.support.model_configs import write_config

from enginehouse_builders.plan.devices import device_names, gpu
from enginehouse_cli.main import run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of the test's own."""
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("model", "device"),
    [
        ("llama-3.1-8b", "h100"),
        ("llama-3.1-8b", "a100"),
        ("llama-3.1-8b", "l4"),
        ("llama-3.1-70b", "b200"),
        ("llama-3.1-405b", "h100"),
        ("mixtral-8x7b", "l40s"),
        ("qwen2.5-0.5b", "cpu"),
        ("deepseek-v3", "h200"),
    ],
)
def test_a_spec_to_start_from_is_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, device: str
) -> None:
    """What `spec init` writes passes `spec check`, and plans without an error on its device."""
    folder, path = write_config(tmp_path, model), tmp_path / "s.yaml"
    assert run(["spec", "init", str(folder), "--device", device, "--output", str(path)]) == 0
    assert run(["spec", "check", str(path)]) == 0
    assert "fine" in capsys.readouterr().out
    assert run(["plan", str(path), "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["memory"]["fits"]
    assert plan["memory"]["num_full_sequences"] >= 4
    assert plan["speed"]["output_tokens_per_s"] > 0
    assert not [one for one in plan["warnings"] if one["severity"] == "error"]
    assert run(["spec", "init", str(folder), "--device", device, "--output", str(path)]) == 1
    assert "--force" in capsys.readouterr().err


def test_check_lists_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`spec check` prints one line for each problem, with its place, and ends with 1; --json has the same."""
    path = tmp_path / "s.yaml"
    path.write_text("name: m\nmodel: {source: gone}\nlimits: {max_seq_len: -1}\ncolour: red\n", encoding="utf-8")
    assert run(["spec", "check", str(path)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2] for line in errors] == ["3", "4"]
    assert run(["spec", "check", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [problem["line"] for problem in report["problems"]] == [3, 4]


def test_plans_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bare model is planned on each device that is named; what does not fit gives 1 and says what would."""
    folder = write_config(tmp_path, "llama-3.1-70b")
    assert run(["plan", str(folder), "--device", "h200", "--device", "l4"]) == 1
    out = capsys.readouterr().out
    assert "on h200-sxm (tensorrt_llm)" in out
    assert "it does not fit" in out
    assert "GPUs (`parallelism.tensor:" in out


def test_the_usual_workload_fits_the_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a workload a plan takes one that the spec's limits allow; a given one that they do not is an error."""
    folder, path = write_config(tmp_path, "llama-3.1-8b"), tmp_path / "s.yaml"
    head = f"name: m\nmodel: {{source: {folder}}}\ntargets: [tensorrt_llm]\n"
    path.write_text(head + "limits: {max_seq_len: 512}\n", encoding="utf-8")
    assert run(["plan", str(path), "--device", "h100", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert (plan["workload"]["num_input_tokens"], plan["workload"]["num_output_tokens"]) == (256, 256)
    assert run(["plan", str(path), "--device", "h100", "--input-tokens", "600"]) == 1
    assert "is under the 856 tokens of the workload" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "gone.gguf"], "does not exist"),
        (["plan", "gone.yaml"], "there is no such file"),
        (["plan", "{model}", "--device", "h1000"], "did you mean `h100`"),
        (["plan", "{model}", "--device", "h100", "--machine-hour", "cheap"], "--machine-hour"),
        (["plan", "{model}", "--device", "t4"], "older than TensorRT-LLM supports"),
        (["spec", "init", "{model}", "--device", "x"], "not in the catalogue"),
        (["spec", "init", "gone"], "does not exist"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """A wrong path, device or price ends with 1 and one line that says what to do."""
    folder = write_config(tmp_path, "llama-3.1-8b")
    assert run([argument.replace("{model}", str(folder)) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`spec schema` prints a JSON Schema that knows every part of a spec."""
    assert run(["spec", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"model", "targets", "limits", "kv_cache", "speculation", "gates", "costs"} <= set(schema["properties"])


def test_init_writes_yaml_for_paths_that_yaml_would_misread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder whose name YAML gives a meaning is quoted, and its name becomes a legal one."""
    folder = write_config(tmp_path / "a: b #c", "llama-3.1-8b").rename(tmp_path / "a: b #c" / "model {x}: [1]")
    assert run(["spec", "init", str(folder), "--device", "h100"]) == 0
    spec = yaml.safe_load(capsys.readouterr().out)
    assert spec["model"]["source"] == str(folder)
    assert spec["name"] == "model-x-1"


def test_docs_name_every_device() -> None:
    """Each device of the catalogue is named in docs/planning.md, by its name or an alias."""
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    named = {gpu(name).name for name in device_names() if f"`{name}`" in text and name != "cpu"}
    assert named == {gpu(name).name for name in device_names() if name != "cpu"}

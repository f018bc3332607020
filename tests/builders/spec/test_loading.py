"""Reading specs: every problem with its line, its limit and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.model_configs import write_config

from enginehouse_builders.spec.loading import load_spec, parse_spec
from enginehouse_builders.spec.problems import SpecError
from enginehouse_builders.spec.schema import schema_text

if TYPE_CHECKING:
    from enginehouse_builders.spec.problems import Problem

ROOT = Path(__file__).parents[3]


def _problems(text: str) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "s.yaml")
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max_batch_sise: 4", "`max_batch_sise` is not a key of a spec"),
        ("max_seq_len: 4096", "It belongs under `limits.max_seq_len`"),
        (
            "limits: {max_batch_sise: 4}",
            "`limits.max_batch_sise` is not a key of a spec. Did you mean `max_batch_size`?",
        ),
        ("limits: {max_batch_size: -4}", "`limits.max_batch_size` must be at least 1; given -4"),
        ("limits: {max_batch_size: 1.5}", "`limits.max_batch_size` must be a whole number; given 1.5"),
        ("limits: {max_batch_size: many}", "`limits.max_batch_size` must be a whole number; given many"),
        ("limits: {max_input_len: 10, max_seq_len: 10}", "`max_input_len` (10) must be under `max_seq_len` (10)"),
        ("limits: 7", "`limits` must be a mapping; given 7. Its keys: max_batch_size"),
        ("quantization: {weights: fp9}", "Did you mean `fp8`?"),
        ("targets: [cpu, cpu]", "`targets` names one target twice"),
        ("targets: []", "`targets`"),
        ("kv_cache: {memory_fraction: 1.5}", "`kv_cache.memory_fraction` must be at most 1"),
        ("kv_cache: {memory_fraction: .nan}", "`kv_cache.memory_fraction` must be"),
        ("costs: {machine_hour: 2.5}", "money is a decimal in quotes"),
        ('costs: {machine_hour: "-1"}', "`costs.machine_hour` must be at least 0"),
        ("costs: {currency: usd}", "Three capital letters (ISO 4217)"),
        ("parallelism: {tensor: 4, expert: 3}", "`expert` (3) must divide `tensor` (4)"),
        ("speculation: {method: draft_target}", "needs `speculation.draft_model`"),
        ("spec_version: 2", "`spec_version` must be one of 1"),
    ],
)
def test_each_problem_names_field_line_and_remedy(line: str, said: str) -> None:
    """A wrong line is reported with the field, the limit, the value given, and its place in the file."""
    problems = _problems(f"name: m\nmodel: {{source: m}}\n{line}\n")
    assert len(problems) == 1
    assert said in problems[0].message
    assert problems[0].line in {3, None}


def test_all_problems_are_reported_at_once() -> None:
    """One reading finds every problem, in the file's order; the message has the first and how many more."""
    text = "name: m m\nmodel: {source: m}\nlimits:\n  max_seq_len: 0\n  max_beams: 2\ncolour: red\n"
    problems = _problems(text)
    assert [problem.line for problem in problems] == [1, 4, 5, 6]
    with pytest.raises(SpecError, match=r"s\.yaml:1: `name` .* \(3 more"):
        parse_spec(text, "s.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a spec is a YAML mapping"),
        ("hello", "a spec is a YAML mapping"),
        ("- 1", "a spec is a YAML mapping"),
        ("name: [a\n", "not readable as YAML"),
        ("name: a\nname: b\n", "`name` is named twice, first on line 1"),
        ("name: !!python/object:os.system x\n", "not readable as YAML"),
        ("name: \x00\n", "not readable as YAML"),
        ("? [a, b]\n: c\n", ""),
        ("a: &x [*x]\n", "no YAML aliases"),
        ("a: " + "[" * 100, "nested more than 16 deep"),
        ("a: " + "[" * 100_000, "exceeded maximum nesting depth"),
    ],
)
def test_what_is_no_spec_is_refused(text: str, said: str) -> None:
    """Empty text, other YAML, broken YAML, duplicate keys and YAML's tricks are refused, never run."""
    assert said in _problems(text)[0].message


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """A missing file, a folder, binary, and a source that is gone (absolute or relative) are each refused."""
    with pytest.raises(SpecError, match="no such file"):
        load_spec(tmp_path / "gone.yaml")
    with pytest.raises(SpecError, match="is a folder"):
        load_spec(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="is not text"):
        load_spec(tmp_path / "binary.yaml")
    for source in ("/gone/model.gguf", "gone.gguf"):
        path = tmp_path / "s.yaml"
        path.write_text(f"name: m\nmodel:\n  source: {source}\n", encoding="utf-8")
        with pytest.raises(SpecError, match=r"s\.yaml:3: `model.source` names nothing that is there"):
            load_spec(path)


def test_paths_start_at_the_specs_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths mean the same from wherever the spec is read."""
    write_config(tmp_path / "models", "llama-3.1-8b")
    (tmp_path / "s.yaml").write_text("name: m\nmodel: {source: models/llama-3.1-8b}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "models")
    spec = load_spec(Path("..") / "s.yaml")
    assert Path(spec.model.source).samefile(tmp_path / "models" / "llama-3.1-8b")
    assert Path(spec.model.source).is_absolute()


def test_refusals_have_lines_too(tmp_path: Path) -> None:
    """What a target refuses is reported at the line that asks for it, and the files' own format counts."""
    write_config(tmp_path, "llama-3.1-8b")
    text = (
        "name: m\nmodel: {source: llama-3.1-8b}\ntargets: [cpu]\nkv_cache:\n  dtype: fp8\nparallelism:\n  tensor: 2\n"
    )
    (tmp_path / "s.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "s.yaml")
    assert [(problem.field, problem.line) for problem in caught.value.problems] == [
        ("kv_cache.dtype", 5),
        ("parallelism.tensor", 7),
    ]


def test_the_published_schema_is_up_to_date() -> None:
    """`docs/spec.schema.json` is what the model says; `enginehouse spec schema` prints it."""
    published = (ROOT / "docs" / "spec.schema.json").read_text(encoding="utf-8")
    assert published == schema_text(), "run: enginehouse spec schema > docs/spec.schema.json"
    assert '"additionalProperties": false' in published

"""The house rules that no linter knows: who may import whom, and what may not stand in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "enginehouse_contract": ROOT / "client" / "enginehouse_contract",
    "enginehouse_client": ROOT / "client" / "enginehouse_client",
    "enginehouse_cli": ROOT / "client" / "enginehouse_cli",
    "enginehouse_backends": ROOT / "backends" / "enginehouse_backends",
    "enginehouse_builders": ROOT / "builders" / "enginehouse_builders",
}
ALLOWED = {
    "enginehouse_contract": {"enginehouse_contract"},
    "enginehouse_client": {"enginehouse_client", "enginehouse_contract"},
    "enginehouse_backends": {"enginehouse_backends", "enginehouse_contract"},
    "enginehouse_builders": {"enginehouse_builders", "enginehouse_contract"},
    "enginehouse_cli": set(PACKAGES),
}
HEAVY = {"torch", "transformers", "optimum", "nncf", "openvino_genai", "pytriton"}
# Of what lies outside: hosts of package registries, and paths of a machine.
FORBIDDEN = re.compile(
    "|".join(["pypi" + r"\.org", "files" + r"\.pythonhosted", "registry" + r"\.npmjs", "/wo" + "rk/"])
)
MAX_LINES = 400
TABLES = {"tensors.py"}  # one row per tensor: long, and simple

MODULES = [(package, path) for package, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]


def imported_roots(path: Path) -> set[str]:
    """Return the first parts of all modules that a file imports, anywhere in it."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots


@pytest.mark.parametrize(("package", "path"), MODULES, ids=[str(path.relative_to(ROOT)) for _, path in MODULES])
def test_imports_point_one_way(package: str, path: Path) -> None:
    """A module imports only what its package may; the contract nothing but the standard library."""
    roots = imported_roots(path)
    ours = {root for root in roots if root.startswith("enginehouse_")}

    assert ours <= ALLOWED[package]
    assert not roots & HEAVY
    if package == "enginehouse_contract":
        assert roots - ours <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(("package", "path"), MODULES, ids=[str(path.relative_to(ROOT)) for _, path in MODULES])
def test_modules_are_documented_and_small(package: str, path: Path) -> None:
    """Every module says what it is for, and none has grown past the limit."""
    text = path.read_text(encoding="utf-8")

    assert ast.get_docstring(ast.parse(text)), package
    assert text.count("\n") <= MAX_LINES or path.name in TABLES


def test_importing_the_command_is_light() -> None:
    """`enginehouse --help` imports neither the engine's runtime nor the transports."""
    code = (
        "import sys, enginehouse_cli.main\n"
        "heavy = {'openvino', 'grpc', 'tritonclient', 'tokenizers', 'sqlalchemy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603

    assert done.returncode == 0, done.stderr


def test_tracked_files_name_no_registry_and_no_machine() -> None:
    """Nothing in the tree depends on where it was made."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".txt", ".pbtxt", ".yaml", ".yml", ""}:
            text = path.read_text(encoding="utf-8", errors="ignore")
            if FORBIDDEN.search(text):
                found.append(name)

    assert found == []

"""The house rules that a machine can check: who may import whom, what stays light, and how long a function may grow."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

PACKAGES = ("components", "pipelines", "monitoring", "inference_client", "k8s")
STEPS = ("extraction", "validation", "preprocessing", "training", "evaluation", "deployment")
HEAVY = (
    "kfp", "pyarrow", "torch", "hugectr", "nvtabular", "merlin", "cudf", "pandas", "dask", "tensorflow",
    "tensorflow_data_validation", "tritonclient", "onnx", "onnxruntime", "sklearn", "google",
)  # fmt: skip
MAX_FUNCTION_LINES = 60
OLDEST_PYTHON = (3, 10)

SOURCES = sorted(p for folder in (*PACKAGES, "benchmarks") for p in (REPOSITORY / folder).rglob("*.py"))
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))


def source_id(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter once `code` has run."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_import_contracts_hold():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"


def test_contracts_load_the_standard_library_and_numpy_only():
    before = modules_after("")
    names = [f"components.contracts.{p.stem}" for p in (REPOSITORY / "components/contracts").glob("*.py")]
    loaded = modules_after("import numpy, " + ", ".join(names)) - before
    own = {"__mp_main__"}  # multiprocessing's name for the main module
    assert loaded - set(sys.stdlib_module_names) - own == {"numpy", "components"}


@pytest.mark.parametrize("step", STEPS)
def test_parser_of_a_step_loads_nothing_heavy(step):
    code = f"from components.{step}.__main__ import build_parser; build_parser().format_help()"
    before = modules_after("")
    assert (modules_after(code) - before).isdisjoint(HEAVY)


def test_compiling_the_pipeline_loads_kfp_and_nothing_heavier():
    # google: kfp's own protocol buffers.
    before = modules_after("import kfp.dsl, kfp.compiler, kfp.kubernetes")
    loaded = modules_after("import kfp.dsl, kfp.compiler, kfp.kubernetes, pipelines.retraining") - before
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("step", STEPS)
def test_step_has_the_rooms_of_every_step(step):
    folder = REPOSITORY / "components" / step
    assert {"__init__.py", "__main__.py", "component.py", "Dockerfile"} <= {p.name for p in folder.iterdir()}


def function_lines(tree: ast.AST) -> dict[str, int]:
    """Lines of each function without those of the functions inside it.

    A pipeline is left out: KFP wants the whole data flow and the documentation of every parameter in one function.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def lines(node):
        inner = [f for f in ast.walk(node) if f in functions and f is not node]
        directly = [f for f in inner if not any(f in ast.walk(other) for other in inner if other is not f)]
        return node.end_lineno - node.lineno + 1 - sum(f.end_lineno - f.lineno + 1 for f in directly)

    return {
        f"{node.name} (line {node.lineno})": lines(node)
        for node in functions
        if not any(ast.unparse(decorator).startswith("dsl.pipeline") for decorator in node.decorator_list)
    }


@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_source_file_opens_with_its_job_and_has_no_endless_function(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{source_id(path)} opens without a docstring"
    long = {name: lines for name, lines in function_lines(tree).items() if lines > MAX_FUNCTION_LINES}
    assert not long, f"functions longer than {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=source_id)
def test_file_is_written_in_the_grammar_of_the_oldest_python(path):
    ast.parse(path.read_text(), feature_version=OLDEST_PYTHON)


NEWER_THAN_3_10 = {
    "typing": {"Self", "assert_never", "Never", "LiteralString", "Required", "NotRequired", "override", "Unpack"},
    "datetime": {"UTC"},
    "enum": {"StrEnum"},
    "itertools": {"batched"},
    "asyncio": {"TaskGroup", "timeout", "Runner"},
}


@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_file_uses_no_library_newer_than_the_oldest_python(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name == "tomllib"}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{a.name}" for a in node.names if a.name in NEWER_THAN_3_10.get(node.module, ())}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {f"{node.value.id}.{node.attr}"} if node.attr in NEWER_THAN_3_10.get(node.value.id, ()) else set()
        elif isinstance(node, ast.TryStar):
            found.add("except*")
    assert not found


def test_package_names_belong_to_nobody_else():
    # The names are generic, see CONTRIBUTING.md: another distribution of this environment must not shadow them.
    owners = importlib.metadata.packages_distributions()
    assert {owner for package in PACKAGES for owner in owners.get(package, ())} <= {"evergreen"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_folder_says_its_job(package):
    folders = {p.parent for p in SOURCES if p.is_relative_to(REPOSITORY / package)}
    assert folders
    for folder in folders:
        assert (folder / "__init__.py").exists(), f"{source_id(folder)} has no __init__.py"


def test_test_folders_are_no_packages():
    assert [source_id(p) for p in TESTS if p.name == "__init__.py"] == []

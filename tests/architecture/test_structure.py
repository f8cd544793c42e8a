"""Checks of house rules: import directions, light imports, names and exit codes."""

import ast
import importlib.metadata
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from testing.paths import REPOSITORY
from tests.support.sources import HEAVY, PACKAGES, imports_of, value_after

MAX_STATEMENTS = 45
"""Maximum number of statements in a function. Lines are not counted, because a table of flags has
many lines."""
PURE_ROOMS = (
    *("monitoring.metrics", "monitoring.drift", "monitoring.policies", "evergreen.config"),
    *(
        "evergreen.statistics.column_profile",
        "evergreen.statistics.comparison",
        "evergreen.statistics.two_sample",
    ),
)
"""Packages that compute and do no input or output."""
IO_MODULES = {
    "os",
    "io",
    "shutil",
    "tempfile",
    "sqlite3",
    "socket",
    "subprocess",
    "urllib",
    "http",
    "requests",
    "grpc",
    "google",
    "evergreen.storage",
    "evergreen.registry",
    "evergreen.events",
    "evergreen.runtime.durable",
}
IO_CALLS = {
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "unlink",
    "mkdir",
    "iterdir",
    "glob",
}
TRITONS_NAME = "TritonPythonModel"
"""Class name that Triton's python backend looks for in every `model.py`."""

SOURCES = sorted(
    p for folder in (*PACKAGES, "benchmarks") for p in (REPOSITORY / folder).rglob("*.py")
)
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))


def source_id(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Maps the name of each source file to its syntax tree."""
    return {source_id(path): ast.parse(path.read_text()) for path in SOURCES}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    sys.path.insert(0, str(REPOSITORY))
    try:
        return grimp.build_graph(*PACKAGES, cache_dir=None)
    finally:
        sys.path.remove(str(REPOSITORY))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def is_pipeline(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the function is a pipeline or component.

    KFP requires all parameters of a pipeline or component in the signature of one function.
    """
    return any(
        ast.unparse(each).startswith(("dsl.pipeline", "dsl.component"))
        for each in function.decorator_list
    )


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after running `code`."""
    names, _ = value_after(code, "sorted(sys.modules)", folder=REPOSITORY, python_path=REPOSITORY)
    return {name.partition(".")[0] for name in names}


def test_import_contracts_hold():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"


def test_no_packages_import_each_other_in_circle(graph):
    found = []
    for package in sorted(graph.modules):
        rooms = graph.find_children(package)
        imports: dict[str, set[str]] = {room: set() for room in rooms}
        for room in rooms:
            for module in {room} | graph.find_descendants(room):
                for imported in graph.find_modules_directly_imported_by(module):
                    imports[room] |= {
                        r for r in rooms if r != room and f"{imported}.".startswith(f"{r}.")
                    }
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            found.append(" <- ".join(error.args[1]))
    assert found == []


def test_pure_packages_do_no_input_and_output(trees):
    found = []
    for name, tree in trees.items():
        module = name.removesuffix(".py").replace("/", ".")
        if not module.startswith(PURE_ROOMS):
            continue
        found += [
            f"{name} imports {n}"
            for n in imports_of(tree)
            if any(f"{n}.".startswith(f"{io}.") for io in IO_MODULES)
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = (
                    node.func.attr
                    if isinstance(node.func, ast.Attribute)
                    else getattr(node.func, "id", "")
                )
                found += [f"{name}:{node.lineno} calls {called}"] if called in IO_CALLS else []
    assert found == []


def test_no_test_module_imports_another():
    names = {source_id(path).removesuffix(".py").replace("/", "."): path for path in TESTS}
    found = []
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                imported = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                found += [
                    f"{source_id(path)} imports {n}"
                    for n in imported & names.keys()
                    if names[n].name[:5] == "test_"
                ]
    assert found == []


@pytest.mark.parametrize(
    ("folder", "forbidden"), [("benchmarks", {"tests"}), ("testing", {"tests", "benchmarks"})]
)
def test_benchmarks_and_shared_helpers_do_not_import_tests(folder, forbidden):
    found = [
        f"{source_id(path)} imports {name}"
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for name in imports_of(ast.parse(path.read_text()))
        if name.partition(".")[0] in forbidden
    ]
    assert found == []


def test_settings_and_contracts_import_only_numpy_msgspec_and_protobuf():
    before = modules_after("")
    names = {
        f"evergreen.{room}.{path.stem}"
        for room in ("config", "contracts")
        for path in (REPOSITORY / "evergreen" / room).glob("*.py")
    }
    own = {"__mp_main__"}  # multiprocessing gives the main module this name
    optional = {"typing_extensions"}  # msgspec imports this package if it is installed
    messages = "evergreen.contracts.record_format"
    for modules, more in ((names - {messages}, set()), ({messages}, {"google"})):
        loaded = modules_after("import numpy, " + ", ".join(sorted(modules))) - before
        loaded -= {*sys.stdlib_module_names, *own, *optional}
        assert loaded - {"msgspec"} == {"numpy", "evergreen", *more}


def test_compiling_pipeline_loads_kfp_and_no_heavier_library():
    # kfp includes protocol buffers under the name `google`.
    before = modules_after("import kfp.dsl, kfp.compiler, kfp.kubernetes")
    loaded = (
        modules_after("import kfp.dsl, kfp.compiler, kfp.kubernetes, pipelines.retraining") - before
    )
    assert loaded.isdisjoint(HEAVY)


def num_statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of statements in a function, without those of nested functions."""
    inner = [each for each in functions(function) if each is not function]
    elsewhere = {id(node) for each in inner for node in ast.walk(each)}
    found = (node for node in ast.walk(function) if isinstance(node, ast.stmt))
    return sum(node is not function and id(node) not in elsewhere for node in found)


def test_every_source_file_has_docstring_and_no_function_is_too_long(trees):
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == []
    long = [
        f"{name}:{each.lineno} {each.name}: {num_statements(each)} statements"
        for name, tree in trees.items()
        for each in functions(tree)
        if not is_pipeline(each) and num_statements(each) > MAX_STATEMENTS
    ]
    assert long == []


def test_arguments_beyond_third_are_keywords(trees):
    found = [
        f"{name}:{each.lineno} {each.name}"
        for name, tree in trees.items()
        for each in functions(tree)
        if not is_pipeline(each)
        and len(
            [a for a in (*each.args.posonlyargs, *each.args.args) if a.arg not in ("self", "cls")]
        )
        > 3
    ]
    assert found == []


def test_every_main_ends_with_exit_code_of_table(trees):
    mains = [
        (name, each)
        for name, tree in trees.items()
        for each in tree.body
        if getattr(each, "name", "") == "main"
    ]
    undecorated = [
        name
        for name, main in mains
        if "exits_with_code" not in {ast.unparse(decorator) for decorator in main.decorator_list}
        and not name.startswith("benchmarks/")
    ]
    assert undecorated == []


NEWER_THAN_3_10 = {
    "typing": {
        "Self",
        "assert_never",
        "Never",
        "LiteralString",
        "Required",
        "NotRequired",
        "override",
        "Unpack",
    },
    "datetime": {"UTC"},
    "enum": {"StrEnum"},
    "itertools": {"batched"},
    "asyncio": {"TaskGroup", "timeout", "Runner"},
}


def test_files_use_no_library_newer_than_oldest_python(trees):
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            used: set[str] = set()
            if isinstance(node, ast.Import):
                used = {a.name for a in node.names if a.name == "tomllib"}
            elif isinstance(node, ast.ImportFrom):
                newer = NEWER_THAN_3_10.get(node.module or "", set())
                used = {f"{node.module}.{a.name}" for a in node.names if a.name in newer}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = {node.attr} & NEWER_THAN_3_10.get(node.value.id, set())
            elif isinstance(node, ast.TryStar):
                used = {"except*"}
            found += [f"{name}: {each}" for each in used]
    assert found == []


def test_package_names_belong_to_no_other_distribution():
    # CONTRIBUTING.md explains why the package names are generic. The names must not clash with
    # those of an installed distribution.
    owners = importlib.metadata.packages_distributions()
    assert {owner for package in PACKAGES for owner in owners.get(package, ())} <= {"evergreen"}


def test_folders_of_sources_are_packages_and_folders_of_tests_are_not():
    folders = {path.parent for path in SOURCES}
    assert [source_id(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    assert [source_id(p) for p in TESTS if p.name == "__init__.py"] == []


def test_class_names_are_unique_over_product(trees):
    modules = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name != TRITONS_NAME:
                modules[node.name].append(name)
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}

"""A tiny pipeline of real KFP components, its runner, and the compiled project pipeline."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kfp import compiler, dsl

from demo.runner import run_pipeline
from pipelines.images import ENVIRONMENT_OF_STEP
from pipelines.package import compile_pipeline
from pipelines.placement import Placement
from testing.paths import REPOSITORY
from tests.support.compiled import Compiled


@dsl.component(base_image="evergreen-extraction", install_kfp_package=False)
def first(folder: str, passes: bool) -> bool:
    import os
    import sys
    from pathlib import Path

    Path(folder, "first").write_text(
        f"{sys.prefix}\n{os.environ['TMPDIR']}\n{os.environ['VIRTUAL_ENV']}"
    )
    print("word from first, threads", os.environ.get("OMP_NUM_THREADS"))
    return passes


@dsl.component(base_image="evergreen-training", install_kfp_package=False)
def second(folder: str, fails: bool, preemptions: int, refuses: bool):
    import os
    from pathlib import Path

    print("threads", os.environ.get("OMP_NUM_THREADS"))
    tries = Path(folder, "second")
    tries.write_text(tries.read_text() + "ran\n" if tries.exists() else "ran\n")
    if refuses:
        raise SystemExit(2)
    if fails:
        raise ValueError("planted failure")
    if len(tries.read_text().splitlines()) <= preemptions:
        raise SystemExit(75)


@dsl.component(base_image="evergreen-run-outcome", install_kfp_package=False)
def last(folder: str, status: dsl.PipelineTaskFinalStatus):
    from pathlib import Path

    Path(folder, "last").write_text(status.state)


@dsl.pipeline(name="tiny")
def tiny(folder: str, passes: bool, fails: bool, preemptions: int, refuses: bool):
    with dsl.ExitHandler(last(folder=folder)):
        gate = first(folder=folder, passes=passes)
        with dsl.If(gate.output == True):  # noqa: E712
            task = second(folder=folder, fails=fails, preemptions=preemptions, refuses=refuses)
            task.set_retry(2, backoff_duration="0s")


@pytest.fixture
def run_tiny(tmp_path):
    """Runs the tiny pipeline through the local runner.

    Returns the run's folder, whose name contains a space.
    """
    folder = tmp_path / "with space"
    folder.mkdir()
    package = tmp_path / "tiny.yaml"
    compiler.Compiler().compile(tiny, str(package))

    def run(
        *, passes: bool, fails: bool = False, preemptions: int = 0, refuses: bool = False
    ) -> Path:
        if refuses:
            text = package.read_text()
            assert "backoffDuration: 0s" in text
            package.write_text(text.replace("backoffDuration: 0s", "backoffDuration: 3600s"))
        run_pipeline(
            package,
            {
                "folder": str(folder),
                "passes": passes,
                "fails": fails,
                "preemptions": preemptions,
                "refuses": refuses,
            },
            name="tiny",
            root=folder / "artifacts",
            logs=folder / "logs",
            pythons=dict.fromkeys(
                ENVIRONMENT_OF_STEP.values(), Path(sys.prefix) / "bin" / "python"
            ),
            source=REPOSITORY,
        )
        return folder

    run.folder = folder
    assert "_KFP_RUNTIME" not in os.environ
    return run


@pytest.fixture(scope="session")
def compile_with(tmp_path_factory):
    """`compile_with(**placement)` compiles the project's pipeline once a session.

    Tests share the compiled pipelines, and must not change them.
    """
    known: dict[str, Compiled] = {}

    def make(**placement) -> Compiled:
        placed = Placement(**placement)
        if repr(placed) not in known:
            path = tmp_path_factory.mktemp("a folder") / "retraining.yaml"
            # KFP reads the source of every frame of the stack repeatedly, and pytest's stack is
            # deep.
            with ThreadPoolExecutor(1) as shallow:
                shallow.submit(compile_pipeline, path, placed).result()
            known[repr(placed)] = Compiled(path)
        return known[repr(placed)]

    return make

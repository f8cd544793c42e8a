"""Tests of README.md and docs/: each page runs its commands in order in its own folder.

A page's folder contains the repository's files, its own `build`, and a copy of a finished demo if
the page mentions a demo. `tests/support/documents.py` describes the marks that say where a block is
run and what it needs.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker

import pytest

from testing.paths import REPOSITORY
from tests.support.documents import DOCUMENTS, PYTHON, blocks
from tests.support.relocated import replace_in_documents

SLOW = {"window.md", "train.md", "experiment.md"}
"""Pages whose commands train models on a lake of their own."""
RUN = {page: [block for block in blocks(page) if block.runs_here] for page in DOCUMENTS}
KEEP = 'trap "export -p > {kept}" EXIT; set -euo pipefail; set -a; [ ! -e {kept} ] || . {kept}; '


class Page:
    """Folder of one page, and the shell that runs the page's blocks."""

    def __init__(self, folder, demo):
        self.folder = folder
        for path in REPOSITORY.iterdir():
            if path.name != "build":
                (folder / path.name).symlink_to(path)
        (folder / "build").mkdir()
        if demo is not None:
            shutil.copytree(demo, folder / "build" / "demo")
            documents = list((folder / "build/demo").rglob("*.json*"))
            replace_in_documents(documents, str(demo), str(folder / "build/demo"))
        path = f"{REPOSITORY / '.venvs/driver/bin'}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
        self.running = contextlib.ExitStack()

    def command(self, block, script):
        if block.kind == PYTHON:
            script = shlex.join([sys.executable, "-c", script])
        return ["bash", "-c", KEEP.format(kept=self.folder / "build" / ".kept") + script]

    def run(self, block):
        for script, promised in block.steps():
            started = {
                "cwd": self.folder,
                "env": self.environment,
                "stdin": subprocess.DEVNULL,
                "text": True,
            }
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            if block.until is not None:
                self.running.enter_context(self.beside(block, script, started))
                continue
            done = subprocess.run(self.command(block, script), **started, **pipes, timeout=600)
            assert done.returncode == 0, (
                f"{block.location}: {script}\nended with {done.returncode}\n{done.stdout}"
            )
            flags = ELLIPSIS | NORMALIZE_WHITESPACE
            assert promised is None or OutputChecker().check_output(promised, done.stdout, flags), (
                f"{block.location}: {script}\nprinted\n{done.stdout}\ninstead of\n{promised}"
            )

    @contextlib.contextmanager
    def beside(self, block, script, started):
        """Start the program in the background, and return when it has printed the block's text."""
        path = self.folder / "build" / "beside.log"
        with open(path, "w") as log:
            command = self.command(block, f"exec {script}")
            process = subprocess.Popen(
                command, **started, stdout=log, stderr=log, start_new_session=True
            )
        try:
            deadline = time.monotonic() + 120
            while block.until not in path.read_text():
                assert process.poll() is None, f"{block.location}: {path.read_text()}"
                assert time.monotonic() < deadline, f"{block.location}: {path.read_text()}"
                time.sleep(0.05)
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, f"{block.location}: {path.read_text()}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else ())
        for page in DOCUMENTS
        if RUN[page]
    ],
    ids=lambda page: str(page.relative_to(REPOSITORY)),
)
def test_commands_of_pages_run_unchanged(page, tmp_path, request):
    needs_demo = any("build/demo" in block.text for block in RUN[page])
    location = Page(tmp_path, request.getfixturevalue("turned")[0] if needs_demo else None)
    with location.running:
        for block in RUN[page]:
            location.run(block)


def test_commands_not_run_here_have_reason_and_contributing_has_their_number():
    """`pytest -s` prints the commands that no test runs."""
    found, reasons = Counter(), Counter()
    for block in (block for page in DOCUMENTS for block in blocks(page)):
        found["here" if block.runs_here else "there" if block.run_by else "nowhere"] += len(
            block.commands
        )
        if block.run_by:
            assert (REPOSITORY / block.run_by).is_file(), (
                f"{block.location}: {block.run_by} is absent"
            )
        if block.needs:
            reasons[block.needs] += len(block.commands)
    total = (
        f"Of {found.total()} commands in the pages, {found['here']} are run by "
        "tests/loop/test_documents.py, "
        f"{found['there']} by other tests, and {found['nowhere']} by none:"
    )
    rows = [f"| {what} | {count} |" for what, count in reasons.most_common()]
    print("\n".join([total, *rows]))
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert total in re.sub(r"\s+", " ", contributing)
    assert "\n".join(rows) in contributing

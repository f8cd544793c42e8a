"""docs/serving.md: its commands and programs run as they stand there, against a real server with two versions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo, raw_rows
from components.deployment.release import ReleaseSettings, release
from components.deployment.servers import Triton
from components.store.models import keep_verdict
from components.store.promotion_journal import read_entries
from pipelines.__main__ import ROOMS
from pipelines.local.triton import TritonServer, TritonSettings
from tests.support.paths import REPOSITORY
from tests.support.served_names import MODEL_NAME

PAGE = (REPOSITORY / "docs" / "serving.md").read_text()
BLOCKS = [(kind, text) for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.M | re.S)]
SHELL = [text for kind, text in BLOCKS if kind == "sh" and "export STORE" not in text]
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    with TritonServer(root / "repository", log=root / "triton.log", settings=TritonSettings(stop_seconds=3)) as server:
        yield server


def _served(table, client, folder):
    """Writes the table's rows into a lake as answered by the server just now; the file."""
    dense = np.stack([table[c].to_numpy(zero_copy_only=False).astype(np.float32) for c in criteo.DENSE], axis=1)
    keys = np.stack([table[c].fill_null(-1).to_numpy() for c in criteo.CATEGORICAL], axis=1).astype(np.int64)
    scores, version = client.infer(MODEL_NAME, dense, keys)
    for name, values in ((raw_rows.MODEL_VERSION, np.full(len(scores), version)), (raw_rows.SCORE, scores)):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, pa.array(values).cast(table.schema.field(name).type))
    path = folder / "day=2026-01-01" / "part-a.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(table, path)
    return path


@pytest.fixture
def place(triton, tmp_path, make_candidate, raw_table):
    """Two released versions, two stored models that no server knows, and rows that version 2 answered; as variables."""
    store = tmp_path / "store"
    settings = ReleaseSettings(
        store=store, repository=triton.repository.as_uri(), triton_urls=(triton.grpc_url,), who="the page's test"
    )
    for seed in (1, 2):
        release(*make_candidate(store, seed), settings=settings)
    for seed, accepted in ((3, False), (4, True)):
        _, verdict, raw = make_candidate(store, seed, accepted=accepted)
        keep_verdict(store, verdict, raw)
    client = Triton(triton.grpc_url)
    rows = _served(raw_table(200, seed=3), client, tmp_path / "lake")
    client.close()
    return {
        "STORE": str(store), "REPOSITORY": str(triton.repository), "LAKE": str(tmp_path / "lake"), "ROWS": str(rows),
        "SERVER": triton.grpc_url, "OUT": str(tmp_path), "REFUSED": "model-3", "CANARY": "model-4",
    }  # fmt: skip


@pytest.mark.e2e
def test_commands_and_programs_of_the_page_run_as_they_stand_there(place):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **place, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    for text in SHELL:
        ended = subprocess.run(
            ["bash", "-euc", text], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, f"{text}\n{ended.stdout}\n{ended.stderr}"
    lived = [(entry.action, entry.version) for entry in read_entries(Path(place["STORE"])) if entry.action != "intent"]
    assert lived[:5] == [("release", 1), ("release", 2), ("rollback", 1), ("rollback", 2), ("promote", 3)]
    assert ("canary", 4) in lived
    _run_programs(place, environment)


def _run_programs(place, environment):
    """Runs the page's programs at once: each spends its time on imports, or on a server of its own."""
    running = []
    for text in PYTHON:
        for written, meant in (
            ("127.0.0.1:8001", place["SERVER"]),
            ("file:///srv/repository", Path(place["REPOSITORY"]).as_uri()),
            ("build/demo/store", place["STORE"]),
            ("build/demo/repository", place["REPOSITORY"]),
            ("/tmp/clicks.db", f"{place['OUT']}/clicks.db"),
            ("build/triton.log", f"{place['OUT']}/other.log"),
        ):
            text = text.replace(written, meant)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        running.append(
            subprocess.Popen([sys.executable, "-c", text], cwd=REPOSITORY, env=environment, text=True, **pipes)
        )
    for text, process in zip(PYTHON, running, strict=True):
        out, errors = process.communicate("\n", timeout=120)
        assert process.returncode == 0, f"{text}\n{out}\n{errors}"
        assert out.strip()


def _flags(command):
    """What `evergreen <command> --help` knows, of its own commands too."""
    words = command.split()
    module = [ROOMS[words[0]][0], *ROOMS[words[0]][1]] if words[0] in ROOMS else ["pipelines", words[0]]
    line = [sys.executable, "-m", *module, *words[1:], "--help"]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120).stdout


def test_every_command_and_flag_that_the_page_names_exists():
    named = {}
    for piece in PAGE.split("evergreen ")[1:]:
        words = re.match(r"(?:canary |model )?[a-z][a-z-]+", piece)
        # A command ends with its cell, its quotation or its paragraph.
        if words and words[0] not in {"canary", "model"}:
            flags = re.findall(r"--[a-z][a-z-]+", re.split(r"`|\||\n\n", piece)[0])
            named.setdefault(words[0], set()).update(flags)
    assert {
        "models",
        "live-at",
        "rollback",
        "promote",
        "verify",
        "controller",
        "load",
        "canary start",
        "model card",
    } <= named.keys()
    for command, flags in named.items():
        known = _flags(command)
        assert {flag for flag in flags if flag not in known} == set(), command

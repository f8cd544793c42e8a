"""Tests of the step in several processes, with changing numbers and a killed worker.

`test_engine_conformance` tests what the engine computes in one, two and four processes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from components.training.torchrec import launch
from evergreen.config.model import DcnConfig, config_from_document
from evergreen.config.training import TrainingSettings
from evergreen.networks.files import one_id_per_slot, open_model
from evergreen.networks.scoring import load_scorer
from evergreen.registry.runs import read_notes
from evergreen.runtime.errors import PermanentError
from evergreen.runtime.exit_codes import ExitCode
from evergreen.storage.uris import local_path
from testing.paths import REPOSITORY
from tests.support.errors import raises
from tests.support.planted_rows import POSITIONS, SLOT_SIZES

pytest.importorskip("torchrec")
LONG = {"passes": 40, "learning_rate": 1e-4, "checkpoint_minutes": 1e-9, "min_steps": 1}
GROWN = [size + more for size, more in zip(SLOT_SIZES, (5, 0, 0, 7))]
"""Sizes of the slots in the next run."""


def scores(model, planted, n=500):
    _, dense, ids, _ = planted.rows(n, 9)
    folder = local_path(model.uri) / model.WEIGHTS
    config = config_from_document(model.config)
    scorer = load_scorer(folder, config, model.slot_sizes, positions=POSITIONS)
    return scorer.probabilities(dense, ids)


@pytest.fixture
def environment(monkeypatch):
    """Each process has one thread, like the step on few cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_two_processes_train_model_of_one_and_growing_run_continues_it(
    step, train_run, planted, make_training_set, environment, workers
):
    training_set = make_training_set(*planted.rows(12_000)[:3])  # four row groups
    code, alone, numbers = step(training_set, run="alone")
    assert code == 0
    code, model, found = step(training_set, run="two", backend="torchrec", processes=2)
    assert code == 0
    assert (alone.backend, model.backend) == ("pytorch", "torchrec")
    np.testing.assert_allclose(scores(model, planted), scores(alone, planted), atol=1e-5)
    del numbers["rows_per_second"], found["rows_per_second"]
    assert found == pytest.approx(numbers, rel=1e-5)
    rows = make_training_set(*planted.rows(2_000, 5)[:3], slot_sizes=GROWN, name="round")
    workers.be(1)
    settings = TrainingSettings(round_rates=(1e-9,))  # The rate is so low that no weight moves.
    config, rows = config_from_document(model.config), replace(rows, parent_model_uri=model.uri)
    child = train_run(rows, config=config, settings=settings, backend="torchrec")
    assert (child.parent_model_id, child.slot_sizes) == (model.model_id, GROWN)
    before, after = (
        open_model(local_path(each.uri) / each.WEIGHTS, each.slot_sizes).weights.table
        for each in (model, child)
    )
    kept = np.concatenate([np.arange(size) + sum(GROWN[:i]) for i, size in enumerate(SLOT_SIZES)])
    np.testing.assert_allclose(after[kept], before, atol=1e-9)


@pytest.fixture
def begun(step_flags, planted, make_training_set, environment, workers, tmp_path):
    """A running step of two processes that has saved its fit.

    Yields the step's process, the workers' process ids by rank, and the training set.
    """
    workers.be(1)  # with more workers, the step would act as a worker
    training_set = make_training_set(*planted.rows(4_000)[:3])
    flags = step_flags(training_set, backend="torchrec", processes=2, training=LONG)
    command = [sys.executable, "-m", "components.training", *flags]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    progress = tmp_path / "a work" / "r1" / "training" / "checkpoint" / "progress.json"
    try:
        while not (progress.exists() and json.loads(progress.read_text())["now"]["passes"]):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        yield process, workers_below(process.pid), training_set
    finally:
        process.kill()
        process.communicate()


def workers_below(parent):
    """Return the process ids of the workers that torchrun started in process `parent`, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1]) == parent:
                variables = dict(
                    each.partition("=")[::2]
                    for each in (folder / "environ").read_text().split("\0")
                )
                found[int(variables["RANK"])] = int(folder.name)
        except (OSError, KeyError):
            continue
    return found


def passes_shown(tmp_path):
    """Return the pass number of each emitted line of numbers, for complete passes only."""
    lines = (tmp_path / "a work" / "r1" / "training" / "metrics.jsonl").read_text().splitlines()
    return [line["pass"] for line in map(json.loads, lines) if "training_loss" in line]


@pytest.mark.slow
def test_killed_worker_ends_step_and_one_process_goes_on_from_last_save(
    begun, step, planted, workers, tmp_path, monkeypatch
):
    process, by_rank, training_set = begun
    os.kill(by_rank[1], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.FAILED, said
    assert "error: worker 1 of 2 was killed by SIGKILL" in said
    assert not list(tmp_path.glob("a store/models/*"))
    assert not any(Path(f"/proc/{pid}").exists() for pid in by_rank.values())
    before = passes_shown(tmp_path)
    workers.be(1)
    for answer in (
        "is_worker",
        "is_leader",
    ):  # This process saves the initial state of another process.
        monkeypatch.setattr(launch, answer, lambda: True)
    code, model, _ = step(training_set, backend="torchrec", training=LONG)
    after = passes_shown(tmp_path)[len(before) :]
    assert (code, after) == (0, list(range(max(2, after[0]), LONG["passes"] + 1)))
    code, unbroken, _ = step(training_set, run="unbroken", training=LONG)
    assert unbroken.optimizer_step == model.optimizer_step
    np.testing.assert_allclose(scores(model, planted), scores(unbroken, planted), atol=2e-4)


OUT_OF_MEMORY = """
import os
if os.environ.get("RANK") == "{rank}":
    import torch
    from components.training.torchrec import engine
    torch.cuda.mem_get_info = lambda: (3 << 29, 80 << 30)
    def fail(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    engine.{patched} = fail
"""


@pytest.mark.parametrize(
    ("rank", "patched"),
    [(1, "_Worker._step"), (0, "_Worker._step"), (1, "table_collection")],
    ids=["worker in step", "leader in step", "worker at start"],
)
def test_full_gpu_memory_of_any_worker_names_sizes(
    step_flags, planted, make_training_set, environment, workers, tmp_path, rank, patched
):
    workers.be(1)
    training_set = make_training_set(*planted.rows(4_000)[:3])
    fault = OUT_OF_MEMORY.format(rank=rank, patched=patched)
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty" / "sitecustomize.py").write_text(fault)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "faulty"), str(REPOSITORY)])}
    flags = step_flags(training_set, backend="torchrec", processes=2)
    done = subprocess.run(
        [sys.executable, "-m", "components.training", *flags],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "Traceback" not in done.stderr
    (note,) = read_notes(tmp_path / "a store", "r1")
    for text in (done.stderr, note.reason):
        assert "the GPU has too little memory: 1.5 of 80.0 GiB are free, and the tables" in text
        assert f"({sum(training_set.slot_sizes):,} x 4) with Adam's moments need" in text
        assert "batches of 256 rows" in text
        assert "CUDA out of memory. Tried to allocate 2.00 GiB." in text


@pytest.mark.slow
def test_sigterm_saves_what_all_workers_hold(begun, tmp_path):
    process, workers, _ = begun
    process.terminate()
    _, said = process.communicate(timeout=90)
    assert process.returncode == ExitCode.PREEMPTED, said
    assert "preempted: stopped on request: saved in pass" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


def test_fbgemm_without_kernels_for_device_is_refused_by_name():
    """The environment has FBGEMM's build for CPUs."""
    from components.training.torchrec.tables import require_kernels

    require_kernels(torch.device("cpu"))
    with raises(PermanentError, "no kernels for cuda", "fbgemm-gpu instead of fbgemm-gpu-cpu"):
        require_kernels(torch.device("cuda"))


def test_table_of_billion_rows_is_split_by_columns_without_using_memory():
    from torchrec.distributed.planner import Topology

    from components.training.torchrec.tables import (
        COLUMN_WISE,
        TABLE_WISE,
        Sharder,
        planner_of,
        table_collection,
    )

    sizes, config = (
        [1_000_000_000, 1_000],
        DcnConfig(num_dense=1, num_categorical=2, embedding_dim=16),
    )
    tables = table_collection(sizes, one_id_per_slot(sizes), config)
    topology = Topology(8, "cuda", hbm_cap=80 << 30, local_world_size=8)
    planner = planner_of(topology, tables, batch_size=4096, sharding=[TABLE_WISE, COLUMN_WISE])
    (planned,) = planner.plan(tables, [Sharder()]).plan.values()
    shards = planned["0"].sharding_spec.shards
    assert [each.shard_sizes for each in shards] == [[1_000_000_000, 4]] * 4
    assert len({each.placement.rank() for each in shards}) == 4

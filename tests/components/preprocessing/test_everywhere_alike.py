"""Tests that workflow and encoded rows are equal for any number of processes and partitions."""

import os
import re
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from fractions import Fraction

import distributed
import numpy as np
import pyarrow as pa
import pytest
import yaml

from evergreen.contracts.manifests import TrainingSet
from evergreen.storage.uris import local_path
from testing.paths import REPOSITORY

CARRIED = ("workflow.json", "vocabularies.npz", "admission.npz")
"""Files that the next run, the training and the serving use. Each engine must write the same files.
NVTabular also writes a file with the time of its save."""
DASK = REPOSITORY / "k8s" / "components" / "dask" / "base"
CLUSTER = "address of a cluster"
ELSEWHERE = {
    "hash seed, locale, one process, one core": (
        {
            "PYTHONHASHSEED": "4711",
            "LC_ALL": "C",
            "LANG": "tr_TR.UTF-8",
            "TZ": "Asia/Tokyo",
            "OMP_NUM_THREADS": "1",
        },
        {"processes": 1},
        (),
    ),
    "chunks and processes": ({"PYTHONHASHSEED": "1"}, {"partition_rows": 200, "processes": 3}, ()),
    "a Dask cluster": ({}, {"partition_rows": 300}, ("--dask-scheduler", CLUSTER)),
    "NVTabular there": (
        {},
        {"partition_rows": 300, "engine": "nvtabular"},
        ("--dask-scheduler", CLUSTER),
    ),
}


@pytest.fixture
def run_elsewhere(tmp_path):
    """Runs the step in a separate process."""

    def run(raw, run, variables, flags):
        output = tmp_path / f"{run}.json"
        command = [sys.executable, "-m", "components.preprocessing", f"--run={run}"]
        command += [f"--store={tmp_path / 'store'}", f"--work={tmp_path / 'work'}"]
        subprocess.run(
            [*command, f"--raw-dataset={raw}", f"--output={output}", *flags],
            cwd=REPOSITORY,
            env=os.environ | variables,
            check=True,
            capture_output=True,
        )
        return TrainingSet.read(output)

    return run


@pytest.fixture
def cluster():
    """Address of a scheduler with two workers, started as in `k8s/components/dask`."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        port, *health = [each.getsockname()[1] for each in sockets]
    address = f"tcp://127.0.0.1:{port}"
    moved = {"--port=8786": f"--port={port}", "--worker-port=8788": "--worker-port=0"}
    moved["tcp://dask-scheduler.evergreen.svc.cluster.local:8786"] = address
    running = []
    try:
        for name, at in zip(("scheduler", "workers", "workers"), health):
            (container,) = next(
                each["spec"]["template"]["spec"]["containers"]
                for each in yaml.safe_load_all((DASK / f"{name}.yaml").read_text())
                if each["kind"] == "Deployment"
            )
            words = [moved.get(word, word) for word in container["args"]]
            words = [
                re.sub("(?<=--dashboard-address=).*", f"127.0.0.1:{at}", word) for word in words
            ]
            command = [sys.executable, *container["command"][1:], *words, "--host=127.0.0.1"]
            log = subprocess.DEVNULL
            running.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log))
        with distributed.Client(address, timeout=60) as client:
            client.wait_for_workers(2, timeout=60)
            for each in health:
                assert (
                    urllib.request.urlopen(f"http://127.0.0.1:{each}/health", timeout=30).status
                    == 200
                )
            yield address
            assert (
                client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
                > 0
            ), "the scheduler got no tasks"
    finally:
        for process in running:
            process.kill()
            process.wait()


def carried(training_set):
    folder = local_path(training_set.workflow_uri)
    return {name: (folder / name).read_bytes() for name in CARRIED}


def test_no_setting_of_machine_changes_byte(
    write_raw, run_step, run_elsewhere, raw_table, reading, cluster
):
    raw = write_raw(raw_table(1700, seed=3), raw_table(400, seed=4), row_group_size=100)
    here = run_step(raw)
    for number, (variables, settings, flags) in enumerate(ELSEWHERE.values()):
        flags = [cluster if flag == CLUSTER else flag for flag in flags]
        reading.with_settings(raw, **settings)
        there = run_elsewhere(raw, f"elsewhere-{number}", variables, flags)
        assert carried(there) == carried(here), list(ELSEWHERE)[number]
        for uri in ("train_uri", "holdout_uri"):
            tables = [reading.encoded(getattr(each, uri)).table for each in (here, there)]
            assert tables[0].equals(tables[1]), list(ELSEWHERE)[number]


def test_numpys_engine_needs_neither_nvtabular_nor_dask(
    write_raw, run_elsewhere, raw_table, reading, tmp_path
):
    for name in ("nvtabular", "merlin", "dask", "distributed"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(__name__)")
    raw = write_raw(raw_table(100))
    run_elsewhere(raw, "numpy", {"PYTHONPATH": str(tmp_path)}, ())
    reading.with_settings(raw, engine="nvtabular")
    with pytest.raises(subprocess.CalledProcessError):
        run_elsewhere(raw, "nvtabular", {"PYTHONPATH": str(tmp_path)}, ())


def test_order_of_rows_changes_no_byte_of_workflow(write_raw, run_step, raw_table):
    table = raw_table(1200, seed=5)
    mixed = table.take(pa.array(np.random.default_rng(0).permutation(1200)))
    one, other = (
        run_step(write_raw(t, name=f"raw {k}"), run=f"run-{k}", partition_rows=300)
        for k, t in enumerate((table, mixed))
    )
    assert carried(one) == carried(other)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sums_are_those_of_exact_arithmetic_in_any_order():
    from components.preprocessing import window_statistics

    random = np.random.default_rng(0)
    drawn = random.normal(size=5000) * 10.0 ** random.integers(-44, 38, 5000)
    values = drawn.astype(np.float32)
    chunks = np.split(random.permutation(values), np.sort(random.choice(5000, 7)))
    zero = window_statistics._moments(np.array([-0.0], np.float32))
    assert not np.signbit([zero.least, zero.largest]).any()
    found = [({}, {"price": window_statistics._moments(chunk)}) for chunk in chunks if len(chunk)]
    _, moments = window_statistics.merged(found)
    exact = [int(Fraction(float(v)) * 2**149) for v in values]
    assert moments["price"] == (
        5000,
        sum(exact),
        sum(k * k for k in exact),
        values.min(),
        values.max(),
    )
    np.testing.assert_allclose(
        moments["price"].mean_and_std(),
        [values.mean(dtype=float), values.std(ddof=1, dtype=float)],
        rtol=1e-9,
    )


def test_error_in_another_process_is_that_error(write_raw, run_step, raw_table, tmp_path, capsys):
    raw = write_raw({f"part-{i}.parquet": raw_table(300, seed=i) for i in range(2)})
    path = tmp_path / "raw" / "train" / "part-1.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 2000 + content[2004:])
    run_step(raw, processes=2, partition_rows=300, expect=2)
    assert "part-1.parquet is not a readable Parquet file" in capsys.readouterr().err

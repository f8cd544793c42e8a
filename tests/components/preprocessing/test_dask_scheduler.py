"""Tests of failures on a user's cluster: no answer, no worker, a dying worker and refused rows."""

import os
import signal
from contextlib import suppress

import dask
import distributed
import pytest

from components.preprocessing import encode, fitting, preprocess
from components.preprocessing.__main__ import main
from evergreen.runtime import workers as dask_workers
from evergreen.runtime.errors import TemporaryError
from evergreen.runtime.workers import workers_of
from evergreen.storage.uris import local_path
from tests.support.errors import raises


@pytest.fixture
def cluster():
    """Makes an in-process cluster with an address."""
    options = {
        "threads_per_worker": 1,
        "processes": False,
        "dashboard_address": None,
        "protocol": "tcp",
    }
    return lambda n_workers: distributed.LocalCluster(n_workers=n_workers, **options)


@pytest.fixture
def arguments(write_raw, run_step, raw_table):
    """Arguments of the step without the scheduler's address."""
    work = run_step.store.parent
    known = [
        "--run=r",
        f"--store={run_step.store}",
        f"--work={work}",
        f"--output={work / 'out.json'}",
    ]
    return [*known, f"--raw-dataset={write_raw(raw_table(50))}"]


def test_scheduler_that_does_not_answer_is_named_by_its_address(
    arguments, run_step, monkeypatch, capsys
):
    monkeypatch.setattr(dask_workers, "_CONNECT_SECONDS", "1s")
    assert main([*arguments, "--dask-scheduler", "tcp://127.0.0.1:1"]) == 3
    assert "error: Dask scheduler tcp://127.0.0.1:1 does not answer" in capsys.readouterr().err
    assert not (run_step.store.parent / "r" / "preprocessing").exists()


@pytest.mark.parametrize("address", ["nowhere", "ftp://host:1"])
def test_address_that_is_none_is_refused(arguments, capsys, address):
    assert main([*arguments, "--dask-scheduler", address]) == 2
    assert f"dask_scheduler is {address!r}" in capsys.readouterr().err
    # A worker that was not closed would take tasks of later steps.
    with raises(ValueError, "No clients found"):
        distributed.default_client()


def test_scheduler_without_worker_is_not_waited_for(arguments, cluster, capsys):
    with cluster(0) as empty:
        assert main([*arguments, "--dask-scheduler", empty.scheduler_address]) == 3
    assert "has no worker, expected at least one" in capsys.readouterr().err


def test_worker_that_is_killed_is_reason_to_try_again(tmp_path):
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        raises(TemporaryError, cluster.scheduler_address, "killed"),
        workers_of(cluster.scheduler_address, processes=1, shared=tmp_path) as workers,
    ):
        workers.run_all(os._exit, [9])


def die_once(folder):
    """Kill the first worker that counts a partition, and the first worker that writes rows."""

    def dying(name, function):
        def call(*arguments, **options):
            result = function(*arguments, **options)
            with suppress(FileExistsError):
                (folder / name).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    fitting.statistics_of = dying("counting", fitting.statistics_of)
    encode.pq.write_table = dying("writing", encode.pq.write_table)


@pytest.mark.slow
def test_two_workers_killed_at_count_and_write_leave_bytes_of_one_process(
    write_raw, run_step, raw_table, keep_as_model, tmp_path, monkeypatch
):
    def files():
        folder = tmp_path / "big data" / "second" / "preprocessing"
        return {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    first = run_step(write_raw(raw_table(900, seed=1), name="first"), run="first")
    keep_as_model(local_path(first.workflow_uri), first.slot_sizes, "parent")
    monkeypatch.setattr(preprocess, "_DOWNSAMPLED_ROWS", 700)
    raw = write_raw(
        {f"part-{i}.parquet": raw_table(700, seed=2 + i) for i in range(3)}, row_group_size=100
    )
    run_step(raw, run="second", parent="parent", processes=1, partition_rows=100, negative_rate=0.7)
    expected = files()
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.run(die_once, tmp_path)
        flags = ("--dask-scheduler", cluster.scheduler_address)
        run_step(
            raw, run="second", parent="parent", partition_rows=100, negative_rate=0.7, extra=flags
        )
    assert (tmp_path / "counting").exists()
    assert (tmp_path / "writing").exists()
    assert files() == expected

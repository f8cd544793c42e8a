"""What breaks on somebody else's cluster: no answer, no worker, a worker that dies, rows that are refused there."""

import os

import dask
import distributed
import pytest

from components.preprocessing import dask_scheduler
from components.preprocessing.__main__ import main
from components.preprocessing.dask_scheduler import workers_of
from components.runtime.errors import TemporaryError


@pytest.fixture
def cluster():
    """Makes a cluster within this process, which answers to an address."""
    options = {"threads_per_worker": 1, "processes": False, "dashboard_address": None, "protocol": "tcp"}
    return lambda n_workers: distributed.LocalCluster(n_workers=n_workers, **options)


@pytest.fixture
def arguments(write_raw, run_step, raw_table):
    """The step's arguments but for the scheduler."""
    work = run_step.store.parent
    known = ["--run=r", f"--store={run_step.store}", f"--work={work}", f"--output={work / 'out.json'}"]
    return [*known, f"--raw-dataset={write_raw(raw_table(50))}"]


def test_a_scheduler_that_does_not_answer_is_told_by_its_address(arguments, run_step, monkeypatch, capsys):
    monkeypatch.setattr(dask_scheduler, "CONNECT_SECONDS", "1s")
    assert main([*arguments, "--dask-scheduler", "tcp://127.0.0.1:1"]) == 3
    assert "error: Dask scheduler tcp://127.0.0.1:1 does not answer" in capsys.readouterr().err
    assert not (run_step.store.parent / "r" / "preprocessing").exists()


@pytest.mark.parametrize("address", ["nowhere", "ftp://host:1"])
def test_an_address_that_is_none_is_refused(arguments, capsys, address):
    assert main([*arguments, "--dask-scheduler", address]) == 2
    assert f"dask_scheduler is {address!r}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="No clients found"):  # one that is left would be given the next step's work
        distributed.default_client()


def test_a_scheduler_without_a_worker_is_not_waited_for(arguments, cluster, capsys):
    with cluster(0) as empty:
        assert main([*arguments, "--dask-scheduler", empty.scheduler_address]) == 3
    assert "has no worker, expected at least one" in capsys.readouterr().err


def test_a_worker_that_is_killed_is_a_reason_to_try_again():
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        pytest.raises(TemporaryError, match=f"workers of Dask scheduler {cluster.scheduler_address} were killed"),
        workers_of(cluster.scheduler_address, processes=1) as workers,
    ):
        workers.run_all(os._exit, [9])

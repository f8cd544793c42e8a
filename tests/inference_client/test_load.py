"""The load's schedule, latencies and counts against NumPy's, in time that only sleeping moves."""

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.contracts.criteo import CRITEO_RECOMMENDER
from components.runtime.errors import ContractError
from inference_client.errors import ModelAbsent, ServerUnavailable
from inference_client.load import LoadSettings, open_loop, run_load, run_precisely
from inference_client.recommender import RecommenderClient
from inference_client.rows import FeatureRows
from inference_client.scoring import Scored
from tests.support.processes import wait_for
from tests.support.virtual_time import VirtualTime


class Scripted:
    """Takes as long as the script says, request by request; the last time is repeated."""

    def __init__(self, time, seconds, fails=lambda number: None):
        self.time, self.seconds, self.fails = time, seconds, fails
        self.asked, self.firsts = [], []
        self.out = self.most_out = 0

    async def score(self, dense, categorical, *, request_id=None, key=None):
        number = len(self.asked)
        self.asked.append(self.time.now)
        self.firsts.append((len(dense), int(categorical[0, 0])))
        self.out += 1
        self.most_out = max(self.most_out, self.out)
        await self.time.sleep(self.seconds[min(number, len(self.seconds) - 1)])
        self.out -= 1
        if error := self.fails(number):
            raise error
        return Scored(np.full(len(dense), 0.5, np.float32), 1 + number % 2)


def rows_of(n):
    categorical = np.zeros((n, 26), np.int64)
    categorical[:, 0] = np.arange(n)
    return FeatureRows(dense=np.zeros((n, 13), np.float32), categorical=categorical)


@pytest.fixture
def load():
    """Loads a scripted scorer; its report and the scorer."""

    def run(service, *, num_rows=100, fails=lambda number: None, **settings):
        time = VirtualTime()
        scorer = Scripted(time, list(service), fails)
        settings = LoadSettings(**{"rows_per_request": 10, "warm_up_seconds": 0.0, "seconds": 4.0, **settings})

        async def go():
            async with RecommenderClient(scorer, recommender=CRITEO_RECOMMENDER, log=None) as client:
                return await run_load(client, rows_of(num_rows), settings, timing=time.timing())

        return time.run(go()), scorer

    return run


def test_percentiles_are_numpys_of_the_service_times_where_nothing_waits(load):
    service = np.random.default_rng(1).gamma(2.0, 0.004, 600)
    report, scorer = load(service, rate=100.0)
    taken = 1e3 * service[: report.answered]
    found = report.latency_ms
    assert len(scorer.asked) == report.answered == pytest.approx(400, abs=4 * 20)
    np.testing.assert_allclose([found.p50, found.p95, found.p99], np.percentile(taken, [50, 95, 99]), rtol=1e-6)
    np.testing.assert_allclose([found.max, found.mean], [taken.max(), taken.mean()], rtol=1e-6)
    assert report.versions == {"1": (report.answered + 1) // 2, "2": report.answered // 2}


def test_a_stall_is_charged_to_every_request_that_was_due_during_it():
    """Coordinated omission: one at a time, the waits are those of a queue (Lindley's recursion)."""
    service = np.full(1000, 0.01)
    service[50] = 0.8
    time = VirtualTime()

    async def go():
        line = asyncio.Lock()

        async def ask(number):
            async with line:
                await time.sleep(service[number])

        return await open_loop(ask, 50.0, 4.0, seed=3, timing=time.timing())

    answers = time.run(go())
    wait, expected = 0.0, []
    for each, gap in zip(service, np.diff(answers.due, append=np.inf)):
        expected.append(wait + each)
        wait = max(0.0, wait + each - gap)
    np.testing.assert_allclose(answers.latencies, expected, atol=1e-6)
    assert np.percentile(answers.latencies, 95) > 0.2


def test_arrivals_have_the_rate_and_the_spread_of_independent_users(load):
    report, scorer = load([0.001], rate=200.0, seconds=20.0)
    gaps = np.diff(scorer.asked)
    assert report.answered == pytest.approx(4000, abs=4 * np.sqrt(4000))
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    assert np.mean(gaps > gaps.mean()) == pytest.approx(np.exp(-1), abs=0.03)


def test_closed_loop_keeps_its_callers_busy_and_no_more(load):
    report, scorer = load([0.02], concurrency=3)
    assert scorer.most_out == 3
    assert report.answered == pytest.approx(3 * 4.0 / 0.02, abs=3)
    assert report.requests_per_second == pytest.approx(150, rel=0.01)
    assert report.rows_per_second == pytest.approx(1500, rel=0.01)
    assert report.latency_ms.p50 == pytest.approx(20)


@pytest.mark.parametrize("kind", [{"rate": 100.0}, {"concurrency": 1}], ids=["open", "closed"])
def test_the_warm_up_is_not_counted(load, kind):
    report, scorer = load([0.5] + [0.01] * 1000, warm_up_seconds=1.0, **kind)
    assert report.latency_ms.max == pytest.approx(10)
    assert report.seconds == pytest.approx(4.0, abs=0.05)
    assert len(scorer.asked) > report.answered == sum(report.versions.values())


def test_errors_are_counted_by_kind_with_their_first_message(load):
    def fails(number):
        return {3: ServerUnavailable(f"busy {number}"), 7: ModelAbsent(f"gone {number}")}.get(number % 10)

    report, scorer = load([0.01], concurrency=1, fails=fails)
    assert len(scorer.asked) == 400
    assert report.failed == {"ModelAbsent": 40, "ServerUnavailable": 40}
    assert report.first_errors == {"ServerUnavailable": "busy 3", "ModelAbsent": "gone 7"}
    assert report.answered == 320


def test_nothing_answered_has_no_latency(load):
    report, _ = load([0.001], rate=100.0, fails=lambda number: ServerUnavailable("gone"))
    assert (report.answered, report.latency_ms.p50, report.latency_ms.max) == (0, None, None)
    assert report.requests_per_second == 0
    json.dumps(asdict(report), allow_nan=False)


@pytest.mark.parametrize("kind", [{"rate": 100.0}, {"concurrency": 2}], ids=["open", "closed"])
def test_a_defect_of_the_scorer_is_raised_and_not_counted(load, kind):
    with pytest.raises(TypeError, match="defect"):
        load([0.001], fails=lambda number: TypeError("defect") if number == 5 else None, **kind)


def test_rows_are_cut_into_requests_and_repeated(load):
    _, scorer = load([0.001], rate=100.0, num_rows=35)
    assert scorer.firsts[:5] == [(10, 0), (10, 10), (10, 20), (10, 0), (10, 10)]


@pytest.mark.parametrize(
    "wrong", [{"rate": float("nan")}, {"seconds": 0.0}, {"warm_up_seconds": -1.0}, {"concurrency": 0}], ids=str
)
def test_impossible_loads_are_refused(wrong):
    with pytest.raises(ContractError, match=next(iter(wrong))):
        LoadSettings(**wrong)


def test_precise_runs_wake_closer_than_a_millisecond():
    async def overshoot():
        loop = asyncio.get_running_loop()
        late = []
        for _ in range(60):
            due = loop.time() + 0.0003
            await asyncio.sleep(0.0003)
            late.append(loop.time() - due)
        return min(late)

    # The usual loop cannot wake before a whole millisecond, however idle the machine is.
    assert run_precisely(overshoot()) < 0.0005


def test_a_load_that_is_interrupted_breaks_off_no_call(server, store, tmp_path, raw_table):
    pq.write_table(raw_table(64), tmp_path / "rows.parquet")
    data = ["--server", server.url, "--data", str(tmp_path / "rows.parquet"), "--rows-per-request", "8"]
    data += ["--recommender", str(store)]
    line = [sys.executable, "-m", "inference_client", "load", *data, "--concurrency", "4", "--seconds", "60"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(server.scoring.requests) >= 50)
        gate = server.scoring.wait = server.make_event()
        asked = len(server.scoring.requests) + 4
        wait_for(lambda: len(server.scoring.requests) >= asked)
        process.send_signal(signal.SIGINT)
        server.release(gate)
        out, errors = process.communicate(timeout=120)
    assert (process.returncode, out, errors) == (130, "", "interrupted: Ctrl-C\n")
    assert server.scoring.cancelled == 0


def test_the_command_prints_settings_and_report_as_json(server, store, tmp_path, raw_table):
    pq.write_table(raw_table(64), tmp_path / "rows.parquet")
    words = [
        "load",
        "--server",
        server.url,
        "--recommender",
        store,
        "--data",
        tmp_path / "rows.parquet",
        "--rows-per-request",
        8,
    ]
    words += ["--rate", 50, "--seconds", 1, "--warm-up-seconds", 0]
    line = [sys.executable, "-m", "inference_client", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    answered = document["report"]["answered"]
    assert answered == pytest.approx(50, abs=30)
    assert (document["report"]["failed"], document["report"]["versions"]) == ({}, {"1": answered})
    assert document["settings"]["rate"] == 50
    # One row is asked for before the load begins.
    assert server.scoring.requests == [1] + [8] * answered

"""The load's schedule, latencies and counts against NumPy's, in time that only sleeping moves."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.runtime.errors import ContractError
from inference_client.errors import ModelAbsent, ServerUnavailable
from inference_client.load import EVEN, LoadSettings, run_load, run_precisely
from inference_client.recommender import RecommenderClient
from inference_client.rows import FeatureRows
from inference_client.scoring import Scored
from tests.support.virtual_time import VirtualTime


class Scripted:
    """Takes as long as the script says, request by request; the last time is repeated."""

    def __init__(self, time, seconds, fails=lambda number: None):
        self.time, self.seconds, self.fails = time, seconds, fails
        self.asked, self.sizes, self.firsts = [], [], []
        self.out = self.most_out = 0

    async def score(self, dense, categorical, *, request_id=None, key=None):
        number = len(self.asked)
        self.asked.append(self.time.now)
        self.sizes.append(len(dense))
        self.firsts.append(int(categorical[0, 0]))
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
            async with RecommenderClient(scorer, log=None) as client:
                return await run_load(client, rows_of(num_rows), settings, timing=time.timing())

        return time.run(go()), scorer

    return run


def percentiles(seconds):
    return np.percentile(np.array(seconds) * 1e3, [50, 95, 99, 100])


def told(latencies):
    return [latencies.p50, latencies.p95, latencies.p99, latencies.max]


def test_percentiles_are_numpys_of_the_service_times_where_nothing_waits(load):
    service = np.random.default_rng(1).gamma(2.0, 0.004, 400)
    report, _ = load(service, rate=100.0, arrivals=EVEN)
    assert (report.sent, report.answered, report.failed, report.unsent) == (400, 400, {}, 0)
    np.testing.assert_allclose(told(report.latency_ms), percentiles(service), rtol=1e-6)
    np.testing.assert_allclose(report.latency_ms.mean, service.mean() * 1e3, rtol=1e-6)
    np.testing.assert_allclose(told(report.service_ms), percentiles(service), rtol=1e-6)
    assert report.versions == {"1": 200, "2": 200}


def test_a_stall_is_charged_to_every_request_that_was_due_during_it(load):
    """Coordinated omission: with one in flight, the waits are those of a queue (Lindley's recursion)."""
    service = np.full(190, 0.01)
    service[50] = 0.8
    report, _ = load(service, rate=50.0, arrivals=EVEN, max_in_flight=1, seconds=3.8)
    wait, waits = 0.0, []
    for each in service:
        waits.append(wait)
        wait = max(0.0, wait + each - 0.02)
    np.testing.assert_allclose(told(report.latency_ms), percentiles(np.array(waits) + service), rtol=1e-6)
    np.testing.assert_allclose(told(report.service_ms), percentiles(service), rtol=1e-6)
    assert report.latency_ms.p95 > 20 * report.service_ms.p95
    assert report.most_behind_ms == pytest.approx(max(waits) * 1e3)
    assert report.late_share == pytest.approx(np.mean(np.array(waits) > 0.005))


def test_what_an_overloaded_server_never_got_is_counted(load):
    report, scorer = load([0.1], rate=100.0, arrivals=EVEN, max_in_flight=2)
    assert scorer.most_out == 2
    assert report.sent + report.unsent == 400
    assert report.sent == pytest.approx(2 * 4.0 / 0.1, abs=2)
    assert report.latency_ms.max > 3000


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_users(load):
    report, scorer = load([0.001], rate=200.0, seconds=20.0)
    gaps = np.diff(scorer.asked)
    assert report.sent == pytest.approx(4000, abs=4 * np.sqrt(4000))
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    assert np.mean(gaps > gaps.mean()) == pytest.approx(np.exp(-1), abs=0.03)


def test_closed_loop_keeps_its_callers_busy_and_no_more(load):
    report, scorer = load([0.02], concurrency=3)
    assert scorer.most_out == 3
    assert report.answered == pytest.approx(3 * 4.0 / 0.02, abs=3)
    assert report.requests_per_second == pytest.approx(150, rel=0.01)
    assert report.latency_ms.p50 == pytest.approx(20)
    assert report.late_share == 0.0


@pytest.mark.parametrize("kind", [{"rate": 100.0, "arrivals": EVEN}, {"concurrency": 1}], ids=["open", "closed"])
def test_the_warm_up_is_not_counted(load, kind):
    slow_start = [0.5] + [0.01] * 1000
    report, scorer = load(slow_start, warm_up_seconds=1.0, **kind)
    assert report.latency_ms.max == pytest.approx(10)
    assert report.seconds == pytest.approx(4.0, abs=0.05)
    assert len(scorer.asked) > report.sent == report.answered


def test_errors_are_counted_by_kind_with_their_first_message(load):
    def fails(number):
        return {3: ServerUnavailable(f"busy {number}"), 7: ModelAbsent(f"gone {number}")}.get(number % 10)

    report, _ = load([0.001], rate=100.0, arrivals=EVEN, fails=fails)
    assert report.failed == {"ModelAbsent": 40, "ServerUnavailable": 40}
    assert report.first_errors == {"ServerUnavailable": "busy 3", "ModelAbsent": "gone 7"}
    assert (report.sent, report.answered) == (400, 320)


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
    report, scorer = load([0.001], rate=100.0, arrivals=EVEN, num_rows=35)
    assert scorer.firsts[:5] == [0, 10, 20, 0, 10]
    assert set(scorer.sizes) == {10}


@pytest.mark.parametrize(
    "wrong",
    [{"rate": 0.0}, {"rate": float("nan")}, {"seconds": 0.0}, {"warm_up_seconds": -1.0}, {"concurrency": 0}],
    ids=str,
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


def test_a_load_that_is_interrupted_breaks_off_no_call(server, tmp_path, raw_table):
    pq.write_table(raw_table(64), tmp_path / "rows.parquet")
    data = ["--server", server.url, "--data", str(tmp_path / "rows.parquet"), "--rows-per-request", "8"]
    line = [sys.executable, "-m", "inference_client", "load", *data, "--concurrency", "4", "--seconds", "60"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while len(server.scoring.requests) < 50 and time.monotonic() < deadline:
            time.sleep(0.01)
        gate = server.scoring.wait = server.make_event()
        asked = len(server.scoring.requests) + 4
        while len(server.scoring.requests) < asked and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        server.release(gate)
        out, errors = process.communicate(timeout=120)
    assert (process.returncode, out, errors) == (130, "", "interrupted: Ctrl-C\n")
    assert server.scoring.cancelled == 0


def command(server, folder, *extra):
    arguments = ["load", "--server", server.url, "--data", folder / "rows.parquet", "--rows-per-request", 8]
    line = [sys.executable, "-m", "inference_client", *arguments, *extra]
    return subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=120)


def test_the_command_prints_a_table_and_writes_json(server, tmp_path, raw_table):
    pq.write_table(raw_table(64), tmp_path / "rows.parquet")
    report_path = tmp_path / "out" / "load.json"
    timing = ["--rate", 50, "--seconds", 1, "--warm-up-seconds", 0, "--arrivals", "even"]
    done = command(server, tmp_path, *timing, "--json", report_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(report_path.read_text())
    assert document["report"]["sent"] == document["report"]["answered"] == 50
    assert document["report"]["failed"] == {}
    assert document["report"]["versions"] == {"1": 50}
    assert document["settings"]["rate"] == 50
    # One row is asked for before the load begins.
    assert server.scoring.requests == [1] + [8] * 50
    assert "open loop, 50 requests/s (even), 8 rows a request, 1 s" in done.stdout
    assert "50 sent, 50 answered, 0 due and never sent" in done.stdout

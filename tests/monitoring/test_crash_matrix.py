"""Tests of the chain from publisher to lake, with SIGKILL at boundaries and random moments.

After any kill, acknowledged records are stored. At the end, every published row is in exactly one
file of the lake, in a folder as in a bucket. The lake contains every late outcome once. The lake's
manifest matches the volume's manifest.
"""

import hashlib
import io
import json
import os
import pickle
import random
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from evergreen.contracts.records import CLICK, CONVERSION, OutcomeBatch, PredictionBatch, record_id
from evergreen.events.sqlite import SqliteLog
from evergreen.storage.uris import open_objects
from testing.recommenders import SHOP, draw_arrays
from tests.support import monitors
from tests.support.archives import values_of
from tests.support.crash_chain import LEASE_SECONDS, WINDOW, ForkServer
from tests.support.record_messages import encode

BEGIN = 1_767_225_000.0
"""Ten minutes before a UTC midnight. The traffic continues past midnight."""
KILLED = -9


@pytest.fixture(scope="module")
def fork_server():
    with ForkServer() as opened:
        yield opened


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def make_chain(request, tmp_path, fork_server):
    if request.param == "bucket":
        request.getfixturevalue("cloud_storage")
    made = []

    def make(seed: int, **settings) -> Chain:
        folder = tmp_path / f"a chain {len(made)}"
        lake = (
            str(folder / "lake") if request.param == "folder" else f"gs://models/chain {len(made)}"
        )
        made.append(Chain(fork_server, folder, lake, seed, **settings))
        return made[-1]

    return make


class Chain:
    """An installation with one log, one monitor, one archive and one lake.

    The three processes run one after the other. The seed determines when a process is killed.
    """

    def __init__(
        self, fork_server: ForkServer, folder: Path, lake: str, seed: int, *, together: bool = False
    ) -> None:
        self.fork_server, self.folder, self.lake, self.together = (
            fork_server,
            folder,
            lake,
            together,
        )
        self.random = random.Random(seed)
        self.now = BEGIN
        self.turn = 0
        self.is_ending = False
        self.predictions: list[PredictionBatch] = []
        self.outcomes: dict[tuple[str, int, str], float] = {}
        self.poison: list[str] = []
        self.messages: list[tuple[str, bytes]] = []
        self.due: list[tuple[int, str, int, str, float]] = []
        """Outcomes to publish in a later turn, as (turn, request, row, event, time)."""
        self.killed_at: Counter[str] = Counter()
        self.reached: set[str] = set()
        self.lengths = {"publisher": 8, "monitor": 30, "uploader": 12}
        """Number of boundaries in the last complete run of each role."""
        self.seconds = {"publisher": 0.01, "monitor": 0.06, "uploader": 0.02}
        folder.mkdir()

    @property
    def unkilled(self) -> list[str]:
        """Boundaries that processes reached, but at which no process was killed yet."""
        return sorted(self.reached - self.killed_at.keys())

    # -- publishing

    def _next_records(self) -> list[PredictionBatch | OutcomeBatch]:
        """Return new predictions, and the outcomes that are due in the current turn."""
        new: list[PredictionBatch | OutcomeBatch] = []
        for i in range(0 if self.is_ending else 3):
            num_rows = self.random.randint(1, 4)
            values = np.random.default_rng(self.random.getrandbits(32))
            dense, categorical = draw_arrays(SHOP.features, num_rows, values)
            prediction = PredictionBatch(
                request_id=f"request {self.turn}-{i}",
                time=self.now + i,
                model_version=1 + self.turn // 4,
                dense=dense,
                categorical=categorical,
                scores=values.random(num_rows).astype(np.float32),
            )
            self.predictions.append(prediction)
            new.append(prediction)
            for row in range(num_rows):
                after, late = (
                    self.turn + self.random.choice([0, 1, 3]),
                    self.random.choice([5.0, WINDOW + 15.0]),
                )
                kind = self.random.choice([None, None, CLICK, CLICK, CONVERSION])
                if kind:
                    self.due.append(
                        (after, prediction.request_id, row, kind, prediction.time + late)
                    )
        due = [each for each in self.due if each[0] <= self.turn]
        self.due = [each for each in self.due if each[0] > self.turn]
        for kind in (CLICK, CONVERSION):
            of_kind = [each for each in due if each[3] == kind]
            self.outcomes |= {
                (request, row, event): time for _, request, row, event, time in of_kind
            }
            if of_kind:
                events = [(request, row, time) for _, request, row, _, time in of_kind]
                new.append(monitors.clicks(f"{kind}s {self.turn}", events, kind))
        return new

    def _write_messages(self) -> str:
        messages = [(record_id(record), encode(record)) for record in self._next_records()]
        if self.turn % 5 == 2:
            self.poison.append(f"poison {self.turn}")
            messages.append((self.poison[-1], b"no record"))
        if self.messages:
            # The rows of a redelivered message may already be archived.
            messages.append(self.random.choice(self.messages))
        self.messages += [each for each in messages if each[0] not in self.poison]
        name = f"messages {self.turn}"
        batches = [messages[at : at + 2] for at in range(0, len(messages), 2)]
        (self.folder / name).write_bytes(pickle.dumps(batches))
        return name

    # -- start, kill and restart of the processes

    def _order(self, role: str, **more) -> dict:
        environment = {n: os.environ[n] for n in ("STORAGE_EMULATOR_HOST",) if n in os.environ}
        order = {
            "role": role,
            "folder": str(self.folder),
            "lake": self.lake,
            "now": self.now,
            "ticks": 2,
            "stop": False,
        }
        return {**order, "environment": environment, "kill_at": [], "kill_after": None, **more}

    def _choose_kill(self, order: dict, kills: str) -> dict:
        role = order["role"]
        if kills == "each boundary" and (
            left := [n for n in self.unkilled if n.startswith(f"{role}: ")]
        ):
            return {**order, "kill_at": [name.partition(": ")[2] for name in left]}
        if kills != "moment":
            return {**order, "kill_at": [self.random.randrange(self.lengths[role])]}
        return {**order, "kill_after": self.random.uniform(0, 1.2 * self.seconds[role])}

    def live_turn(self, kills: str = "", *, stop: bool = False) -> None:
        """Run each of the three processes once.

        A killed process is restarted, and its last run is not interrupted.
        """
        messages = self._write_messages()
        orders = [
            self._order("publisher", messages=messages),
            self._order("monitor", stop=stop),
            self._order("uploader"),
        ]
        attempt = 0
        while orders:
            doomed = kills and attempt < (4 if kills == "each boundary" else 2)
            orders = [{**order, "now": self.now} for order in orders]
            sent = [self._choose_kill(order, kills) if doomed else order for order in orders]
            bites = [sent] if self.together else [[order] for order in sent]
            ends = [end for bite in bites for end in self.fork_server.live(*bite)]
            again = []
            for order, sent_order, end in zip(orders, sent, ends):
                if end["status"] == KILLED:
                    again.append(order)
                    at = end["boundaries"][-1] if sent_order["kill_at"] else "a moment"
                    self.killed_at[f"{order['role']}: {at}"] += 1
                    self.expect_acknowledged_is_stored()
                else:
                    assert end["status"] == 0, f"{order['role']} failed at {end['boundaries'][-3:]}"
                    self.lengths[order["role"]] = max(len(end["boundaries"]), 4)
                self.reached |= {f"{order['role']}: {name}" for name in end["boundaries"]}
            orders, attempt = again, attempt + 1
            self.now += LEASE_SECONDS + 1
        self.turn += 1
        self.now += 10

    def finish(self) -> None:
        """Publish what is due, let every window close, and stop before the last upload."""
        self.is_ending = True
        while self.due:
            self.live_turn()
        for stop in (False, True):
            self.now += WINDOW + LEASE_SECONDS
            self.live_turn_of_rest(stop=stop)

    def live_turn_of_rest(self, *, stop: bool) -> None:
        for order in (self._order("monitor", stop=stop), self._order("uploader")):
            (end,) = self.fork_server.live(order)
            assert end["status"] == 0

    # -- invariants

    def expect_acknowledged_is_stored(self) -> None:
        log, state = self.folder / "log.db", self.folder / "state" / "monitor.db"
        if not log.exists() or not state.exists():
            return
        acknowledged = _column(log, "SELECT message_id FROM messages WHERE state = 'acknowledged'")
        stored = _column(
            state, "SELECT request_id FROM predictions UNION SELECT batch_id FROM outcome_batches"
        )
        # A batch is stored under its id, its event and a digest.
        assert acknowledged <= {name.partition("/")[0] for name in stored}

    def expect_nothing_lost_or_doubled(self) -> None:
        lake = {
            each.name: open_objects(self.lake).read(each.name).content
            for each in open_objects(self.lake).list()
        }
        rows = _rows(lake, "day=")
        self._expect_rows(rows)
        self._expect_late_outcomes(rows, _rows(lake, "outcomes/"))
        self._expect_manifests(lake)
        log = SqliteLog(self.folder / "log.db")
        assert log.backlog() == 0
        assert sorted(each.message_id for each in log.list_dead_letters()) == sorted(self.poison)
        log.close()
        left = [
            p.name
            for p in self.folder.rglob("*part-*")
            if p.is_file() and p.parent.name != "uploaded"
        ]
        assert sorted(left) == sorted(
            Path(name).name for name in lake if self.lake.startswith("/")
        ), "the lake contains an incomplete file"

    def _expect_rows(self, rows: list[dict]) -> None:
        found = {(row["request_id"], row["row"]): row for row in rows}
        assert len(found) == len(rows), "a row is in two files"
        assert set(found) == {
            (p.request_id, row) for p in self.predictions for row in range(len(p))
        }
        for prediction in self.predictions:
            for row, score in enumerate(prediction.scores):
                archived = found[prediction.request_id, row]
                assert np.float32(archived["score"]) == score
                assert archived["event_time"].timestamp() == prediction.time
                assert values_of(archived, SHOP.features)[1] == prediction.categorical[row].tolist()

    def _expect_late_outcomes(self, rows: list[dict], late: list[dict]) -> None:
        """Assert that each click within the window is either a label or a late outcome.

        Outcomes of all other kinds are late outcomes. Each outcome occurs once.
        """
        times = {p.request_id: p.time for p in self.predictions}
        clicked = {(row["request_id"], row["row"]) for row in rows if row["label"]}
        found = {
            (each["request_id"], each["row"], each["event"]): each["outcome_time"].timestamp()
            for each in late
        }
        assert len(found) == len(late), "a late outcome is archived twice"
        in_time = {
            key
            for key, time in self.outcomes.items()
            if key[2] == CLICK and time <= times[key[0]] + WINDOW
        }
        assert {key: self.outcomes.get(key) for key in found} == found
        assert self.outcomes.keys() - in_time <= found.keys()
        as_labels = {key for key in in_time if key[:2] in clicked}
        assert as_labels | (found.keys() & in_time) == in_time
        assert not as_labels & found.keys()
        assert len(clicked) == len(as_labels), "a label has no click"

    def _expect_manifests(self, lake: dict[str, bytes]) -> None:
        markers = [
            json.loads(path.read_text())
            for path in (self.folder / "archive" / "uploaded").glob("*.json")
        ]
        volume = {(each["name"], each["num_bytes"], each["sha256"]) for each in markers}
        assert volume == {
            (name, len(held), hashlib.sha256(held).hexdigest()) for name, held in lake.items()
        }
        assert len(markers) == len(lake)
        assert _column(self.folder / "state" / "monitor.db", "SELECT name FROM files") == set(lake)


def _column(path: Path, query: str) -> set:
    connection = sqlite3.connect(path)
    try:
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return {value for (value,) in connection.execute(query)} if num_tables else set()
    finally:
        connection.close()


def _rows(lake: dict[str, bytes], start: str) -> list[dict]:
    found = [content for name, content in sorted(lake.items()) if name.startswith(start)]
    return [
        row for content in found for row in pq.ParquetFile(io.BytesIO(content)).read().to_pylist()
    ]


def run_chain(chain: Chain, *, num_turns: int, kills: tuple[str, ...]) -> Chain:
    for turn in range(num_turns):
        chain.live_turn(kills[turn % len(kills)])
    chain.finish()
    chain.expect_nothing_lost_or_doubled()
    return chain


def test_chain_killed_at_each_boundary_loses_and_doubles_nothing(make_chain):
    chain = make_chain(1)
    while chain.turn < 4 or chain.unkilled:
        assert chain.turn < 25, f"no process was killed at {chain.unkilled}"
        chain.live_turn("each boundary")
    chain.finish()
    chain.expect_nothing_lost_or_doubled()
    assert len(chain.killed_at) >= 30


@pytest.mark.slow
def test_chain_killed_at_random_moments_loses_and_duplicates_nothing(make_chain):
    chain = run_chain(make_chain(2, together=True), num_turns=4, kills=("moment", "boundary"))
    assert chain.killed_at.total() >= 8

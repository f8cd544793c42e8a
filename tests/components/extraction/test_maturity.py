"""Young rows thinned so that odds come out right: on clicks with known delays, against NumPy and the planted truth."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from components.contracts.records import CLICK
from components.extraction.extract import ExtractionSettings, extract
from components.extraction.times import DAY_MICROS, TimeSpan, parse_time
from components.extraction.window import ImmatureRows, LateClickDelays, Maturity
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from tests.support.lakes import OUTCOMES, folder_lake

HOUR = DAY_MICROS // 24
ATTRIBUTION = 24 * HOUR
AS_OF = 10 * DAY_MICROS
START = datetime(2026, 3, 1, tzinfo=timezone.utc)


class Clicks:
    """Rows over some days whose clicks come after an exponential delay, cut off by the attribution window.

    `labels` is what is known at `AS_OF`, `final` what will be.
    """

    def __init__(self, n, *, seed, rate=0.08, mean_hours=6.0, days=4.0, archived_with_click=0.3):
        random = np.random.default_rng(seed)
        self.times = np.sort(AS_OF - 1 - random.integers(0, int(days * DAY_MICROS), n))
        self.final = random.random(n) < rate
        delays = np.minimum(random.exponential(mean_hours * HOUR, n), ATTRIBUTION)
        self.delays = np.where(random.random(n) < archived_with_click, 0.0, delays)
        self.labels = self.final & (self.times + self.delays <= AS_OF)
        self.is_young = self.times >= AS_OF - ATTRIBUTION

    def table(self, mask):
        rows = np.flatnonzero(mask)
        return pa.table(
            {
                criteo.LABEL: pa.array(self.labels[rows].astype(np.int32)),
                criteo.REQUEST_ID: pa.array([f"request {row // 10}" for row in rows]),
                criteo.ROW: pa.array((rows % 10).astype(np.int32)),
                criteo.EVENT_TIME: pa.array(self.times[rows]).cast(pa.timestamp("us", tz="UTC")),
            }
        )

    def young_rows(self):
        """The thinning, after the mature rows; their late clicks are told of as `LateClicks` does."""
        delays = LateClickDelays(known_by=AS_OF)
        late = self.labels & (self.delays > 0)
        delays.saw(self.times[late], (self.times + self.delays)[late])
        young_rows = ImmatureRows(AS_OF - ATTRIBUTION, delays)
        young_rows.count(self.table(~self.is_young))
        return young_rows


def log_odds(clicks, others):
    return math.log(clicks / others)


def error(clicks, others, mature_clicks):
    """Four standard errors of log odds that are counted, with p and F estimated from mature clicks (each 1/n)."""
    return 4 * math.sqrt(1 / clicks + 1 / others + 2 / mature_clicks)


@pytest.mark.parametrize("seed", range(2))
def test_the_odds_of_kept_young_rows_are_those_of_final_labels_at_every_age(seed):
    world = Clicks(200_000, seed=seed)
    kept = world.young_rows().thinned(world.table(world.is_young))
    labels, ages = kept[criteo.LABEL].to_numpy(), AS_OF - kept[criteo.EVENT_TIME].cast(pa.int64()).to_numpy()
    mature_clicks = int(world.labels[~world.is_young].sum())
    for low, high in ((0, 24), (0, 2), (2, 6), (6, 12), (12, 24)):
        of_age = (ages >= low * HOUR) & (ages < high * HOUR)
        clicks, others = int(labels[of_age].sum()), int((labels[of_age] == 0).sum())
        bound = error(clicks, others, mature_clicks)
        assert log_odds(clicks, others) == pytest.approx(log_odds(0.08, 0.92), abs=bound)
    untreated = world.labels[world.is_young]
    biased = log_odds(untreated.sum(), (~untreated).sum())
    assert biased < log_odds(0.08, 0.92) - error(untreated.sum(), (~untreated).sum(), mature_clicks)


@pytest.mark.parametrize(
    ("clicks", "said"),
    [
        ({"archived_with_click": 1.0}, "0 of them reported after their rows"),
        ({"rate": 0.0004}, "expected at least 100"),
    ],
    ids=["no click is told of later", "too few clicks"],
)
def test_without_evidence_of_delays_nothing_is_thinned(clicks, said):
    world = Clicks(20_000, seed=1, **clicks)
    with pytest.raises(ContractError, match=said):
        world.young_rows().thinned(world.table(world.is_young))


@pytest.mark.parametrize(
    "settings", [{"attribution_hours": -1.0}, {"attribution_hours": math.nan}, {"immature_rows": "drop"}]
)
def test_what_is_no_policy_is_refused(settings):
    with pytest.raises(ContractError, match="attribution_hours is|immature_rows is 'drop'"):
        Maturity(**settings)


NUM_ROWS = 12_000
CLICK_RATE = 0.25


@pytest.fixture
def lake(tmp_path, raw_table, write_lake):
    """Four days of rows archived at once, whose clicks follow by hours in outcome files; and their final labels."""
    table = raw_table(NUM_ROWS, start=START.timestamp(), seconds=4 * 86_400)
    random = np.random.default_rng(5)
    final = random.random(NUM_ROWS) < CLICK_RATE
    hours = np.minimum(random.exponential(5.0, NUM_ROWS), 24.0)
    at = table.column_names.index(criteo.LABEL)
    folder = write_lake(tmp_path / "lake", table.set_column(at, criteo.LABEL, pa.array(np.zeros(NUM_ROWS, np.int32))))
    times = table[criteo.EVENT_TIME].to_pylist()
    by_day: dict[str, list[dict]] = {}
    for row in np.flatnonzero(final):
        clicked = times[row] + timedelta(hours=float(hours[row]))
        by_day.setdefault(times[row].date().isoformat(), []).append(
            {"request_id": table["request_id"][row].as_py(), "row": table["row"][row].as_py(), "event": CLICK}
            | {"outcome_time": clicked, "stored_at": clicked, "window_seconds": 86_400.0}
        )
    for day, outcomes in by_day.items():
        partition = folder / criteo.OUTCOME_PARTITION.format(day=day)
        partition.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(outcomes, OUTCOMES), partition / "part-1.parquet")
    return folder, table


@pytest.fixture
def run_step(tmp_path):
    def run(source, *, end="2026-03-05T00:00:00Z", policy="weight", **settings):
        maturity = Maturity(attribution_hours=24, immature_rows=policy)
        window = TimeSpan(None, parse_time("end", end))
        folder = tmp_path / "work" / policy
        settings = ExtractionSettings(maturity=maturity, **settings)
        return extract(folder_lake(source), window, folder=folder, settings=settings)

    return run


def read(uri):
    return pa.concat_tables([pq.read_table(path, partitioning=None) for path in sorted(local_path(uri).iterdir())])


def test_a_lakes_young_rows_are_thinned_and_its_held_out_rows_are_mature_and_final(lake, run_step):
    source, table = lake
    dataset = run_step(source, holdout_fraction=0.2)
    train, holdout = read(dataset.train_uri), read(dataset.holdout_uri)
    maturity = np.datetime64("2026-03-04T00:00:00", "us")
    times, held_out = (t[criteo.EVENT_TIME].to_numpy().astype("M8[us]") for t in (train, holdout))
    assert (np.diff(times.astype(np.int64)) >= 0).all()
    assert held_out.max() < maturity
    assert len(held_out) == round(0.2 * NUM_ROWS * 3 / 4)
    young = times >= maturity
    assert dataset.num_immature == young.sum()
    assert 0 < young.sum() < NUM_ROWS / 4
    labels = train[criteo.LABEL].to_numpy()
    mature_clicks = int(labels[~young].sum() + holdout[criteo.LABEL].to_numpy().sum())
    clicks, others = int(labels[young].sum()), int((labels[young] == 0).sum())
    bound = error(clicks, others, mature_clicks)
    assert log_odds(clicks, others) == pytest.approx(log_odds(CLICK_RATE, 1 - CLICK_RATE), abs=bound)
    # The rows before them are all there, once, and only clicks that were known by the window's end are.
    assert (times < held_out.min()).sum() + len(held_out) == NUM_ROWS * 3 / 4
    assert dataset.last_event_time == table[criteo.EVENT_TIME][-1].as_py().isoformat()
    assert dataset.attribution_seconds == 86_400


def test_a_try_that_is_repeated_keeps_the_same_young_rows_also_when_more_is_known_by_then(lake, run_step, write_lake):
    source, table = lake
    first = run_step(source, policy="weight")
    later = table.set_column(
        table.column_names.index(criteo.EVENT_TIME),
        criteo.EVENT_TIME,
        pa.array([time + timedelta(days=10) for time in table[criteo.EVENT_TIME].to_pylist()]).cast(
            table.schema.field(criteo.EVENT_TIME).type
        ),
    )
    write_lake(source, later)
    assert run_step(source, policy="weight").digest == first.digest


def test_kept_young_rows_are_all_learnt_and_none_held_out(lake, run_step):
    source, _ = lake
    dataset = run_step(source, policy="keep")
    assert dataset.num_train_rows + dataset.num_holdout_rows == NUM_ROWS
    assert dataset.num_immature == NUM_ROWS / 4
    assert read(dataset.holdout_uri)[criteo.EVENT_TIME].to_pylist()[-1] < datetime(2026, 3, 4, tzinfo=timezone.utc)


def test_a_window_of_young_rows_only_cannot_be_judged(lake, run_step):
    source, _ = lake
    with pytest.raises(ContractError, match="no rows that are mature, and 3000 younger ones"):
        run_step(source, policy="keep", end="2026-03-02T00:00:00Z")

"""Tests of drift detection: planted shifts are found, and stationary data raises no alarm."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from evergreen.config.features import MAX_CATEGORY, MISSING_CATEGORY
from evergreen.config.monitor import DriftSettings
from evergreen.contracts import criteo
from evergreen.contracts.records import Predictions
from monitoring.drift.comparison import compare
from monitoring.drift.sketch import Layout, Sketch
from monitoring.drift.watch import DriftWatch

from .conftest import reference_of, requests_of

SETTINGS = DriftSettings(drift_bucket_seconds=100.0, drift_min_rows=1000)
ANY_SIZE = dict.fromkeys(
    (
        "categorical_drift",
        "categorical_drift_relative",
        "numeric_drift",
        "missing_drift",
        "outlier_drift",
    ),
    0.0,
)


def watching(reference, requests=(), *, settings=SETTINGS, state=None):
    """Return a watch that restores `state` and observes `requests`."""
    watch = DriftWatch(lambda version: reference, settings)
    if state is not None:
        watch.restore(state)
    for request in requests:
        watch.observe(Predictions.of([request]))
    return watch


def report_on(reference, rows, *, settings=SETTINGS, **requests):
    (report,) = watching(reference, requests_of(rows, **requests), settings=settings).close(1100.0)
    return report


def column(report, name):
    (found,) = [each for each in report.columns if each.feature == name]
    return found


def names(columns):
    return {each.feature for each in columns}


@pytest.fixture
def rows(simulator):
    """A bucket of rows that are drawn from the distribution of the reference."""
    drawn = simulator.draw(8000, np.random.default_rng(21))
    return replace_arrays(drawn)


def replace_arrays(drawn, **arrays):
    return drawn._replace(
        **{"dense": drawn.dense.copy(), "categorical": drawn.categorical.copy(), **arrays}
    )


def test_unchanged_simulator_has_no_drift_and_every_column_is_evaluated(reference, rows):
    report = report_on(reference, rows)
    assert (report.drifted, report.outlying) == ((), ())
    assert [each.feature for each in report.columns] == [*criteo.FEATURES, "score"]
    assert all(each.effect is not None and each.p_value is not None for each in report.columns)
    assert (report.rows, report.requests, report.bucket_start, report.bucket_end) == (
        8000,
        160,
        1000.0,
        1100.0,
    )
    assert "no drift" in report.text()


def test_category_whose_share_doubles_is_found(reference, rows):
    index = criteo.CATEGORICAL.index("C14")
    values = rows.categorical[:, index]
    ranked = reference.profile.columns["C14"].values
    value = int(ranked[2])
    now = int((values == value).sum())
    others = np.flatnonzero((values != value) & (values != MISSING_CATEGORY))
    values[np.random.default_rng(0).choice(others, now, replace=False)] = value
    report = report_on(reference, rows)
    assert names(report.drifted) == {"C14"}
    before = reference.profile.columns["C14"]
    moved = column(report, "C14").moved_value
    assert moved.share_before == before.counts[2] / before.present
    assert moved.share_now == 2 * now / (values != MISSING_CATEGORY).sum()
    assert moved.value is None, (
        "the report must contain no category, because categories may identify users"
    )
    assert column(report, "C14").effect == pytest.approx(moved.share_now - moved.share_before)


def test_ten_points_more_missing_values_are_found_in_both_column_kinds(reference, rows):
    lost = np.random.default_rng(1).random(len(rows.label)) < 0.1
    rows.dense[lost, criteo.DENSE.index("I2")] = np.nan
    rows.categorical[lost, criteo.CATEGORICAL.index("C5")] = MISSING_CATEGORY
    report = report_on(reference, rows)
    assert names(report.drifted) == {"I2", "C5"}
    assert column(report, "I2").missing_now == pytest.approx(0.1, abs=0.01)
    assert column(report, "I2").missing_before == 0.0


def test_change_of_unit_raises_outlier_alarm(reference, rows):
    rows.dense[:, criteo.DENSE.index("I5")] *= 1000
    report = report_on(reference, rows)
    assert names(report.outlying) == {"I5"}
    assert column(report, "I5").outliers_now > 0.4
    assert column(report, "I5").outliers_before < 0.003
    assert "outliers: I5" in report.text()


def test_outliers_are_removed_before_drift_is_evaluated(reference, rows):
    """One value in fifty becomes an outlier.

    Outliers raise a separate alarm, but do not count as drift of the other values.
    """
    rubbish = np.random.default_rng(4).random(len(rows.label)) < 0.02
    rows.dense[rubbish, criteo.DENSE.index("I2")] = 4e9
    report = report_on(reference, rows)
    assert names(report.outlying) == {"I2"}
    assert report.drifted == ()


@pytest.mark.parametrize(
    ("name", "share", "last"),
    [("C10", 0.06, 1), ("C14", 0.3, MAX_CATEGORY)],
    ids=["one", "a flood of rare ones"],
)
def test_new_categories_are_found_though_none_is_frequent(reference, rows, name, share, last):
    new = np.random.default_rng(5).random(len(rows.label)) < share
    drawn = (
        424_242_424 + np.random.default_rng(7).integers(0, last, int(new.sum()))
    ) % MAX_CATEGORY
    rows.categorical[new, criteo.CATEGORICAL.index(name)] = drawn
    assert names(report_on(reference, rows).drifted) == {name}


def test_other_scores_are_drift_of_score_alone(reference, rows):
    report = report_on(reference, rows, scores=np.clip(rows.probability * 1.3, 0, 1))
    assert names(report.drifted) == {"score"}
    assert report.evidence().drifted == ("score",)
    without = report_on(replace(reference, scores=None), rows)
    assert "score" not in names(without.columns)


def test_irrelevant_change_is_no_drift_however_many_rows_show_it(reference, rows):
    """With minimum effect sizes of 0, every difference is a change.

    With a minimum effect size of 1, the evaluator ignores every difference.
    """
    rows.dense[:, criteo.DENSE.index("I5")] *= 2
    assert names(report_on(reference, rows).drifted) == {"I5"}
    large = replace(SETTINGS, numeric_drift=1.0)
    assert report_on(reference, rows, settings=large).drifted == ()


def alike_in_requests(simulator, n, random, size=40):
    """Return rows. In every second column, the rows of a request have equal values.

    The features of the user agree in all rows of a ranked list.
    """
    drawn = replace_arrays(simulator.draw(n, random))
    users = simulator.draw(n // size, random)
    of_row = np.repeat(np.arange(n // size), size)
    drawn.dense[:, 1::2] = users.dense[of_row, 1::2]
    drawn.categorical[:, 1::2] = users.categorical[of_row, 1::2]
    return drawn


@pytest.mark.parametrize("pairs", [50, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("alike", [False, True])
def test_stationary_buckets_raise_alarms_at_most_at_stated_rate(simulator, alike, pairs):
    """The test draws pairs of a reference and a bucket with fixed seeds.

    The minimum effect sizes are 0, so any change is drift.
    """
    settings = DriftSettings(false_discovery_rate=0.02, **ANY_SIZE)
    alarms = 0
    for seed in range(pairs // 5):
        random = np.random.default_rng([31, seed])
        draw = alike_in_requests if alike else type(simulator).draw
        layout = Layout(reference_of(draw(simulator, 16_000, random), size=40))
        for _ in range(5):
            sketch = Sketch(layout)
            for request in requests_of(draw(simulator, 4000, random), size=40):
                sketch.add(Predictions.of([request]))
            alarms += any(each.drifted or each.outlying for each in compare(sketch, settings))
    # If the alarm rate is 0.02, the probability of exceeding this limit is one in a thousand.
    assert alarms <= stats.binom.isf(0.001, pairs, 0.02)
    print(
        f"{alarms} alarms in {pairs} stationary buckets, rows of a request "
        f"{'alike' if alike else 'independent'}"
    )


def test_rows_alike_within_requests_would_be_alarms_without_design_effect(reference, simulator):
    rows = alike_in_requests(simulator, 8000, np.random.default_rng(8))
    assert report_on(reference, rows, size=40).drifted == (), (
        "independent training rows must not cause an alarm"
    )
    alike = reference_of(alike_in_requests(simulator, 40_000, np.random.default_rng(7)), size=40)
    report = report_on(alike, rows, size=40)
    assert report.drifted == ()
    assert column(report, "C2").design_effect == pytest.approx(40, rel=0.01)
    assert column(report, "C1").design_effect < 2
    assert len(report_on(reference, rows, size=1).drifted) > 5


def test_same_records_in_any_order_give_same_report(reference, simulator):
    random = np.random.default_rng(9)
    requests = []
    for part in range(4):
        drawn = simulator.draw(3000, random)
        requests += requests_of(
            drawn, size=23, time=1000.0 + 60 * part, version=1 + part % 2, prefix=f"p{part}-"
        )

    def reports(order, restart_at, at_once=1):
        watch, made = watching(reference), []
        for number in range(0, len(order), at_once):
            if number in restart_at:
                watch = watching(reference, state=json.loads(json.dumps(watch.state_dict())))
            watch.observe(Predictions.of([requests[i] for i in order[number : number + at_once]]))
        for up_to in (1050.0, 1100.0, 1200.0, 1500.0):
            made += watch.close(up_to)
        return made

    expected = reports(range(len(requests)), ())
    assert [(report.bucket_end, report.version, report.rows) for report in expected] == [
        (1100.0, 1, 3000),
        (1100.0, 2, 3000),
        (1200.0, 1, 3000),
        (1200.0, 2, 3000),
    ]
    for at_once in (1, 50):
        assert reports(random.permutation(len(requests)), (100, 300), at_once) == expected


def test_too_small_bucket_is_merged_with_next_of_its_version(reference, simulator):
    random = np.random.default_rng(10)
    watch = watching(reference, requests_of(simulator.draw(600, random), time=1050.0))
    assert watch.close(1100.0) == []
    watch = watching(
        reference, requests_of(simulator.draw(700, random), time=1350.0), state=watch.state_dict()
    )
    (report,) = watch.close(1400.0)
    assert (report.bucket_start, report.bucket_end, report.rows) == (1000.0, 1400.0, 1300)
    assert watch.close(1400.0) == []


def test_record_of_closed_bucket_is_skipped_and_counted(reference, rows):
    *requests, last = requests_of(rows)
    watch = watching(reference, requests)
    (report,) = watch.close(1100.0)
    watch.observe(Predictions.of([last]))
    assert watch.close(2000.0) == []
    assert (report.rows, dict(watch.passed_over)) == (7950, {"late": 50})
    watch.close(100_000.0)  # the clock is wrong for one call
    watch.close(2000.0)
    watch.observe(Predictions.of([replace(each, time=2050.0) for each in requests]))
    assert [each.rows for each in watch.close(2100.0)] == [7950]


def test_versions_without_statistics_are_counted_and_requested_again(reference, rows):
    requested = []

    def reference_of_version(version):
        requested.append(version)
        return reference if len(requested) > 1 else None

    watch = DriftWatch(reference_of_version, SETTINGS)
    for time in (1050.0, 1150.0):
        for request in requests_of(rows, time=time, version=7):
            watch.observe(Predictions.of([request]))
    (report,) = watch.close(1200.0)
    assert (report.bucket_end, report.version, requested) == (1200.0, 7, [7, 7])
    assert dict(watch.passed_over) == {"no_reference": 8000}


def test_memory_is_bounded_for_any_times_and_versions(reference, rows):
    watch = watching(reference)
    (request, *_) = requests_of(rows)
    for number in range(200):
        watch.observe(
            Predictions.of([replace(request, time=1000.0 + 100 * number, model_version=number % 7)])
        )
    assert len(watch.state_dict()["open"]) == 32
    assert dict(watch.passed_over) == {}
    for version in range(50):
        watch.observe(Predictions.of([replace(request, time=950.0, model_version=version)]))
    assert len(watch.state_dict()["open"]) <= 32
    assert dict(watch.passed_over) == {"too_many_versions": 50 * 18}


def test_fast_clocks_do_not_displace_present_requests(reference, rows):
    first, *requests = requests_of(rows)
    ahead = [replace(first, time=1000.0 + 100 * number) for number in range(1, 60)]
    (report,) = watching(reference, [*ahead, *requests]).close(1100.0)
    assert report.rows == 7950


def test_record_is_in_bucket_of_its_time_rounded_to_microseconds(reference, rows):
    """The monitor rounds times to microseconds, as the archive does.

    A backtest reads the archive, and must assign each row to the same bucket as the monitor.
    """
    watch = watching(reference, requests_of(rows, time=1100.0 - 1e-7))
    assert watch.close(1100.0) == []
    (report,) = watch.close(1200.0)
    assert report.bucket_start == 1100.0


def test_restart_with_other_statistics_of_version_forgets_its_bucket(reference, simulator, rows):
    other = reference_of(simulator.draw(3000, np.random.default_rng(12)))
    after = watching(other, state=watching(reference, requests_of(rows)).state_dict())
    assert after.close(1100.0) == []
    assert dict(after.passed_over) == {"no_reference": 8000}


def test_columns_without_values_have_no_distance(reference, rows):
    rows.dense[:, 0] = np.nan
    rows.categorical[:, 0] = MISSING_CATEGORY
    report = report_on(reference, rows)
    for name in ("I1", "C1"):
        assert column(report, name).effect is None
        assert column(report, name).missing_now == 1.0
        assert column(report, name).drifted
    assert "I1" not in report.evidence().distances

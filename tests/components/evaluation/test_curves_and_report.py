"""Tests of curves (compared with scikit-learn), of slices (with a filter), and of the report."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from components.evaluation.__main__ import main
from components.evaluation.gate import MAX_SHOWN, measure_slices, slice_masks
from components.evaluation.report import calibration_bins, roc_curve
from components.evaluation.scoring import NEW_ITEM, UNKNOWN_ITEM, ScoredHoldout
from evergreen.config.data import ColumnNames
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.category_texts import ShownValues
from evergreen.contracts.manifests import AucLead, Verdict
from evergreen.registry.model_cards import card_path
from evergreen.runtime.exit_codes import ExitCode
from evergreen.statistics.metrics import auc_difference, auc_estimate, user_quality
from evergreen.storage.uris import local_path
from testing.recommenders import SHOP
from tests.support.html_pages import assert_needs_nothing

FEATURES = SHOP.features


def sample(n=2000, *, levels=None, seed=0):
    random = np.random.default_rng(seed)
    labels = (random.random(n) < 0.2).astype(np.int8)
    scores = 1 / (1 + np.exp(1.5 - labels - random.normal(size=n)))
    return labels, (np.round(scores * levels) / levels if levels else scores).astype(np.float32)


@pytest.mark.parametrize("levels", [None, 50, 1], ids=["distinct", "ties", "two values"])
def test_every_roc_point_is_one_of_scikit_learns(levels):
    labels, scores = sample(levels=levels)
    exact = np.stack(sklearn_metrics.roc_curve(labels, scores, drop_intermediate=False), axis=1)
    exact[0, 2] = 1.0
    points = np.array(roc_curve(labels, scores))
    assert len(points) <= 201
    assert np.isfinite(points).all()
    distance = np.abs(points[:, None, :] - exact[None, :, :]).max(axis=2).min(axis=1)
    assert distance.max() < 1e-7
    np.testing.assert_array_equal(points[[0, -1], :2], [[0, 0], [1, 1]])
    assert (np.diff(points[:, :2], axis=0) >= 0).all()
    area = np.trapezoid(points[:, 1], points[:, 0])
    assert area == pytest.approx(sklearn_metrics.roc_auc_score(labels, scores), abs=0.002)


def test_there_is_no_roc_curve_of_one_class():
    assert roc_curve(np.zeros(5, np.int8), np.linspace(0, 1, 5, dtype=np.float32)) == []
    assert roc_curve(np.zeros(0, np.int8), np.zeros(0, np.float32)) == []


def test_calibration_bins_hold_all_rows_in_order_of_their_scores():
    labels, scores = sample(2003)
    bins = calibration_bins(labels, scores)
    assert sum(b.num_rows for b in bins) == 2003
    assert sum(b.num_rows * b.click_rate for b in bins) == pytest.approx(labels.sum())
    assert sum(b.num_rows * b.mean_score for b in bins) == pytest.approx(
        scores.sum(dtype=np.float64)
    )
    assert np.diff([b.mean_score for b in bins]).min() > 0
    assert len(calibration_bins(labels[:3], scores[:3])) == 3
    assert calibration_bins(labels[:0], scores[:0]) == []


def scored(n=3000, *, seconds=7200.0, champion=True, seed=0):
    random = np.random.default_rng(seed)
    labels, candidate = sample(n, seed=seed)
    return ScoredHoldout(
        labels=labels,
        event_seconds=1_760_000_400.0 + np.arange(n) * (seconds / n),
        requests=np.arange(n) // 5,
        users=None,
        positions=(np.arange(n) % 5).astype(np.int32),
        candidate=candidate,
        champion=random.random(n).astype(np.float32) if champion else None,
        has_new_category=random.random(n) < 0.1,
        has_unknown_category=random.random(n) < 0.2,
        item_newness=None,
        categories=random.choice(
            [MISSING_CATEGORY, 5, 0xFFFFFFFF, 7, 8, 9, 10],
            (n, len(FEATURES.position_names)),
            p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.06, 0.04],
        ),
        columns=FEATURES.position_features,
    )


def test_slices_are_measured_on_their_own_rows():
    rows = scored()
    slices = slice_masks(rows, is_first_run=False, shown=ShownValues())
    users = rows.categories[:, 2]
    expected = {
        "all rows": np.ones(3000, bool),
        "position: 3": np.arange(3000) % 5 == 3,
        "user: missing": users == -1,
        "user: 4294967295": users == 0xFFFFFFFF,
        "user: other 2 values": np.isin(users, [9, 10]),
        "categories: one or more got an id in this run": rows.has_new_category,
        "categories: one or more have no id of their own": rows.has_unknown_category,
        "categories: all known before": ~(rows.has_new_category | rows.has_unknown_category),
    }
    measured = {
        part.name: part for part in measure_slices(rows, slices, dict.fromkeys(expected, 0.5))
    }
    for name, kept in expected.items():
        np.testing.assert_array_equal(slices[name], kept)
        part, groups, labels = measured[name], rows.groups[kept], rows.labels[kept]
        assert (part.num_rows, part.p_value) == (kept.sum(), 0.5)
        by_both = rows.candidate[kept], rows.champion[kept]
        for quality, scores in zip((part.candidate, part.champion), by_both):
            assert quality.auc == pytest.approx(sklearn_metrics.roc_auc_score(labels, scores))
            estimate = auc_estimate(labels, scores, groups=groups)
            assert (quality.auc_low, quality.auc_high) == (
                (estimate.low, estimate.high) if estimate else (None, None)
            )
        lead = auc_difference(labels, *by_both, groups=groups)
        numbers = {name: getattr(lead, name, None) for name in ("auc", "low", "high", "p_value")}
        assert part.difference == AucLead(**numbers)
        now, before = (
            sklearn_metrics.log_loss(labels, scores.astype(np.float64)) for scores in by_both
        )
        assert part.log_loss_change == pytest.approx(now / before - 1)
    for column in ("hour", "user"):
        assert (
            sum(kept.sum() for name, kept in slices.items() if name.startswith(f"{column}: "))
            == 3000
        )


def test_new_and_unknown_items_are_slices_where_recommender_names_item():
    made = scored(6)
    made = replace(
        made, item_newness=np.array([0, NEW_ITEM, UNKNOWN_ITEM, 0, NEW_ITEM, 0], np.int8)
    )
    names = ("item: got its id in this run", "item: has no id of its own")
    later, first = (
        slice_masks(made, is_first_run=is_first, shown=ShownValues()) for is_first in (False, True)
    )
    assert [np.flatnonzero(later[name]).tolist() for name in names] == [[1, 4], [2]]
    assert names[0] not in first, "the first run has no earlier items to compare with"
    assert not set(names) & set(slice_masks(scored(6), is_first_run=False, shown=ShownValues()))


def test_row_belongs_to_slice_of_each_list_element_and_counts_once_in_it():
    rows = [
        [5, 5, 5],
        [5, 6],
        [],
        [6, 5],
        [7, 10],
        [8, 9],
        [9, 10, 9],
        [],
        [8, 7],
        [6],
        [11, 5],
        [11, 11, 11],
    ]
    made = scored(len(rows))
    places = np.array([row + [MISSING_CATEGORY] * (3 - len(row)) for row in rows])
    made = replace(
        made,
        categories=np.c_[made.categories[:, :1], places],
        columns=("item", "tags", "tags", "tags"),
    )
    slices = slice_masks(made, is_first_run=True, shown=ShownValues(texts={"tags": {5: "jazz"}}))
    found = {name: kept.tolist() for name, kept in slices.items() if name.startswith("tags: ")}
    names = {"tags: 'jazz'": 5, "tags: 6": 6, "tags: 7": 7, "tags: 8": 8}
    assert found == {
        **{name: [element in row for row in rows] for name, element in names.items()},
        "tags: missing": [not row for row in rows],
        "tags: other 3 values": [not {9, 10, 11}.isdisjoint(row) for row in rows],
    }


def test_columns_of_users_are_not_cut_by_value():
    every, shown = (
        slice_masks(scored(), is_first_run=True, shown=ShownValues(hidden=h))
        for h in ((), ("item", "shop"))
    )
    assert {name.partition(": ")[0] for name in set(every) - set(shown)} == {"item", "shop"}
    assert {name.partition(": ")[0] for name in shown} >= {"user", "seen"}


def test_people_see_slices_that_speak_most_against_candidate_first():
    rows = scored(seconds=86_400.0)
    slices = slice_masks(rows, is_first_run=False, shown=ShownValues())
    shown = measure_slices(rows, slices, {"user: missing": 0.3, "hour: 09": 0.01})
    assert [part.name for part in shown[:2]] == ["hour: 09", "user: missing"]
    assert len(shown) == MAX_SHOWN < len(slices)


def test_hours_are_those_of_day_and_column_of_one_value_is_not_cut():
    rows = scored(seconds=3 * 86_400)
    rows.categories[:, 0] = 7
    names = slice_masks(rows, is_first_run=False, shown=ShownValues())
    assert [name for name in names if name.startswith("hour")] == [
        f"hour: {hour:02}" for hour in range(24)
    ]
    assert not [name for name in names if name.startswith("item: ")]


def test_first_round_has_no_slice_of_new_categories():
    names = slice_masks(scored(), is_first_run=True, shown=ShownValues())
    words = slice_masks(
        scored(), is_first_run=True, shown=ShownValues(texts={"item": {5: "missing"}})
    )
    assert {"item: 'missing'", "item: missing"} <= set(words)
    np.testing.assert_array_equal(words["item: 'missing'"], names["item: 5"])
    assert [name.partition(": ")[2] for name in names if name.startswith("categories")] == [
        "one or more have no id of their own",
        "all known",
    ]


def test_slice_without_clicks_has_no_number():
    rows = scored(40)
    rows.labels[:] = 0
    for part in measure_slices(
        rows, slice_masks(rows, is_first_run=False, shown=ShownValues()), {}
    ):
        assert (
            part.candidate.auc,
            part.champion.auc,
            part.difference.auc,
            part.candidate.calibration,
        ) == (None,) * 4


def test_quality_within_users_is_told_where_recommender_names_them(make_round):
    made = make_round(1000)
    made.release_champion(made.planted)
    named = replace(SHOP, data=ColumnNames(user="user"))
    flags, users = made.flags(), made.categorical[:, 2]

    def values_shown():
        text = made.path("report.html").read_text() + card_path(made.store, "candidate").read_text()
        return [user for user in np.unique(users[users != MISSING_CATEGORY]) if str(user) in text]

    assert main(flags) == ExitCode.DONE
    assert "GAUC" not in made.path("report.html").read_text()
    assert values_shown()
    made.change("raw", recommender=named)
    assert main(flags) == ExitCode.DONE
    verdict = Verdict.read(made.path("verdict"))
    assert not values_shown(), "the report shows values of a user column"
    known, scores = users != MISSING_CATEGORY, np.load(local_path(verdict.scores_uri))["candidate"]
    expected = user_quality(made.labels[known], scores[known], users=users[known])
    assert verdict.candidate.gauc == pytest.approx(expected.gauc)
    assert verdict.candidate.user_ndcg == pytest.approx(expected.ndcg)
    assert f"{expected.gauc:.4g}" in made.path("report.html").read_text()


def test_report_is_one_closed_page_that_fetches_nothing(make_round):
    made = make_round(1000, new_categories=[1] * 4)
    made.release_champion(made.planted, "<b>champion</b>")
    main(made.flags())
    page = made.path("report.html").read_text()
    assert_needs_nothing(page)
    assert "<b>champion</b>" not in page
    (kept,) = made.store.glob("runs/*/evaluation_report.html")
    assert kept.read_text() == page, "the registry's copy must survive an empty work folder"
    assert "&lt;b&gt;champion&lt;/b&gt;" in page
    for expected in ("The gate accepted it", "strongest evidence against", "<polyline"):
        assert expected in page

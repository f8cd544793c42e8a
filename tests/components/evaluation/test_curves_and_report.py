"""Curves against scikit-learn, slices against a filter written out, and a report that needs nothing but itself."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from components.contracts.criteo import MISSING_CATEGORY
from components.contracts.metrics import auc_difference, auc_estimate
from components.evaluation.__main__ import main
from components.evaluation.report import calibration_bins, roc_curve
from components.evaluation.scoring import ScoredHoldout
from components.evaluation.slices import measure_slices, slice_column
from tests.support.html_pages import assert_needs_nothing


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


def test_calibration_bins_hold_all_rows_in_the_order_of_their_scores():
    labels, scores = sample(2003)
    bins = calibration_bins(labels, scores)
    assert sum(b.num_rows for b in bins) == 2003
    assert sum(b.num_rows * b.click_rate for b in bins) == pytest.approx(labels.sum())
    assert sum(b.num_rows * b.mean_score for b in bins) == pytest.approx(scores.sum(dtype=np.float64))
    assert np.diff([b.mean_score for b in bins]).min() > 0
    assert len(calibration_bins(labels[:3], scores[:3])) == 3
    assert calibration_bins(labels[:0], scores[:0]) == []


def scored(n=3000, *, seconds=7200.0, champion=True, seed=0):
    random = np.random.default_rng(seed)
    labels, candidate = sample(n, seed=seed)
    return ScoredHoldout(
        labels=labels,
        event_seconds=1_760_000_400.0 + np.arange(n) * (seconds / n),
        groups=np.arange(n) // 5,
        candidate=candidate,
        champion=random.random(n).astype(np.float32) if champion else None,
        has_new_category=random.random(n) < 0.1,
        has_unknown_category=random.random(n) < 0.2,
        categories=random.choice(
            [MISSING_CATEGORY, 5, 0xFFFFFFFF, 7, 8, 9, 10], n, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.06, 0.04]
        ),
    )


def test_slices_are_measured_on_their_own_rows():
    rows = scored()
    slices = {(s.group, s.name): s for s in measure_slices(rows, column=8, is_first_round=False)}
    expected = {
        ("C9", "missing"): rows.categories == -1,
        ("C9", "ffffffff"): rows.categories == 0xFFFFFFFF,
        ("C9", "other 2 values"): np.isin(rows.categories, [9, 10]),
        ("categories", "one or more got an id in this round"): rows.has_new_category,
        ("categories", "one or more have no id of their own"): rows.has_unknown_category,
        ("categories", "all known before"): ~(rows.has_new_category | rows.has_unknown_category),
    }
    for key, kept in expected.items():
        part, groups = slices[key], rows.groups[kept]
        assert part.num_rows == kept.sum()
        assert part.candidate == auc_estimate(rows.labels[kept], rows.candidate[kept], groups=groups)
        by_both = rows.candidate[kept], rows.champion[kept]
        assert part.difference == auc_difference(rows.labels[kept], *by_both, groups=groups)
    for group in ("hour", "C9"):
        assert sum(s.num_rows for (g, _), s in slices.items() if g == group) == len(rows.labels)


def test_short_windows_are_cut_by_hour_and_long_ones_by_the_newest_days():
    def names(seconds):
        slices = measure_slices(scored(seconds=seconds), column=0, is_first_round=False)
        return [s.name for s in slices if s.group in ("day", "hour")]

    assert names(7200) == ["2025-10-09 09:00", "2025-10-09 10:00"]
    assert names(3 * 86_400)[:2] == ["2025-10-09", "2025-10-10"]
    assert len(names(100 * 86_400)) == 24


def test_first_round_has_no_slice_of_new_categories():
    slices = measure_slices(scored(), column=0, is_first_round=True)
    assert [s.name for s in slices if s.group == "categories"] == ["one or more have no id of their own", "all known"]


def test_slice_without_two_clicks_has_no_number():
    rows = scored(40)
    rows.labels[:] = 0
    for part in measure_slices(rows, column=0, is_first_round=False):
        assert (part.candidate, part.champion, part.difference, part.calibration) == (None, None, None, None)


@pytest.mark.parametrize(("sizes", "column"), [([9, 5, 7], 1), ([4, 9, 6], 2), ([3, 3, 3], 0), ([5, 5, 4], 0)], ids=str)
def test_slices_are_cut_by_the_smallest_column_that_has_two_categories(sizes, column):
    assert slice_column(sizes) == column


def test_no_slices_are_cut_by_a_column_whose_categories_have_left(make_round):
    made = make_round(600)
    sizes = made.workflow.slot_sizes
    column = slice_column(sizes)
    left = [size - 3 if i == column else 0 for i, size in enumerate(sizes)]
    made.change("training_set", tombstones=left)
    assert main(made.flags()) in (0, 1)
    page = made.path("report.html").read_text()
    (kept,) = made.store.glob("runs/*/evaluation_report.html")
    assert kept.read_text() == page, "the work folder may be emptied"
    other = slice_column([size if i != column else 3 for i, size in enumerate(sizes)])
    assert f"C{other + 1}: " in page
    assert f"C{column + 1}: " not in page


def test_report_is_one_closed_page_that_fetches_nothing(make_round):
    made = make_round(1000, new_categories=[1] * 26)
    made.release_champion(made.planted, "<b>champion</b>")
    main(made.flags())
    page = made.path("report.html").read_text()
    assert_needs_nothing(page)
    assert "<b>champion</b>" not in page
    assert "&lt;b&gt;champion&lt;/b&gt;" in page
    for expected in ("Model gate: accepted", "got an id in this round", "<polyline", "hour: "):
        assert expected in page

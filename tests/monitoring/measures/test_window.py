"""Windows and KPIs against scikit-learn on the tail of the stream."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from monitoring.measures.kpis import measure
from monitoring.measures.window import MAX_VERSIONS, VersionWindows


@pytest.mark.parametrize("batch_rows", [1, 7, 64, 150])
def test_auc_equals_scikit_learn_on_the_tail_after_every_update(batch_rows):
    random = np.random.default_rng(batch_rows)
    windows, labels, scores = VersionWindows(100), [], []
    for step in range(40):
        new_labels = (random.random(batch_rows) < 0.3).astype(np.uint8)
        new_scores = np.round(random.random(batch_rows), 2).astype(np.float32)  # many ties
        labels += new_labels.tolist()
        scores += new_scores.tolist()
        windows.update(1, new_labels, new_scores, predicted_at=float(step))
        kpis = measure(1, windows[1].labels, windows[1].scores)
        tail_labels, tail_scores = labels[-100:], scores[-100:]
        assert (kpis.rows, kpis.clicks) == (len(tail_labels), sum(tail_labels))
        if 0 < sum(tail_labels) < len(tail_labels):
            assert kpis.auc == pytest.approx(roc_auc_score(tail_labels, tail_scores), abs=1e-12)
            clipped = np.clip(np.float64(tail_scores), 1e-7, 1 - 1e-7)
            assert kpis.log_loss == pytest.approx(log_loss(tail_labels, clipped), abs=1e-9)
        else:
            assert kpis.auc is None


@pytest.mark.parametrize("label", [0, 1])
def test_a_one_class_window_has_no_auc(label):
    kpis = measure(3, np.full(50, label, np.uint8), np.linspace(0, 1, 50, dtype=np.float32))
    assert kpis.auc is kpis.auc_low is kpis.auc_high is None
    assert kpis.ctr == label


def test_an_empty_window_has_no_number():
    kpis = measure(1, np.zeros(0, np.uint8), np.zeros(0, np.float32))
    assert (kpis.rows, kpis.auc, kpis.log_loss, kpis.calibration, kpis.ctr) == (0, None, None, None, None)


def test_serving_version_is_that_of_the_newest_prediction_even_after_a_rollback():
    windows, one = VersionWindows(10), (np.zeros(1, np.uint8), np.zeros(1, np.float32))
    windows.update(1, *one, predicted_at=1.0)
    windows.update(2, *one, predicted_at=3.0)
    windows.update(1, *one, predicted_at=2.0)  # matured late
    assert windows.serving_version == 2
    windows.note_prediction(1, 4.0)  # not matured yet
    assert windows.serving_version == 1


def test_versions_unseen_for_longest_are_forgotten():
    windows, one = VersionWindows(10), (np.zeros(1, np.uint8), np.zeros(1, np.float32))
    for version in range(MAX_VERSIONS + 2):
        windows.update(version, *one, predicted_at=float(version))
    assert windows.versions == tuple(range(2, MAX_VERSIONS + 2))

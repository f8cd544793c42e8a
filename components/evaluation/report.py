"""What people see of an evaluation: one HTML page, and what the Kubeflow UI draws itself.

The UI shows the page in a frame without network, and draws flat metrics and the ROC curve from JSON: only finite
numbers, since a NaN or infinity in KFP's metadata ends the run. What the numbers are is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.charts.line_chart import Line, line_chart
from components.charts.page import ABSENT, html_page, html_table, number, percent, probability
from components.contracts.manifests import AucLead, ModelQuality, ReorderingGain, Verdict
from components.contracts.metrics import AucDifference, AucEstimate, row_weighted
from components.evaluation.evaluate import Evaluation
from components.evaluation.gate import MIN_CLASS_REQUESTS
from components.evaluation.scoring import ScoredHoldout
from components.evaluation.settings import GateSettings
from components.evaluation.slices import SliceMetrics

_COLOURS = {"candidate": "var(--now)", "champion": "var(--mark)"}


def render_report(evaluation: Evaluation) -> str:
    """The page."""
    verdict = evaluation.verdict
    accepted = "accepted" if verdict.accepted else "refused"
    return html_page(
        f"Model gate: {accepted}",
        decision=verdict.decision,
        intro=f"<p>{escape(verdict.reason)}.</p>",
        sections={
            "All held-out rows": _quality_table(
                verdict, verdict.candidate, verdict.champion, difference=verdict.difference
            ),
            "Old rows": _old_rows(verdict),
            "Explored lists": _explored_lists(verdict.reordering_gain),
            "Calibration": _calibration(evaluation.scored),
            "Slices": "<p>Those that speak most against the candidate. p is the probability of such a loss of log loss "
            "where the slice loses no more than is allowed; the gate corrects it for the number of slices. Intervals "
            "are 95 %, one by one.</p>" + _slices_table(evaluation.slices),
            "How it was judged": _settings_table(evaluation.settings, verdict),
        },
    )


def metrics_document(verdict: Verdict) -> dict[str, float]:
    """Names and values of the metrics that exist, for KFP's metadata."""
    parts: dict[str, ModelQuality | AucLead | ReorderingGain | None] = {
        "": verdict.candidate,
        "champion_": verdict.champion,
        "difference_": verdict.difference,
        "reordering_": verdict.reordering_gain,
    }
    values: dict[str, float | None] = {
        "num_rows": verdict.num_rows,
        "num_clicks": verdict.num_clicks,
        "accepted": int(verdict.accepted),
    }
    if old := verdict.old_distribution:
        parts |= {"old_": old.candidate, "old_champion_": old.champion, "old_difference_": old.difference}
        values |= {"old_num_rows": old.num_rows, "old_num_clicks": old.num_clicks}
    for prefix, part in parts.items():
        values |= {f"{prefix}{name}": value for name, value in asdict(part).items()} if part else {}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def roc_document(scored: ScoredHoldout) -> dict[str, list[float]]:
    """The arguments of KFP's `log_roc_curve`; empty lists with one class only."""
    points = roc_curve(scored.labels, scored.candidate)
    return {
        "fpr": [point.false_positive_rate for point in points],
        "tpr": [point.true_positive_rate for point in points],
        "threshold": [point.threshold for point in points],
    }


# -- tables


def _auc(value: AucEstimate | None) -> str:
    return ABSENT if value is None else f"{value.auc:.4f} [{value.low:.4f}, {value.high:.4f}]"


def _difference(value: AucDifference | AucLead | None) -> str:
    if value is None or value.auc is None or value.low is None or value.high is None:
        return ABSENT
    text = f"{value.auc:+.4f} [{value.low:+.4f}, {value.high:+.4f}]"
    return f'<span class="worse">{text}</span>' if value.high < 0 else text


def _quality_table(
    verdict: Verdict, candidate: ModelQuality, champion: ModelQuality | None, *, difference: AucLead | None
) -> str:
    of_users = candidate.gauc is not None

    def row(name: str, quality: ModelQuality) -> list[str]:
        auc, low, high = (ABSENT if v is None else f"{v:.4f}" for v in (quality.auc, quality.auc_low, quality.auc_high))
        others = [quality.log_loss, quality.normalized_entropy, quality.calibration]
        others += [quality.gauc, quality.user_ndcg] if of_users else []
        return [escape(name), f"{auc} [{low}, {high}]", *map(number, others)]

    rows = [row(f"candidate {verdict.candidate_model_id}", candidate)]
    if champion is not None:
        rows.append(row(f"champion {verdict.champion_model_id}", champion))
    head = ["model", "AUC [95 %]", "log loss", "normalized entropy", "expected / observed clicks"]
    head += ["AUC within users (GAUC)", "NDCG within users"] if of_users else []
    table = html_table(head, rows, caption="both models on the same rows", numbers=range(1, len(head)))
    if difference is None:
        return f"{table}<p>There is no champion to compare with.</p>"
    p_value = probability(difference.p_value)
    text = f"AUC difference, candidate minus champion, paired: <b>{_difference(difference)}</b>, p = {escape(p_value)}."
    return f"{table}<p>{text}</p>"


def _old_rows(verdict: Verdict) -> str:
    old = verdict.old_distribution
    if old is None:
        return "<p>No rows older than the window were held out.</p>"
    return (
        f"<p>{old.num_rows} rows of days before the window, {old.num_clicks} clicks, drawn for this and never "
        "replayed. Both models may have learned them when they were new: this shows how well they are remembered. "
        "Where the world changed in between, a candidate that follows it is wrong about them and scores lower; that is "
        "a fault only where the old world may return.</p>"
        + _quality_table(verdict, old.candidate, old.champion, difference=old.difference)
    )


def _explored_lists(found: ReorderingGain | None) -> str:
    if found is None:
        return "<p>No held-out list was explored, so the logs do not tell what another order is worth.</p>"
    overlap = (
        f"{found.num_lists} held-out lists were explored. The candidate would order {percent(found.disputed_share)} of "
        f"the neighbours otherwise, and {found.num_swaps} swaps of such a pair were shown"
    )
    if found.gain is None or found.low is None or found.high is None:
        return f"<p>{overlap}: too few to tell what its order is worth.</p>"
    return (
        f"<p>{overlap}. Each such swap gains <b>{found.gain:+.4f} [{found.low:+.4f}, {found.high:+.4f}]</b> clicks on "
        "the two rows over the order that was served. The interval, 95 %, holds at every number of lists at once. The "
        "gate does not judge by it.</p>"
    )


def _slices_table(slices: Sequence[SliceMetrics]) -> str:
    head = ["slice", "rows", "click rate", "log loss", "p", "AUC [95 %]", "champion", "difference", "NE", "calibration"]
    rows = [
        [
            escape(part.name),
            str(part.num_rows),
            percent(part.click_rate),
            ABSENT if part.log_loss_change is None else f"{part.log_loss_change:+.1%}",
            escape(probability(part.p_value)),
            _auc(part.candidate),
            _auc(part.champion),
            _difference(part.difference),
            number(part.normalized_entropy),
            number(part.calibration),
        ]
        for part in slices
    ]
    return html_table(head, rows, caption="parts of the held-out rows", numbers=range(1, len(head)))


def _settings_table(settings: GateSettings, verdict: Verdict) -> str:
    rows = {
        "AUC needed at all": f"{settings.min_auc:g}",
        "AUC by which the candidate may trail the champion": f"{settings.max_auc_loss:g}",
        "part by which its log loss may exceed the champion's in a slice": f"{settings.max_slice_loss:g}",
        "factor by which expected clicks may be off": f"{settings.max_calibration_factor:g}",
        "requests with a click, and with a row without, needed for an interval": str(MIN_CLASS_REQUESTS),
        "held-out rows, clicks, each counted once": f"{verdict.num_rows}, {verdict.num_clicks}",
        "scores": escape(verdict.scores_uri),
    }
    return html_table(["setting", "value"], list(rows.items()), caption="the gate's settings and what they met")


# -- drawings


def _calibration(scored: ScoredHoldout) -> str:
    models = {"candidate": scored.candidate}
    if scored.champion is not None:
        models["champion"] = scored.champion
    lines = []
    for name, scores in models.items():
        bins = calibration_bins(scored.labels, scores, weights=scored.weights)
        x, y = [each.mean_score for each in bins], [each.click_rate for each in bins]
        lines.append(Line(label=name, color=_COLOURS[name], x=x, y=y))
    ends = [0.0, max((value for line in lines for value in line.x), default=0.0)]
    # The candidate last: it lies on top.
    lines = [Line(label="calibrated", color="#bbb", x=ends, y=ends), *reversed(lines)]
    drawn = line_chart(lines, y_label="click rate", x_unit="", from_zero=True)
    return (
        f"<figure>{drawn}<figcaption>click rate against mean score, ten equal shares of the rows</figcaption></figure>"
    )


# -- curves that people judge a classifier by


MAX_ROC_POINTS = 200


class RocPoint(NamedTuple):
    """Rates of the rows that score at or above `threshold`."""

    false_positive_rate: float
    true_positive_rate: float
    threshold: float


class CalibrationBin(NamedTuple):
    """One equal share of the rows, cut by score."""

    num_rows: int
    mean_score: float
    click_rate: float


def roc_curve(
    labels: NDArray[np.int8], scores: NDArray[np.float32], max_points: int = MAX_ROC_POINTS
) -> list[RocPoint]:
    """Points of the ROC curve from (0, 0) to (1, 1), evenly spread along it; empty unless both classes are present.

    Every point is one of the exact curve. The first has no row above its threshold; it is written as 1, being the
    largest probability, where others write infinity, which no metadata store takes.
    """
    num_clicks = int(np.count_nonzero(labels))
    num_others = len(labels) - num_clicks
    if not num_clicks or not num_others:
        return []
    order = np.argsort(-scores, kind="stable")
    descending = scores[order]
    last_of_tie = np.r_[np.flatnonzero(np.diff(descending)), len(descending) - 1]
    clicks = np.cumsum(labels[order], dtype=np.int64)[last_of_tie]
    true_rate = np.r_[0.0, clicks / num_clicks]
    false_rate = np.r_[0.0, (last_of_tie + 1 - clicks) / num_others]
    thresholds = np.r_[1.0, descending[last_of_tie].astype(np.float64)]
    along = true_rate + false_rate
    wanted = np.searchsorted(along, np.linspace(0.0, 2.0, max_points))
    kept = np.unique(np.r_[0, np.minimum(wanted, len(along) - 1), len(along) - 1])
    # searchsorted's first hit for 0 is the point (0, 0) itself, so no more than max_points + 1 are kept.
    return [RocPoint(*map(float, point)) for point in zip(false_rate[kept], true_rate[kept], thresholds[kept])]


def calibration_bins(
    labels: NDArray[np.int8],
    scores: NDArray[np.float32],
    num_bins: int = 10,
    *,
    weights: NDArray[np.float32] | None = None,
) -> list[CalibrationBin]:
    """Mean score against click rate in shares of equal size, lowest scores first; no more of them than rows.

    Both are weighted where rows have weights.
    """

    def mean(values: NDArray[Any], rows: NDArray[np.int64]) -> float:
        return float(row_weighted(values[rows].astype(np.float64), None if weights is None else weights[rows]).mean())

    order = np.argsort(scores, kind="stable")
    return [
        CalibrationBin(len(rows), mean(scores, rows), mean(labels, rows))
        for rows in np.array_split(order, num_bins)
        if len(rows) and (weights is None or weights[rows].any())
    ]

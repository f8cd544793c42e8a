"""What people see of an evaluation: one HTML page that needs no other file, and what the Kubeflow UI draws itself.

The UI shows the page in a frame without network, and logs flat metrics, ROC curve and confusion matrix from JSON: only
finite numbers, since a NaN or infinity in KFP's metadata ends the run. What the numbers are is decided elsewhere; on
the page, a number that does not exist is drawn as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from components.contracts.manifests import AucLead, ModelQuality, Verdict
from components.contracts.metrics import AucDifference, AucEstimate
from components.evaluation.curves import CalibrationBin, RocPoint, calibration_bins, confusion_matrix, roc_curve
from components.evaluation.evaluate import Evaluation
from components.evaluation.gate import GateSettings
from components.evaluation.scoring import ScoredHoldout
from components.evaluation.slices import SliceMetrics

ABSENT = "–"
_SIDE = 300
"""Side of a drawing, in pixels."""
_CANDIDATE_COLOUR, _CHAMPION_COLOUR = "#0b6bcb", "#c2410c"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2024; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
.verdict { padding: .75rem 1rem; border-left: .4rem solid; }
.pass { border-color: #18794e; background: #e9f9ee; } .fail { border-color: #cd2b31; background: #ffefef; }
.inconclusive { border-color: #ad5700; background: #fff8e6; }
.worse { color: #cd2b31; } .better { color: #18794e; }
figure { display: inline-block; margin: 0 2rem 1rem 0; } figcaption { font-size: 13px; color: #555; }
"""


def render_report(evaluation: Evaluation) -> str:
    """The page."""
    verdict, scored = evaluation.verdict, evaluation.scored
    curves = {"candidate": roc_curve(scored.labels, scored.candidate)}
    bins = {"candidate": calibration_bins(scored.labels, scored.candidate)}
    if scored.champion is not None:
        curves["champion"] = roc_curve(scored.labels, scored.champion)
        bins["champion"] = calibration_bins(scored.labels, scored.champion)
    accepted = "accepted" if verdict.accepted else "refused"
    parts = [
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Gate: {escape(verdict.decision)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Model gate: {escape(verdict.decision)}, {accepted}</h1>",
        f'<p class="verdict {escape(verdict.decision)}">{escape(verdict.reason)}.</p>',
        "<h2>On all held-out rows</h2>",
        _metrics_table(verdict, verdict.candidate, verdict.champion, verdict.difference),
        "<h2>On old rows</h2>",
        _old_rows(verdict),
        "<h2>Curves</h2>",
        _figure(_roc_drawing(curves), "ROC: share of clicks found against share of non-clicks shown"),
        _figure(_calibration_drawing(bins), "Calibration: click rate against mean score, ten equal shares of the rows"),
        f'<p><span style="color:{_CANDIDATE_COLOUR}">■</span> candidate '
        f'<span style="color:{_CHAMPION_COLOUR}">■</span> champion, if any</p>',
        "<h2>Slices</h2>",
        "<p>For people; the gate judges all rows together. Intervals are 95 %, one by one.</p>",
        _slices_table(evaluation.slices),
        "<h2>How it was judged</h2>",
        _settings_table(evaluation.settings, verdict),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def metrics_document(verdict: Verdict) -> dict[str, float]:
    """Names and values of the metrics that exist, for KFP's metadata."""
    parts: dict[str, ModelQuality | AucLead | None] = {
        "": verdict.candidate,
        "champion_": verdict.champion,
        "difference_": verdict.difference,
    }
    values: dict[str, float | None] = {
        "num_rows": verdict.num_rows,
        "num_clicks": verdict.num_clicks,
        "rows_needed": verdict.rows_needed,
        "accepted": int(verdict.accepted),
    }
    if old := verdict.old_distribution:
        parts |= {"old_": old.candidate, "old_champion_": old.champion, "old_difference_": old.difference}
        values |= {"old_num_rows": old.num_rows, "old_num_clicks": old.num_clicks}
    for prefix, part in parts.items():
        values |= {f"{prefix}{name}": value for name, value in asdict(part).items()} if part else {}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def roc_document(scored: ScoredHoldout) -> dict[str, Any]:
    """The arguments of KFP's `log_roc_curve` (empty lists with one class only) and `log_confusion_matrix` at 0.5."""
    points = roc_curve(scored.labels, scored.candidate)
    return {
        "roc": {
            "fpr": [point.false_positive_rate for point in points],
            "tpr": [point.true_positive_rate for point in points],
            "threshold": [point.threshold for point in points],
        },
        "confusion": {
            "categories": ["no click", "click"],
            "matrix": confusion_matrix(scored.labels, scored.candidate),
        },
    }


def _number(value: float | None, digits: int = 4) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}"


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f} [{_number(low)}, {_number(high)}]"


def _row(cells: Iterable[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return f"<table>{_row(head, 'th')}{''.join(_row(row) for row in rows)}</table>"


def _metrics_table(
    verdict: Verdict, candidate: ModelQuality, champion: ModelQuality | None, difference: AucLead | None
) -> str:
    def cells(name: str, quality: ModelQuality) -> list[str]:
        return [
            escape(name),
            _interval(quality.auc, quality.auc_low, quality.auc_high),
            *(_number(value) for value in (quality.log_loss, quality.normalized_entropy, quality.calibration)),
        ]

    rows = [cells(f"candidate {verdict.candidate_model_id}", candidate)]
    if champion is not None:
        rows.append(cells(f"champion {verdict.champion_model_id}", champion))
    table = _table(["model", "AUC [95 %]", "log loss", "normalized entropy", "expected / observed clicks"], rows)
    if difference is None:
        return table + "<p>There is no champion to compare with.</p>"
    return table + (
        f"<p>AUC difference, candidate minus champion, paired: "
        f"<b>{_interval(difference.auc, difference.low, difference.high)}</b>, "
        f"p = {_number(difference.p_value)}.</p>"
    )


def _old_rows(verdict: Verdict) -> str:
    old = verdict.old_distribution
    if old is None:
        return "<p>No rows older than the window were held out.</p>"
    return (
        f"<p>{old.num_rows} rows of days before the window, {old.num_clicks} clicks, drawn for this and never "
        "replayed. Both models may have learned them when they were new: this shows how well they are remembered. "
        "Where the world changed in between, a candidate that follows it is wrong about them and scores lower; that is "
        "a fault only where the old world may return.</p>"
        + _metrics_table(verdict, old.candidate, old.champion, old.difference)
    )


def _slices_table(slices: list[SliceMetrics]) -> str:
    def auc(estimate: AucEstimate | None) -> str:
        return _interval(estimate.auc, estimate.low, estimate.high) if estimate else ABSENT

    def difference(value: AucDifference | None) -> str:
        if value is None:
            return ABSENT
        text = f"{value.auc:+.4f} [{value.low:+.4f}, {value.high:+.4f}]"
        kind = "worse" if value.high < 0 else "better" if value.low > 0 else ""
        return f'<span class="{kind}">{text}</span>' if kind else text

    head = ["slice", "rows", "click rate", "AUC [95 %]", "champion", "difference", "NE", "calibration"]
    return _table(
        head,
        (
            [
                escape(f"{part.group}: {part.name}"),
                str(part.num_rows),
                _number(part.click_rate),
                auc(part.candidate),
                auc(part.champion),
                difference(part.difference),
                _number(part.normalized_entropy),
                _number(part.calibration),
            ]
            for part in slices
        ),
    )


def _settings_table(settings: GateSettings, verdict: Verdict) -> str:
    rows = [
        ("AUC needed at all", f"{settings.min_auc:g}"),
        ("AUC by which the candidate may trail the champion", f"{settings.max_auc_loss:g}"),
        (
            "the same on old rows",
            "not judged" if settings.max_old_auc_loss is None else f"{settings.max_old_auc_loss:g}",
        ),
        ("clicks, and rows without, needed for an interval", str(settings.min_class_rows)),
        ("an inconclusive candidate is", "accepted" if settings.accept_inconclusive else "refused"),
        ("held-out rows, clicks", f"{verdict.num_rows}, {verdict.num_clicks}"),
        ("rows that would decide", ABSENT if verdict.rows_needed is None else str(verdict.rows_needed)),
        ("scores", escape(verdict.scores_uri)),
    ]
    return _table(["", ""], rows)


def _figure(drawing: str, caption: str) -> str:
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def _drawing(lines: dict[str, list[tuple[float, float]]], limit: float, *, dots: bool) -> str:
    """Lines over the square [0, limit] x [0, limit], with its diagonal and the ends of both axes named."""
    colours = {"candidate": _CANDIDATE_COLOUR, "champion": _CHAMPION_COLOUR}
    shapes = [
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#bbb"/>',
        f'<line x1="0" y1="{_SIDE}" x2="{_SIDE}" y2="0" stroke="#ddd"/>',
        f'<text x="0" y="{_SIDE + 16}" font-size="12">0</text>',
        f'<text x="{_SIDE}" y="{_SIDE + 16}" font-size="12" text-anchor="end">{limit:.3g}</text>',
    ]
    # The candidate last: it lies on top.
    for name in reversed(list(lines)):
        points = [(x / limit * _SIDE, _SIDE - y / limit * _SIDE) for x, y in lines[name]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        if dots:
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[name]}"/>' for x, y in points]
    size = f'width="{_SIDE + 20}" height="{_SIDE + 30}" viewBox="-10 -5 {_SIDE + 20} {_SIDE + 30}"'
    return f'<svg role="img" {size}>{"".join(shapes)}</svg>'


def _roc_drawing(curves: dict[str, list[RocPoint]]) -> str:
    if not curves["candidate"]:
        return "<p>No curve: the held-out rows are of one class.</p>"
    lines = {name: [(p.false_positive_rate, p.true_positive_rate) for p in points] for name, points in curves.items()}
    return _drawing(lines, 1.0, dots=False)


def _calibration_drawing(bins: dict[str, list[CalibrationBin]]) -> str:
    lines = {name: [(b.mean_score, b.click_rate) for b in cut] for name, cut in bins.items()}
    limit = max((value for line in lines.values() for point in line for value in point), default=0.0)
    return _drawing(lines, limit or 1.0, dots=True)

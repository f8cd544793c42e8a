"""A report with something in every section, for the tests of the page and of the document."""

from __future__ import annotations

import pyarrow as pa

from components.contracts import criteo
from components.validation.drift import measure_drift
from components.validation.kept_windows import KeptWindows
from components.validation.label_shift import measure_label_shift
from components.validation.reference import ReferenceCounter
from components.validation.reports.document import Found, make_document
from components.validation.rules import Judging
from components.validation.rules.drift import judge_drift
from components.validation.settings import ValidationSettings
from components.validation.tfdv_drift import tfdv_distances
from tests.components.validation.counting import statistics_of

HOSTILE = "<script src='//evil'>alert(1)</script>\"&"
SKEWED = {
    "feature": "I3",
    "method": "rows",
    "measure": "DIFFERING_ROWS",
    "distance": 0.5,
    "threshold": 0.001,
    "severity": "warn",
    "drifted": True,
    "num_rows_now": 200,
    "num_rows_before": 200,
    "effect": 0.5,
    "effect_low": 0.43,
    "effect_high": 0.57,
    "differing": 100,
    "only_training": 0,
    "only_served": 0,
    "factor": 1000.0,
    "example": {"request_id": HOSTILE, "row": 3, "training": 5000.0, "served": 5.0},
}
SERVED = {
    "served_uri": "file:///archive",
    "method": "rows",
    "first_event_time": "2026-01-01T00:00:00+00:00",
    "last_event_time": "2026-01-02T00:00:00+00:00",
    "num_joined": 200,
    "num_only_training": 300,
    "num_only_served": 7,
}


def window_of(table: pa.Table):
    counter = ReferenceCounter()
    for batch in table.to_batches():
        counter.add(batch)
    return counter.window()


def found_in(now: pa.Table, before: pa.Table, **changes) -> Found:
    """What validation finds of `now` beside `before`, with skew, quarantine and schema differences made up."""
    window, kept = window_of(now), KeptWindows((window_of(before),))
    statistics = [statistics_of(table) for table in (now, before)]
    drift = measure_drift(window, kept, ValidationSettings(), distances=tfdv_distances(*statistics))
    findings = [
        *judge_drift(drift, Judging()),
        *Judging().find(HOSTILE, "rule", "anomaly", HOSTILE),
    ]
    fields = {
        "run": HOSTILE,
        "decision": "warn",
        "findings": findings,
        "drift": drift,
        "now": statistics[0],
        "before": statistics[1],
        "champion": "file:///store/models/m1",
        "label": measure_label_shift(window, kept),
        "skew": [SKEWED],
        "served": SERVED,
        "num_by_rule": {"outlier": 12, HOSTILE: 1},
        "quarantine_uri": f"file:///{HOSTILE}",
        "schema_uri": "file:///work/schema.pbtxt",
        "schema_differences": [
            {"feature": "I1", "rule": "max", "kind": "looser", "old": "10", "new": HOSTILE},
        ],
    }
    return Found(**{**fields, **changes})


def document_of(judged, **changes):
    """The document of 3,000 rows beside 3,000 others, I2 lost and C5 replaced by one category."""
    now = judged(3000, seed=1, I2=pa.nulls(3000, pa.float32()), C5=pa.array([7] * 3000, pa.int64()))
    return make_document(found_in(now, judged(3000), **changes))


NUM_CARDS = 1 + len(criteo.FEATURES)

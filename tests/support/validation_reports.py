"""A validation report with content in every section, for the tests of its page and its document."""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.validation.checks import Observation, apply_rules, observe_drift
from components.validation.measure import (
    Champion,
    LineageWindows,
    Measured,
    measure_drift,
    measure_label_shift,
)
from components.validation.quarantine import ScreenedRows
from components.validation.report import make_document
from components.validation.schema import check_statistics, infer_schema
from components.validation.skew import ServedRowFacts, Skew, SkewEntry
from components.validation.validate import make_report
from evergreen.config.validation import ValidationSettings
from evergreen.contracts import criteo
from evergreen.contracts.category_texts import ShownValues
from evergreen.contracts.manifests import RawDataset
from evergreen.statistics.profile_counter import ProfileCounter
from tests.support.validation_statistics import statistics_of

HOSTILE = "<script src='//evil'>alert(1)</script>\"&"
NUM_CARDS = 1 + len(criteo.FEATURES)
SKEW = Skew(
    facts=ServedRowFacts(
        served_uri="file:///archive",
        first_event_time="2026-01-01T00:00:00+00:00",
        last_event_time="2026-01-02T00:00:00+00:00",
        one_request_in=1,
        num_joined=200,
        num_only_training=300,
        num_only_served=7,
    ),
    entries=(
        SkewEntry(
            feature="I3",
            drifted=True,
            effect=0.5,
            threshold=0.001,
            num_rows=200,
            differing=100,
            only_training=0,
            only_served=0,
            factor=1000.0,
            example={"request_id": HOSTILE, "row": 3, "training": 5000.0, "served": 5.0},
        ),
    ),
)


def _count_rows(table: pa.Table) -> ProfileCounter:
    counter = ProfileCounter(criteo.CRITEO)
    for batch in table.to_batches():
        counter.add(batch)
    return counter


NUMBERS = ShownValues()
"""Settings of the report. The report names no string category and hides no column."""


def _measure_rows(now: pa.Table, champion: Champion | None, shown: ShownValues) -> Measured:
    """Measure the rows `now` and the champion's rows with the functions of the validation step.

    The measurements of skew and of quarantined rows are constants.
    """
    counter = _count_rows(now)
    window = counter.profile()
    statistics = statistics_of(now)
    schema = infer_schema(statistics, criteo.CRITEO, range_factor=10.0)
    raw = RawDataset.__new__(RawDataset)
    for name, value in {
        "quarantine_uri": f"file:///{HOSTILE}",
        "num_quarantined": 13,
        "digest": "d" * 64,
    }.items():
        object.__setattr__(raw, name, value)
    return Measured(
        rows=ScreenedRows(dataset=raw, files=[]),
        champion=champion,
        statistics=statistics,
        schema=schema,
        proposal=None,
        anomalies=check_statistics(statistics, schema),
        counter=counter,
        window=window,
        drift=measure_drift(window, champion.windows, ValidationSettings(), shown=shown)
        if champion
        else [],
        label=measure_label_shift(window, champion.windows) if champion else None,
        skew=SKEW,
        shown=shown,
    )


def document_of(
    now: pa.Table, before: pa.Table | None, *, run: str = HOSTILE, shown: ShownValues = NUMBERS
) -> dict[str, Any]:
    """Return the document of a report that compares `now` with `before`.

    The texts of a check and of a schema difference contain markup.
    """
    rules, folder = ValidationSettings(), Path(tempfile.gettempdir())
    champion = None
    if before is not None:
        windows = LineageWindows((_count_rows(before).profile(),))
        champion = Champion(folder=folder, statistics=statistics_of(before), windows=windows)
    measured = _measure_rows(now, champion, shown)
    hostile = Observation(rule="anomaly", column=HOSTILE, detail=HOSTILE)
    checks = apply_rules([*observe_drift(measured.drift, rules), hostile], rules)
    document = make_document(run, measured, make_report(measured, checks, folder=folder))
    document["schema"]["differences"] = {"I1": f"--- I1\n+++ I1\n-    max: 10\n+    max: {HOSTILE}"}
    return document


def document_with_drift(checked: Any, **options: Any) -> dict[str, Any]:
    """Return the document of a report that compares 3,000 rows with 3,000 earlier rows.

    I2 is lost, and C5 is replaced by one category.
    """
    now = checked(
        3000, seed=1, I2=pa.nulls(3000, pa.float32()), C5=pa.array([7] * 3000, pa.int64())
    )
    return document_of(now, checked(3000), **options)

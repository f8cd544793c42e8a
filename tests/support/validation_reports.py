"""A validation report with something in every section, for the tests of its page and its document."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.contracts import criteo
from components.contracts.manifests import RawDataset
from components.validation.drift import measure_drift, measure_label_shift
from components.validation.inputs import Champion, Round
from components.validation.judge import judge_drift
from components.validation.measure import Measured
from components.validation.quarantine import ScreenedRows
from components.validation.reference import ReferenceCounter
from components.validation.report import make_document
from components.validation.rows import ColumnCheck
from components.validation.rules import RuleSet
from components.validation.schema import check_statistics, infer_schema
from components.validation.skew import ServedRowFacts, Skew, SkewEntry
from components.validation.tfdv_statistics import tfdv_distances
from components.validation.windows import KeptWindows
from tests.support.validation_statistics import statistics_of

HOSTILE = "<script src='//evil'>alert(1)</script>\"&"
NUM_CARDS = 1 + len(criteo.FEATURES)
SKEW = Skew(
    facts=ServedRowFacts(
        served_uri="file:///archive",
        method="rows",
        first_event_time="2026-01-01T00:00:00+00:00",
        last_event_time="2026-01-02T00:00:00+00:00",
        num_joined=200,
        num_only_training=300,
        num_only_served=7,
    ),
    rows=(
        SkewEntry(
            feature="I3",
            drifted=True,
            effect=0.5,
            effect_low=0.43,
            effect_high=0.57,
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


def measured_of(now: pa.Table, before: pa.Table | None) -> Measured:
    """What validation measures of `now` beside `before`; skew and quarantine are made up."""
    counters = []
    for table in (now, before):
        counters.append(ReferenceCounter())
        for batch in table.to_batches() if table is not None else ():
            counters[-1].add(batch)
    window, kept = counters[0].window(), KeptWindows((counters[1].window(),))
    statistics = statistics_of(now)
    statistics_before = statistics_of(before) if before is not None else None
    schema = infer_schema(statistics, range_factor=10.0)
    drift = []
    if statistics_before is not None:
        distances = tfdv_distances(statistics, statistics_before)
        drift = measure_drift(window, kept, RuleSet().settings, distances=distances)
    raw = RawDataset.__new__(RawDataset)
    object.__setattr__(raw, "quarantine_uri", f"file:///{HOSTILE}")
    return Measured(
        rows=ScreenedRows(dataset=raw, files=[], num_by_rule={"outlier": 12, HOSTILE: 1}),
        columns=ColumnCheck(faulty=[], cast=[], new=[]),
        excluded=frozenset(),
        statistics=statistics,
        statistics_before=statistics_before,
        schema=schema,
        proposal=None,
        anomalies=check_statistics(statistics, schema),
        counter=counters[0],
        window=window,
        drift=drift,
        label=measure_label_shift(window, kept) if before is not None else None,
        skew=SKEW,
    )


def document_of(now: pa.Table, before: pa.Table | None, *, run: str = HOSTILE) -> dict[str, Any]:
    """The document of `now` beside `before`, with a hostile finding and a hostile schema difference."""
    measured = measured_of(now, before)
    rules, folder = RuleSet(), Path(tempfile.gettempdir())
    champion = None
    if before is not None:
        champion = Champion(folder=folder, statistics=measured.statistics_before, windows=KeptWindows(()))
    round_ = Round(run=run, raw=measured.rows.dataset, folder=folder, store=folder, rules=rules, champion=champion)
    findings = [*judge_drift(measured.drift, rules), *rules.find("anomaly", HOSTILE, HOSTILE)]
    document = make_document(round_, replace(measured, skew=SKEW), findings)
    document["schema"]["differences"] = [
        {"feature": "I1", "rule": "max", "kind": "looser", "old": "10", "new": HOSTILE},
    ]
    return document


def document_with_drift(judged: Any, **options: Any) -> dict[str, Any]:
    """The document of 3,000 rows beside 3,000 others, I2 lost and C5 replaced by one category."""
    now = judged(3000, seed=1, I2=pa.nulls(3000, pa.float32()), C5=pa.array([7] * 3000, pa.int64()))
    return document_of(now, judged(3000), **options)

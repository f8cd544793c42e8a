"""The validation step as a contestant: `validate`, as a run calls it, with its default settings and rules.

The window before is what the champion learnt from: it is validated as a first round's rows are, and what that leaves
behind, laid out as training lays it into the model, is the parent. Every finding that is more than a note counts as an
alarm of its feature, whatever rule made it.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from benchmarks.validation_study.answering import answer
from components.contracts.manifests import Model, RawDataset, ValidationReport
from components.storage.uris import local_path
from components.validation.rules import Judging
from components.validation.validate import Parent, Place, validate

_SCRATCH = Path(tempfile.mkdtemp(prefix="evergreen-study-"))


def judge(before: Path, now: Path, columns: tuple[str, ...]) -> dict[str, list[str]]:
    """The features, and `dataset`, with a finding that warns or blocks."""
    report = _validated(now, _SCRATCH / "now", _parent(before))
    return {"ours": sorted({f["feature"] for f in report.findings if f["severity"] != "info"})}


def _validated(rows: Path, folder: Path, parent: Parent | None) -> ValidationReport:
    place = Place(run="study", folder=folder, store=_SCRATCH / "store")
    schema_path = parent.schema_path if parent else None
    return validate(_raw(rows), place, parent=parent, schema_path=schema_path, judging=Judging()).report


@lru_cache(maxsize=1)
def _parent(rows: Path) -> Parent:
    """The model folder that the rows' first round would have left."""
    model = _SCRATCH / "model"
    shutil.rmtree(model, ignore_errors=True)
    report = _validated(rows, _SCRATCH / "before", None)
    assert report.windows_uri is not None
    for part, uri in (
        (Model.STATISTICS, report.statistics_uri),
        (Model.SCHEMA, report.schema_uri),
        (Model.WINDOWS, report.windows_uri),
    ):
        (model / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local_path(uri), model / part)
    return Parent(statistics_path=model / Model.STATISTICS, schema_path=model / Model.SCHEMA, folder=model)


def _raw(rows: Path) -> RawDataset:
    """The manifest of a window whose rows are all training rows; validation reads no more of it."""
    return RawDataset(
        source_uri=rows.as_uri(),
        window_start=None,
        window_end=None,
        first_event_time="2025-10-09T00:00:00+00:00",
        last_event_time="2025-10-10T00:00:00+00:00",
        train_uri=rows.as_uri(),
        holdout_uri=rows.as_uri(),
        num_train_rows=1,
        num_holdout_rows=0,
        num_malformed=0,
        malformed_uri=None,
        num_duplicates=0,
        digest=str(rows),
    )


if __name__ == "__main__":
    try:
        answer(judge)
    finally:
        shutil.rmtree(_SCRATCH, ignore_errors=True)

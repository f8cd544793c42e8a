import json
import re
import shutil
from dataclasses import replace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.quarantine import main as quarantine
from components.validation.__main__ import metric_values
from components.validation.quarantine import rows_folder, screen_rows
from components.validation.schema_versions import format_schema, read_schema
from components.validation.schema_versions import main as schema_command
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.manifests import RawDataset
from evergreen.storage.uris import local_path
from testing.validation_models import make_dataset, release_validated


@pytest.fixture
def scenario(tmp_path, store, step, raw_table):
    """Helper that creates a window with malformed rows, makes a champion and runs the step."""
    return QuarantineScenario(tmp_path, store, step, raw_table)


class QuarantineScenario:
    def __init__(self, folder, store, step, raw_table):
        self.folder, self.store, self._step, self._raw_table = folder, store, step, raw_table

    def window(self, name="raw", *, rows=600, files=2, **odd):
        """Return the rows as a table, and the path of their manifest.

        `odd` contains the values to replace: `odd[column][row]` is the new value.
        """
        table = self._raw_table(rows)
        for column, change in odd.items():
            values = table[column].to_pylist()
            for at, value in change.items():
                values[at] = value
            table = table.set_column(
                table.schema.get_field_index(column), column, pa.array(values, table[column].type)
            )
        return table, self.write(table, name, files)

    def write(self, table, name, files):
        folder = self.folder / name / "train"
        folder.mkdir(parents=True, exist_ok=True)
        size = -(-table.num_rows // files)
        for i in range(files):
            pq.write_table(table.slice(i * size, size), folder / f"part-{i:05d}.parquet")
        manifest = self.folder / name / "raw.json"
        make_dataset(folder, table.num_rows, recommender=CRITEO_RECOMMENDER).write(manifest)
        return manifest

    def check(self, manifest, run, action="quarantine", *, actions=(), **asked):
        """Run the step, and return the exit code, the report and the dataset that is passed on.

        The returned dataset has no reference to the report.
        """
        code, report = self._step(
            manifest, run=run, actions={"domain": action, **dict(actions)}, **asked
        )
        valid = self.folder / "out" / f"{run}.valid.json"
        if not valid.exists():
            return code, report, None
        return code, report, replace(RawDataset.read(valid), validation_report=None)

    def release(self):
        """Validate valid rows, make a model of these rows the champion, and return the report."""
        report = self.check(self.window("sound")[1], "r0", "off")[1]
        release_validated(self.store, "m1", report)
        return report


def rows_of(uri):
    """Read all rows of a folder by pandas, in the order of file names."""
    return pd.concat(
        [pq.read_table(path).to_pandas() for path in sorted(local_path(uri).glob("*.parquet"))]
    )


def keys_of(frame):
    return list(zip(frame[raw_rows.REQUEST_ID], frame[raw_rows.ROW]))


def test_without_rule_valid_dataset_is_raw_one(scenario):
    _, manifest = scenario.window(label={5: 7})
    _, _, valid = scenario.check(manifest, "r1", "off")
    assert valid == RawDataset.read(manifest)
    assert not (scenario.store / "quarantine").exists()


def test_offending_rows_are_quarantined_with_reason_and_rest_is_passed_on(scenario):
    scenario.release()
    table, manifest = scenario.window(I2={3: 1e9, 500: -1e9}, I4={10: 5.0})
    code, report, valid = scenario.check(manifest, "r1")
    assert (code, report.decision, report.num_rows) == (0, "warn", 598)
    (finding,) = report.findings
    assert metric_values(report)["num_quarantined"] == finding.num_quarantined == 2
    assert metric_values(report)["quarantine_domain"] == 1
    assert (finding.rule, finding.action, finding.result) == (
        "domain",
        "quarantine",
        "warn",
    )
    assert (
        "2 of 600 rows break rule domain, and 2 of these rows are quarantined; first: I2 is "
        "1e+09, expected" in finding.detail
    )
    gone = rows_of(valid.quarantine_uri)
    assert keys_of(gone) == [keys_of(table.to_pandas())[at] for at in (3, 500)]
    assert [reason.split(",")[0] for reason in gone.pop("quarantine_reason")] == [
        "I2 is 1e+09",
        "I2 is -1e+09",
    ]
    assert gone.columns.tolist() == list(criteo.RAW_TYPES)
    rest = pa.concat_tables(
        [pq.read_table(path) for path in sorted(local_path(valid.train_uri).iterdir())]
    )
    assert rest == pa.concat_tables([table.slice(0, 3), table.slice(4, 496), table.slice(501)])
    raw = RawDataset.read(manifest)
    assert (valid.num_train_rows, valid.num_quarantined) == (598, 2)
    assert valid.digest not in ("", raw.digest)
    assert report.raw_digest == valid.digest
    same = ("holdout_uri", "first_event_time", "last_event_time", "num_holdout_rows", "source_uri")
    assert all(getattr(valid, name) == getattr(raw, name) for name in same)


def test_quarantined_rows_outlive_work_folder_and_retry_replaces_them(scenario, capsys):
    scenario.release()
    _, manifest = scenario.window(I2={3: 1e9})
    scenario.check(manifest, "r1")
    _, _, valid = scenario.check(manifest, "r1")
    shutil.rmtree(scenario.folder / "work place")
    assert local_path(valid.quarantine_uri).is_relative_to(scenario.store)
    assert len(rows_of(valid.quarantine_uri)) == 1
    assert quarantine(["list", "--store", str(scenario.store)]) == 0
    _, line, total = capsys.readouterr().out.splitlines()
    assert re.search(rf"^r1 .* 1  {re.escape(str(local_path(valid.quarantine_uri)))}", line)
    assert total == "1 rows of 1 runs are quarantined"
    scenario.check(scenario.window("clean")[1], "r1")
    assert quarantine(["list", "--store", str(scenario.store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_more_quarantined_rows_than_share_allows_block(scenario):
    scenario.release()
    _, manifest = scenario.window(I2=dict.fromkeys(range(31), 1e9))
    assert scenario.check(manifest, "r1")[0] == 1
    assert scenario.check(manifest, "r2", max_quarantined_fraction=31 / 600)[:1] == (0,)
    report = scenario.check(manifest, "r3", actions={"quarantined_share": "notify"})[1]
    assert {f.rule: f.action for f in report.findings}["quarantined_share"] == "notify"


def test_rule_that_only_reports_counts_rows_and_moves_none(scenario):
    scenario.release()
    _, manifest = scenario.window(I2=dict.fromkeys(range(40), 1e9))
    code, report, valid = scenario.check(manifest, "r1", "block")
    assert (code, report.decision, valid) == (1, "fail", RawDataset.read(manifest))
    (finding,) = [each for each in report.findings if each.rule == "domain"]
    assert "40 of 600 rows break rule domain; first: I2 is 1e+09" in finding.detail
    assert not (scenario.store / "quarantine").exists()


def test_rule_with_nothing_to_compare_with_is_reported_in_first_run(scenario):
    _, manifest = scenario.window()
    _, report, valid = scenario.check(manifest, "r1")
    assert [(f.rule, f.action) for f in report.findings] == [("domain", "info")]
    assert valid == RawDataset.read(manifest)


def test_rows_out_of_any_domain_of_schema_are_quarantined(scenario):
    schema = read_schema(local_path(scenario.release().schema_uri))
    table, _ = scenario.window("once more")
    c1 = next(feature for feature in schema.feature if feature.name == "C1")
    next(feature for feature in schema.feature if feature.name == "I6").float_domain.min = 0
    c1.string_domain.value.extend(
        sorted({str(v) for v in table["C1"].to_pylist() if v is not None})
    )
    edited = scenario.folder / "edited.pbtxt"
    edited.write_text(format_schema(schema))
    accept = ["accept", str(edited), "--store", str(scenario.store), "--reason", "few shops"]
    assert schema_command([*accept, "--change=I6", "--change=C1"]) == 0
    odd = {"I2": {4: 1e9}, "I3": {5: float("inf")}, "I6": {6: -1.0}, "C1": {7: 123}, "C2": {8: 123}}
    rows, manifest = scenario.window(**odd, label={9: 2})
    _, _, valid = scenario.check(manifest, "r2")
    gone = rows_of(valid.quarantine_uri)
    assert keys_of(gone) == [keys_of(rows.to_pandas())[at] for at in (4, 5, 6, 7, 9)]
    assert [reason.split(",")[0] for reason in gone["quarantine_reason"]] == [
        *("I2 is 1e+09", "I3 is inf", "I6 is -1", "C1 is 123", "label is 2")
    ]


def test_memory_is_flat_in_rows(scenario, tmp_path):
    """Rows of many files are read one batch at a time.

    Eight times as many rows need no more Arrow memory.
    """
    schema, peaks = read_schema(local_path(scenario.release().schema_uri)), []
    table, _ = scenario.window(rows=40_000, files=1, I2={3: 1e9})
    for files in (1, 8):
        raw = RawDataset.read(
            scenario.write(pa.concat_tables([table] * files), f"{files} files", files)
        )
        folder = tmp_path / f"step {files}"
        folder.mkdir()
        pool, before = pa.system_memory_pool(), pa.default_memory_pool()
        pa.set_memory_pool(pool)
        try:
            screen_rows(
                raw,
                schema,
                action="quarantine",
                folder=folder,
                final=folder,
                quarantine=rows_folder(scenario.store, "r"),
            )
        finally:
            pa.set_memory_pool(before)
        peaks.append(pool.max_memory())
    assert peaks[1] < 1.5 * peaks[0], peaks

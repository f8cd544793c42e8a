import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from components.validation.__main__ import metric_values
from components.validation.measure import read_windows
from evergreen.config.reader import parse_settings
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.checks import headline
from evergreen.registry import runs
from evergreen.registry.runs import report_path
from evergreen.runtime.errors import flags_to_run_again
from evergreen.storage.uris import local_path
from tests.support.archives import day_folders
from tests.support.kfp_components import run_component


def blocking(report):
    return [(f.column, f.detail) for f in report.findings if f.result == "fail"]


def reasons(report):
    return [check.detail for check in report.checks if not check.passed]


def test_first_run_infers_schema_and_passes(step, write_rows, raw_table, store):
    code, report = step(write_rows(raw_table(1500), raw_table(1500, seed=1)))
    assert (code, report.decision, report.findings, report.drift) == (0, "pass", [], [])
    assert report.num_rows == 3000
    assert report.parent_statistics_uri is None
    schema = local_path(report.schema_uri).read_text()
    assert re.findall(r'^  name: "(\w+)"', schema, re.M) == [raw_rows.LABEL, *criteo.FEATURES]
    (note,) = runs.read_notes(store, "r1")
    assert note.state == "done"
    assert note.facts["num_rows"] == 3000


def test_second_run_reuses_champions_schema_unchanged(step, write_rows, raw_table, release_model):
    _, first = step(write_rows(raw_table(3000)))
    model = release_model(first)
    code, second = step(write_rows(raw_table(2000, seed=1), name="raw2"), run="r2")
    assert (code, second.decision, second.findings) == (0, "pass", [])
    assert [entry["feature"] for entry in second.drift] == list(criteo.FEATURES)
    assert (
        local_path(second.schema_uri).read_bytes()
        == (model / "statistics/schema.pbtxt").read_bytes()
    )
    assert local_path(second.schema_uri) != local_path(first.schema_uri)
    assert local_path(second.parent_statistics_uri) == model / "statistics/statistics.pb"


def test_drift_warns_and_lets_retraining_go_through(step, write_rows, checked, release_model):
    release_model(step(write_rows(checked(3000)))[1])
    rows = checked(3000, seed=1)
    old = rows["C4"].fill_null(rows["C4"].drop_null()[0]).to_numpy()
    swapped = pa.array(np.where(np.arange(3000) % 2, 999_999_937, old), pa.int64())
    code, report = step(write_rows(checked(3000, seed=1, C4=swapped), name="raw2"), run="r2")
    assert (code, report.decision) == (0, "warn")
    assert {finding.column for finding in report.findings} == {"C4"}
    assert {finding.rule for finding in report.findings} == {"drift", "new_categories"}
    assert any("value 999999937 went from 0.0% to 50.0%" in reason for reason in reasons(report))
    assert any(
        "at least 50.0% of the rows have a category of C4" in reason for reason in reasons(report)
    )


@pytest.mark.parametrize("value", [0, 1])
def test_one_class_labels_block_with_class_named(step, write_rows, checked, store, value):
    code, report = step(write_rows(checked(200, label=pa.array([value] * 200, pa.int32()))))
    assert code == 1
    assert [feature for feature, _ in blocking(report)] == ["label"]
    assert f"label is {value} in all 200 rows" in reasons(report)[0]
    (note,) = runs.read_notes(store, "r1")
    assert note.state == "refused"
    assert note.reason == f"{headline(report.checks)}; correct the rows and ingest them again"
    assert "failed: label: label_one_class" in note.reason


def test_refusal_names_setting_by_which_rows_would_be_learned_all_same(
    step, write_rows, checked, release_model, store
):
    release_model(step(write_rows(checked(3000)))[1])
    empty = write_rows(checked(3000, seed=1, I1=pa.nulls(3000, pa.float32())), name="raw2")
    code, report = step(empty, run="r2", actions={"click_rate": "notify"})
    assert (code, [feature for feature, _ in blocking(report)]) == (1, ["I1"])
    note = next(note for note in runs.read_notes(store, "r2") if note.state == "refused")
    flag, setting = flags_to_run_again(note.reason)
    assert flag == "--set"
    (actions,) = parse_settings(shlex.join([setting])).values()
    assert actions == {"click_rate": "notify", "column_empty": "warn"}
    code, report = step(empty, run="r3", actions=actions)
    assert (code, report.decision) == (0, "warn")


@pytest.mark.parametrize("labels", [[0, 1, 2, -1], [0, 1, None, 1], [None] * 4], ids=str)
def test_label_other_than_0_and_1_or_none_blocks(step, write_rows, checked, labels):
    code, report = step(write_rows(checked(200, label=pa.array(labels * 50, pa.int32()))))
    assert (code, {feature for feature, _ in blocking(report)}) == (1, {"label"})


def test_column_entirely_null_warns_in_first_run(step, write_rows, checked):
    rows = checked(200, I7=pa.nulls(200, pa.float32()), C7=pa.nulls(200, pa.int64()))
    code, report = step(write_rows(rows))
    assert (code, report.decision) == (0, "warn")
    assert reasons(report) == [
        "I7 has no value in any of 200 rows",
        "C7 has no value in any of 200 rows",
    ]


def test_column_entirely_null_blocks_only_if_it_had_values_before(
    step, write_rows, checked, release_model
):
    release_model(step(write_rows(checked(300, I7=pa.nulls(300, pa.float32()))))[1])
    rows = checked(200, I7=pa.nulls(200, pa.float32()), C7=pa.nulls(200, pa.int64()))
    code, report = step(write_rows(rows, name="raw2"), run="r2")
    assert code == 1
    assert [feature for feature, _ in blocking(report)] == ["C7"]
    assert "had values" in reasons(report)[0]
    assert "earlier" in reasons(report)[0]
    assert [f.column for f in report.findings if f.action == "info"] == ["I7"]


def test_rare_column_empty_in_small_window_warns_because_it_may_be_chance(
    step, write_rows, checked, release_model
):
    rare = pa.array([7.0 if i % 100 == 0 else None for i in range(3000)], pa.float32())
    release_model(step(write_rows(checked(3000, I7=rare)))[1])
    rows = checked(200, I7=pa.nulls(200, pa.float32()))
    code, report = step(write_rows(rows, name="small"), run="small")
    assert (code, blocking(report)) == (0, [])
    assert (
        "I7 has no value in any of 200 rows; earlier, 30 of 3000 rows had values, so 2 values "
        "were expected" in reasons(report)
    )
    rows = checked(1500, I7=pa.nulls(1500, pa.float32()))
    code, report = step(write_rows(rows, name="large"), run="large")
    assert (code, [feature for feature, _ in blocking(report)]) == (1, ["I7"])


@pytest.mark.parametrize("files", [0, 1])
def test_no_rows_block(step, write_rows, raw_table, release_model, files):
    tables = [raw_table(10).slice(0, 0)] * files
    code, report = step(write_rows(*tables))
    assert (code, report.num_rows) == (1, 0)
    assert blocking(report) == [("dataset", "there are no training rows, expected at least 1")]
    release_model(step(write_rows(raw_table(300), name="good"), run="r2")[1])
    code, report = step(write_rows(*tables, name="raw3"), run="r3")
    assert (code, len(blocking(report)), report.drift) == (1, 1, [])


def test_fall_of_click_rate_warns_and_chance_does_not(step, write_rows, checked, release_model):
    def clicks(share):
        # The order is random, because consecutive clicks would fall into few requests.
        return pa.array(
            np.random.default_rng(0).permutation(np.arange(1000) < share * 1000).astype(np.int32)
        )

    release_model(step(write_rows(checked(1000, label=clicks(0.3))))[1])
    code, report = step(write_rows(checked(1000, seed=1, label=clicks(0.1)), name="raw2"), run="r2")
    assert (code, report.decision) == (0, "warn")
    assert reasons(report)[0].startswith("the share of clicks is 10.00%, was 30.00%")
    few = checked(10, seed=1, label=pa.array([1] * 6 + [0] * 4, pa.int32()))
    assert reasons(step(write_rows(few, name="raw3"), run="r3")[1]) == []


def test_column_of_nan_only_warns_and_is_page_without_nan(step, write_rows, checked, release_model):
    nothing = pa.array([float("nan")] * 300, pa.float32())
    _, first = step(write_rows(checked(300, I3=nothing)))
    assert (first.decision, [f.column for f in first.findings]) == ("warn", ["I3"])
    release_model(first)
    code, second = step(write_rows(checked(300, seed=1), name="raw2"), run="r2")
    assert code == 0
    assert next(e for e in second.drift if e["feature"] == "I3")["effect"] is None
    assert "nan" not in local_path(first.report_uri).read_text()


@pytest.mark.parametrize(
    ("value", "words"),
    [(1e9, "Out-of-range"), (float("nan"), "NaN"), (float("inf"), "Inf")],
    ids=str,
)
def test_values_that_no_count_can_have_warn(step, write_rows, checked, release_model, value, words):
    release_model(step(write_rows(checked(500)))[1])
    column = checked(500)["I2"].to_pandas().to_numpy(copy=True)
    column[3] = value
    rows = checked(500, I2=pa.array(column, pa.float32()))
    code, report = step(write_rows(rows, name="raw2"), run="r2")
    assert (code, report.decision) == (0, "warn")
    assert any(words in reason and reason.startswith("I2") for reason in reasons(report))


def test_second_attempt_replaces_first(step, write_rows, raw_table):
    _, first = step(write_rows(raw_table(300)))
    local_path(first.statistics_uri).parent.with_name(f".validation.{'0123abcd' * 4}").mkdir()
    code, report = step(write_rows(raw_table(400), name="raw2"))
    assert (code, report.num_rows) == (0, 400)
    folder = local_path(report.statistics_uri).parent
    names = {
        "reference.npz",
        "report.html",
        "report.json",
        "schema.pbtxt",
        "statistics.pb",
        "windows.npz",
    }
    names.add("validation_report.json")  # The rows that are passed on refer to this report.
    assert {p.name for p in folder.iterdir()} == names
    assert [p.name for p in folder.parent.iterdir()] == ["validation"]


@pytest.mark.parametrize("is_flipped", [False, True])
def test_champion_with_unexpected_statistics_is_one_line_error(
    step, write_rows, raw_table, release_model, capsys, is_flipped
):
    model = release_model(step(write_rows(raw_table(300)))[1])
    path = model / "statistics/statistics.pb"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if is_flipped:
        path.write_bytes(content)
    code, _ = step(write_rows(raw_table(300), name="raw2"), run="r2")
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2
    assert message.startswith("error: ")
    assert "/statistics with " in message
    assert "as in the manifest of model m1" in message


def test_metrics_are_finite_and_max_drift_absent_without_champion(
    step, write_rows, raw_table, release_model
):
    _, first = step(write_rows(raw_table(500)))
    assert "max_drift" not in metric_values(first)
    release_model(first)
    _, second = step(write_rows(raw_table(500, seed=1), name="raw2"), run="r2")
    values = metric_values(second)
    assert values["max_drift"] == max(entry["effect"] for entry in second.drift)
    assert all(math.isfinite(value) for value in values.values())


@pytest.fixture
def component(write_rows, raw_table, tmp_path, store):
    """Runs the component on 300 rows, in the given work folder."""

    def run(work):
        write_rows(raw_table(300)).rename(tmp_path / "raw_dataset")
        parameters = {"run": "r1", "store": str(store), "work": str(work), "champion": "current"}
        parameters |= {"served": "", "beam_options": ""}
        outputs = {"report": "Artifact", "html": "HTML", "valid_dataset": "Dataset"}
        return run_component(
            "validation", tmp_path, parameters, inputs={"raw_dataset": "Dataset"}, outputs=outputs
        )

    return run


def test_component_answers_and_copies_report(component, tmp_path):
    done, recorded = component(tmp_path / "work")
    assert done.returncode == 0, done.stderr
    assert recorded["parameterValues"]["Output"] is True
    assert (tmp_path / "html").read_text().startswith("<!doctype html>")
    assert "decision pass: passed 12 of 12 checks" in done.stdout + done.stderr


def test_each_round_adds_its_window_to_those_of_its_champion(
    step, write_rows, raw_table, release_model
):
    _, first = step(write_rows(raw_table(300)))
    assert [w.rows for w in read_windows(local_path(first.windows_uri)).windows] == [300]
    release_model(first)
    second = step(write_rows(raw_table(200, seed=1), name="raw2"), run="r2")[1]
    # The fixture's manifests share one digest. A dataset that is validated twice is one window.
    assert [w.rows for w in read_windows(local_path(second.windows_uri)).windows] == [200]
    assert second.drift[0]["num_rows_before"] == 300
    assert second.label["num_rows_before"] == 300


# -- reports, and served rows


def replaced(table, name, column):
    return table.set_column(table.schema.get_field_index(name), name, column)


@pytest.fixture
def archive(tmp_path):
    """Writes a table as served rows, with a folder for each day."""

    def write(table):
        for rows, folder in day_folders(tmp_path / "archive", table):
            pq.write_table(rows, folder / "part-x.parquet")
        return tmp_path / "archive"

    return write


def test_feature_served_in_another_unit_is_named_by_step(step, write_rows, raw_table, archive):
    rows = raw_table(2000)
    served = replaced(rows, "I4", pc.multiply(rows.column("I4"), pa.scalar(0.001, pa.float32())))
    code, report = step(write_rows(rows), f"--served={archive(served)}", champion="none")
    assert (code, report.decision) == (0, "warn")
    (finding,) = [finding for finding in report.findings if finding.rule == "skew"]
    assert finding.column == "I4"
    assert "1000 times the served value" in finding.detail
    assert report.served["num_joined"] == 2000
    metrics = metric_values(report)
    assert (metrics["num_skewed"], metrics["num_joined"]) == (1, 2000)


def test_rule_may_block_on_skew_and_rows_served_as_trained_pass(
    step, write_rows, raw_table, archive
):
    rows = raw_table(2000)
    served = replaced(rows, "C9", pa.nulls(2000, pa.int64()))
    manifest, flag = write_rows(rows), f"--served={archive(served)}"
    code, report = step(manifest, flag, champion="none", actions={"skew": "block"})
    assert (code, report.decision) == (1, "fail")
    code, report = step(manifest, flag, champion="none", run="r2", actions={}, skew_share=1.0)
    assert (code, report.decision) == (0, "pass")
    assert next(entry for entry in report.skew if entry["feature"] == "C9")["effect"] > 0.9


def test_reports_are_kept_in_store_whatever_becomes_of_work_folder(
    step, write_rows, raw_table, store
):
    _, report = step(write_rows(raw_table(500)), champion="none", run="r7")
    kept = report_path(store, "r7", "validation")
    assert kept.read_bytes() == local_path(report.report_uri).read_bytes()
    document = json.loads(report_path(store, "r7", "validation", kind="json").read_text())
    assert document == json.loads(Path(local_path(report.json_uri)).read_text())
    assert (document["run"], document["decision"], document["num_rows"]) == (
        "r7",
        report.decision,
        500,
    )
    assert len(document["columns"]) == 40


def test_repeated_run_that_fails_leaves_no_report_of_try_before(
    step, write_rows, raw_table, store, tmp_path
):
    manifest = write_rows(raw_table(500))
    step(manifest, champion="none")
    assert report_path(store, "r1", "validation").exists()
    (tmp_path / "raw" / "train" / "part-0.parquet").write_bytes(b"corrupt")
    code, _ = step(manifest, champion="none")
    assert code == 2
    assert not report_path(store, "r1", "validation").exists()

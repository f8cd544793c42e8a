"""Tests of the rules' actions and of accepted values. Each test runs the whole step."""

import dataclasses

import pyarrow as pa
import pytest

from components.validation.checks import Observation, apply_rules
from components.validation.schema_versions import main
from evergreen.config.validation import ACTIONS, ValidationSettings
from evergreen.contracts.checks import decide
from evergreen.contracts.manifests import RawDataset


@pytest.mark.parametrize("action", ACTIONS)
def test_action_of_rule_decides_what_its_finding_does(action):
    rule = "domain"  # This rule accepts every action.
    rules = ValidationSettings(actions={rule: action})
    observed = Observation(rule=rule, column="I1", detail="I1 is odd")
    checks = apply_rules([observed], rules)
    decisions = {"block": "fail", "info": "pass", "off": "pass"}
    assert decide(checks) == decisions.get(action, "warn")
    assert [check.action for check in checks] == ([] if action == "off" else [action])
    milder = apply_rules([dataclasses.replace(observed, action="info")], rules)
    assert [check.action for check in milder] == ["info"] * len(checks)


def test_rule_that_notifies_leaves_its_sentence_for_message_about_runs_end(
    step, write_rows, checked, store, notes_of
):
    rows = checked(200, I7=pa.nulls(200, pa.float32()))
    step(write_rows(rows), actions={"column_empty_by_chance": "notify"})
    assert notes_of("r1").facts["notify"] == ["I7 has no value in any of 200 rows"]
    step(write_rows(rows, name="raw2"), run="r2")
    assert "notify" not in notes_of("r2").facts


def test_rules_that_mean_nothing_end_step_before_any_row_is_read(step, write_rows, checked, capsys):
    assert step(write_rows(checked(20)), actions={"missing_shar": "block"}) == (2, None)
    assert "rule 'missing_shar' is unknown" in capsys.readouterr().err


@pytest.fixture
def write_with_price(write_rows, raw_table):
    """Writes rows of a lake that has a column `price`, and returns the manifest's path."""
    price = {
        "column": "price",
        "arrow_type": "double",
        "expected": None,
        "file": "/lake/day=2026-03-01/a.parquet",
    }

    def write(name):
        manifest = write_rows(raw_table(300, seed=1), name=name)
        dataclasses.replace(RawDataset.read(manifest), schema_mismatches=[price]).write(manifest)
        return manifest

    return write


def test_accepted_column_is_no_longer_new_and_its_absence_is_no_fault(
    step, write_rows, write_with_price, raw_table, release_model, tmp_path, store
):
    release_model(step(write_rows(raw_table(300)))[1])
    step(write_with_price("raw2"), run="r2")
    accept = [
        "accept",
        "--store",
        str(store),
        "--work",
        str(tmp_path / "work place"),
        "run:r2",
        "--reason",
        "agreed",
    ]
    assert main([*accept, "--change", "price"]) == 0
    for name, manifest in (
        ("r3", write_with_price("r3")),
        ("r4", write_rows(raw_table(300, seed=2), name="r4")),
    ):
        _, report = step(manifest, run=name)
        assert [f for f in report.findings if f.column == "price"] == []


def test_columns_that_extraction_cast_are_checked_by_their_type_in_lake(
    step, write_rows, raw_table, release_model
):
    release_model(step(write_rows(raw_table(300)))[1])
    origin = {"arrow_type": "string", "file": "/lake/day=2026-03-01/a.parquet"}
    foreign = [
        {"column": "C7", "expected": "int64", **origin},
        {"column": "shop", "expected": None, **origin},
    ]

    def checked(run, **settings):
        manifest = write_rows(raw_table(300, seed=1), name=run)
        dataclasses.replace(RawDataset.read(manifest), schema_mismatches=foreign).write(manifest)
        code, report = step(manifest, run=run, **settings)
        return (
            code,
            report.decision,
            [(f.rule, f.column, f.detail) for f in report.findings],
        )

    findings = [
        (
            "column_retyped",
            "C7",
            "column C7 is string in /lake/day=2026-03-01/a.parquet, expected int64",
        ),
        (
            "column_new",
            "shop",
            "column shop (string) of /lake/day=2026-03-01/a.parquet is new: it is not in the "
            "schema and is not read",
        ),
    ]
    assert checked("r2") == (1, "fail", findings)
    assert checked("r3", actions={"column_retyped": "warn"}) == (0, "warn", findings)


def test_files_that_extraction_left_out_are_reported_and_notified_once(
    step, write_rows, raw_table, notes_of
):
    reason = "a.parquet is not a readable Parquet file: Parquet file size is 0 bytes"
    left_out = {
        "file": "day=2026-03-01/a.parquet",
        "num_rows": None,
        "reason": reason,
        "known": False,
    }
    text = (
        "1 files of the lake were left out{again}, because their rows cannot be read; the first: "
        f"day=2026-03-01/a.parquet (rows not known): {reason}"
    )

    def checked(run, **changed):
        manifest = write_rows(raw_table(300), name=run)
        dataclasses.replace(
            RawDataset.read(manifest), quarantined_files=[{**left_out, **changed}]
        ).write(manifest)
        code, report = step(manifest, run=run)
        found = [(f.action, f.detail) for f in report.findings if f.rule == "files_quarantined"]
        return (
            code,
            found,
            decide(report.checks) == "warn",
            notes_of(run).facts.get("notify", []),
        )

    new = text.format(again="")
    assert checked("r1") == (0, [("notify", new)], True, [new])
    assert checked("r2", known=True) == (0, [("info", text.format(again=" again"))], False, [])


def test_new_values_are_proposed_and_current_schema_holds_until_accepted(
    step, write_rows, checked, release_model, tmp_path, store, capsys
):
    release_model(step(write_rows(checked(500)))[1])
    column = checked(500)["I2"].to_pylist()
    column[3] = 1e9
    manifest = write_rows(checked(500, I2=pa.array(column, pa.float32())), name="raw2")
    _, second = step(manifest, run="r2")
    assert [(f.column, f.rule) for f in second.findings if f.rule == "range"] == [("I2", "range")]
    work = ["--work", str(tmp_path / "work place")]
    accept = ["accept", "run:r2", "--store", str(store), "--reason", "real", *work]
    _, third = step(manifest, run="r3")
    assert [f for f in third.findings if f.rule == "range"]
    assert main(accept) == 2
    assert "--change I2" in capsys.readouterr().err
    assert main([*accept, "--change", "I2"]) == 0
    _, fourth = step(manifest, run="r4")
    assert [f for f in fourth.findings if f.rule == "range"] == []
    schema = tmp_path / "work place/r4/validation/schema.pbtxt"
    assert schema.read_bytes() == (store / "schemas" / "1.pbtxt").read_bytes()
    assert not schema.with_name("proposed_schema.pbtxt").exists()

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo, raw_rows
from components.contracts.manifests import RawDataset
from components.storage.uris import local_path
from components.validation.__main__ import metric_values
from components.validation.quarantine import screen_rows
from components.validation.quarantine_store import main as quarantine
from components.validation.round import Round
from components.validation.rules import RULES, RuleSet, ValidationSettings
from components.validation.schema_versions import format_schema, read_schema
from components.validation.schema_versions import main as schema_command
from tests.support.releases import keep_model
from tests.support.validation_models import make_dataset, release_validated

START = 1_760_000_000.0
NAMED = {"named_rows": "quarantine", "request_ids": ["bad", "worse"]}


@pytest.fixture
def world(tmp_path, store, step, raw_table):
    """Windows of rows, one after the other, the step over them, and models whose line goes from one to the next."""
    return QuarantineWorld(tmp_path, store, step, raw_table)


class QuarantineWorld:
    def __init__(self, folder, store, step, raw_table):
        self.folder, self.store, self._step, self._raw_table = folder, store, step, raw_table
        self.live = None

    def window(self, number, *, rows=600, files=2, **replaced):
        """The rows of one window as a table, and its manifest's path; request ids are its own."""
        table = self._raw_table(rows, seed=number, start=START + number * 86_400.0)
        for name, change in replaced.items():
            values = table[name].to_pylist()
            for at, value in change.items():
                values[at] = value
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(values, table[name].type))
        return table, self.write(table, f"window {number}", files)

    def write(self, table, name, files):
        folder = self.folder / name / "train"
        folder.mkdir(parents=True, exist_ok=True)
        size = -(-table.num_rows // files)
        for i in range(files):
            pq.write_table(table.slice(i * size, size), folder / f"part-{i:05d}.parquet")
        times = table[raw_rows.EVENT_TIME].to_pylist()
        manifest = self.folder / name / "raw.json"
        make_dataset(
            folder,
            table.num_rows,
            digest=(name.encode().hex() * 64)[:64],
            first_event_time=times[0].isoformat(),
            last_event_time=times[-1].isoformat(),
        ).write(manifest)
        return manifest

    def judge(self, manifest, run, **asked):
        """Actions by rule, and settings."""
        actions = {name: asked.pop(name) for name in list(asked) if name in RULES}
        code, report = self._step(manifest, run=run, actions=actions, **asked)
        valid = self.folder / "out" / f"{run}.valid.json"
        return code, report, RawDataset.read(valid) if valid.exists() else None

    def release(self, report, valid, name):
        """A model that learned the dataset `valid` becomes the champion; it continues the one before."""
        release_validated(self.store, name, report, raw_digest=valid.digest)
        keep_model(
            self.store,
            name,
            parent_model_id=self.live,
            raw_digest=valid.digest,
            window_start=valid.first_event_time,
            last_learned_time=valid.last_learned_time,
        )
        self.live = name

    def replay(self, run, *flags):
        return quarantine(["replay", "--store", str(self.store), "--run", run, "--reason", "they are fine", *flags])


def rows_of(uri):
    """All rows of a folder, by pandas, in the order of file names."""
    return pd.concat([pq.read_table(path).to_pandas() for path in sorted(local_path(uri).glob("*.parquet"))])


def keys_of(frame):
    return list(zip(frame[raw_rows.REQUEST_ID], frame[raw_rows.ROW]))


def test_without_a_rule_about_rows_the_valid_dataset_is_the_raw_one(world):
    _, manifest = world.window(0, label={5: 7})
    _, _, valid = world.judge(manifest, "r1")
    assert valid == RawDataset.read(manifest)
    assert not (world.store / "quarantine").exists()


def test_offending_rows_are_quarantined_with_rule_and_reason_and_the_rest_is_judged_and_handed_on(world):
    table, manifest = world.window(0, request_id={3: "bad", 500: "worse"}, I4={10: 5.0})
    code, report, valid = world.judge(manifest, "r1", **NAMED)
    assert (code, report.decision, report.num_rows) == (0, "warn", 598)
    (finding,) = report.findings
    assert metric_values(report)["num_quarantined"] == finding["num_quarantined"] == 2
    assert metric_values(report)["quarantine_named_rows"] == 1
    assert (finding["rule"], finding["action"], finding["severity"]) == ("named_rows", "quarantine", "warn")
    assert (
        "broken by 2 of 600 rows, 2 of them quarantined by it; first: request 'bad' is named by the rule"
        in report.reasons[0]
    )
    gone = rows_of(valid.quarantine_uri)
    assert keys_of(gone) == [keys_of(table.to_pandas())[at] for at in (3, 500)]
    assert list(gone["quarantine_rule"]) == ["named_rows"] * 2
    assert list(gone["quarantine_reason"]) == [f"request {name!r} is named by the rule" for name in ("bad", "worse")]
    assert gone.drop(columns=["quarantine_rule", "quarantine_reason"]).columns.tolist() == list(criteo.RAW_TYPES)
    rest = pa.concat_tables([pq.read_table(path) for path in sorted(local_path(valid.train_uri).iterdir())])
    assert rest == pa.concat_tables([table.slice(0, 3), table.slice(4, 496), table.slice(501)])
    raw = RawDataset.read(manifest)
    assert (valid.num_train_rows, valid.num_quarantined) == (598, 2)
    assert valid.digest not in ("", raw.digest)
    assert report.raw_digest == valid.digest
    same = ("holdout_uri", "first_event_time", "last_event_time", "num_holdout_rows", "source_uri")
    assert all(getattr(valid, name) == getattr(raw, name) for name in same)


def test_quarantined_rows_outlive_the_work_folder_and_a_retry_replaces_them(world, capsys):
    _, manifest = world.window(0, request_id={3: "bad"})
    world.judge(manifest, "r1", **NAMED)
    _, _, valid = world.judge(manifest, "r1", **NAMED)
    shutil.rmtree(world.folder / "work place")
    assert local_path(valid.quarantine_uri).is_relative_to(world.store)
    assert len(rows_of(valid.quarantine_uri)) == 1
    assert quarantine(["list", "--store", str(world.store)]) == 0
    assert "named_rows: 1 rows\n1 rows of 1 runs are quarantined" in capsys.readouterr().out
    _, clean = world.window(0)
    world.judge(clean, "r1", **NAMED)
    assert quarantine(["list", "--store", str(world.store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_more_quarantined_rows_than_the_share_allows_block(world):
    _, manifest = world.window(0, request_id=dict.fromkeys(range(31), "bad"))
    assert world.judge(manifest, "r1", **NAMED)[0] == 1
    code, report, _ = world.judge(manifest, "r2", **NAMED, max_quarantined_fraction=31 / 600)
    assert (code, report.decision) == (0, "warn")
    report = world.judge(manifest, "r3", **NAMED, quarantined_share="notify")[1]
    assert {f["rule"]: f["action"] for f in report.findings}["quarantined_share"] == "notify"


def test_a_rule_about_rows_that_only_reports_counts_them_and_moves_none(world):
    days = [datetime.fromtimestamp(START, timezone.utc).strftime("%Y-%m-%d")]
    table, manifest = world.window(0)
    answer = world.judge(manifest, "r1", named_rows="block", days=days)
    on_day = sum(time.strftime("%Y-%m-%d") == days[0] for time in table[raw_rows.EVENT_TIME].to_pylist())
    assert 0 < on_day < 600
    assert (answer[0], answer[1].decision, answer[2]) == (1, "block", RawDataset.read(manifest))
    assert (
        f"rule named_rows is broken by {on_day} of 600 rows; first: day {days[0]!r}"
        in answer[1].findings[0]["description"]
    )


def test_a_rule_with_nothing_to_compare_with_is_reported_in_a_first_run(world):
    _, manifest = world.window(0)
    _, report, valid = world.judge(manifest, "r1", domain="quarantine")
    assert [(f["rule"], f["severity"]) for f in report.findings] == [("domain", "info")]
    assert valid == RawDataset.read(manifest)


def test_rows_out_of_the_schemas_domain_are_quarantined(world):
    table, manifest = world.window(0)
    _, report, valid = world.judge(manifest, "r1")
    world.release(report, valid, "m1")
    schema = read_schema(local_path(report.schema_uri))
    c1 = next(feature for feature in schema.feature if feature.name == "C1")
    next(feature for feature in schema.feature if feature.name == "I6").float_domain.min = 0
    c1.string_domain.value.extend(sorted({str(v) for v in table["C1"].to_pylist() if v is not None}))
    edited = world.folder / "edited.pbtxt"
    edited.write_text(format_schema(schema))
    assert schema_command(["accept", str(edited), "--store", str(world.store), "--reason", "few shops"]) == 0
    odd = {"I2": {4: 1e9}, "I3": {5: float("inf")}, "I6": {6: -1.0}, "C1": {7: 123}, "C2": {8: 123}}
    rows, manifest = world.window(1, **odd, label={9: 2})
    _, _, valid = world.judge(manifest, "r2", domain="quarantine")
    gone = rows_of(valid.quarantine_uri)
    assert keys_of(gone) == [keys_of(rows.to_pandas())[at] for at in (4, 5, 6, 7, 9)]
    assert [reason.split(",")[0] for reason in gone["quarantine_reason"]] == [
        *("I2 is 1e+09", "I3 is inf", "I6 is -1", "C1 is 123", "label is 2")
    ]


def test_rows_taken_back_are_learned_by_the_next_round_and_once(world, capsys):
    first, manifest = world.window(0)
    named = [first[raw_rows.REQUEST_ID][at].as_py() for at in (20, 300)]  # twenty rows
    rules = {"named_rows": "quarantine", "request_ids": named}
    _, report, valid = world.judge(manifest, "r1", **rules)
    assert valid.num_quarantined == 20
    world.release(report, valid, "m1")
    assert world.replay("r1") == 0
    assert "20 rows under named_rows will be learned" in capsys.readouterr().out
    assert world.replay("r1") == 0
    assert "nothing changed" in capsys.readouterr().out
    second, manifest = world.window(1)
    gone = first.filter(pa.array([name in named for name in first[raw_rows.REQUEST_ID].to_pylist()]))
    wanted = pa.concat_tables([gone, second])
    # A round that is refused afterwards has lost nothing: the next one takes them again.
    for run in ("r2", "r2 again"):
        _, report, valid = world.judge(manifest, run)
        files = sorted(local_path(valid.train_uri).iterdir())
        assert pa.concat_tables([pq.read_table(path) for path in files]) == wanted
        assert (valid.num_train_rows, report.num_rows, valid.num_quarantined) == (620, 620, 0)
        texts = [f["description"] for f in report.findings if f["rule"] == "quarantine_replayed"]
        assert texts == ["20 rows of earlier quarantines, which people took back, are learned with these"]
    world.release(report, valid, "m2")
    _, manifest = world.window(2)
    _, _, valid = world.judge(manifest, "r3")
    assert valid == RawDataset.read(manifest)
    # A line that never learned them takes them.
    world.live = None
    _, report, alone = world.judge(manifest, "r4")
    world.release(report, alone, "m3")
    _, manifest = world.window(3)
    assert world.judge(manifest, "r5")[2].num_train_rows == 620


def test_rows_taken_back_that_lie_in_the_window_come_with_it_in_spite_of_the_rule(world):
    table, manifest = world.window(0, request_id={3: "bad", 40: "worse"})
    world.judge(manifest, "r1", **NAMED)
    assert world.replay("r1", "--rule", "named_rows") == 0
    _, _, valid = world.judge(manifest, "r2", **NAMED)
    assert valid == RawDataset.read(manifest)


def test_late_rows_that_a_refused_round_quarantined_come_from_the_lake_again_and_once(world):
    """They lie before the window, so that they could come from the store as well."""
    late, _ = world.window(0, rows=100, files=1)
    window, _ = world.window(1)
    both = pa.concat_tables([late, window])
    manifest = world.write(both, "both", 3)
    raw = RawDataset.read(manifest)
    first = window[raw_rows.EVENT_TIME][0].as_py().isoformat()
    replace(raw, first_event_time=first, num_late_rows=100).write(manifest)
    rules = {"named_rows": "quarantine", "request_ids": [late[raw_rows.REQUEST_ID][50].as_py()]}
    assert world.judge(manifest, "refused", **rules)[2].num_train_rows == 690
    assert world.replay("refused") == 0
    _, _, valid = world.judge(manifest, "r2", **rules)
    found = [pq.read_table(path) for path in sorted(local_path(valid.train_uri).iterdir())]
    assert pa.concat_tables(found) == both
    assert valid.num_train_rows == 700


def test_rows_taken_back_that_a_shorter_round_does_not_reach_are_learned_by_the_one_that_does(world):
    """The first round was refused; the second learns half as many rows, and the third goes on from there."""
    table, manifest = world.window(0)
    named = [table[raw_rows.REQUEST_ID][at].as_py() for at in (20, 500)]
    rules = {"named_rows": "quarantine", "request_ids": named}
    world.judge(manifest, "refused", **rules)
    assert world.replay("refused") == 0
    _, report, valid = world.judge(world.write(table.slice(0, 300), "half", 1), "half", **rules)
    assert valid.num_train_rows == 290
    world.release(report, valid, "m1")
    _, report, valid = world.judge(world.write(table.slice(300), "rest", 1), "rest", **rules)
    assert (valid.num_train_rows, report.num_rows) == (310, 310)
    found = Counter(keys_of(rows_of(valid.train_uri)))
    assert found.keys() == set(keys_of(table.slice(20, 10).to_pandas()) + keys_of(table.slice(300).to_pandas()))
    assert set(found.values()) == {1}


@pytest.mark.parametrize("learned_between", [False, True])
def test_a_row_quarantined_by_two_runs_comes_back_once(world, learned_between):
    table, manifest = world.window(0)
    rules = {"named_rows": "quarantine", "request_ids": [table[raw_rows.REQUEST_ID][0].as_py()]}
    _, report, valid = world.judge(manifest, "r1", **rules)
    world.judge(manifest, "r1 again", **rules)
    world.release(report, valid, "m1")
    world.replay("r1")
    if not learned_between:
        world.replay("r1 again")
    _, manifest = world.window(1)
    _, report, valid = world.judge(manifest, "r2")
    assert valid.num_train_rows == 610
    world.release(report, valid, "m2")
    world.replay("r1 again")
    _, manifest = world.window(2)
    assert world.judge(manifest, "r3")[2].num_train_rows == 600


@pytest.mark.parametrize("is_quarantined_again", [False, True])
def test_a_row_that_a_refused_run_quarantined_is_not_learned_again_after_one_that_learned_it_was_released(
    world, is_quarantined_again
):
    table, manifest = world.window(0)
    first, third = (table[raw_rows.REQUEST_ID][at].as_py() for at in (0, 20))  # ten rows each

    def naming(*requests):
        return {"named_rows": "quarantine", "request_ids": list(requests)}

    assert world.judge(manifest, "refused", **naming(first))[2].num_train_rows == 590
    again = (first, third) if is_quarantined_again else (third,)
    _, report, valid = world.judge(manifest, "released", **naming(*again))
    assert valid.num_train_rows == 600 - 10 * len(again)
    world.release(report, valid, "m1")
    world.replay("refused")
    _, manifest = world.window(1)
    assert world.judge(manifest, "r2")[2].num_train_rows == (610 if is_quarantined_again else 600)
    world.replay("released")
    assert world.judge(manifest, "r3")[2].num_train_rows == 600 + 10 * len(again)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "--run", "r9", "--reason", "x"], "run 'r9' quarantined no row; .* are those of: r1"),
        (
            ["replay", "--run", "r1", "--rule", "drift", "--reason", "x"],
            "quarantined no row under rule 'drift', expected one of",
        ),
        (["replay", "--run", "r1", "--reason", " "], "reason is empty"),
        (["replay", "--run", "../r1", "--reason", "x"], "expected a name of one folder"),
    ],
    ids=str,
)
def test_a_replay_of_what_is_not_there_is_refused_by_name(world, capsys, arguments, message):
    _, manifest = world.window(0, request_id={3: "bad"})
    world.judge(manifest, "r1", **NAMED)
    capsys.readouterr()
    assert quarantine([*arguments, "--store", str(world.store)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_memory_is_flat_in_rows(world, tmp_path):
    """Rows of many files pass one batch at a time: eight times the rows cost no more Arrow memory."""
    settings = ValidationSettings(actions={"named_rows": "quarantine"}, request_ids=("bad", "worse"))
    rules = RuleSet(settings=settings)
    peaks = []
    table, _ = world.window(0, rows=40_000, files=1, request_id={3: "bad"})
    for files in (1, 8):
        raw = RawDataset.read(world.write(pa.concat_tables([table] * files), f"{files} files", files))
        folder = tmp_path / f"step {files}"
        folder.mkdir()
        round_ = Round(run="r", raw=raw, folder=folder, store=world.store, rules=rules)
        pool, before = pa.system_memory_pool(), pa.default_memory_pool()
        pa.set_memory_pool(pool)
        try:
            screen_rows(round_, None, folder)
        finally:
            pa.set_memory_pool(before)
        peaks.append(pool.max_memory())
    assert peaks[1] < 1.5 * peaks[0], peaks

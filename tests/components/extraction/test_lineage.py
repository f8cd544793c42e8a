"""Tests of lineage: which version of each day was used to train a model and its parents."""

import json
import re
import shutil
from datetime import date, datetime, timedelta, timezone

import pyarrow.parquet as pq
import pytest

from cli.backfill import backfill
from components.extraction.lineage import lake_versions, main
from evergreen.registry.models import model_folder
from testing.recommenders import SHOP
from testing.releases import make_live, release, store_model

START = datetime(2026, 3, 1, tzinfo=timezone.utc)


def saw(day: str, version: int, num_rows: int, **more) -> dict:
    return {"day": day, "version": version, "digest": "d", "num_rows": num_rows, **more}


def at(hours: float) -> str:
    return (START + timedelta(hours=hours)).isoformat()


@pytest.fixture
def store(tmp_path):
    """Registry with m1 from scratch, m2 from m1 (live), m3 from m2, and two more from scratch.

    The parent of the model `old` was deleted from the registry.
    """
    days = {
        "m1": (None, [saw("2026-03-01", 0, 100), saw("2026-03-02", 0, 50, num_holdout_rows=15)]),
        "m2": ("m1", [saw("2026-03-02", 0, 60), saw("2026-03-01", 1, 20, replay=True)]),
        "m3": ("m2", [saw("2026-03-03", 0, 70, num_late_rows=9)]),
        "other": (None, [saw("2026-03-02", 1, 110)]),
        "old": ("gone", []),
    }
    root = tmp_path / "my store"
    for number, (model_id, (parent, seen)) in enumerate(days.items()):
        times = {"watermark": at(number), "last_event_time": at(number + 0.5)}
        store_model(root, model_id, parent_model_id=parent, days=seen, **times)
    make_live(root, release(root, 1, "m2"))
    return root


@pytest.fixture
def lake(tmp_path, raw_table, write_lake):
    """A lake of three days. The first day was back-filled once, and the second day twice."""
    table = raw_table(300, start=START.timestamp(), seconds=3 * 86_400)
    folder = write_lake(tmp_path / "la ke", table)
    for day in (1, 2, 2):
        source = folder / f"day=2026-03-0{day}" / "part-0.parquet"
        pq.write_table(pq.read_table(source, partitioning=None), tmp_path / "again.parquet")
        backfill(
            [tmp_path / "again.parquet"],
            SHOP,
            lake=str(folder),
            day=date(2026, 3, day),
        )
    return folder


@pytest.fixture
def printed_models(store, capsys):
    """Runs the command and returns the models of its JSON document by id."""

    def run(*more: str) -> dict[str, dict]:
        assert main(["--store", store.as_uri(), "--json", *more]) == 0
        return {each["model_id"]: each for each in json.loads(capsys.readouterr().out)["models"]}

    return run


def short(days: list[dict]) -> list[tuple]:
    return [
        (each["day"][-2:], each["version"], each["num_rows"], each["replay"], each["model_id"])
        for each in days
    ]


def test_model_carries_what_its_line_of_descent_saw(printed_models):
    (m3,) = printed_models("--model", "m3").values()
    assert short(m3["days"]) == [
        ("03", 0, 70, False, "m3"),
        ("02", 0, 60, False, "m2"),
        ("01", 1, 20, True, "m2"),
        ("01", 0, 100, False, "m1"),
        ("02", 0, 50, False, "m1"),
    ]
    assert (m3["parent_model_id"], m3["is_live"], m3["unknown"]) == ("m2", False, [])
    assert [each["num_late_rows"] for each in m3["days"]] == [9, 0, 0, 0, 0]
    assert [each["num_holdout_rows"] for each in m3["days"]] == [0, 0, 0, 0, 15]


def test_model_names_descendants_trained_on_its_evaluation_rows(printed_models, store):
    store_model(store, "early", parent_model_id="m1", watermark=at(0.4), last_event_time=at(0.45))
    found = printed_models()
    assert {
        model_id: each["trained_later"] for model_id, each in found.items() if each["trained_later"]
    } == {
        "m1": ["m2"],
        "m2": ["m3"],
    }
    assert (found["m2"]["watermark"], found["m2"]["last_event_time"]) == (at(1), at(1.5))


@pytest.mark.parametrize(
    ("child_start", "grandchild_start", "expected"),
    [
        (at(4) + "|1", at(4.3) + "|1", ["grandchild"]),
        (None, None, ["grandchild"]),
        (at(4.2), at(4.3) + "|1", []),
        (at(4) + "|1", at(4.4), []),
        (at(4.2), at(3), ["grandchild"]),
    ],
    ids=[
        "one after the other",
        "all rows",
        "the child skips rows",
        "the grandchild skips rows",
        "it reads them again",
    ],
)
def test_evaluation_rows_are_used_later_if_windows_cover_them_all(
    printed_models, store, child_start, grandchild_start, expected
):
    """The model is evaluated on the rows from 4 h to 4.5 h.

    The child model's training rows end at 4.3 h, and the grandchild model's training rows end at
    4.5 h.
    """

    def start(text):
        time, _, behind = (text or "").partition("|")
        return (
            (datetime.fromisoformat(time) + timedelta(microseconds=int(behind or 0))).isoformat()
            if time
            else None
        )

    for name, parent, hours, window_start in (
        ("model", None, 4, None),
        ("child", "model", 4.3, start(child_start)),
        ("grandchild", "child", 4.5, start(grandchild_start)),
        ("its child", "grandchild", 6, at(5)),
    ):
        times = {
            "watermark": at(hours),
            "last_event_time": at(hours + 0.5),
            "window_start": window_start,
        }
        store_model(store, name, parent_model_id=parent, **times)
    assert printed_models()["model"]["trained_later"] == expected


def test_lake_lists_outdated_rows(printed_models, lake):
    assert lake_versions(str(lake)) == {"2026-03-01": 1, "2026-03-02": 2, "2026-03-03": 0}
    found = printed_models("--lake", lake.as_uri())
    outdated = {
        model_id: [
            (seen["day"][-2:], seen["version"], seen["lake_version"])
            for seen in each["days"]
            if seen["outdated"]
        ]
        for model_id, each in found.items()
    }
    assert outdated == {
        "m1": [("01", 0, 1), ("02", 0, 2)],
        "m2": [("02", 0, 2), ("01", 0, 1), ("02", 0, 2)],
        "m3": [("02", 0, 2), ("01", 0, 1), ("02", 0, 2)],
        "other": [("02", 1, 2)],
        "old": [],
    }


def test_missing_notes_are_reported(printed_models):
    assert printed_models("--model", "old")["old"]["unknown"] == ["old", "gone"]


def test_lines_for_people_have_same_content(store, lake, capsys):
    assert main(["--store", str(store), "--lake", str(lake), "--model", "m2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head) == [
        *("model", "day", "version", "rows", "late", "held out", "through", "note")
    ]
    assert [re.split(r"  +", line) for line in lines[:4]] == [
        ["m2", "2026-03-02", "0", "60", "0", "0", "-", "OUTDATED: the lake has version 2"],
        ["m2", "2026-03-01", "1", "20", "0", "0", "-", "replayed"],
        ["m2", "2026-03-01", "0", "100", "0", "0", "m1", "OUTDATED: the lake has version 1"],
        ["m2", "2026-03-02", "0", "50", "0", "15", "m1", "OUTDATED: the lake has version 2"],
    ]
    assert lines[4:] == [
        f"model m2 (live), from m1: trained on rows up to {at(1)}, evaluated on rows up to "
        f"{at(1.5)}",
        "  its evaluation rows were later used to train m3",
    ]


def test_day_is_reported_as_unused_only_if_all_models_are_known(store, capsys):
    assert main(["--store", str(store), "--day", "2027-01-01"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"model old, from gone: trained on rows up to {at(4)}, evaluated on rows up to {at(4.5)}",
        "  the days of old are unknown",
        "  the days of gone are unknown",
    ]
    shutil.rmtree(model_folder(store, "old"))
    assert main(["--store", str(store), "--day", "2027-01-01"]) == 0
    assert capsys.readouterr().out == "no model saw it\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "nobody"], "model 'nobody' is not in the model registry"),
        (["--day", "yesterday"], "day is 'yesterday', expected a date YYYY-MM-DD"),
        (["--lake", "/no/such"], "lake /no/such does not exist"),
    ],
)
def test_bad_flag_is_reported_in_one_line(store, capsys, flags, message):
    assert main(["--store", str(store), *flags]) == 2
    assert f"error: {message}" in capsys.readouterr().err

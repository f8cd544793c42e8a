"""Tests of `evergreen admin forget`: an independent scan must not find the user afterwards."""

import os
import shlex
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import date, datetime, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.backfill import backfill
from cli.forget import LOCATIONS, main
from cli.ingest import IngestSettings, ingest
from cli.models import print_models
from components.extraction.__main__ import main as extraction
from components.preprocessing.parent import save_columns
from components.preprocessing.vocabularies import Candidates, Column
from components.validation.quarantine import rows_folder, store_quarantined
from evergreen.config.data import ColumnNames
from evergreen.config.features import (
    MISSING_CATEGORY,
    CategoricalOptions,
    Features,
    ListOptions,
    category_of,
)
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import Model, ServingTarget
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import CONVERSION, PredictionBatch
from evergreen.registry.models import graph_folder, model_folder, write_serving_target
from evergreen.rows.raw_schema import MalformedRows, lake_schema, raw_batch
from evergreen.serving.parity import GoldenRows
from evergreen.storage.folder import FolderObjects
from monitoring.backtest.incident import record, replay
from monitoring.rows import MaturedRequests
from monitoring.state.database import unpack
from monitoring.state.rules_file import write_rules
from monitoring.uploader import Uploader
from testing.recommenders import accept_into
from testing.releases import keep_model, make_live, release
from tests.support.crashes import Kill
from tests.support.lakes import URI, folder_lake, open_storage, put, read_window
from tests.support.monitors import Bench, clicks, publish
from tests.support.workflows import workflow_of

USER, OTHERS = "ann-9f3c", ("bob", "cy", "7")
CATEGORY = category_of(USER)
STRING = CategoricalOptions(type="string")
FEATURES = Features(
    numeric=("price",),
    categorical=("item", "user"),
    categorical_options={"item": STRING, "user": STRING},
    lists=("friends",),
    list_options={"friends": ListOptions(max=2, table="user")},
)
SHOP = Recommender(name="shop", features=FEATURES, data=ColumnNames(user="user"))
START = datetime(2026, 3, 1, tzinfo=timezone.utc).timestamp()
SCANNED = ("lake", "archive", "store/quarantine", "work", "incidents")
MONITORING = {
    "window_rows": 50,
    "min_clicks": 1,
    "decide_seconds": 5.0,
    "policies": "threshold",
    "auc_threshold": 0.1,
}


def rows_of(day: int, users: tuple[str, ...], *, name: str = "r", friend: str = USER) -> pa.Table:
    """Return 120 rows of one day in the lake's form. Some rows contain the friend in a list."""
    at = np.arange(120)
    times = pa.array(((START + 86_400 * day + 60 * at) * 1e6).astype(np.int64))
    columns = {
        "label": pa.array((at % 3 == 0).astype(np.int32)),
        "price": pa.array((at + day / 8).astype(np.float32)),
        "item": pa.array([f"item-{i % 5}" for i in at]),
        "user": pa.array([users[i % len(users)] for i in at]),
        "friends": pa.array(
            [[friend, "cy"][i % 5 % 2 :] if i % 5 < 4 else None for i in at], pa.list_(pa.string())
        ),
        "request_id": pa.array([f"{name}{day}-{i // 4}" for i in at]),
        "row": pa.array((at % 4).astype(np.int32)),
        "event_time": times.cast(pa.timestamp("us", tz="UTC")),
    }
    return pa.Table.from_batches([raw_batch(columns, lake_schema(FEATURES))])


def fill_lake(lake: Path, files: Path) -> None:
    """Write rows of four days.

    The first day contains a friend of the user, the next two days contain rows of the user, and the
    last day contains neither. A back-fill wrote the third day. One file of the second day has
    columns with dictionary encoding.
    """
    files.mkdir()
    pq.write_table(rows_of(-1, OTHERS), files / "-1.parquet")
    for day in range(2):
        pq.write_table(rows_of(day, (USER, *OTHERS)), files / f"{day}.parquet")
    pq.write_table(rows_of(2, OTHERS, friend="bob"), files / "2.parquet")
    ingest(sorted(files.iterdir()), SHOP, lake=str(lake), replay=None, settings=IngestSettings())
    table = rows_of(0, (USER, *OTHERS), name="words")
    words = table.set_column(
        table.column_names.index("user"), "user", table["user"].dictionary_encode()
    )
    lists = table["friends"].combine_chunks()
    encoded = pa.ListArray.from_arrays(
        lists.offsets, lists.values.dictionary_encode(), mask=lists.is_null()
    )
    words = words.set_column(table.column_names.index("friends"), "friends", encoded)
    pq.write_table(words, lake / "day=2026-03-01" / "part-words.parquet")
    (lake / "day=2026-03-01" / "_unfinished.parquet").write_bytes(b"someone's")
    again = rows_of(1, (USER, *OTHERS), name="again")
    labels = pa.array([7, 7, 7, *again["label"].to_pylist()[3:]], pa.int32())
    pq.write_table(again.set_column(0, "label", labels), files / "again.parquet")
    tolerant = SHOP.with_settings({"extraction.max_malformed_fraction": 0.3})
    backfill([files / "again.parquet"], tolerant, lake=str(lake), day=date(2026, 3, 2))


def users_of_row(row: int) -> list[int]:
    """Return the user and two friends of a served row."""
    return [CATEGORY, 7, MISSING_CATEGORY] if row % 2 else [7, CATEGORY if row % 4 else 9, CATEGORY]


def run_monitor(folder: Path) -> None:
    """Run a monitor on requests of two users, so that lake, archive and state contain rows."""
    bench = Bench(folder, archive_roll_rows=40, **MONITORING)
    bench.clock.now = START + 3 * 86_400
    bench.start(SHOP)
    for number in range(24):
        name, now = f"served-{number}", bench.clock.now
        rows = {
            "dense": np.full((8, 1), number, np.float32),
            "scores": np.linspace(0, 1, 8, dtype=np.float32),
        }
        users = np.array([[number, *users_of_row(i)] for i in range(8)], np.int64)
        batch = PredictionBatch(
            request_id=name, time=now, model_version=1, categorical=users, **rows
        )
        bought = clicks(f"b-{name}", [(name, row, now + 2) for row in (1, 2)], CONVERSION)
        clicked = clicks(f"c-{name}", [(name, 3, now + 1), (name, 6, now + 1)])
        publish(bench.log, batch, clicked, bought, form=RecordFormat(FEATURES))
        bench.monitor.tick()
        bench.clock.now += 100.0 if number < 23 else 0.0
        if number == 12:
            bench.monitor.stop()
            Uploader(bench.settings.archive, folder / "lake", clock=bench.clock).run_once()
            bench.start(SHOP)
    bench.monitor.stop()
    write_rules(bench.settings.state, bench.settings.decisions)
    bench.kill()
    bench.log.close()
    for name in ("archive", "state"):
        (bench.folder / name).rename(folder / name)


def keep_learnt(
    store: Path, model_id: str, known: str, *, rare: tuple[str, ...] = (), day: str = "", **more
) -> None:
    """Store a model whose vocabulary of users has one user."""
    vocabularies = (np.array([5], np.int64), np.array([category_of(known)], np.int64))
    nothing, folder = np.empty(0, np.int64), model_folder(store, model_id) / Model.WORKFLOW
    workflow_of(vocabularies, FEATURES).save(folder)
    none = Candidates(categories=nothing, frequencies=nothing, last_seen=nothing)
    some = replace(none, categories=np.array([category_of(each) for each in rare], np.int64))
    save_columns(
        [
            Column(vocabulary=v, last_seen=v, candidates=c)
            for v, c in zip(vocabularies, (none, some))
        ],
        folder,
    )
    days = [{"day": day, "version": 0, "digest": "d", "num_rows": 1}] if day else []
    times = dict.fromkeys(("watermark", "last_event_time"), "2026-03-04T00:00:00Z")
    keep_model(store, model_id, recommender=SHOP, days=days, **times, **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every kind of file that can contain rows of a shop.

    The product's own code writes all files.
    """
    folder, gone = tmp_path_factory.mktemp("a shop"), tmp_path_factory.mktemp("gone")
    store = folder / "store"
    accept_into(store, SHOP)
    fill_lake(folder / "lake", gone / "files")
    for run, start, end in (
        ("r0", "2026-02-28", "2026-03-01"),
        ("r1", "2026-03-01", ""),
        ("r2", "2026-03-03", ""),
    ):
        flags = {"work": folder / "work", "lake": folder / "lake", "output": gone / f"{run}.json"}
        flags |= {
            "store": store,
            "run": run,
            "window-start": start,
            "settings": "extraction.replay_days=0",
        }
        flags |= {"window-end": end}
        assert extraction([f"--{name}={value}" for name, value in flags.items()]) == 0
    rows = pq.read_table(
        folder / "work" / "r1" / "extraction" / "train" / "part-00000.parquet"
    ).slice(0, 9)
    (gone / "rows").mkdir()
    pq.write_table(
        rows.append_column("quarantine_reason", pa.array(["a reason"] * 9)),
        gone / "rows" / "part.parquet",
    )
    store_quarantined("r1", gone / "rows", rows_folder(store, "r1"), num_rows=9)
    run_monitor(folder)
    keep_learnt(store, "m1", USER, day="2026-03-01")
    keep_learnt(store, "m2", "bob", parent_model_id="m1")
    keep_learnt(store, "m3", "bob", rare=(USER,))
    keep_learnt(store, "m4", "bob", day="2026-03-02")
    keep_learnt(store, "m5", "bob", day="2026-03-03")
    keep_learnt(store, "m6", "bob", day="2026-02-28")
    one, categories = np.ones(1, np.float32), np.array([[2, 9, 9, CATEGORY]])
    golden = GoldenRows(features=FEATURES, dense=one[:, None], categorical=categories, expected=one)
    golden.save(graph_folder(store, 1) / "golden.npz")
    shutil.copytree(graph_folder(store, 1), folder / "repository" / "shop" / "1")
    place = ServingTarget(
        repository_uri=(folder / "repository").as_uri(), triton_urls=[], server="python"
    )
    write_serving_target(store, place)
    make_live(store, release(store, 1, "m2"))
    record(
        folder / "incidents" / "one",
        state=folder / "state",
        archive=FolderObjects(folder / "archive"),
        store=store,
    )
    return folder


@pytest.fixture
def installation(made, tmp_path):
    return shutil.copytree(made, tmp_path / "the shop")


def forget(installation: Path, *more: str, user: str = USER) -> int:
    return main(
        [
            f"--user={user}",
            f"--store={installation / 'store'}",
            *(f"--{n}={installation / n}" for n in LOCATIONS),
            *more,
        ]
    )


def holders(installation: Path) -> set[str]:
    """Return the paths at which a row or the bytes of any file name the user."""
    found = set()
    for path in (
        path for each in SCANNED for path in (installation / each).rglob("*") if path.is_file()
    ):
        content, marks = (
            path.read_bytes(),
            (USER.encode(), CATEGORY.to_bytes(8, "little"), str(CATEGORY).encode()),
        )
        table = pq.ParquetFile(path).read() if content[:4] == b"PAR1" else pa.table({})
        users = table["user"].to_pylist() if "user" in table.column_names else []
        if "event" in table.column_names:
            # Files of outcomes contain no users. In served requests, the rows with odd numbers
            # belong to the user. The last request is not archived yet.
            users = [
                CATEGORY
                for row in table.to_pylist()
                if row["row"] % 2 and row["request_id"] != "served-23"
            ]
        for friends in table["friends"].to_pylist() if "friends" in table.column_names else []:
            users += friends or []
        if any(mark in content for mark in marks) or {USER, CATEGORY} & set(users):
            found |= {each for each in SCANNED if path.is_relative_to(installation / each)}
    return found


def rows_of_windows(installation: Path) -> int:
    """Return the user's rows in the monitor's stored windows."""
    with closing(sqlite3.connect(installation / "state" / "monitor.db")) as connection:
        held = connection.execute("SELECT requests FROM matured").fetchall()
        users = [unpack(MaturedRequests, packed).users for (packed,) in held]
    return int((np.concatenate(users) == CATEGORY).sum())


def others_rows(installation: Path) -> tuple[list[dict], list[str]]:
    """Return the other users' rows in the lake, and in archive, quarantine and late outcomes.

    The forgotten user is removed from the lists of friends.
    """

    def without_user(row: dict) -> dict:
        left = [each for each in row.get("friends") or [] if each != CATEGORY]
        return row | ({"friends": left or None} if "friends" in row else {})

    lake = folder_lake(installation / "lake")
    with MalformedRows(Path(os.devnull), max_fraction=1.0) as malformed:
        found = read_window(lake, malformed, features=FEATURES)
        read = [row for rows in found for row in rows.table.to_pylist()]
    paths = [
        p
        for place in ("archive", "store/quarantine", "lake/outcomes")
        for p in (installation / place).rglob("*.parquet")
    ]
    stored = [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]
    stored = [
        without_user(row)
        for row in stored
        if row.get("user", CATEGORY * (row["row"] % 2)) != CATEGORY
    ]
    return [without_user(row) for row in read if row["user"] != CATEGORY], sorted(map(str, stored))


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_no_file_names_forgotten_user_and_all_other_rows_are_unchanged(
    installation, kind, cloud_storage, capsys
):
    before, flags = others_rows(installation), []
    assert [len(rows) > 50 for rows in before] == [True, True]
    assert forget(installation) == 0
    assert "nothing was removed" in capsys.readouterr().out
    assert (others_rows(installation), holders(installation), rows_of_windows(installation)) == (
        before,
        set(SCANNED),
        7 * 4,
    )
    if kind == "bucket":
        put(installation / "lake")
        shutil.rmtree(installation / "lake")
        flags = [f"--lake={URI}"]
    assert forget(installation, "--yes", *flags) == 0
    for each in open_storage(URI).list() if flags else ():
        (installation / each.name.join(["lake/", ""])).parent.mkdir(parents=True, exist_ok=True)
        (installation / "lake" / each.name).write_bytes(open_storage(URI).read(each.name).content)
    assert (others_rows(installation), holders(installation), rows_of_windows(installation)) == (
        before,
        set(),
        0,
    )
    assert [path.name for path in (installation / "work").iterdir()] == ["r2"]
    assert forget(installation, "--yes") == 0
    assert "no row, outcome, incident or run contains the user" in capsys.readouterr().out


def test_models_trained_on_user_are_named_with_run_to_replace_them(installation, capsys):
    forget(installation)
    output = capsys.readouterr().out
    assert dict(
        line[6:].split(": ", 1) for line in output.splitlines() if line.startswith("model ")
    ) == {
        "m1": "its vocabulary contains the user; it was trained on 2026-03-01, whose rows "
        "contain the user",
        "m2 (live)": "it continues m1",
        "m3": "its list of rare categories contains the user",
        "m4": "it was trained on 2026-03-02, whose rows contain the user",
        "m6": "it was trained on 2026-02-28, whose rows contain the user",
    }
    assert output.count("golden rows of version 1, model m2: ") == 2
    assert "version 1 still contains the user, until a run from scratch is released:" in output
    assert (
        f"evergreen run --package build/retraining.yaml --folder '{installation}' --from-scratch"
        in output
    )
    assert "1 requests of the user are not archived yet" in output
    assert "not searched either: the event log's records and dead letters" in output
    keep_learnt(installation / "store", "m7", "bob")
    make_live(installation / "store", release(installation / "store", 2, "m7"))
    forget(installation)
    assert "the live version 2 was not trained on the user's rows" in capsys.readouterr().out


def test_live_version_contains_removed_user_until_full_run_is_live(installation, capsys):
    """The training of model m4 on the user is recorded only by rows in the registry.

    The first `forget` deletes these rows. A later `forget` must still report model m4.
    """
    store = installation / "store"
    make_live(store, release(store, 2, "m4"))
    assert forget(installation, "--yes") == 0
    assert "version 2 still contains the user, until" in capsys.readouterr().out

    keep_learnt(store, "m8", "bob", parent_model_id="m4")
    keep_learnt(store, "m9", "bob")
    for version, model, still in ((2, "m4", True), (3, "m8", True), (4, "m9", False)):
        if version > 2:
            make_live(store, release(store, version, model))
        for command in (lambda: forget(installation), lambda: print_models(store)):
            command()
            output = "".join(capsys.readouterr())
            assert (
                f"version {version} still contains a user whose rows were removed at 20" in output
            ) == still, output
            assert ("--from-scratch" in output) == still
    recorded = (store / "forgotten.jsonl").read_text()
    assert "m4" in recorded
    assert USER not in recorded
    assert str(CATEGORY) not in recorded


def test_command_names_package_that_is_there_or_first_how_to_compile_it(
    installation, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    forget(installation)
    output = capsys.readouterr().out
    assert "  evergreen compile --output build/retraining.yaml\n" in output
    (installation / "retraining.yaml").write_text("compiled")
    forget(installation)
    output = capsys.readouterr().out
    assert "evergreen compile" not in output
    assert shlex.join(["run", "--package", str(installation / "retraining.yaml")]) in output


def test_restore_killed_repeatedly_leaves_complete_files_and_continues(installation):
    """Kill the command before its third rename, then its fourth, and then its third again."""
    before, kills = others_rows(installation), 0
    while True:
        with Kill(2 + kills % 2).watch(os, "replace", "rename", "unlink"):
            assert forget(installation, "--yes") == 0
            break
        kills += 1
        assert others_rows(installation)[0] == before[0]
        if (incident := installation / "incidents" / "one").exists():
            replay(incident)  # A replay fails if a file of the incident is absent.
    assert kills > 20
    assert (others_rows(installation), holders(installation)) == (before, set())
    assert [
        path.name for name in ("work", "incidents") for path in (installation / name).iterdir()
    ] == ["r2"]


@pytest.mark.parametrize(
    ("user", "output"), [("nobody", "no row"), ("", "user is '', expected a string")]
)
def test_unknown_user_is_found_nowhere_and_changes_nothing(installation, capsys, user, output):
    before = {path: path.read_bytes() for path in installation.rglob("*") if path.is_file()}
    assert forget(installation, "--yes", user=user) == (0 if user else 2)
    assert output in "".join(capsys.readouterr())
    assert {path: path.read_bytes() for path in before} == before

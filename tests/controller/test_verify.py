"""Tests of verification: a version's logged scores are compared with float64 NumPy."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller import verify as module
from controller.verify import main, verify
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import Model, Release
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.registry.models import DATA_FILE, graph_sha256, model_folder, release_path
from evergreen.registry.promotion_journal import read_entries
from evergreen.serving.parity import GoldenRows
from evergreen.storage.folder import FolderObjects
from evergreen.storage.uris import local_path, open_objects
from testing.recommenders import SHOP, arrays_of
from tests.support.deployments import release

VERSION = 1
NUM_ROWS = 300


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(module, "BATCH_ROWS", 50)


@pytest.fixture
def store(unserved):
    return unserved.store


@pytest.fixture
def released(unserved, make_candidate):
    """Publishes the model of `seed` and returns the release."""
    return lambda seed=1: release(*make_candidate(unserved.store, seed), settings=unserved)


@pytest.fixture
def reference_scores(make_parts, store):
    """Computes reference scores [n] of a table's rows by the stored model of a release."""

    def scores(done, table):
        folder = model_folder(store, done.model_id)
        model = Model.read(folder / Model.MANIFEST)
        workflow = FeatureWorkflow.load(folder / Model.WORKFLOW)
        _, toy = make_parts(model.seed)
        return toy.scores(workflow, *arrays_of(table)).astype(np.float32)

    return scores


def logged(table, version, scores):
    """Return the table as the monitor archives it, with the version and score of each row."""
    for name, values in (
        (raw_rows.MODEL_VERSION, np.asarray(version, np.int32)),
        (raw_rows.SCORE, scores),
    ):
        at = table.schema.get_field_index(name)
        column = pa.array(np.broadcast_to(values, table.num_rows)).cast(
            table.schema.field(name).type
        )
        table = table.set_column(at, name, column)
    return table


@pytest.fixture
def lake(tmp_path, raw_table, reference_scores):
    """Two days of rows with reference scores.

    `change(scores)` modifies the logged scores of the second file.
    """

    def make(done, change=lambda scores: scores):
        folder = tmp_path / "a lake"
        for day, seed in ((1, 21), (2, 22)):
            table = raw_table(NUM_ROWS // 2, seed=seed)
            scores = reference_scores(done, table)
            part = folder / f"day=2026-01-0{day}"
            part.mkdir(parents=True)
            table = logged(table, done.version, change(scores) if day == 2 else scores)
            pq.write_table(table, part / "part-a.parquet", row_group_size=64)
            # Some of these rows name a version that was never valid. Other rows name no version, or
            # are in unfinished files.
            other = logged(raw_table(80, seed=seed + 100), done.version + 7, np.float32(0.5))
            pq.write_table(other, part / "part-b.parquet")
            pq.write_table(raw_table(40, seed=seed + 200), part / "simulated.parquet")
            (part / ".part-c.parquet.aside").write_bytes(b"half a file")
            (part / "_half.parquet").write_bytes(b"half a file")
        return folder

    return make


def run(capsys, *words):
    code = main([str(word) for word in words])
    return code, capsys.readouterr()


def test_answers_are_recomputed_within_millionth(released, lake, store, tmp_path):
    done = released()
    found = verify(VERSION, store, FolderObjects(lake(done)))
    assert found.same
    assert (found.num_rows, found.num_files, found.num_different) == (NUM_ROWS, 2, 0)
    assert 0 <= found.max_abs_diff <= 1e-6
    assert found.first_difference is None
    assert verify(VERSION, store, FolderObjects(tmp_path / "a lake"), limit=200).num_rows == 200
    assert {check.name: check.passed for check in found.checks} == {
        "journal": True,
        "data": True,
        "workflow": True,
        "weights": True,
        "graph": True,
        "graph exported again": True,
        "golden rows": True,
    }


def test_first_differing_row_is_named_with_its_values_and_both_scores(
    released, lake, store, raw_table, capsys
):
    done = released()

    def change(scores):
        scores[[70, 90]] += np.float32(2e-5)
        return scores

    folder = lake(done, change)
    code, said = run(capsys, VERSION, "--store", store, "--lake", folder)
    assert code == 1
    assert (
        "300 logged rows of 2 files scored again, 2 differ by more than 1e-06; largest difference "
        "2e-05" in said.out
    )
    first = verify(VERSION, store, FolderObjects(folder)).first_difference
    assert (first.file, first.position, first.request_id, first.row) == (
        "day=2026-01-02/part-a.parquet",
        70,
        "request-22-7",
        0,
    )
    assert first.logged - first.recomputed == pytest.approx(2e-5, abs=1e-6)
    dense, categorical = arrays_of(raw_table(NUM_ROWS // 2, seed=22).slice(70, 1))
    expected = dict(zip(SHOP.features.numeric, dense[0].tolist()))
    expected |= dict(zip(SHOP.features.position_names, categorical[0].tolist()))
    missing = (MISSING_CATEGORY, None)
    assert first.values == {
        name: None if value in missing or np.isnan(value) else value
        for name, value in expected.items()
    }
    assert None in first.values.values()
    assert f"request-22-7 row 0: logged {first.logged}, recomputed {first.recomputed}" in said.out


@pytest.mark.parametrize("score", [np.nan, None], ids=["not a number", "no score"])
def test_row_without_score_differs(released, lake, store, score):
    done = released()
    folder = lake(done)
    path = folder / "day=2026-01-01" / "part-a.parquet"
    table = pq.read_table(path)
    scores = table[raw_rows.SCORE].to_pylist()
    scores[3] = score
    at = table.schema.get_field_index(raw_rows.SCORE)
    pq.write_table(table.set_column(at, raw_rows.SCORE, pa.array(scores, pa.float32())), path)
    found = verify(VERSION, store, FolderObjects(folder))
    assert (found.num_different, found.max_abs_diff) == (1, None)
    assert (found.first_difference.position, found.first_difference.logged) == (3, None)
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_rows_of_other_versions_are_neither_read_nor_evaluated(released, lake, store):
    done = released()
    folder = lake(done)
    seen = list(module.read_logged_rows(FolderObjects(folder), done.version + 7, SHOP.features))
    assert sum(len(rows.positions) for rows in seen) == 160
    assert {rows.file.rpartition("/")[2] for rows in seen} == {"part-b.parquet"}
    assert verify(VERSION, store, FolderObjects(folder)).num_rows == NUM_ROWS


def test_scores_of_shadow_are_recomputed_too(released, lake, store, raw_table, reference_scores):
    done = released()
    folder = lake(done)
    table = logged(raw_table(100, seed=9), done.version + 7, np.float32(0.5))
    shadow = reference_scores(done, table)
    shadow[60] += np.float32(0.01)
    of_version = pa.array([VERSION] * 100, pa.int32(), mask=np.arange(100) < 50)
    table = table.append_column(raw_rows.SHADOW_VERSION, of_version)
    table = table.append_column(raw_rows.SHADOW_SCORE, pa.array(shadow, mask=np.arange(100) < 50))
    pq.write_table(table, folder / "day=2026-01-02" / "part-0.parquet")
    found = verify(VERSION, store, FolderObjects(folder))
    assert (found.num_rows, found.num_different) == (NUM_ROWS + 50, 1)
    assert (found.first_difference.file, found.first_difference.position) == (
        "day=2026-01-02/part-0.parquet",
        60,
    )


def _spoil(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _stored_graph(done):
    return local_path(done.graph_uri)


@pytest.mark.parametrize(
    ("tamper", "differing"),
    [
        (lambda store, done: _spoil(_stored_graph(done)), {"graph"}),
        (lambda store, done: _stored_graph(done).unlink(), {"graph"}),
        (
            lambda store, done: _spoil(
                _largest(model_folder(store, done.model_id) / Model.WEIGHTS)
            ),
            {"weights", "graph exported again"},
        ),
        (
            lambda store, done: _spoil(
                _largest(model_folder(store, done.model_id) / Model.WORKFLOW)
            ),
            {"workflow", "graph exported again"},
        ),
        (
            lambda store, done: dataclasses.replace(
                Model.read(model_folder(store, done.model_id) / Model.MANIFEST),
                raw_digest="other rows",
            ).write(model_folder(store, done.model_id) / Model.MANIFEST),
            {"data"},
        ),
    ],
    ids=[
        "a flipped bit in the graph",
        "the graph is gone",
        "a flipped bit in a weight file",
        "in the workflow",
        "data",
    ],
)
def test_tampering_is_named_and_rows_are_still_evaluated_by_valid_parts(
    released, lake, store, capsys, tamper, differing
):
    done = released()
    folder = lake(done)
    tamper(store, done)
    code, said = run(capsys, VERSION, "--store", store, "--lake", folder, "--json")
    assert code == 1
    found = json.loads(said.out)
    assert {check["name"] for check in found["checks"] if check["passed"] is False} == differing
    assert (found["same"], found["num_rows"], found["num_different"]) == (False, NUM_ROWS, 0)


def test_manifest_rewritten_to_match_tampered_graph_contradicts_journal(released, lake, store):
    done = released()
    folder = lake(done)
    _spoil(_stored_graph(done).with_name(DATA_FILE))
    forged = {**done.sha256, "graph": graph_sha256(_stored_graph(done).parent)}
    dataclasses.replace(done, sha256=forged).write(release_path(store, VERSION))
    passed = {
        check.name: check.passed for check in verify(VERSION, store, FolderObjects(folder)).checks
    }
    assert passed["journal"] is False
    assert passed["graph exported again"] is False


def test_golden_rows_that_graph_does_not_answer_are_named(released, lake, store):
    done = released()
    folder = lake(done)
    path = _stored_graph(done).with_name("golden.npz")
    with np.load(path) as arrays:
        golden = dict(arrays)
    golden["expected"][5] += np.float32(0.01)
    np.savez(path, **golden)
    (check,) = [
        c for c in verify(VERSION, store, FolderObjects(folder)).checks if c.passed is False
    ]
    assert check.name == "golden rows"
    assert "row 5" in check.detail


def test_golden_rows_that_hold_and_are_not_released_ones_are_named(released, lake, store):
    done = released()
    folder = lake(done)
    GoldenRows.load(_stored_graph(done).with_name("golden.npz")).take(slice(5)).save(
        _stored_graph(done).with_name("golden.npz")
    )
    (check,) = [
        c for c in verify(VERSION, store, FolderObjects(folder)).checks if c.passed is False
    ]
    assert (check.name, "as in the release" in check.detail) == ("golden rows", True)


def test_moved_store_is_verified_at_its_new_path(released, lake, store):
    folder = lake(released())
    moved = store.rename(store.with_name("restored"))
    found = verify(VERSION, moved, FolderObjects(folder))
    assert found.same, found.checks
    assert found.num_rows == NUM_ROWS


def test_answers_of_version_that_was_withdrawn_again_are_verified(
    lake, store, unserved, make_candidate
):
    def fail(step_name):
        if step_name == "config written":
            raise OSError("the power went")

    candidate = make_candidate(store, 1)
    with pytest.raises(OSError, match="the power went"):
        release(*candidate, settings=dataclasses.replace(unserved, checkpoint=fail))
    assert [entry.action for entry in read_entries(store)] == ["intent", "withdrawn"]
    found = verify(VERSION, store, FolderObjects(lake(Release.read(release_path(store, VERSION)))))
    assert (found.same, found.num_rows) == (True, NUM_ROWS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["9"], "version 9 was never released"),
        (["1", "--tolerance", "-1"], "tolerance is -1.0, expected at least 0"),
        (["1", "--tolerance", "nan"], "tolerance is nan"),
        (["1", "--limit", "0"], "limit is 0, expected at least 1"),
    ],
)
def test_misuse_is_one_clear_line(released, lake, store, capsys, words, message):
    code, said = run(capsys, *words, "--store", store, "--lake", lake(released()))
    assert code == 2
    assert said.err.startswith(f"error: {message}")
    assert len(said.err.splitlines()) == 1


def test_lake_without_its_rows_or_with_corrupt_file_proves_nothing(
    released, lake, store, tmp_path, capsys
):
    done = released()
    (tmp_path / "empty").mkdir()
    code, said = run(capsys, VERSION, "--store", store, "--lake", tmp_path / "empty")
    assert code == 2
    assert "was scored by version 1, expected logged rows" in said.err
    folder = lake(done)
    path = folder / "day=2026-01-02" / "part-a.parquet"
    path.write_bytes(path.read_bytes()[:-60])
    code, said = run(capsys, VERSION, "--store", store, "--lake", folder)
    assert code == 2
    assert "part-a.parquet is not a readable Parquet file" in said.err


def test_lake_in_bucket_proves_what_same_lake_in_folder_does(
    released, lake, store, cloud_storage, tmp_path, capsys
):
    folder = lake(released(), lambda scores: np.where(np.arange(len(scores)) == 7, 0.5, scores))
    objects = open_objects("gs://models/lake")
    for path in folder.rglob("*.parquet"):
        objects.write(path.relative_to(folder).as_posix(), path)
    answers = [
        run(capsys, VERSION, "--store", store, "--lake", where, "--json")
        for where in (folder, objects.uri)
    ]
    assert [code for code, _ in answers] == [1, 1]
    assert answers[1][1].out == answers[0][1].out
    assert (
        json.loads(answers[1][1].out)["first_difference"]["file"] == "day=2026-01-02/part-a.parquet"
    )
    cloud_storage.fail(lambda request: True, "status", status=403, message="no access", times=10**6)
    code, said = run(capsys, VERSION, "--store", store, "--lake", objects.uri)
    assert (code, said.out) == (3, "")
    assert "no access" in said.err


def _largest(folder):
    return max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )

"""Tests that the parity check compares the right scores, and rejects differences."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from evergreen.registry.models import DATA_FILE
from evergreen.runtime.errors import ContractError
from evergreen.serving.parity import (
    GoldenRows,
    check_scores,
    open_graph,
    prove_parity,
    read_held_out,
)
from testing.paths import REPOSITORY
from testing.recommenders import SHOP, shop_with
from tests.support.errors import raises
from tests.support.rounded import rounded


@pytest.fixture
def candidate(make_candidate, tmp_path):
    return make_candidate(tmp_path / "store", 1)


def test_parity_holds_against_independent_scores(candidate, exported):
    model, verdict, raw = candidate
    rows = read_held_out(raw, verdict)
    assert len(rows) == raw.num_holdout_rows
    assert np.isnan(rows.dense).any()
    assert (rows.categorical == -1).any()
    assert 0 <= prove_parity(open_graph(exported(model)), rows) <= 1e-6


@pytest.mark.parametrize("numbers", ["float16", "int8"])
def test_rounded_table_is_proven_by_scores_of_it(
    make_candidate, make_parts, exported, numbers, tmp_path
):
    workflow, toy = make_parts(1, embedding_dim=128)
    model, verdict, raw = make_candidate(tmp_path / "store", 1, parts=(workflow, toy))
    rows, plain = read_held_out(raw, verdict), exported(model)
    graph = exported(
        dataclasses.replace(model, recommender=shop_with(release={"tables": numbers})), numbers
    )
    as_served = dataclasses.replace(toy, table=rounded(toy.table, numbers))
    expected = as_served.scores(workflow, rows.dense, rows.categorical).astype(np.float32)
    assert (
        0 <= prove_parity(open_graph(graph), dataclasses.replace(rows, expected=expected)) <= 1e-6
    )
    assert np.abs(expected - rows.expected).max() > 2e-5
    with raises(ContractError, "graph", "differs"):
        prove_parity(open_graph(graph), rows)
    assert graph.with_name(DATA_FILE).stat().st_size < plain.with_name(DATA_FILE).stat().st_size


def test_open_graph_looks_nothing_up_and_leaves_nothing_in_home_folder(
    candidate, exported, tmp_path
):
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    graph, trace = exported(candidate[0]), tmp_path / "trace"
    command = (
        "import sys; from pathlib import Path; from evergreen.serving.parity import "
        "open_graph as o; "
    )
    command += "[print(each.name) for each in o(Path(sys.argv[1])).get_inputs()]"
    (tmp_path / "home").mkdir()
    variables = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(REPOSITORY)}
    variables.pop("ORT_DISABLE_TELEMETRY", None)  # the Makefile sets ORT_DISABLE_TELEMETRY
    tracing = ["strace", "-f", "-e", "trace=%network", "-o", trace]
    done = subprocess.run(
        [*tracing, sys.executable, "-c", command, graph],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "dense" in done.stdout.split()
    assert "AF_INET" not in trace.read_text()
    assert list((tmp_path / "home").rglob("*")) == []


def test_holdout_rows_keep_their_order_across_files_and_stop_at_limit(candidate, raw_rows):
    _, verdict, raw = candidate
    dense, categorical = raw_rows(60, 1)
    rows = read_held_out(raw, verdict, max_rows=40)
    np.testing.assert_array_equal(rows.dense, dense[:40])
    np.testing.assert_array_equal(rows.categorical, categorical[:40])


@pytest.mark.parametrize(
    "off", [2e-5, -0.3, np.nan], ids=["just too much", "wrong", "not a number"]
)
def test_score_that_differs_is_refused_with_its_row_and_values(
    candidate, with_scores, tmp_path, exported, off
):
    model, verdict, raw = candidate

    def change(scores):
        scores[37] += np.float32(off)
        return scores

    rows = read_held_out(raw, with_scores(verdict, change, tmp_path))
    with raises(ContractError, "graph", "row 37", "at most 1e-05", "'seen/1'"):
        prove_parity(open_graph(exported(model)), rows)


@pytest.mark.parametrize("length", [0, 59, 61])
def test_scores_of_other_rows_are_refused_and_empty_holdout_proves_nothing(
    candidate, with_scores, tmp_path, length
):
    _, verdict, raw = candidate
    other = with_scores(verdict, lambda s: np.resize(s, length), tmp_path)
    with raises(ContractError, f"{length} rows", "expected 60"):
        read_held_out(raw, other)
    if length == 0:
        with raises(ContractError, "at least 1"):
            read_held_out(dataclasses.replace(raw, num_holdout_rows=0), other)


def test_lost_and_corrupt_holdout_scores_and_golden_rows_are_named(candidate, tmp_path):
    _, verdict, raw = candidate
    with raises(ContractError, "absent.npz", "read"):
        read_held_out(raw, dataclasses.replace(verdict, scores_uri="/nowhere/absent.npz"))
    with raises(ContractError, "golden rows", "read"):
        GoldenRows.load(tmp_path / "golden.npz")
    path = tmp_path / "hold out 1" / "part-1.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    with raises(ContractError, "part-1.parquet", "readable"):
        read_held_out(raw, verdict)
    path.unlink()
    with raises(ContractError, "30 holdout rows", "expected 60"):
        read_held_out(raw, verdict)


def test_golden_rows_survive_disk_and_are_spread_over_holdout(candidate, tmp_path):
    _, verdict, raw = candidate
    golden = read_held_out(raw, verdict).sample(10)
    assert len(golden) == 10
    golden.save(tmp_path / "golden.npz")
    again = GoldenRows.load(tmp_path / "golden.npz")
    np.testing.assert_array_equal(again.dense, golden.dense)
    assert check_scores(again.expected, golden, source="copy") == 0


def test_golden_rows_corrupt_anywhere_are_refused_or_read_as_they_were(candidate, tmp_path):
    _, verdict, raw = candidate
    golden, path = read_held_out(raw, verdict).sample(3), tmp_path / "golden.npz"
    golden.save(path)
    whole, refused = path.read_bytes(), 0
    variants = [whole[:at] for at in range(0, len(whole), 37)]
    variants += [
        whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        for at in range(len(whole))
        for bit in (1, 8)
    ]
    for corrupt in variants:
        path.write_bytes(corrupt)
        try:
            again = GoldenRows.load(path)
        except ContractError:
            refused += 1
        else:
            np.testing.assert_array_equal(again.dense, golden.dense)
            np.testing.assert_array_equal(again.categorical, golden.categorical)
            np.testing.assert_array_equal(again.expected, golden.expected)
    assert refused > len(variants) / 2


def test_arrays_that_are_no_golden_rows_are_refused(tmp_path):
    path = tmp_path / "golden.npz"
    names = {"features": np.array(json.dumps(dataclasses.asdict(SHOP.features)))}
    dense, categorical = np.zeros((2, 1), np.float32), np.zeros((2, 8), np.int64)
    np.savez(path, dense=dense, categorical=categorical, expected=np.zeros(2), **names)
    with raises(ContractError, (2, 1), "expected", (2, 2)):
        GoldenRows.load(path)

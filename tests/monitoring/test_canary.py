"""Tests of a canary next to the serving version: the canary's rows are used in no decision."""

import dataclasses

import numpy as np
import pytest

from evergreen.contracts.raw_rows import raw_types
from evergreen.contracts.records import Predictions
from evergreen.rows.archived_rows import arrow_schema
from monitoring.state.archive import build_row_table
from testing.recommenders import SHOP
from tests.support.monitors import START, WINDOW, prediction
from tests.support.record_messages import decode, encode

SCHEMA = arrow_schema(raw_types(SHOP.features))


def by_canary(name, *, time, version=2):
    return dataclasses.replace(prediction(name, time=time, version=version), canary=True)


def archived(*batches):
    requests = Predictions.of(batches)
    return build_row_table(requests, np.zeros(requests.num_rows, np.uint8), SHOP.features)


@pytest.fixture
def beside(bench):
    """A bench whose monitor has read a prediction of version 1, then a prediction of a canary."""
    b = bench()
    b.start()
    b.tick(prediction("s", time=START), by_canary("c", time=START + 1))
    return b


@pytest.mark.parametrize("restart", [False, True])
def test_canary_is_not_version_that_serves_however_new_its_answers(beside, restart):
    beside.tick(at=START + WINDOW + 10)
    if restart:
        beside.start()
    assert beside.monitor.serving_version == 1
    assert set(beside.monitor.windows.versions) == {1, 2}, (
        "the canary's rows must have a window too"
    )


def test_canary_serves_once_promoted_and_late_records_do_not_revert_that(beside):
    beside.clock.now += 5
    beside.tick(
        prediction("promoted", time=START + 4, version=2), by_canary("late", time=START + 2)
    )
    assert beside.monitor.serving_version == 2
    beside.start()
    assert beside.monitor.serving_version == 2


def test_version_of_newest_prediction_serves_even_after_rollback(started):
    b = started()
    b.tick(
        prediction("new", time=START + 3, version=2),
        prediction("late", time=START + 2, version=1),
        at=START + 5,
    )
    assert b.monitor.serving_version == 2
    b.tick(prediction("rolled back", time=START + 4, version=1))
    assert b.monitor.serving_version == b.start().serving_version == 1


def test_events_distinguish_canary_from_serving_version(beside):
    seen = {e["version"]: e["text"] for e in beside.events if e["kind"] == "version_seen"}
    assert seen == {1: "model version 1 serves", 2: "model version 2 takes a share of the traffic"}


def test_ranked_list_is_no_pair_because_arm_that_served_it_chose_its_rows():
    """A ranked list contains the rows to which the serving model gave the highest scores.

    A choice of rows by one model biases a comparison of two models. If two models are equally good
    and one of them serves the best ten of 200 rows, the AUC of the other model is higher by 0.04.
    """
    shadow = np.array([0.25, 0.5, 0.75], np.float32)
    scored = dataclasses.replace(prediction("scored", 3), shadow_version=9, shadow_scores=shadow)
    ranked = dataclasses.replace(
        scored, request_id="ranked", positions=np.arange(1, 4, dtype=np.int32)
    )
    table = archived(ranked, scored)
    assert table["request_id"].to_pylist() == ["ranked"] * 3 + ["scored"] * 3
    assert table["shadow_version"].to_pylist() == [None, None, None, 9, 9, 9]
    assert table["shadow_score"].to_pylist() == [None, None, None, 0.25, 0.5, 0.75]
    alone = archived(ranked).schema
    assert alone.names == SCHEMA.names, (
        "the file must have no shadow columns, because no row has two comparable scores"
    )
    assert decode(encode(ranked)).shadow_scores.tolist() == shadow.tolist(), (
        "the log must contain the shadow scores"
    )

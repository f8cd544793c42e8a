"""Tests of the client: rows by name go in, scores and lists come out, and all of it is logged."""

import asyncio
import threading
from dataclasses import replace
from functools import partial

import grpc
import numpy as np
import pyarrow as pa
import pytest

from evergreen.config.features import (
    MISSING_CATEGORY,
    CategoricalOptions,
    Features,
    ListOptions,
    category_of,
)
from evergreen.config.spec import Recommender
from evergreen.contracts.records import OutcomeBatch, PredictionBatch
from evergreen.runtime.errors import ContractError, TemporaryError
from inference_client import (
    Outcome,
    PublisherSettings,
    RecommenderClient,
    SyncRecommenderClient,
    Unpublished,
)
from inference_client.errors import BadReply, ModelAbsent, ServerUnavailable
from inference_client.recommender import RequestIds, _candidate_rows
from inference_client.rows import FeatureRows, feature_rows
from inference_client.scoring import ClientSettings, Scored, shadow_of
from inference_client.timing import Timing
from testing.recommenders import SHOP, accept_into
from tests.support.errors import raises

connect = partial(RecommenderClient, recommender=SHOP)
connect_sync = partial(SyncRecommenderClient, recommender=SHOP)
SMALL = Recommender(
    name="shop", features=Features(numeric=("price",), categorical=("item", "user"))
)


def by_name(dense, categorical):
    """Return the rows as an application has them: lists by column, None if missing."""
    columns = {
        name: [None if np.isnan(v) else v for v in dense[:, i].tolist()]
        for i, name in enumerate(SHOP.features.numeric)
    }
    columns |= {
        name: [None if v < 0 else v for v in categorical[:, i].tolist()]
        for i, name in enumerate(SHOP.features.categorical)
    }
    for name, (start, stop, _) in zip(SHOP.features.lists, SHOP.features.positions.lists):
        columns[name] = [
            [v for v in row if v >= 0] or None for row in categorical[:, start:stop].tolist()
        ]
    return columns


def as_dicts(columns):
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def as_text(value):
    """Return a category, or each element of a list, as text."""
    if isinstance(value, list):
        return [str(each) for each in value]
    return None if value is None else str(value)


class OwnScorer:
    """Scores by a known function. The test decides when the shadow scores are complete."""

    def __init__(self, score_rows, shadow=None):
        self.score_rows, self.shadow, self.calls = score_rows, shadow, []

    async def score(self, dense, categorical, *, request_id=None, key=None):
        self.calls.append((request_id, key))
        scores = self.score_rows(dense, categorical)
        shadow = None if self.shadow is None else asyncio.ensure_future(self._shadow_of(1 - scores))
        return Scored(scores, 3, canary=self.shadow is not None, shadow=shadow)

    async def _shadow_of(self, scores):
        await self.shadow.wait()
        return Scored(scores, 4)


class LostLog:
    """A log that accepts no message. The event `began` is set at the first attempt to publish."""

    def __init__(self):
        self.began = threading.Event()

    def publish(self, messages):
        self.began.set()
        raise TemporaryError("the disk is gone")

    def close(self):
        pass


def predictions(records):
    return [record for record in records if isinstance(record, PredictionBatch)]


def outcomes(records):
    batches = [record for record in records if isinstance(record, OutcomeBatch)]
    return [
        (name, int(row), batch.event)
        for batch in batches
        for name, row in zip(batch.request_ids, batch.rows)
    ]


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log.db"


FORMS = {
    "columns": lambda columns: columns,
    "dicts": as_dicts,
    "texts": lambda columns: {
        name: [as_text(v) for v in values] if name not in SHOP.features.numeric else values
        for name, values in columns.items()
    },
    "table": pa.table,
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_by_name_are_scored_and_logged_in_form_of_model(
    server, log, make_rows, score_rows, read_log, form
):
    server.scoring.version = 7
    dense, categorical = make_rows(5)
    rows = FORMS[form](by_name(dense, categorical))

    async def talk():
        async with connect(server.url, log=f"sqlite:///{log}") as client:
            return await client.score(rows, request_id="r1")

    scored = asyncio.run(talk())
    np.testing.assert_array_equal(scored.scores, score_rows(dense, categorical))
    assert (scored.request_id, scored.model_version, scored.canary, scored.logged) == (
        "r1",
        7,
        False,
        True,
    )
    [record] = read_log(log)
    assert (record.request_id, record.model_version, record.time) == ("r1", 7, scored.time)
    assert (record.positions, record.propensities) == (None, None)
    assert (record.recommender, record.recommender_digest) == (
        SHOP.name,
        SHOP.digest,
    )
    for name, expected in (
        ("dense", dense),
        ("categorical", categorical),
        ("scores", scored.scores),
    ):
        np.testing.assert_array_equal(getattr(record, name), expected)


def test_request_with_missing_probabilities_fails_and_is_logged(
    server, log, make_rows, score_rows, read_log
):
    server.scoring.reply_scores = lambda scores: np.where(
        np.arange(5)[:, None] % 2, scores, np.float32([[np.nan]])
    )
    dense, categorical = make_rows(5)

    async def talk():
        async with connect(server.url, log=f"sqlite:///{log}") as client:
            for logged in (True, False):
                with raises(BadReply, "3 scores", [0, 1], "nan"):
                    await client.score(
                        by_name(dense, categorical), request_id=f"r{logged}", log=logged
                    )

    asyncio.run(talk())
    [record] = read_log(log)
    assert record.request_id == "rTrue"
    expected = np.where(np.arange(5) % 2, score_rows(dense, categorical), np.nan)
    np.testing.assert_array_equal(record.scores, expected.astype(np.float32))


def test_log_of_ranking_contains_shown_items_and_click(
    server, log, make_rows, score_rows, read_log
):
    dense, categorical = make_rows(30, seed=1)
    rows = by_name(dense, categorical)
    items = {name: values for name, values in rows.items() if name not in ("price", "item")}
    user = {name: [None] for name in SHOP.features.names}
    user |= {"price": [3.0], "item": ["255"], "shop": [9]}
    dense[:, 0], categorical[:, 0] = 3.0, 255
    categorical[:, 1] = np.where(categorical[:, 1] < 0, 9, categorical[:, 1])
    expected = score_rows(dense, categorical)
    best = np.argsort(-expected, kind="stable")[:4]

    async def talk():
        async with connect(server.url, log=f"sqlite:///{log}") as client:
            ranking = await client.rank(items, 4, context=user, key="user 1")
            client.report(Outcome(request_id=ranking.request_id, row=2))
            client.report(Outcome(request_id=ranking.request_id, row=2, event="conversion"))
            return ranking

    ranking = asyncio.run(talk())
    np.testing.assert_array_equal(ranking.candidates, best)
    np.testing.assert_array_equal(ranking.scores, expected[best])
    records = read_log(log)
    [record] = predictions(records)
    assert (record.request_id, record.propensities) == (ranking.request_id, None)
    assert record.positions.tolist() == ranking.positions.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(record.scores, expected[best])
    np.testing.assert_array_equal(record.categorical, categorical[best])
    assert sorted(outcomes(records)) == [
        (ranking.request_id, 2, "click"),
        (ranking.request_id, 2, "conversion"),
    ]


def test_explored_list_is_shown_and_logged_in_its_order_with_its_odds(
    server, log, make_rows, score_rows, read_log
):
    dense, categorical = make_rows(30, seed=1)
    scores = score_rows(dense, categorical)
    best = np.argsort(-scores, kind="stable")[:4]
    chances = iter([0.31, 0.29])

    async def talk():
        timing = Timing(uniform=lambda: next(chances))
        async with connect(server.url, log=f"sqlite:///{log}", timing=timing) as client:
            rows = FeatureRows(dense=dense, categorical=categorical)
            stayed, swapped = [await client.rank(rows, 4, explore=0.3) for _ in range(2)]
            client.report(Outcome(request_id=swapped.request_id, row=2))
            return stayed, swapped

    stayed, swapped = asyncio.run(talk())
    np.testing.assert_array_equal(stayed.candidates, best)
    np.testing.assert_allclose(stayed.propensities, [0.9, 0.8, 0.8, 0.9])
    np.testing.assert_array_equal(swapped.candidates, best[[0, 1, 3, 2]])
    np.testing.assert_array_equal(swapped.scores, scores[best[[0, 1, 3, 2]]])
    np.testing.assert_allclose(swapped.propensities, [0.9, 0.8, 0.1, 0.1])
    records = read_log(log)
    of_swapped = next(
        record for record in predictions(records) if record.request_id == swapped.request_id
    )
    np.testing.assert_array_equal(of_swapped.propensities, swapped.propensities)
    assert of_swapped.positions.tolist() == [1, 2, 3, 4]
    clicked = outcomes(records)[0][1]
    np.testing.assert_array_equal(of_swapped.dense[clicked], dense[best[3]])


def test_without_exploration_order_equals_that_of_scores_for_certain(server, make_rows):
    assert rank(server, make_rows(9), 3).propensities.tolist() == [1.0, 1.0, 1.0]


def rank(server, rows, k, **settings):
    async def run():
        async with connect(server.url, log=None, settings=ClientSettings(**settings)) as client:
            return await client.rank(FeatureRows(dense=rows[0], categorical=rows[1]), k)

    return asyncio.run(run())


def test_equal_scores_keep_input_order_and_short_list_is_ranked_completely(server, make_rows):
    server.scoring.reply_scores = lambda scores: np.round(scores, 1)
    ranking = rank(server, make_rows(500), 600)
    assert sorted(ranking.candidates) == list(range(500))
    assert (np.diff(ranking.scores) <= 0).all()
    for score in np.unique(ranking.scores):
        assert (np.diff(ranking.candidates[ranking.scores == score]) > 0).all()


@pytest.mark.parametrize(
    ("n", "k", "text"), [(5, 0, "k is 0"), (5, 5000, "k is 5000"), (0, 3, "no candidates")]
)
def test_impossible_lists_are_refused(server, make_rows, n, k, text):
    with pytest.raises(ContractError, match=text):
        rank(server, make_rows(n), k)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            {"price": [1.0], "item": ["red"]},
            "column item, row 0 is 'red', expected a whole number of 64 bits",
        ),
        (
            {"price": [1.0, "x"], "item": [1, 2]},
            "column price, row 1 is 'x', expected a finite number",
        ),
        (
            {"price": ["1", "1.5"], "item": [1, 2]},
            "column price, row 0 is '1', expected a finite number",
        ),
        (
            {"price": [None, np.int64(2), "y"], "item": [1, 2, 3]},
            "column price, row 2 is 'y', expected a finite number",
        ),
        ({"price": [1.0, np.inf], "item": [1, 2]}, "column price, row 1 is inf"),
        ({"price": [1.0, 10**400], "item": [1, 2]}, "column price, row 1 is 1000"),
        (
            pa.table({"price": [1.0], "item": ["red"]}),
            "column item, row 0 is 'red', expected a whole number of 64 bits",
        ),
        (
            pa.table({"price": [1.0, 1e39], "item": [1, 2]}),
            "column price, row 1 is 1e\\+39, expected a finite number",
        ),
        ({"price": [1.0, 2.0], "item": [1, 2**64]}, f"column item, row 1 is {2**64}"),
        ({"price": [1.0, 2.0], "item": [1.0, 2.5]}, "column item, row 1 is 2.5"),
        (
            {"price": [1.0, 2.0], "item": [1]},
            "column item has 1 rows, expected 2, the number of rows of column price",
        ),
        (
            {"price": [1.0], "itme": [1]},
            "rows have a column 'itme', which is not a feature, expected item",
        ),
        ({"price": 1.0, "item": [1]}, "column price is 1.0, expected a list or an array"),
        ({"price": b"12", "item": [1, 2]}, "column price is b'12', expected a list or an array"),
        (
            {"price": {"a": 1.0}, "item": [1]},
            "column price is {'a': 1.0}, expected a list or an array",
        ),
        ({"price": {1.0}, "item": [1]}, "column price is {1.0}, expected a list or an array"),
        (
            {"price": np.array(1.0), "item": [1]},
            r"column price is array\(1.\), expected a list or an array",
        ),
        (
            {"price": [1.0], "item": ["1.5"]},
            "column item, row 0 is '1.5', expected a whole number of 64 bits",
        ),
        (
            {"price": [1.0], "item": [b"1"]},
            "column item, row 0 is b'1', expected a whole number of 64 bits",
        ),
        (
            {"price": [[1.0]], "item": [1]},
            r"column price, row 0 is \[1.0\], expected a finite number",
        ),
        (
            {"price": [1.0], "item": [[1]]},
            r"column item, row 0 is \[1\], expected a whole number of 64 bits",
        ),
        ("price", "rows are a str, expected a dict of columns"),
        ("", "rows are a str, expected a dict of columns"),
        (b"price", "rows are a bytes, expected a dict of columns"),
        (["1.5,7"], "row 0 is '1.5,7', expected a dict of features"),
        ([{"price": 1.0, "item": 1}, "1.5,7"], "row 1 is '1.5,7', expected a dict of features"),
        ([{"price": 1.0, "item": 1}, None], "row 1 is None, expected a dict of features"),
        (
            FeatureRows(dense=np.zeros((1, 13)), categorical=np.zeros((1, 26))),
            "have 13 numeric and 26 categorical",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_row_is_named_by_column_row_and_value(rows, text):
    with pytest.raises(ContractError, match=text):
        feature_rows(rows, SMALL.features, may_lack_columns=True)
    with raises(ContractError, "lack", ["item", "user"], "expected price, item, user"):
        feature_rows({"price": [1.0]}, SMALL.features)
    served = replace(SMALL.features, categorical_options={"user": CategoricalOptions(served_as=1)})
    assert feature_rows({"price": [1.0], "item": [2]}, served).categorical[0, :2].tolist() == [
        2,
        MISSING_CATEGORY,
    ]


def test_numbers_texts_and_dictionaries_of_same_category_are_valid():
    mixed = feature_rows(
        {"price": [None, 2], "item": ["255", 255]}, SMALL.features, may_lack_columns=True
    )
    assert mixed.categorical[:, :1].tolist() == [[255], [255]]
    dictionary = pa.table({"price": [True], "item": pa.array(["10"]).dictionary_encode()})
    rows = feature_rows(dictionary, SMALL.features, may_lack_columns=True)
    assert (rows.dense.tolist(), rows.categorical.tolist()) == ([[1.0]], [[10, -1]])


def test_client_uses_recommender_that_registry_serves_or_file_describes(
    server, log, tmp_path, read_log
):
    """The recommender determines the columns, the requested model and the content of the record."""
    with raises(ContractError, "nowhere", "does not exist"):
        RecommenderClient(server.url, recommender=tmp_path / "nowhere", log=None)
    with raises(ContractError, "no recommender", "accepted"):
        RecommenderClient(server.url, recommender=str(tmp_path), log=None)
    accept_into(tmp_path, SMALL)
    scorer = OwnScorer(lambda dense, categorical: (dense[:, 0] / 10).astype(np.float32))

    async def talk():
        for path in (tmp_path, str(tmp_path / "recommender" / "1.json")):
            async with RecommenderClient(
                scorer, recommender=path, log=f"sqlite:///{log}"
            ) as client:
                await client.rank(
                    [{"item": 5, "price": 2}, {"item": 6, "price": 7}], 2, context={"user": [8]}
                )
        async with RecommenderClient(server.url, recommender=tmp_path, log=None) as client:
            with raises(ModelAbsent, "shop"):
                await client.score({"price": [1.0], "item": [2], "user": [3]})

    asyncio.run(talk())
    for record in read_log(log, SMALL.features):
        assert (record.recommender, record.recommender_digest) == ("shop", SMALL.digest)
        assert (record.dense.tolist(), record.categorical.tolist()) == (
            [[7.0], [2.0]],
            [[6, 8], [5, 8]],
        )


def test_context_of_one_user_may_be_written_without_lists():
    items = {"item": [5, 6], "price": [None, 7.0]}
    one = [
        _candidate_rows(items, context, SMALL.features)
        for context in ({"user": [8], "price": [2.0]}, {"user": 8, "price": np.float32(2.0)})
    ]
    assert one[0].dense.tolist() == one[1].dense.tolist() == [[2.0], [7.0]]
    assert one[0].categorical.tolist() == one[1].categorical.tolist() == [[5, 8], [6, 8]]
    with raises(ContractError, "column user, row 0", "x"):
        _candidate_rows(items, {"user": "x"}, SMALL.features)
    with raises(ContractError, "context has 2 rows, expected 1"):
        _candidate_rows(items, {"user": [8, 9]}, SMALL.features)


LISTS = Features(
    numeric=(),
    categorical=("item",),
    lists=("genres", "seen"),
    list_options={
        "genres": ListOptions(type="string", max=3, keep="oldest"),
        "seen": ListOptions(max=2, table="item"),
    },
)
PUNK, FOLK, JAZZ, ROCK = (category_of(each) for each in ("punk", "folk", "jazz", "rock"))
GIVEN = {
    "item": [7, 8, 9],
    "genres": [["punk", None, "folk"], None, ["rock", "jazz", "folk", "punk"]],
}
SEEN = [[1, 2, 3], [], [None, 4]]
PLACED = [[7, PUNK, FOLK, -1, 2, 3], [8, -1, -1, -1, -1, -1], [9, ROCK, JAZZ, FOLK, 4, -1]]


@pytest.mark.parametrize(
    "rows",
    [
        {**GIVEN, "seen": SEEN},
        [
            dict(zip(("item", "genres", "seen"), row))
            for row in zip(GIVEN["item"], GIVEN["genres"], SEEN)
        ],
        pa.table({**GIVEN, "seen": SEEN}),
        {**GIVEN, "seen": [np.array([1, 2, 3]), (), ("", 4.0)]},
    ],
    ids=["columns", "rows", "Arrow", "arrays"],
)
def test_counted_list_elements_occupy_positions(rows):
    assert feature_rows(rows, LISTS).categorical.tolist() == PLACED


def test_wrong_element_is_named_and_list_of_candidate_is_own_or_of_context():
    wrongs = (
        (["punk", 1.5], "column genres, row 1 is 1.5, expected elements to be a text"),
        ("punk", "a list"),
    )
    for wrong, message in wrongs:
        with pytest.raises(ContractError, match=message):
            feature_rows({"item": [1, 2], "genres": [["folk"], wrong], "seen": [None, None]}, LISTS)
    candidates = feature_rows({"item": [7, 8], "seen": [[5], None]}, LISTS, may_lack_columns=True)
    context = feature_rows({"genres": [["jazz"]], "seen": [[1, 2]]}, LISTS, may_lack_columns=True)
    filled = candidates.filled_from(context, LISTS).categorical.tolist()
    assert filled == [[7, JAZZ, -1, -1, 5, -1], [8, JAZZ, -1, -1, 1, 2]]


def test_later_changes_of_callers_arrays_change_no_record(make_rows):
    given = FeatureRows(dense=make_rows(3)[0], categorical=make_rows(3)[1])
    taken = feature_rows(given, SHOP.features)
    given.dense[:], given.categorical[:] = 0, 0
    np.testing.assert_array_equal(taken.dense, make_rows(3)[0])
    np.testing.assert_array_equal(taken.categorical, make_rows(3)[1])


def test_scoring_waits_for_no_log_even_if_publishing_hangs(score_rows, make_rows, log):
    """The log's publish call hangs in its own thread, but requests are answered.

    Closing the client publishes all records.
    """
    hangs = threading.Event()
    stored = []

    class HangingLog:
        def publish(self, messages):
            assert hangs.wait(60)
            stored.extend(messages)

        def close(self):
            pass

    rows = FeatureRows(dense=make_rows(2)[0], categorical=make_rows(2)[1])

    async def talk():
        publishing = PublisherSettings(interval_seconds=0.001)
        async with connect(
            OwnScorer(score_rows), log=HangingLog(), publishing=publishing
        ) as client:
            for number in range(50):
                scored = await client.score(rows, request_id=f"r{number}")
                assert client.report(Outcome(request_id=scored.request_id))
                await asyncio.sleep(0)
            assert stored == []
            assert client.log_counts.queued_rows == 100
            hangs.set()
        return client.log_counts

    counts = asyncio.run(talk())
    assert (counts.published_rows, counts.published_outcomes, counts.queued_rows) == (100, 50, 0)
    assert {f"r{number}" for number in range(50)} <= dict(stored).keys()


def test_lost_log_fails_no_request_and_closing_reports_losses(score_rows, make_rows):
    log = LostLog()
    rows = FeatureRows(dense=make_rows(2)[0], categorical=make_rows(2)[1])

    async def talk(client):
        async with client:
            await client.score(rows, request_id="r1")
            assert await asyncio.to_thread(log.began.wait, 60)
            assert (await client.score(rows)).logged
            client.report(Outcome(request_id="r1"))
            assert client.log_counts.queued_rows == 4

    publishing = PublisherSettings(interval_seconds=0.01, close_seconds=0.2)
    client = connect(OwnScorer(score_rows), log=log, publishing=publishing)
    with raises(Unpublished, "4 rows and 1 outcomes", "lost", "the disk is gone"):
        asyncio.run(talk(client))
    assert (client.log_counts.dropped_rows, client.log_counts.problem) == (4, "the disk is gone")

    async def fail(client):
        async with client:
            await client.score(rows)
            raise KeyError("the site's own")

    # The error inside the `async with` block must reach the caller, although records are lost too.
    with raises(KeyError, "the site's own"):
        asyncio.run(fail(connect(OwnScorer(score_rows), log=log, publishing=publishing)))


def test_request_that_failed_leaves_no_record_and_next_one_does(server, log, make_rows, read_log):
    server.scoring.always = (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
    rows = FeatureRows(dense=make_rows(2)[0], categorical=make_rows(2)[1])

    async def talk():
        settings = ClientSettings(max_attempts=1)
        async with connect(server.url, log=f"sqlite:///{log}", settings=settings) as client:
            with pytest.raises(ServerUnavailable):
                await client.score(rows, request_id="failed")
            server.scoring.always = None
            await client.score(rows, request_id="unseen", log=False)
            await client.score(rows, request_id="answered")

    asyncio.run(talk())
    assert [record.request_id for record in read_log(log)] == ["answered"]


def test_closing_waits_for_request_in_flight_and_logs_it(server, log, make_rows, read_log):
    server.scoring.wait = server.make_event()
    rows = FeatureRows(dense=make_rows(2)[0], categorical=make_rows(2)[1])

    async def talk():
        client = await connect(server.url, log=f"sqlite:///{log}").__aenter__()
        asking = asyncio.create_task(client.score(rows, request_id="r1"))
        while not server.scoring.in_flight:
            await asyncio.sleep(0.005)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        server.release(server.scoring.wait)
        await closing
        with raises(ContractError, "not open"):
            await client.score(rows)
        with raises(ContractError, "open client"):
            client.report(Outcome(request_id="r1"))
        return await asking

    assert asyncio.run(talk()).logged
    assert [record.request_id for record in read_log(log)] == ["r1"]


def test_outcomes_of_client_that_is_opened_again_are_new_to_log(score_rows, log, read_log):
    async def talk():
        client = connect(OwnScorer(score_rows), log=f"sqlite:///{log}", source="checkout-0")
        for name in ("first", "second"):
            async with client:
                client.report(Outcome(request_id=name))

    asyncio.run(talk())
    assert outcomes(read_log(log)) == [("first", 0, "click"), ("second", 0, "click")]


def test_record_waits_for_its_shadow_and_its_outcome_for_record(
    score_rows, make_rows, log, read_log
):
    rows = FeatureRows(dense=make_rows(6)[0], categorical=make_rows(6)[1])

    async def talk():
        scorer = OwnScorer(score_rows, shadow=asyncio.Event())
        async with connect(scorer, log=f"sqlite:///{log}", source="test") as client:
            ranking = await client.rank(rows, 3, request_id="list")
            client.report(Outcome(request_id="list", row=1))
            assert client.log_counts.queued_rows == client.log_counts.queued_outcomes == 0
            scorer.shadow.set()
            return ranking

    ranking = asyncio.run(talk())
    record, outcome = read_log(log)
    assert (record.canary, record.model_version, record.shadow_version) == (True, 3, 4)
    expected = score_rows(rows.dense, rows.categorical)
    np.testing.assert_array_equal(record.shadow_scores, (1 - expected)[ranking.candidates])
    assert outcomes([outcome]) == [("list", 1, "click")]


def test_shadow_counts_if_it_comes_in_time_and_from_another_version():
    async def score_with_shadow(version, shadow_version):
        shadow = asyncio.get_running_loop().create_future()
        if shadow_version is not None:
            shadow.set_result(Scored(np.zeros(1, np.float32), shadow_version))
        return await shadow_of(Scored(np.ones(1, np.float32), version, shadow=shadow), 0.01)

    assert asyncio.run(score_with_shadow(3, 4)).model_version == 4
    assert asyncio.run(score_with_shadow(4, 4)) is None
    assert asyncio.run(score_with_shadow(3, None)) is None


def test_record_is_logged_whatever_its_shadow_does(score_rows, make_rows, log, read_log, caplog):
    rows = FeatureRows(dense=make_rows(2)[0], categorical=make_rows(2)[1])

    class Broken(OwnScorer):
        async def _shadow_of(self, scores):
            raise RuntimeError("a defect") if len(self.calls) == 1 else ValueError("no number")

    class WrongShadowScorer(OwnScorer):
        async def _shadow_of(self, scores):
            return Scored(scores + 7, 4)

    async def talk():
        for number, scorer in enumerate(
            (Broken(score_rows, shadow=1), WrongShadowScorer(score_rows, shadow=1))
        ):
            async with connect(scorer, log=f"sqlite:///{log}") as client:
                await client.score(rows, request_id=f"r{number}")
                assert client.report(Outcome(request_id=f"r{number}"))

    asyncio.run(talk())
    records = read_log(log)
    assert [(each.request_id, each.shadow_version) for each in predictions(records)] == [
        ("r0", None),
        ("r1", None),
    ]
    assert outcomes(records) == [("r0", 0, "click"), ("r1", 0, "click")]
    messages = [each for each in caplog.messages if "is logged without shadow scores" in each]
    assert len(messages) == 2


def test_ids_and_sizes_that_log_cannot_hold_are_refused_before_scoring(score_rows, make_rows, log):
    scorer = OwnScorer(score_rows)
    few, many = (
        FeatureRows(dense=rows[0], categorical=rows[1]) for rows in (make_rows(1), make_rows(2049))
    )

    async def talk():
        async with connect(scorer, log=f"sqlite:///{log}") as client:
            with raises(ContractError, "2049 rows", "at most 2048"):
                await client.score(many)
            for wrong in ("x" * 129, 7, b"r1", ""):
                with raises(ContractError, "request_id"):
                    await client.score(few, request_id=wrong)
            for wrong in (7, b"user", ["user"]):
                with raises(ContractError, "key", "expected a text, or None"):
                    await client.score(few, key=wrong)
                with raises(ContractError, "key", "expected a text, or None"):
                    await client.rank(few, 1, key=wrong)
            assert scorer.calls == []
            return await client.score(many, log=False)

    assert len(asyncio.run(talk()).scores) == 2049


def test_request_id_names_one_logged_request(score_rows, make_rows, log, read_log):
    scorer = OwnScorer(score_rows)
    rows = [
        FeatureRows(dense=dense[:1], categorical=categorical[:1])
        for dense, categorical in [make_rows(1)] * 5
    ]

    async def talk():
        async with connect(scorer, log=f"sqlite:///{log}") as client:
            # The log has no record of this request, so its id remains free.
            await client.score(rows[0], request_id="session 7", log=False)
            await client.score(rows[0], request_id="session 7")
            for again in rows[1:]:
                with raises(ContractError, "request_id 'session 7'", "earlier request"):
                    await client.score(again, request_id="session 7")
                with raises(ContractError, "new id for each request"):
                    await client.rank(again, 1, request_id="session 7")
            await client.score(rows[0], request_id="session 7", log=False)
            ranking = await client.rank(rows[0], 1)
            with raises(ContractError, "earlier request"):
                await client.score(rows[1], request_id=ranking.request_id)
        return client.log_counts

    counts = asyncio.run(talk())
    assert len(scorer.calls) == 4
    assert counts.published_rows == sum(len(record) for record in predictions(read_log(log))) == 2


def test_two_requests_at_once_cannot_share_id(make_rows, log, read_log):
    rows = FeatureRows(dense=make_rows(1)[0], categorical=make_rows(1)[1])

    class Slow:
        async def score(self, dense, categorical, *, request_id=None, key=None):
            await asyncio.sleep(0)
            return Scored(np.full(len(dense), 0.5, np.float32), 3)

    async def talk():
        async with connect(Slow(), log=f"sqlite:///{log}") as client:
            calls = (client.score(rows, request_id="r") for _ in range(3))
            return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(talk())
    assert [type(answer).__name__ for answer in answers] == [
        "ScoredRows",
        "ContractError",
        "ContractError",
    ]
    assert len(predictions(read_log(log))) == 1


@pytest.mark.parametrize(
    "failure", [ServerUnavailable("away"), BadReply("no scores"), asyncio.CancelledError()]
)
def test_id_of_request_without_record_is_free_again(score_rows, make_rows, log, read_log, failure):
    rows = FeatureRows(dense=make_rows(1)[0], categorical=make_rows(1)[1])
    failures = [failure]

    def score(dense, categorical):
        if failures:
            raise failures.pop()
        return score_rows(dense, categorical)

    async def talk():
        async with connect(OwnScorer(score), log=f"sqlite:///{log}") as client:
            with pytest.raises(type(failure)):
                await client.score(rows, request_id="r")
            await client.score(rows, request_id="r")

    asyncio.run(talk())
    assert [record.request_id for record in predictions(read_log(log))] == ["r"]


def test_ids_of_newest_requests_are_remembered_and_no_more():
    ids = RequestIds(remembered=3)
    for name in "abcd":
        ids.take(name)
    ids.take("a")  # "a" is older than the three remembered ids
    for name in "cda":
        with raises(ContractError, f"request_id '{name}'"):
            ids.take(name)


def test_request_of_wide_rows_is_limited_by_message_size_of_log(log):
    """A record too large for the log would be retried forever and block later records."""
    names = tuple(f"column {i}" for i in range(300))
    wide = Recommender(name="wide", features=Features(numeric=(), categorical=names))
    rows = FeatureRows(dense=np.zeros((500, 0), np.float32), categorical=np.full((500, 300), 2**40))
    scorer = OwnScorer(lambda dense, categorical: np.linspace(0, 1, len(dense), dtype=np.float32))

    async def talk():
        async with RecommenderClient(scorer, recommender=wide, log=f"sqlite:///{log}") as client:
            for call in (client.score(rows), client.rank(rows, 500)):
                with raises(ContractError, "500 rows", "at most 411", "log="):
                    await call
            assert (await client.rank(rows, 411)).logged

    asyncio.run(talk())


def test_without_log_rows_are_scored_and_outcomes_are_refused(server, make_rows):
    async def talk():
        async with connect(server.url, log=None) as client:
            scored = await client.score(by_name(*make_rows(2)))
            with raises(ContractError, "open client", "log=URL"):
                client.report(Outcome(request_id=scored.request_id))
            return scored

    assert asyncio.run(talk()).logged is False


def test_synchronous_client_scores_from_threads_and_publishes_meanwhile(
    server, log, make_rows, read_log
):
    rows = by_name(*make_rows(2))
    publishing = PublisherSettings(interval_seconds=0.01)
    with connect_sync(server.url, log=f"sqlite:///{log}", publishing=publishing) as client:
        threads = [threading.Thread(target=client.score, args=(rows,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        ranking = client.rank(rows, 1, key="user 1")
        assert client.report(Outcome(request_id=ranking.request_id))
        with raises(ContractError, "lack columns"):
            client.score({"price": [1]})
    assert (client.log_counts.published_rows, client.log_counts.published_outcomes) == (17, 1)
    assert len(predictions(read_log(log))) == 9


def test_client_that_cannot_log_does_not_open(server, tmp_path):
    with raises(ContractError, "nowhere"):
        connect_sync(server.url, log="nowhere://x").__enter__()
    with raises(ContractError, "with SyncRecommenderClient"):
        connect_sync(server.url, log=None).score({})

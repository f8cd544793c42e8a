"""Tests of a recommender's description: its errors name the path, and its digest is stable."""

import re
from dataclasses import dataclass, replace

import pytest

from evergreen.config.data import ColumnNames
from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.config.training import TrainingSettings
from evergreen.contracts.manifests import Manifest
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises, raises_text

FEATURES = Features(numeric=("price",), categorical=("item", "shop"))


def shop(**settings):
    return Recommender(name="shop", features=FEATURES, settings=settings)


@pytest.mark.parametrize("role", ["user", "item"])
def test_user_or_item_that_is_no_categorical_feature_is_refused(role):
    with raises_text(ContractError, "no-categorical-feature", role=role):
        replace(shop(), data=ColumnNames(**{role: "shp"}))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("trainin.seed", "trainin is not a section, expected training"),
        ("training", "expected section.name"),
    ],
)
def test_path_to_nowhere_is_refused(path, message):
    with pytest.raises(ContractError, match=message):
        shop().with_settings({path: 1})


def test_settings_that_are_not_named_are_defaults_of_their_class():
    assert shop().section("training", TrainingSettings) == TrainingSettings()
    assert shop(training={"seed": 7}).section("training", TrainingSettings) == TrainingSettings(
        seed=7
    )


def test_changed_settings_leave_others_and_original_alone():
    before = shop(training={"seed": 7, "passes": 2})
    assert before.with_settings({"training.seed": 8}).settings == {
        "training": {"seed": 8, "passes": 2}
    }
    assert before.settings == {"training": {"seed": 7, "passes": 2}}


def test_digest_depends_on_content_and_not_on_order():
    one, other = shop(training={"seed": 7, "passes": 2}), shop(training={"passes": 2, "seed": 7})
    assert one.digest == other.digest
    assert len({one.digest, shop().digest, shop(training={"seed": 8, "passes": 2}).digest}) == 3
    swapped = Recommender(
        name="shop", features=Features(numeric=("price",), categorical=("shop", "item"))
    )
    assert swapped.digest != shop().digest


@pytest.mark.parametrize("name", ["", "Shop", "a-b", "7up", None])
def test_names_that_no_server_or_metric_takes_are_refused(name):
    with raises(ContractError, "recommender name"):
        Recommender(name=name, features=FEATURES)


@pytest.mark.parametrize(
    "name", ["label", "request_id", "row", "event_time", "score", "position", "canary"]
)
def test_feature_named_like_column_that_every_row_has_is_refused(name):
    with pytest.raises(
        ContractError, match=re.escape(f"features ['{name}'] have the names of columns")
    ):
        Recommender(name="shop", features=Features(numeric=("price",), categorical=("item", name)))


def test_description_survives_manifest():
    @dataclass(frozen=True, kw_only=True)
    class Note(Manifest):
        recommender: Recommender

    written = Note(recommender=shop(training={"round_rates": [0.1, 1.5]}))
    read = Note.loads(written.dumps(), source="it")
    assert read == written
    assert read.recommender.digest == written.recommender.digest


@pytest.mark.parametrize(
    "names", [{"label": ""}, {"label": "ts", "event_time": "ts"}, {"row": "request_id"}]
)
def test_indistinguishable_names_are_refused(names):
    with raises(ContractError, "expected a name for each"):
        ColumnNames(**names)

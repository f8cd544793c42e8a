"""Tests that the tables of settings and the JSON Schema contain every current setting."""

import json

import pytest
import yaml
from jsonschema import Draft202012Validator

from evergreen.recommender_file.form import FORMAT, parse_recommender
from evergreen.recommender_file.json_schema import json_schema
from evergreen.recommender_file.reference import reference
from evergreen.runtime.errors import ContractError
from testing.paths import REPOSITORY


def test_page_shows_key_type_default_and_meaning():
    page = reference()
    assert "| `passes` | int | `1` | Number of passes over the training rows. |" in page
    assert "| `solver.loss_interval` | int | `100` | Steps between two readings" in page
    assert "Number of cross layers. Only of dcn. |" in page
    assert "num_dense" not in page
    assert "|  |" not in page


def test_schema_is_current_and_accepts_what_reader_accepts():
    published = json.loads((REPOSITORY / "docs/reference/recommender.schema.json").read_text())
    assert published == json.loads(json.dumps(json_schema())), (
        "the published schema is not current; `make golden` writes it"
    )
    check = Draft202012Validator(published)
    Draft202012Validator.check_schema(published)
    example = yaml.safe_load((REPOSITORY / "examples/criteo/recommender.yaml").read_text())
    check.validate(example)
    written = {
        "data": {"label": "clicked"},
        "model": {"kind": "dlrm", "tower": [8, 4]},
        "training": {"passes": 2, "solver": {"loss_interval": 5}, "learning_rate": 1},
        "monitor": {"policies": "sequential"},
    }
    check.validate(example | written)
    parse_recommender(yaml.safe_dump(example | written), source="shop.yaml")


@pytest.mark.parametrize(
    "change",
    [
        {"trainin": {}},
        {"training": {"pases": 2}},
        {"training": {"passes": "two"}},
        {"model": {"num_dense": 3}},
        {"model": {"kind": "svm"}},
        {"features": {}},
        {"features": {"numeric": []}},
        {"name": "Shop"},
        {"format": "evergreen/recommender/2"},
    ],
    ids=str,
)
def test_schema_refuses_what_reader_refuses(change):
    document = {
        "format": FORMAT,
        "name": "shop",
        "features": {"numeric": ["a"], "categorical": ["b"]},
    } | change
    assert not Draft202012Validator(json_schema()).is_valid(document)
    with pytest.raises(ContractError):
        parse_recommender(yaml.safe_dump(document), source="shop.yaml")

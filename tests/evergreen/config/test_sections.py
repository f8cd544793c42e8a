"""Tests that a wrong setting is reported before a run, with path, value and expected value."""

import re

import pytest

from evergreen.config.features import Features
from evergreen.config.reader import parse_settings
from evergreen.config.sections import check_settings
from evergreen.config.spec import SECTIONS, Recommender
from evergreen.runtime.errors import ContractError

SHOP = Recommender(name="shop", features=Features(numeric=("price",), categorical=("item",)))
WRONG = {
    "extraction": (
        "extraction.holdout_fraction=2",
        "holdout_fraction is 2.0, expected more than 0",
    ),
    "validation": ('\'validation.actions={"drift": "stop"}\'', "rule drift has action 'stop'"),
    "preprocessing": ("preprocessing.frequency_treshold=3", "expected frequency_threshold"),
    "model": ("model.kind=dcm", "model.kind is 'dcm', expected one of dcn"),
    "training": (
        "'training.solver={\"stage_row\": 5}'",
        "training.solver.stage_row is not a setting, expected stage_rows",
    ),
    "gate": ("gate.min_auc=high", "gate.min_auc is 'high', expected float"),
    "release": ("release.rollout=all", "rollout is 'all', expected one of auto"),
    "monitor": (
        "monitor.window_row=100",
        "monitor.window_row is not a setting, expected window_rows",
    ),
}


@pytest.mark.parametrize("section", SECTIONS)
def test_wrong_setting_of_any_section_is_named(section):
    settings, message = WRONG[section]
    with pytest.raises(ContractError, match=re.escape(message)):
        check_settings(SHOP.with_settings(parse_settings(settings)))


def test_settings_of_every_section_are_read():
    check_settings(
        SHOP.with_settings(
            parse_settings(
                'extraction.late_days=0 \'validation.actions={"domain": "quarantine"}\' '
                "validation.mean_drift=0.2 "
                "preprocessing.negative_rate=0.5 model.kind=deepfm model.tower=[64,32] "
                "training.seed=7 "
                "gate.min_auc=0.65 release.rollout=full monitor.window_rows=500 "
                "monitor.daily_budget=2"
            )
        )
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("model.num_dense=3", "the features decide it"),
        ("model.projection_dim=3", "model.projection_dim is not a setting"),
    ],
)
def test_setting_that_network_does_not_have_is_refused(path, message):
    with pytest.raises(ContractError, match=message):
        check_settings(SHOP.with_settings({"model.kind": "dlrm", **parse_settings(path)}))

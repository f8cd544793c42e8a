"""Tests of the section `validation`: rules for thresholds, and actions that are refused."""

import dataclasses

import pytest

from evergreen.config.validation import RULES, ValidationSettings
from evergreen.runtime.errors import ContractError
from testing.recommenders import criteo_with


def rules_of(**settings):
    return criteo_with(validation=settings).section("validation", ValidationSettings)


def test_every_threshold_belongs_to_rule_and_every_rule_names_real_ones():
    named = {name for rule in RULES.values() for name in rule.settings}
    assert named == {field.name for field in dataclasses.fields(ValidationSettings)} - {"actions"}


def test_actions_and_thresholds_of_recommender_override_defaults():
    rules = rules_of(actions={"drift": "block", "domain": "quarantine"}, click_rate_factor=3)
    assert (rules.action_of("drift"), rules.action_of("domain")) == ("block", "quarantine")
    assert rules.action_of("click_rate") == "warn"
    assert (rules.click_rate_factor, rules.false_discovery_rate) == (3.0, 0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"actions": {"missing_shar": "block"}},
            "rule 'missing_shar' is unknown, expected one of no_rows, column_ret",
        ),
        (
            {"actions": {"drift": "panic"}},
            "rule drift has action 'panic', expected one of block, quarantine, warn, notify, info, "
            "off",
        ),
        (
            {"actions": {"drift": "quarantine"}},
            "rule drift has action quarantine, which only rule domain supports",
        ),
        ({"skew_size": 3}, "validation.skew_size is not a setting, expected skew_share"),
        ({"click_rate_factor": 0.5}, "factor is 0.5, expected a finite number of at least 1"),
        ({"click_rate_factor": float("nan")}, "factor is nan"),
        ({"click_rate_factor": True}, "factor is True"),
        ({"new_value_share": 7}, "new_value_share is 7"),
        ({"new_value_share": "0.1"}, "new_value_share is '0.1', expected float"),
    ],
    ids=str,
)
def test_meaningless_rules_are_refused_by_name(settings, message):
    with pytest.raises(ContractError, match=message):
        rules_of(**settings)

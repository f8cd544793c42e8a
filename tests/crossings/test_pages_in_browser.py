"""Tests of every page in a real browser, from a phone to a desktop, light and dark.

`tests/loop` checks the demo's report.
"""

import copy
import json
import re
from dataclasses import fields, is_dataclass, replace
from enum import Enum

import pytest

from cli.compare import Comparison, comparison_page
from components.validation.report_page import draw_page
from evergreen.registry.model_cards import read_card
from evergreen.registry.runs import report_path
from evergreen.reports.model_card import card_page
from evergreen.reports.page import refusal_page
from monitoring.web.exposition import Exposition
from monitoring.web.page import History, status_page
from tests.support.browser import (
    DARK,
    MARKUP,
    beyond_first_screen,
    cut_texts,
    needs_browser,
    pixels_too_wide,
    planted,
    serious_findings,
)
from tests.support.snapshots import EVENTS, FULL, NOW, POINTS

pytestmark = [needs_browser, pytest.mark.timeout(900)]


def status(_chain, spoil=lambda value: value):
    exposition = Exposition()
    exposition.show(spoil(FULL))
    return status_page(exposition, spoil(History(POINTS, EVENTS)), now=NOW).replace(
        'http-equiv="refresh"', ""
    )


def comparison(chain, spoil=lambda value: value):
    card = read_card(chain.root / "store", "2")
    found = Comparison(
        a=card.verdict.champion_model_id,
        b=card.model_id,
        rows_of=card.model_id,
        differing={"training.learning_rate": (None, 0.5), "features": (list("abcdefgh") * 20, [])},
        sizes={"ids of categories": (1, 2)},
        quality=card.verdict,
        slices=card.slices,
        calibration_a=card.champion_calibration,
        calibration_b=card.calibration,
    )
    return comparison_page(spoil(found))


WIDTHS = (360, 480, 768, 1280, 1920)
"""Widths of a phone, Kubeflow's pane, a tablet, a laptop and a desktop."""
LONG = (
    "a_column_with_a_very_long_name_indeed: 'a value of that column which nobody would call short'"
)


def card(chain, **changes):
    return card_page(replace(read_card(chain.root / "store", "2"), **changes))


def card_of_many(chain):
    """Return a card with forty slices of long names, and long warnings and advice."""
    made = read_card(chain.root / "store", "2")
    slices = [replace(made.slices[0], name=f"{number} {LONG}") for number in range(40)]
    verdict = replace(
        made.verdict, warnings=[LONG * 3], advice=[LONG * 3] * 3, column_aucs={LONG: 0.9}
    )
    return card(chain, slices=slices, verdict=verdict)


PAGES = {
    "status": status,
    "comparison": comparison,
    "card": card,
    "card of many slices": card_of_many,
    "card of no slices": lambda chain: card(
        chain, slices=[], calibration=[], champion_calibration=[], validation=None
    ),
    "validation": lambda chain: report_path(
        chain.root / "store", "round-2", "validation"
    ).read_text(),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_every_screen_and_is_accessible(chain, tmp_path, name):
    page = PAGES[name](chain)
    assert pixels_too_wide(tmp_path, page, *WIDTHS) == [0] * len(WIDTHS)
    assert cut_texts(tmp_path, page, *WIDTHS) == [[]] * len(WIDTHS)
    assert serious_findings(tmp_path, page) == []
    assert serious_findings(tmp_path, page, DARK) == []


@pytest.mark.parametrize("name", ["status", "card", "validation"])
def test_first_screen_has_state_chart_and_decision(chain, tmp_path, name):
    page = PAGES[name](chain)
    assert beyond_first_screen(tmp_path, page) == [[], []]
    assert '<table class="checks">' in page.partition("<nav")[0]


def test_findings_are_reported(tmp_path):
    text = (
        '<p style="color:#777;background:#555">grey on grey</p><p '
        f'style="white-space:nowrap">{"wide " * 50}</p>'
    )
    faulty = f'<!doctype html><html lang="en"><title>t</title><body>{text}</body></html>'
    assert [rule for rule, *_ in serious_findings(tmp_path, faulty)] == ["color-contrast"]
    assert min(pixels_too_wide(tmp_path, faulty, 390, 500)) > 100


class KeysWithMarkup(dict):
    """Dictionary that appends `MARKUP` to its keys in an iteration, but not in a lookup."""

    def __iter__(self):
        return (f"{key}{MARKUP}" if isinstance(key, str) else key for key in super().__iter__())

    def keys(self):
        return list(self)

    def items(self):
        return list(zip(self, self.values()))

    def __getitem__(self, key):
        return super().__getitem__(key.removesuffix(MARKUP) if isinstance(key, str) else key)

    def get(self, key, default=None):
        return super().get(key.removesuffix(MARKUP) if isinstance(key, str) else key, default)


KINDS = ("number", "category", "label", "block", "warn", "info")
"""Kinds of columns and severities in a validation report. Each of these kinds has its own form on
the page."""


def with_markup(value):
    """Append `MARKUP` to every text and every name, but not to times and kinds."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return value if value in KINDS or re.match(r"\d{4}-\d\d-\d\d", value) else value + MARKUP
    if isinstance(value, dict):
        return KeysWithMarkup({key: with_markup(each) for key, each in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(with_markup, value))
    if isinstance(value, list | tuple):
        return type(value)(map(with_markup, value))
    if is_dataclass(value):
        found = copy.copy(value)
        for each in fields(value):
            object.__setattr__(found, each.name, with_markup(getattr(value, each.name)))
        return found
    return value


def validation_document(chain):
    return json.loads(
        report_path(chain.root / "store", "round-2", "validation").with_suffix(".json").read_text()
    )


PAGES_WITH_MARKUP = {
    "status": lambda chain: status(chain, with_markup),
    "comparison": lambda chain: comparison(chain, with_markup),
    "card": lambda chain: card_page(with_markup(read_card(chain.root / "store", "2"))),
    "validation": lambda chain: draw_page(with_markup(validation_document(chain))),
    "refusal": lambda _: refusal_page("evaluation", MARKUP),
}


@pytest.mark.parametrize("name", PAGES_WITH_MARKUP)
def test_no_text_on_page_becomes_markup(chain, tmp_path, name):
    num_shown, became_markup = planted(tmp_path, PAGES_WITH_MARKUP[name](chain))
    assert num_shown > 0
    assert became_markup == []


def test_markup_that_is_not_escaped_is_found(tmp_path):
    page = f'<!doctype html><title>t</title><body><p title="{MARKUP}">{MARKUP}</p></body>'
    num_shown, (ran, *became_markup) = planted(tmp_path, page)
    assert (num_shown, ran, len(became_markup)) == (0, "it ran", 6)

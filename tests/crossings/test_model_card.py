"""Tests that a model's card agrees with the manifests, scores and journal of two real runs."""

from dataclasses import replace

import numpy as np
import pytest

from cli.__main__ import main
from evergreen.registry.model_cards import ModelCard, card_path
from evergreen.registry.runs import report_path
from evergreen.storage.uris import local_path
from monitoring.web.server import read_report
from tests.support.html_pages import assert_needs_nothing

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def card_of(tmp_path, capsys):
    """Return the card of a version as parsed output of the command line, and as a page."""

    def show(chain, reference):
        store = str(chain.root / "store")
        capsys.readouterr()
        assert main(["models", "show", reference, "--store", store]) == 0
        card = ModelCard.loads(capsys.readouterr().out.encode(), source="what was printed")
        assert (
            main(
                [
                    "models",
                    "show",
                    reference,
                    "--store",
                    store,
                    "--output",
                    str(tmp_path / "card.html"),
                ]
            )
            == 0
        )
        return card, (tmp_path / "card.html").read_text()

    return show


def test_numbers_on_card_equal_manifests_and_scores(chain, card_of):
    first, second = chain.rounds
    card, page = card_of(chain, "2")
    assert (card.model, card.raw) == (
        replace(second.training, files={}),
        replace(second.extraction, files={}, validation_report=card.raw.validation_report),
    )
    verdict = second.evaluation
    assert card.verdict == replace(verdict, model=None, raw_dataset=None)
    assert card.validation == second.validation
    with np.load(local_path(verdict.scores_uri)) as scores:
        for bins, name in (
            (card.calibration, "candidate"),
            (card.champion_calibration, "champion"),
        ):
            assert sum(each.num_rows for each in bins) == verdict.num_rows
            assert sum(each.num_rows * each.click_rate for each in bins) == pytest.approx(
                verdict.num_clicks
            )
            mean = sum(each.num_rows * each.mean_score for each in bins) / verdict.num_rows
            assert mean == pytest.approx(scores[name].mean(dtype=np.float64))
    assert [each.model_id for each in card.lineage] == [first.training.model_id]
    days = [each["digest"] for each in second.extraction.days]
    figures = [
        f"{verdict.candidate.auc:.4f}",
        f"{verdict.difference.low:+.4f}",
        str(second.extraction.num_train_rows),
    ]
    figures += [
        second.extraction.digest,
        second.training.sha256["weights"],
        "Live as version 2 since",
    ]
    assert [text for text in days + figures if text not in page] == []
    assert_needs_nothing(page)


def test_pages_of_first_model_have_no_champion_and_end_with_release(chain):
    store = chain.root / "store"
    evaluated, released = (
        report_path(store, "round-1", step).read_text() for step in ("evaluation", "deployment")
    )
    for page, state in (
        (evaluated, "It has not answered a request"),
        (released, "release of version 1 by round-1"),
    ):
        assert_needs_nothing(page)
        for sentence in (
            state,
            "There is no champion to compare with",
            "It was trained from scratch",
        ):
            assert sentence in page
    written = ModelCard.read(card_path(store, chain.rounds[0].training.model_id))
    assert [span.is_live for span in written.served] == [True], (
        "the card is not rewritten at the next release"
    )


def test_after_rollback_cards_show_when_each_version_served(chain, card_of, tmp_path):
    first, second = chain.rounds
    back = chain.copied_to(tmp_path / "gone back")
    back.go_back(1)
    card, page = card_of(back, second.training.model_id)
    (span,) = card.served
    begun = span.begun
    assert (begun.version, begun.action, begun.who, span.is_live) == (
        2,
        "release",
        "round-2",
        False,
    )
    assert (span.ended.action, span.ended.version) == ("rollback", 1)
    assert f"Not live since {span.ended.time[:19].replace('T', ' ')}" in page
    card, page = card_of(back, "1")
    assert [(each.begun.action, each.is_live) for each in card.served] == [
        ("release", False),
        ("rollback", True),
    ]
    assert (card.served[0].ended, card.served[1].begun) == (begun, span.ended)
    assert "Live as version 1 since" in read_report(back.root / "store", "/models/1").decode()

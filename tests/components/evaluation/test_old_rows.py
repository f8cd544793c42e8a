"""How well old rows are remembered: told beside the verdict, never part of it."""

import json

import pytest
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from components.contracts.manifests import Verdict
from components.evaluation.__main__ import main
from components.store import runs


@pytest.fixture
def forgetful(make_round, raw_table):
    """A candidate that is right about the window and wrong about the old rows, which the champion knows.

    Returns the round, the old rows' labels, and the function from a model to its scores of them.
    """

    def make(num_old_rows: int = 1500):
        made = make_round(2000)
        champion = made.planted.noisy(0.25, 1)
        labels, scores = made.add_old_rows(raw_table(num_old_rows, seed=50), champion)
        made.release_champion(champion)
        return made, champion, labels, scores

    return make


def verdict_of(made) -> Verdict:
    return Verdict.read(made.path("verdict"))


def test_candidate_and_champion_are_measured_on_old_rows_too(forgetful):
    made, champion, labels, scores = forgetful()
    assert main(made.flags()) == 0
    old = verdict_of(made).old_distribution
    for name, model in (("candidate", made.planted), ("champion", champion)):
        assert getattr(old, name).auc == pytest.approx(roc_auc_score(labels, scores(model)), abs=1e-4)
        assert getattr(old, name).log_loss == pytest.approx(sklearn_log_loss(labels, scores(model)), abs=1e-4)
    assert old.difference.auc == pytest.approx(old.candidate.auc - old.champion.auc, abs=1e-9)
    assert old.difference.high < -0.01, "the candidate has forgotten"
    assert (old.num_rows, old.num_clicks) == (1500, labels.sum())
    verdict = verdict_of(made)
    assert (verdict.decision, verdict.num_rows) == ("pass", 2000), "what is forgotten does not change it"
    assert "old rows" not in verdict.reason


def test_without_a_champion_old_rows_give_the_candidates_numbers_alone(make_round, raw_table):
    made = make_round(500)
    made.add_old_rows(raw_table(300, seed=50), made.planted)
    assert main(made.flags()) == 0
    old = verdict_of(made).old_distribution
    assert (old.champion, old.difference) == (None, None)
    assert old.candidate.auc is not None


def test_without_old_rows_there_are_no_numbers_of_them(make_round):
    made = make_round(500)
    made.release_champion(made.planted)
    assert main(made.flags()) == 0
    assert verdict_of(made).old_distribution is None
    assert not [name for name in json.loads(made.path("metrics").read_text()) if name.startswith("old_")]
    assert "No rows older than the window" in made.path("report.html").read_text()


def test_old_numbers_reach_metrics_report_and_note(forgetful):
    made, *_ = forgetful()
    main(made.flags())
    old = verdict_of(made).old_distribution
    metrics = json.loads(made.path("metrics").read_text(), parse_constant=pytest.fail)
    assert metrics["old_auc"] == old.candidate.auc
    assert metrics["old_champion_auc"] == old.champion.auc
    assert metrics["old_difference_low"] == old.difference.low
    assert metrics["old_num_rows"] == 1500
    page = made.path("report.html").read_text()
    assert ">Old rows</h2>" in page
    assert "a fault only where the old world may return" in page
    assert f"{old.candidate.auc:.4f}" in page
    (note,) = runs.read_notes(made.store, made.run)
    assert (note.facts["old_auc"], note.facts["old_champion_auc"]) == (metrics["old_auc"], metrics["old_champion_auc"])


def test_old_rows_that_only_one_side_knows_are_refused(forgetful, capsys):
    made, *_ = forgetful()
    made.change("training_set", replay_holdout_uri=None, num_replay_holdout_rows=0)
    assert main(made.flags()) == 2
    assert "raw dataset has 1500 old rows held out and the training set 0" in capsys.readouterr().err

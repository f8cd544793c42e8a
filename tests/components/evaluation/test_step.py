"""Tests of the evaluation step, from its manifests to its verdict.

Candidate and champion have known quality, and there are old rows.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from components.evaluation.__main__ import main
from evergreen.config.data import ColumnNames
from evergreen.contracts.checks import RuleCheck
from evergreen.contracts.manifests import AucLead, RawDataset, ValidationReport, Verdict
from evergreen.registry import models as registry
from evergreen.registry import runs
from evergreen.storage.references import keep
from evergreen.storage.uris import local_path
from testing.recommenders import shop_with
from tests.support.kfp_components import run_component


def verdict_of(made) -> Verdict:
    return Verdict.read(made.path("verdict"))


def note_of(made):
    (note,) = runs.read_notes(made.store, made.run)
    return note


def scores_of(verdict):
    with np.load(local_path(verdict.scores_uri), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def test_better_candidate_is_accepted_with_true_numbers(make_round):
    made = make_round()
    worse = made.planted.noisy(0.8, 1)
    made.release_champion(worse)
    assert main(made.flags()) == 0
    verdict = verdict_of(made)
    candidate, champion = made.scores(made.planted), made.scores(worse)
    assert (verdict.decision, verdict.accepted) == ("pass", True)
    assert (verdict.candidate_model_id, verdict.champion_model_id) == (
        "candidate",
        "champion-model",
    )
    assert (verdict.num_rows, verdict.num_clicks) == (3000, made.labels.sum())
    assert verdict.candidate.auc == pytest.approx(roc_auc_score(made.labels, candidate), abs=1e-5)
    assert verdict.champion.auc == pytest.approx(roc_auc_score(made.labels, champion), abs=1e-5)
    assert verdict.candidate.log_loss == pytest.approx(
        sklearn_log_loss(made.labels, candidate), abs=1e-5
    )
    assert verdict.candidate.calibration == pytest.approx(
        candidate.sum() / made.labels.sum(), abs=1e-4
    )
    assert verdict.difference.auc == pytest.approx(
        verdict.candidate.auc - verdict.champion.auc, abs=1e-9
    )
    assert verdict.difference.low > 0
    note = note_of(made)
    assert (note.state, note.reason) == ("done", verdict.reason)


def test_scores_are_kept_in_order_of_raw_rows(make_round):
    made = make_round(noise=0.3)
    champion = made.planted.noisy(0.7, 1)
    made.release_champion(champion)
    main(made.flags())
    verdict = verdict_of(made)
    scores = scores_of(verdict)
    assert (
        local_path(verdict.scores_uri)
        == made.root / "work" / made.run / "evaluation" / "scores.npz"
    )
    assert {name: array.dtype for name, array in scores.items()} == {
        "candidate": np.float32,
        "champion": np.float32,
    }
    np.testing.assert_allclose(
        scores["candidate"], made.scores(made.planted.noisy(0.3, 5)), atol=1e-5
    )
    np.testing.assert_allclose(scores["champion"], made.scores(champion), atol=1e-5)


def test_worse_candidate_is_refused(make_round):
    made = make_round(noise=0.8)
    made.release_champion(made.planted)
    assert main(made.flags()) == 1
    verdict = verdict_of(made)
    assert (verdict.decision, verdict.accepted) == ("fail", False)
    assert verdict.candidate.auc_low > 0.6
    note = note_of(made)
    assert (note.state, note.reason) == ("refused", verdict.reason)


def test_inconclusive_candidate_goes_on_to_where_its_rollout_is_decided(make_round):
    made = make_round(300, noise=0.2)
    made.release_champion(made.planted.noisy(0.2, 1))
    assert main(made.flags()) == 0
    verdict = verdict_of(made)
    assert (verdict.decision, verdict.accepted) == ("inconclusive", True)


def test_without_champion_floor_decides(make_round):
    made = make_round(1000)
    assert main(made.flags(min_auc=0.9)) == 1
    verdict = verdict_of(made)
    assert (verdict.champion_model_id, verdict.champion, verdict.difference) == (None, None, None)
    assert set(scores_of(verdict)) == {"candidate"}


def test_what_later_promotion_and_monitor_need_is_kept_in_store(make_round):
    made = make_round()
    main(made.flags(min_auc=0.99))
    kept, raw = registry.verdict_paths(made.store, "candidate")
    assert Verdict.read(kept) == verdict_of(made)
    assert RawDataset.read(raw).digest == made.raw.digest
    assert not Verdict.read(kept).accepted
    document = json.loads(registry.scores_path(made.store, "candidate").read_text())
    expected = np.histogram(scores_of(verdict_of(made))["candidate"], document["edges"])[0]
    assert document["counts"] == expected.tolist()


def test_champion_may_be_named_or_left_out(make_round):
    made = make_round(1000)
    made.release_champion(made.planted.noisy(1.0, 1), "first", 1)
    made.release_champion(made.planted, "second", 2)
    for reference, expected in (("first", "first"), ("current", "second"), ("none", None)):
        made.change("raw", champion_model_id=expected)
        main(made.flags(champion=reference))
        assert (verdict_of(made).champion_model_id, verdict_of(made).champion_reference) == (
            expected,
            reference,
        )


@pytest.mark.parametrize("label", [0, 1])
def test_holdout_of_one_class_is_inconclusive_without_numbers(make_round, label):
    made = make_round(200, labels=np.full(200, label))
    made.release_champion(made.planted)
    assert main(made.flags()) == 0
    verdict = verdict_of(made)
    assert verdict.decision == "inconclusive"
    assert verdict.candidate.auc is None
    assert verdict.candidate.normalized_entropy is None
    assert verdict.difference == AucLead()
    metrics = json.loads(made.path("metrics").read_text())
    assert "auc" not in metrics
    assert json.loads(made.path("roc").read_text())["fpr"] == []


@pytest.mark.parametrize("user", [None, "user"])
def test_empty_holdout_is_inconclusive(make_round, user):
    made = make_round(200)
    for folder in (made.raw.holdout_uri, made.training_set.holdout_uri):
        for file in local_path(folder).glob("*.parquet"):
            rewrite(file, lambda table: table.slice(0, 0))
    named = replace(made.raw.recommender, data=ColumnNames(user=user))
    made.change("raw", num_holdout_rows=0, recommender=named)
    made.change("training_set", num_holdout_rows=0)
    assert main(made.flags()) == 0
    (check,) = verdict_of(made).checks
    assert (check.name, check.value, check.limit) == ("requests with clicks", 0, 10)


def rewrite(file, change):
    pq.write_table(change(pq.read_table(file)), file)


def drop_last_encoded_rows(made):
    rewrite(
        local_path(made.training_set.holdout_uri) / "part_10.parquet",
        lambda table: table.slice(0, 3),
    )


def swap_two_encoded_files(made):
    listing = local_path(made.training_set.holdout_uri) / "_file_list.txt"
    count, first, second, *rest = listing.read_text().splitlines()
    listing.write_text("\n".join([count, second, first, *rest]))


def damage_graph(made):
    graph = local_path(made.release_champion(made.planted).graph_uri)
    graph.write_bytes(graph.read_bytes()[:-10])


def truncate_weights(made):
    weights = local_path(made.model.uri) / "weights" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


def change_label(made):
    def changed(table):
        return table.set_column(0, "label", pa.array([7, *table["label"].to_pylist()[1:]]))

    rewrite(local_path(made.raw.holdout_uri) / "0.parquet", changed)


def drop_column(made):
    rewrite(
        local_path(made.raw.holdout_uri) / "1.parquet", lambda table: table.drop_columns(["shop"])
    )


def damage_pages_of_encoded_file(made):
    file = local_path(made.training_set.holdout_uri) / "part_3.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\xff" * 2000 + content[2004:])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            drop_last_encoded_rows,
            r"raw holdout has 500 rows and encoded holdout 4\d\d, expected the same rows",
        ),
        (
            lambda m: m.change("raw", num_holdout_rows=499),
            "raw holdout has 500 rows, expected the 499 of its manifest",
        ),
        (swap_two_encoded_files, "labels of raw and encoded holdout differ in"),
        (
            lambda m: m.change("training_set", raw_digest="other"),
            "training set has raw rows with digest other, expected digest digest",
        ),
        (
            lambda m: m.change("model", raw_digest="other"),
            "model candidate was trained on raw rows with digest other, expected digest digest",
        ),
        (lambda m: m.change("model", slot_sizes=[9] * 4), "has 36 ids"),
        (truncate_weights, r"weights with .* has sha256 .* as in the manifest of model candidate"),
        (damage_graph, r"champion graph .*model\.onnx has SHA-256"),
        (
            lambda m: local_path(m.release_champion(m.planted).graph_uri).unlink(),
            "of version 1 is absent",
        ),
        (change_label, r"labels hold \[7\], expected 0 and 1"),
        (drop_column, r"lacks the columns \['shop'\]"),
        (damage_pages_of_encoded_file, r"part_3\.parquet is not a readable Parquet file"),
    ],
    ids=[
        "fewer encoded rows",
        "fewer rows stated",
        "other order",
        "training set of other rows",
        "model of other rows",
        "other slots",
        "truncated weights",
        "corrupt graph",
        "absent graph",
        "label 7",
        "absent column",
        "corrupt encoded file",
    ],
)
def test_inputs_that_do_not_belong_together_are_refused_in_one_line(
    make_round, capsys, spoil, said
):
    made = make_round(500)
    spoil(made)
    assert main(made.flags()) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"error: .*{said}.*\n", error), error
    assert not made.path("verdict").exists()
    assert note_of(made).state == "failed"


@pytest.mark.parametrize(
    ("extracted", "reference"),
    [(None, "current"), ("another", "current"), ("champion-model", "none")],
)
def test_champion_that_extraction_did_not_know_is_no_opponent(
    make_round, capsys, extracted, reference
):
    """A champion that was released during the run may have been trained on the evaluation rows."""
    made = make_round(500)
    made.release_champion(made.planted)
    made.change("raw", champion_model_id=extracted)
    assert main(made.flags(champion=reference)) == 1
    assert note_of(made).state == "refused"
    found = "champion-model" if reference == "current" else "none"
    reason = f"champion is {found}, expected {extracted or 'none'}: the champion changed"
    assert reason in capsys.readouterr().err
    assert reason in made.path("report.html").read_text(), (
        "Kubeflow shows an error if the report is missing"
    )


def test_metrics_are_finite_and_named(make_round):
    made = make_round(1000)
    made.release_champion(made.planted)
    main(made.flags())
    metrics = json.loads(made.path("metrics").read_text(), parse_constant=pytest.fail)
    own = {
        "auc",
        "auc_low",
        "auc_high",
        "log_loss",
        "calibration",
        "rows_trained",
        "rows_held_out",
        "accepted",
    }
    lead = "auc_against_the_champion"
    assert metrics.keys() == own | {
        "champion_auc",
        *(f"{lead}{end}" for end in ("", "_low", "_high")),
        "slices_with_more_log_loss",
    }
    verdict = verdict_of(made)
    assert (metrics["auc"], metrics[f"{lead}_low"]) == (
        verdict.candidate.auc,
        verdict.difference.low,
    )
    assert (metrics["rows_held_out"], metrics["accepted"]) == (
        verdict.num_rows,
        int(verdict.accepted),
    )


def run_as_component(made):
    """Run the component's process as Kubeflow does. Return the finished process and its outputs."""
    files = dict.fromkeys(
        ("statistics_uri", "schema_uri", "report_uri", "json_uri", "parent_statistics_uri"), ""
    )
    report = {
        "decision": "warn",
        "checks": [
            RuleCheck(
                name="age: drift",
                rule="drift",
                column="age",
                action="warn",
                result="warn",
                detail="age is <new>",
            )
        ],
        "drift": [],
        "raw_digest": "digest",
    }
    kept = keep(ValidationReport(**report, **files, num_rows=1), made.path("validation_report"))
    made.change("training_set", validation_report=kept)
    made.change("raw", recommender=shop_with(gate={"max_auc_loss": 0.01}))
    parameters = {
        "run": made.run,
        "store": str(made.store),
        "work": str(made.root / "work"),
        "champion": "current",
    }
    return run_component(
        "evaluation",
        made.root / "artifacts",
        parameters,
        inputs={"model": "Model"},
        outputs={
            "verdict": "Artifact",
            "metrics": "Metrics",
            "roc": "ClassificationMetrics",
            "report": "HTML",
        },
    )


def test_component_answers_no_where_another_model_went_live_during_run(make_round):
    made = make_round(500)
    made.release_champion(made.planted)
    made.change("raw", champion_model_id="another")
    done, recorded = run_as_component(made)
    assert done.returncode == 0, done.stderr
    assert recorded["parameterValues"] == {"Output": False}
    assert not made.path("verdict").exists()


def test_component_logs_metrics_curve_and_matrix_and_returns_answer(make_round):
    made = make_round(1000)
    made.release_champion(made.planted)
    done, recorded = run_as_component(made)
    assert done.returncode == 0, done.stderr
    assert recorded["parameterValues"] == {"Output": True}
    assert verdict_of(made).accepted

    def metadata(name):
        return recorded["artifacts"][name]["artifacts"][0]["metadata"]

    assert metadata("metrics")["auc"] == verdict_of(made).candidate.auc
    assert 2 < len(metadata("roc")["confidenceMetrics"]) <= 201
    page = made.path("report").read_text()
    assert "<h1>Model card: candidate" in page
    assert "age is &lt;new&gt;" in page
    assert "<new>" not in page


@pytest.fixture
def forgetful(make_round, raw_table):
    """A candidate that fits the window but not the old rows. The champion fits the old rows.

    Returns the run, the labels of the old rows, and a function that scores these rows with a model.
    """

    def make(num_old_rows: int = 1500):
        made = make_round(2000)
        champion = made.planted.noisy(0.8, 1)
        labels, scores = made.add_old_rows(raw_table(num_old_rows, seed=50), champion)
        made.release_champion(champion)
        return made, champion, labels, scores

    return make


def test_candidate_and_champion_are_measured_on_old_rows_too(forgetful):
    made, champion, labels, scores = forgetful()
    assert main(made.flags()) == 0
    old = verdict_of(made).old_distribution
    for name, model in (("candidate", made.planted), ("champion", champion)):
        assert getattr(old, name).auc == pytest.approx(
            roc_auc_score(labels, scores(model)), abs=1e-4
        )
        assert getattr(old, name).log_loss == pytest.approx(
            sklearn_log_loss(labels, scores(model)), abs=1e-4
        )
    assert old.difference.auc == pytest.approx(old.candidate.auc - old.champion.auc, abs=1e-9)
    assert old.difference.high < -0.01, "the candidate must be worse on old rows"
    assert (old.num_rows, old.num_clicks) == (1500, labels.sum())
    verdict = verdict_of(made)
    assert (verdict.decision, verdict.num_rows) == ("pass", 2000), (
        "old rows must not change the decision"
    )


def test_without_champion_old_rows_give_candidates_numbers_alone(make_round, raw_table):
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
    assert "No rows older than the window" in made.path("report.html").read_text()


def test_old_numbers_reach_report_and_note(forgetful):
    made, *_ = forgetful()
    main(made.flags())
    old = verdict_of(made).old_distribution
    assert old.num_rows == 1500
    page = made.path("report.html").read_text()
    assert ">Old rows</h2>" in page
    assert "fault only if the old behaviour may return" in page
    assert f"{old.candidate.auc:.4f}" in page
    (note,) = runs.read_notes(made.store, made.run)
    assert (note.facts["old_auc"], note.facts["old_champion_auc"]) == (
        old.candidate.auc,
        old.champion.auc,
    )


def test_old_rows_that_only_one_side_knows_are_refused(forgetful, capsys):
    made, *_ = forgetful()
    made.change("training_set", replay_holdout_uri=None, num_replay_holdout_rows=0)
    assert main(made.flags()) == 2
    assert (
        "raw dataset has 1500 old holdout rows and the training set has 0"
        in capsys.readouterr().err
    )

"""Tests of the demo on a user's own file: with few rows, and with no data."""

import json

import pytest

from evergreen.recommender_file.form import read_recommender


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory, run_to_end, write_clicks):
    folder = tmp_path_factory.mktemp("data") / "own rows"
    data = write_clicks(folder.parent / "in put" / "my clicks.csv", 4000)
    words = ["demo", "--data", str(data), "--folder", str(folder)]
    ended = run_to_end(words, output=folder.parent / "screen.log")
    assert ended.code == 0, ended.output
    return folder, ended, json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_few_thousand_rows_run_and_every_record_is_accounted_for(few_rows):
    _, ended, summary = few_rows
    assert summary["requests"]["failed"] == 0
    assert summary["records"]["archived"] == summary["records"]["published"] > 0
    assert summary["serving_parity_max_abs_diff"] <= 1e-5
    assert summary["bayes_auc"] == {"before": None, "after": None}
    assert summary["drift"]["kind"] == "permutation"
    assert ended.left == {}


@pytest.mark.slow
def test_demo_on_few_thousand_rows_reports_uncertainty_everywhere(few_rows):
    folder, ended, summary = few_rows
    assert summary["uncertain"]
    assert "uncertain: " in ended.output
    assert "Uncertain for lack of rows" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_few_thousand_rows_are_split_by_time_and_sent_as_their_requests(few_rows):
    """The 4,000 rows are 30 s apart, and each request has five rows.

    The first 2,400 rows train the first model, and span 20 hours.
    """
    folder, ended, summary = few_rows
    assert "rows before 2026-11-01 20:00:00 UTC train and evaluate the first model" in ended.output
    assert summary["requests"]["sent"] == 1600 / 5
    assert min(path.name for path in (folder / "lake").glob("day=*")) == "day=2026-11-01"


@pytest.mark.slow
def test_few_thousand_rows_end_with_advice_unless_loop_succeeds(few_rows):
    _, ended, summary = few_rows
    has_turned = summary["auc"]["recovered"] is not None
    assert bool(summary["to_complete"]) != has_turned
    last = ended.output.splitlines()[-1]
    assert ("to complete the loop: " in last) != has_turned


@pytest.mark.slow
def test_few_thousand_rows_of_other_columns_need_no_description(few_rows):
    folder, ended, summary = few_rows
    assert "recommender.yaml is drafted from the rows" in ended.output
    assert "left out" not in ended.output
    drafted = read_recommender(folder / "recommender.yaml")
    assert (drafted.name, drafted.features.names) == ("my_clicks", ("price", "age", "item", "shop"))
    assert summary["drift"]["columns"] == ["price", "age", "item", "shop"]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "between"), [("other columns", 0.5), ("Criteo's", 0.6)])
def test_demo_loop_succeeds_on_own_file(
    tmp_path, write_clicks, write_kaggle, run_to_end, form, between
):
    write = write_clicks if form == "other columns" else write_kaggle
    folder, data = tmp_path / "a demo", write(tmp_path / "in put" / "my clicks.csv", 60_000)
    ended = run_to_end(
        ["demo", "--data", str(data), "--folder", str(folder)], output=tmp_path / "screen.log"
    )
    assert ended.code == 0, ended.output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["requests"]["failed"] == 0
    assert summary["records"]["archived"] == summary["records"]["published"] > 0
    assert [(each["version"], each["gate"]) for each in summary["versions"]] == [
        (1, "pass"),
        (2, "pass"),
    ]
    # The AUC of the new version is not checked. On a busy machine, too few rows may be left to
    # measure the new version.
    assert (
        summary["auc"]["at_detection"]
        < between
        < summary["auc"]["threshold"]
        < summary["auc"]["baseline"]
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder, kaggle: folder / "absent.csv", "does not exist"),
        (lambda folder, kaggle: folder, "no file of rows"),
        (
            lambda folder, kaggle: (
                (at := folder / "letter.csv").write_text("Dear all,\n...") and at
            ),
            "letter.csv",
        ),
        (
            lambda folder, kaggle: kaggle(folder / "train.csv", 200),
            "has 200 rows, expected at least 1,000",
        ),
    ],
    ids=["absent", "empty folder", "a letter", "200 rows"],
)
def test_unusable_data_gives_one_clear_line(tmp_path, run_to_end, write_kaggle, make, words):
    data = tmp_path / "in put"
    data.mkdir()
    path = make(data, write_kaggle)
    ended = run_to_end(
        ["demo", "--data", str(path), "--folder", str(tmp_path / "a demo")],
        output=tmp_path / "screen.log",
        seconds=120,
    )
    assert ended.code == 2
    assert words in ended.output.splitlines()[-1]
    assert "Traceback" not in ended.output
    assert "Criteo" not in ended.output or path.name == "train.csv"
    assert ended.left == {}


def test_data_inside_folder_of_demo_is_refused_and_not_deleted(tmp_path, run_to_end, write_kaggle):
    data = write_kaggle(tmp_path / "a demo" / "train.csv", 50)
    (tmp_path / "a demo" / ".evergreen-demo").touch()
    words = ["demo", "--data", str(data), "--folder", str(data.parent)]
    ended = run_to_end(words, output=tmp_path / "screen.log", seconds=120)
    assert ended.code == 2
    assert "which the demo empties" in ended.output
    assert data.exists()

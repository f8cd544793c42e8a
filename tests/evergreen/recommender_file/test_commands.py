"""Tests of `evergreen data`: from a click log to an accepted file."""

import re
from pathlib import Path

import pytest

from cli.recommender import main
from evergreen.recommender_file.form import read_recommender
from testing.releases import make_live, release, store_model
from tests.support.record_messages import fields_of

SHOP = (
    "format: evergreen/recommender/1\nname: shop\nfeatures:\n  numeric: [price]\n  categorical: "
    "[C1..C3]\n"
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "shop.yaml"
    path.write_text(SHOP)
    return path


@pytest.fixture
def run(tmp_path, capsys):
    """Runs a command over the folder's registry, and returns its exit code and output."""

    def run(*line):
        store = [] if line[0] in ("init", "check") else ["--store", str(tmp_path / "store")]
        code = main([*map(str, line), *store])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    (tmp_path / "store").mkdir()
    return run


def test_click_log_becomes_accepted_file(run, tmp_path):
    log, drafted = tmp_path / "My Clicks.csv", tmp_path / "recommender.yaml"
    log.write_text("clicked,price,item_id\n0,1.5,3\n1,2.5,4\n")
    assert run("init", log, "--output", drafted)[0] == 0
    code, printed = run("check", drafted)
    assert (
        code,
        f"{drafted} is valid: my_clicks, 1 numeric and 1 categorical features" in printed,
    ) == (0, True)
    assert run("accept", drafted, "--why", "first", "--who", "ann")[0] == 0
    code, printed = run("history")
    assert code == 0
    line = printed.splitlines()[1]
    assert re.fullmatch(r" +1  \S+ \S+ \S+ +ann +my_clicks +[0-9a-f]{8} +first", line)
    (tmp_path / "shown.yaml").write_text(run("show")[1])
    assert run("diff", "current", tmp_path / "shown.yaml") == (0, "0 differences\n")


def test_schema_of_records_is_that_of_file_and_published_one_is_current(run, file, capsys):
    assert main(["records", "examples/shop/recommender.yaml"]) == 0
    assert capsys.readouterr().out == Path("docs/reference/records.proto").read_text(), (
        "the published schema is not current; `make golden` writes it"
    )
    run("accept", file, "--why", "x")
    printed = run("records", "1")[1]
    assert [name for *_, name, _ in fields_of(printed)["Features"]] == ["price", "C1", "C2", "C3"]
    assert main(["records", "1"]) == 2
    assert "--store is not given" in capsys.readouterr().err


def test_draft_does_not_replace_file(run, tmp_path, file):
    (tmp_path / "log.csv").write_text("clicked,price\n0,1.5\n1,2.5\n")
    code, printed = run("init", tmp_path / "log.csv", "--output", file)
    assert (code, "exists already" in printed, file.read_text()) == (2, True, SHOP)


def test_wrong_file_is_neither_valid_nor_accepted(run, file):
    file.write_text(SHOP.replace("price", "score"))
    for line in (("check", file), ("accept", file, "--why", "x")):
        code, printed = run(*line)
        assert code == 2
        assert printed.startswith(
            f"error: {file}:4: features.numeric[0] is 'score', which every row has"
        )
    assert run("history") == (0, "no recommender was accepted yet\n")


def test_accepting_shows_changes_and_same_recommender_again_is_refused(run, file):
    assert run("accept", file, "--why", "first")[0] == 0
    assert run("accept", file, "--why", "again")[0] == 2
    file.write_text(SHOP.replace("[price]", "[price, age]") + "training: {seed: 7}\n")
    code, printed = run("accept", file, "--why", "age is known")
    assert code == 0
    assert printed.startswith(
        "training.seed: not named -> 7\nfeatures.numeric: without none -> with age\nversion 2 is "
        "used from the next"
        " run on"
    )


def test_other_recommender_is_accepted_by_flag_that_refusal_names(run, file):
    assert run("accept", file, "--why", "first")[0] == 0
    file.write_text(SHOP.replace("name: shop", "name: films"))
    code, printed = run("accept", file, "--why", "films")
    assert code == 2
    assert "the file names its recommender 'films', expected 'shop'" in printed
    assert "--replace" in printed
    assert run("show", "2")[0] == 2
    code, printed = run("accept", file, "--why", "films", "--replace")
    assert (code, "version 2 is used from the next run on" in printed) == (0, True)


def test_accepting_warns_if_live_model_cannot_be_continued(run, file, tmp_path):
    run("accept", file, "--why", "first")
    store_model(tmp_path / "store", "m1", recommender=read_recommender(file))
    make_live(tmp_path / "store", release(tmp_path / "store", 1, "m1"))
    for text, warning in (
        (SHOP.replace("[price]", "[price, age]"), False),
        (SHOP.replace("[price]", "[age]").replace("[C1..C3]", "[C1..C3, price]"), True),
    ):
        file.write_text(text)
        code, printed = run("accept", file, "--why", "other columns")
        assert code == 0
        assert ("cannot continue the live model" in printed) == warning
        assert ("run it again with `--from-scratch`" in printed) == warning


def test_difference_of_any_key_is_reported(run, file, tmp_path):
    assert run("accept", file, "--why", "first")[0] == 0
    other = tmp_path / "other.yaml"
    other.write_text(
        "format: evergreen/recommender/1\nname: store\ndata: {label: clicked}\n"
        "features:\n  numeric: [price]\n  categorical: [C3, C2, C1]\n"
    )
    code, printed = run("diff", "1", other)
    assert code == 1
    assert printed.splitlines() == [
        "name: shop -> store",
        "data.label: label -> clicked",
        "features.categorical: C1..C3 -> C3, C2, C1",
        "3 differences",
    ]


def test_missing_reason_and_unknown_version_are_refused(run, file):
    assert "evergreen data accept" in run("show")[1]
    assert run("accept", file, "--why", " ")[0] == 2
    assert run("accept", file, "--why", "first")[0] == 0
    assert run("show", "2")[0] == 2

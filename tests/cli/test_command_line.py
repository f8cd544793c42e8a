"""Tests of the `evergreen` command line: accepted arguments, exit codes and one-line errors."""

from pathlib import Path

import pytest

from cli.__main__ import main
from evergreen.runtime.errors import ContractError
from pipelines.package import read_parameters
from testing.recommenders import accept_into
from tests.support.errors import says

GOLDEN = Path(__file__).parents[1] / "pipelines" / "golden" / "retraining.yaml"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-p", "lake"], "parameter 'lake' has no '=', expected NAME=VALUE"),
        (["-p", "min_auc=0.7"], "parameter min_auc is unknown, expected some of champion, "),
        (["-p", "store=/s"], "`evergreen compile` sets store, from the placement or a flag"),
        (["--set", "training.seeed=7"], "training.seeed is not a setting, expected seed"),
        (["--set", "gate.min_auc=high"], "gate.min_auc is 'high', expected float"),
        (
            ["-p", "settings=training.seed=7", "--set", "training.passes=0"],
            "passes is 0, expected at least 1",
        ),
        (
            ["-p", "recommender=2"],
            "recommender is '2', expected current, the number of an accepted version",
        ),
    ],
)
def test_wrong_parameter_or_setting_is_refused_before_anything_runs(
    words, expected, tmp_path, capsys
):
    accept_into(tmp_path / "store")
    assert main(["run", "--package", str(GOLDEN), "--folder", str(tmp_path), *words]) == 2
    assert expected in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("setting", ["training.seeed=7", "gate.min_auc=high", "moddel.tower=[8]"])
def test_submit_refuses_wrong_setting_before_it_calls_server(setting, capsys):
    line = ["submit", "--package", str(GOLDEN), "--host", "http://127.0.0.1:9", "--set", setting]
    assert main(line) == 2
    assert setting.partition("=")[0].rpartition(".")[0] in capsys.readouterr().err


def test_run_without_accepted_recommender_says_how_to_accept_one(tmp_path, capsys):
    assert main(["run", "--package", str(GOLDEN), "--folder", str(tmp_path)]) == 2
    assert "evergreen data accept" in capsys.readouterr().err


def test_parameters_are_texts_and_settings_extend_those_of_parameter():
    assert read_parameters(
        GOLDEN, ["parent=a=b", "settings=training.seed=7"], ['training.solver={"stage_rows": 5}']
    ) == {
        "parent": "a=b",
        "settings": "training.seed=7 'training.solver={\"stage_rows\": 5}'",
    }


def test_from_scratch_continues_no_model_and_is_compared_with_none():
    scratch = {"parent": "none", "champion": "none"}
    assert read_parameters(GOLDEN, ["settings=a"], from_scratch=True) == {
        "settings": "a",
        **scratch,
    }
    assert read_parameters(GOLDEN, ["parent=none"], from_scratch=True) == scratch
    with says(ContractError, "from-scratch-champion"):
        read_parameters(GOLDEN, ["champion=current"], from_scratch=True)


def test_demo_refuses_folder_that_it_did_not_write(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["demo", "--folder", str(tmp_path)]) == 2
    assert "contains files that are not from a demo" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize("command", [["models", "list"], ["runs"]])
def test_folder_that_is_no_registry_is_refused_and_empty_folder_accepted(command, tmp_path, capsys):
    assert main([*command, "--store", str(tmp_path)]) == 0
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main([*command, "--store", str(tmp_path)]) == 2
    assert (
        "contains none of models, runs, recommender, journal.jsonl, expected a model registry"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["validation.json", "outcome.json"])
def test_corrupt_note_of_run_is_named(name, tmp_path, capsys):
    (path := tmp_path / "runs" / "r1" / name).parent.mkdir(parents=True)
    path.write_text('{"step": "val')
    assert main(["runs", "--store", str(tmp_path)]) == 2
    assert f"{path} cannot be read" in capsys.readouterr().err


def test_folder_of_environment_that_was_not_built_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "demo.environments.python_of", lambda environment: tmp_path / environment / "python"
    )
    assert main(["data", "schema", "show", "--store", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: data schema needs {tmp_path}/validation/python, which is absent; "
        "`make environments ENVIRONMENTS=validation` builds it\n"
    )

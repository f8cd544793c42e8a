"""The `evergreen` command line: what it accepts is a promise, and misuse has an exit code and one clear line."""

from pathlib import Path

import pytest

from pipelines.__main__ import ROOMS, build_parser, main
from pipelines.package import read_parameters


def test_commands_are_the_promised_ones():
    actions = [action for action in build_parser()._actions if action.dest == "command"]
    assert set(actions[0].choices) == {"demo", "compile", "run", "submit", "models", "live-at", "model", *ROOMS}
    assert set(ROOMS) == {
        "log",
        "monitor", "uploader", "simulate", "drift", "traffic", "score", "rank", "load", "ingest",
        "rollback", "promote", "canary", "verify", "watchdog", "backtest", "incident", "replay", "scale",
        "backfill", "lineage", "schema", "quarantine",
    }  # fmt: skip


GOLDEN = Path(__file__).parent / "golden" / "retraining.yaml"


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("min_auc", "parameter 'min_auc' has no '=', expected NAME=VALUE"),
        ("min_acu=0.7", "parameter min_acu is unknown, expected some of attribution_hours, "),
        ("min_auc=high", "parameter min_auc is 'high', expected a number"),
        ("min_auc=NaN", "parameter min_auc is 'NaN', expected a number"),
        ("min_auc=1e999", "parameter min_auc is '1e999', expected a number"),
        ("seed=1.5", "parameter seed is '1.5', expected a whole number"),
        ("seed=true", "parameter seed is 'true', expected a whole number"),
        ("response_cache=1", "parameter response_cache is '1', expected true or false"),
    ],
)
def test_wrong_parameter_is_refused_by_name_before_anything_runs(pair, expected, tmp_path, capsys):
    code = main(["run", "--package", str(GOLDEN), "--folder", str(tmp_path), "-p", pair])
    assert code == 2
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_parameters_have_the_types_of_the_compiled_pipeline():
    pairs = ["min_auc=1", "seed=7", "response_cache=true", "tower=64", 'solver={"vvgpu": [[0, 1]]}', "lake=a=b"]
    assert read_parameters(GOLDEN, pairs) == {
        "min_auc": 1,
        "seed": 7,
        "response_cache": True,
        "tower": "64",
        "solver": '{"vvgpu": [[0, 1]]}',
        "lake": "a=b",
    }


def test_demo_refuses_a_folder_that_it_did_not_write(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["demo", "--folder", str(tmp_path)]) == 2
    assert "is not empty and no demo wrote it" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()


def test_room_of_an_environment_that_was_not_built_says_which(tmp_path, monkeypatch, capsys):
    from pipelines import __main__ as command

    monkeypatch.setattr(command, "python_of", lambda environment: tmp_path / environment / "python")
    assert main(["schema", "show", "--store", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: schema needs {tmp_path}/validation/python, which is absent; `make environments` builds it\n"
    )

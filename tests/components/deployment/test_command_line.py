"""Tests of user input: relative paths, absent folders and empty reasons.

Each error names the wrong argument.
"""

import pytest

from cli.__main__ import main as evergreen
from controller import __main__ as controller
from controller import promote, rollback, verify
from controller.canary import __main__ as canary_command
from controller.deployment_target import target_of

COMMANDS = {
    "rollback": (rollback.main, ["--reason", "why"]),
    "promote": (promote.main, ["--model-id", "m", "--override", "why"]),
    "canary": (canary_command.main, ["status"]),
    "controller": (controller.main, []),
    "verify": (lambda words: verify.main(["1", "--lake", ".", *words]), []),
    "models": (lambda words: evergreen(["models", "list", *words]), []),
    "live-at": (lambda words: evergreen(["models", "live-at", "2026-01-01", *words]), []),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_absent_registry_is_invalid_input_and_named(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main, words = COMMANDS[command]
    assert main([*words, "--store", "stoer"]) == 2
    assert f"--store is 'stoer', but {tmp_path}/stoer is not a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "a mistyped path must create no file"


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (rollback.main, ["--to", "1", "--reason", "why"]),
        (promote.main, ["--model-id", "m", "--override", "why"]),
        (canary_command.main, ["status", "--lake", "lake"]),
    ],
    ids=["rollback", "promote", "canary"],
)
def test_relative_paths_count_from_working_folder(main, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)
    main([*words, "--store", "store", "--repository", "repository", "--triton-urls", ""])
    assert "expected file:///... or an absolute path" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["runs"], ["models", "list"]], ids=" ".join)
def test_listing_without_registry_is_of_demo(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert evergreen(words) == 2
    assert f"{tmp_path}/build/demo/store is not a folder" in capsys.readouterr().err
    (tmp_path / "build" / "demo" / "store").mkdir(parents=True)
    assert evergreen(words) == 0


def test_controller_is_author_of_its_changes_unless_flag_names_another(tmp_path):
    words = ["--store", str(tmp_path), "--repository", str(tmp_path), "--triton-urls", ""]
    for given, author in ([], "controller"), (["--who", "anna"], "anna"):
        assert target_of(controller.build_parser().parse_args([*words, *given])).who == author


@pytest.mark.parametrize(
    ("main", "words"),
    [(rollback.main, []), (canary_command.main, ["abort"]), (canary_command.main, ["advance"])],
    ids=["rollback", "abort", "advance"],
)
def test_empty_reason_is_invalid_input(main, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--store", str(tmp_path), "--reason", " "])
    assert ended.value.code == 2
    assert (
        "argument --reason: is empty, expected a reason for the journal" in capsys.readouterr().err
    )

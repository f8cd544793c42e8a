"""Tests that every command's exit code tells its caller what to do next."""

import subprocess
import sys

import pytest

from evergreen.runtime.errors import (
    ContractError,
    PermanentError,
    Preempted,
    Refused,
    TemporaryError,
)
from evergreen.runtime.exit_codes import exits_with_code


@exits_with_code
def main(outcome: int | BaseException) -> int:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Refused("auc is 0.5"), 1, "refused: auc is 0.5\n"),
        (ContractError("num_rows is 0"), 2, "error: num_rows is 0\n"),
        (TemporaryError("bucket answers 503"), 3, "error: bucket answers 503\n"),
        (PermanentError("disk is read-only"), 3, "error: disk is read-only\n"),
        (OSError(28, "No space left on device"), 3, "error: [Errno 28] No space left on device\n"),
        (TemporaryError(), 3, "error: TemporaryError\n"),
        (Preempted("saved at step 7"), 75, "preempted: saved at step 7\n"),
        (KeyboardInterrupt(), 130, "interrupted: Ctrl-C\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_expected_failure_is_one_line_and_code(error, code, line, capsys):
    assert main(error) == code
    assert capsys.readouterr().err == line


def test_bug_of_program_is_no_refusal_and_shows_its_traceback(capsys):
    assert main(KeyError("absent")) == 70
    assert "KeyError" in capsys.readouterr().err


def test_results_arguments_and_argparse_exits_pass_through():
    assert main(1) == 1
    with pytest.raises(SystemExit):
        main(SystemExit(2))


def test_process_ends_without_garbage_collection():
    script = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count())); "
    script += "from evergreen.runtime.exit_codes import exits_with_code; exits_with_code(int)()"
    assert int(subprocess.check_output([sys.executable, "-c", script])) > 1_000

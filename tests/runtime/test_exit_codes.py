"""Every command ends with the code that tells its caller what to do next."""

import pytest

from components.runtime.errors import ContractError, PermanentError, Preempted, Refused, TemporaryError
from components.runtime.exit_codes import exits_with_code


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
def test_an_expected_failure_is_one_line_and_a_code(error, code, line, capsys):
    @exits_with_code
    def main() -> int:
        raise error

    assert main() == code
    assert capsys.readouterr().err == line


def test_a_fault_of_the_program_is_no_refusal_and_shows_its_traceback(capsys):
    @exits_with_code
    def main() -> int:
        return {}["absent"]

    assert main() == 70
    assert "KeyError" in capsys.readouterr().err


def test_results_arguments_and_argparse_exits_pass_through():
    @exits_with_code
    def main(argv: list[str]) -> int:
        if not argv:
            raise SystemExit(2)
        return len(argv)

    assert main(["a"]) == 1
    with pytest.raises(SystemExit):
        main([])

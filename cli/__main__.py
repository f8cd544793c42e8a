"""Find the command of an `evergreen` line, and run it.

A command runs in this process if its packages are installed here. If another environment has the
command's packages, this process is replaced by the interpreter of that environment.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from cli.commands import COMMANDS, build_parser, complete_parser, find_command
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code

COMPLETION = "--print-completion"


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. docs/reference/exit-codes.md lists the exit codes."""
    line = list(sys.argv[1:] if argv is None else argv)
    path = find_command(line)
    if path is None:
        return _without_command(line)
    command = COMMANDS[path]
    words = [*command.words, *line[len(path) :]]
    if command.environment:
        python = _python_of(path)
        os.execv(python, [python, "-m", command.module, *words])
    return int(importlib.import_module(command.module).main(words))


def _without_command(line: list[str]) -> int:
    """Print help, or the script for a shell. An unknown command ends with exit code 2."""
    if line[:1] == [COMPLETION]:
        return _print_completion(line[1:])
    if len(line) == 1 and (moved := [path for path in COMMANDS if path[1:] == tuple(line)]):
        raise ContractError(
            f"{line[0]!r} is no command, did you mean `evergreen {' '.join(moved[0])}`?"
        )
    build_parser().parse_args(line)
    raise ContractError(f"{' '.join(line)!r} is no command")


def _print_completion(words: list[str]) -> int:
    import shtab

    if len(words) != 1 or words[0] not in shtab.SUPPORTED_SHELLS:
        raise ContractError(
            f"{COMPLETION} is followed by {' '.join(words) or 'nothing'}, expected one of "
            f"{', '.join(shtab.SUPPORTED_SHELLS)}"
        )
    print(shtab.complete(complete_parser(), shell=words[0]))
    return ExitCode.DONE


def _python_of(path: tuple[str, ...]) -> str:
    """Return the interpreter of a command's environment.

    Raises:
        ContractError: the environment was not built.
    """
    from demo.environments import REPOSITORY, python_of

    name = COMMANDS[path].environment
    python = python_of(name)
    if not python.exists():
        raise ContractError(
            f"{' '.join(path)} needs {python}, which is absent; "
            f"`make environments ENVIRONMENTS={name}` builds it"
        )
    # The interpreter of the other environment does not find this repository by itself. The working
    # folder remains the user's.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    )
    return str(python)


if __name__ == "__main__":
    raise SystemExit(main())

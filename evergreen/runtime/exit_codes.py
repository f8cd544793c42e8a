"""Exit codes of all commands, and the translation of exceptions into messages and codes.

The `main` function of a command has the decorator `exits_with_code` and raises exceptions. A `main`
function does not format error messages. The code that detects an error chooses the exception class
(`evergreen.runtime.errors`). docs/reference/exit-codes.md has the table of codes for users.
"""

import atexit
import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import ParamSpec

from evergreen.runtime.errors import (
    ContractError,
    PermanentError,
    Preempted,
    Refused,
    TemporaryError,
    UnreadableFile,
)
from evergreen.runtime.plain_text import printable

P = ParamSpec("P")

_OBJECTS_PER_COLLECTION = 50_000
"""Number of new objects after which Python's garbage collector runs again, while a command runs.
With Python's default of 700, garbage collection took 2.8 s of the 9.4 s of the validation step: 1.2
s during the imports, and 1.6 s at the end."""


class ExitCode(IntEnum):
    """Exit code of a command."""

    DONE = 0
    REFUSED = 1
    """The command completed with a negative result: a gate refused, or a check found a problem."""
    BAD_INPUT = 2
    """A flag or an input is invalid. The same command fails again until the flag or the input is
    corrected."""
    FAILED = 3
    """Storage, a server or the disk failed. The same command can succeed later."""
    DEFECT = 70
    """The program has a bug (EX_SOFTWARE of sysexits.h). The traceback is on standard error."""
    PREEMPTED = 75
    """The step was requested to stop and has saved its progress (EX_TEMPFAIL of sysexits.h). A
    retry continues from the saved progress."""
    INTERRUPTED = 130
    """The user pressed Ctrl-C."""


def exits_with_code(main: Callable[P, int]) -> Callable[P, int]:
    """Turn the exceptions of a command's `main` into one line on standard error and an `ExitCode`.

    `SystemExit` passes through, so that argparse behaves as usual. A closed output pipe, as after
    `head`, is not an error. Any other exception is a bug. After a bug, the program prints the
    traceback and ends with an exit code that is used only for bugs.

    While `main` runs, Python collects garbage less often (`_OBJECTS_PER_COLLECTION`). When the
    process ends, Python collects no garbage.

    >>> @exits_with_code
    ... def main() -> int:
    ...     raise ContractError("num_rows is 0, expected at least 1")
    >>> main()
    2
    >>> @exits_with_code
    ... def read() -> int:
    ...     raise UnreadableFile("journal.jsonl cannot be read: Stale file handle")
    >>> read()
    3
    >>> gc.get_threshold()[0]
    50000
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        gc.set_threshold(_OBJECTS_PER_COLLECTION)
        atexit.register(gc.freeze)
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except BrokenPipeError as error:
            return (
                ExitCode.DONE
                if _is_output_closed()
                else _print_error("error", error, ExitCode.FAILED)
            )
        except Refused as error:
            return _print_error("refused", error, ExitCode.REFUSED)
        except UnreadableFile as error:
            return _print_error("error", error, ExitCode.FAILED)
        except ContractError as error:
            return _print_error("error", error, ExitCode.BAD_INPUT)
        except Preempted as error:
            return _print_error("preempted", error, ExitCode.PREEMPTED)
        except (TemporaryError, PermanentError, OSError) as error:
            return _print_error("error", error, ExitCode.FAILED)
        except KeyboardInterrupt:
            return _print_error("interrupted", KeyboardInterrupt("Ctrl-C"), ExitCode.INTERRUPTED)
        except Exception:
            traceback.print_exc()
            return int(ExitCode.DEFECT)

    return run


def _is_output_closed() -> bool:
    """Return whether the reader of the output pipe is gone.

    If the reader is gone, output that is not yet printed is dropped.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _print_error(kind: str, error: BaseException, code: ExitCode) -> int:
    # A message may have several lines. Control characters are escaped, because they come from a
    # value in the message.
    lines = (str(error) or type(error).__name__).split("\n")
    print(f"{kind}: " + "\n".join(map(printable, lines)), file=sys.stderr)
    return int(code)

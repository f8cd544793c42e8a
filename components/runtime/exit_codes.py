"""The exit codes of every command, and the one place that turns an exception into a message and a code.

A command's `main` carries the decorator and raises; it formats no error itself. Which exception an error is, is
decided where the error is found (`runtime.errors`). The table for users is in docs/pipeline.md.
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

from components.runtime.errors import ContractError, PermanentError, Preempted, Refused, TemporaryError
from components.runtime.plain_text import printable

P = ParamSpec("P")

OBJECTS_PER_COLLECTION = 50_000
"""New objects after which a command's process searches them for garbage. Python's own 700 cost validation 1.2 s in its
imports, and a search through all objects at its end another 1.6 s, of 9.4 s in all."""


class ExitCode(IntEnum):
    """What a command's exit code tells its caller."""

    DONE = 0
    REFUSED = 1
    """The command did its work, and the answer is no: a gate refused, a check found a problem."""
    BAD_INPUT = 2
    """A flag or an input is wrong; the same command fails again until it is corrected."""
    FAILED = 3
    """Storage, a server or the disk failed; the same command may succeed later."""
    DEFECT = 70
    """The program has a fault (EX_SOFTWARE of sysexits.h); the traceback is on standard error."""
    PREEMPTED = 75
    """The step was asked to end and saved its work (EX_TEMPFAIL of sysexits.h); a retry continues from there."""
    INTERRUPTED = 130
    """Ctrl-C."""


def exits_with_code(main: Callable[P, int]) -> Callable[P, int]:
    """Decorates a command's `main`: its exceptions become one line on standard error and an `ExitCode`.

    `SystemExit` passes through, so that argparse keeps its own behaviour. A reader of the output that went away, as
    `head` does, is no error. Any other exception is a fault of the program: its traceback is printed, and the code
    differs from that of a refusal.

    The process searches for garbage less often from then on, and not when it ends (`OBJECTS_PER_COLLECTION`).

    >>> @exits_with_code
    ... def main() -> int:
    ...     raise ContractError("num_rows is 0, expected at least 1")
    >>> main()
    2
    >>> gc.get_threshold()[0]
    50000
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        gc.set_threshold(OBJECTS_PER_COLLECTION)
        atexit.register(gc.freeze)
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except BrokenPipeError as error:
            return ExitCode.DONE if _reader_has_gone() else _print_error("error", error, ExitCode.FAILED)
        except Refused as error:
            return _print_error("refused", error, ExitCode.REFUSED)
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


def _reader_has_gone() -> bool:
    """Whether nobody reads what is printed, as behind `| head`; what is still to be printed is then dropped."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _print_error(kind: str, error: BaseException, code: ExitCode) -> int:
    # A message may have several lines of its own; what a terminal obeys comes from a value in it.
    lines = (str(error) or type(error).__name__).split("\n")
    print(f"{kind}: " + "\n".join(map(printable, lines)), file=sys.stderr)
    return int(code)

"""Measure the duration of `make test` and its number of tests, for `make benchmark-suite`."""

import sys
import time
from collections.abc import Sequence

from benchmarks.command import benchmark_parser, documented, run_to_end
from benchmarks.spread import Figure, spread

MINUTES_TARGET = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test suite once, and raise an error if a test fails."""
    flags = benchmark_parser("suite", __doc__, quick="only the tests of contracts").parse_args(argv)
    with documented(flags) as document:
        began = time.monotonic()
        output = run_to_end(
            [sys.executable, "-m", "tests.everywhere", *["tests/evergreen/contracts"] * flags.quick]
        )
        minutes = (time.monotonic() - began) / 60
        passed = int(output.splitlines()[-1].split()[0])
        document["figures"] = [
            Figure("make test", spread([minutes]), "minutes", target=MINUTES_TARGET),
            Figure("tests that passed", spread([passed]), "tests"),
        ]
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What benchmarks share: two flags, the machine's facts first, a JSON document of all figures last; child processes.

What is measured, and how it is shown to people, is each benchmark's own.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.spread import named
from components.runtime.durable import write_whole
from pipelines.local.environments import REPOSITORY


def benchmark_parser(name: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A parser with `--quick`, whose help is `quick`, and `--output`, the document's path."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    output = Path("build/benchmarks") / f"{name}.json"
    parser.add_argument("--output", type=Path, default=output, help="JSON file with all figures (default: %(default)s)")
    return parser


@contextmanager
def documented(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the document, to be filled with figures, and writes it to `flags.output` if the block succeeds.

    The machine's facts are printed first and a warning last, where other work took so much of the machine that the
    figures are doubtful. Facts, flags and the share of other work are in the document; a `Spread` becomes an object.
    """
    facts, other_work = machine.facts(), machine.OtherWork()
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    document: dict[str, Any] = {
        "machine": facts,
        "flags": {name: value for name, value in vars(flags).items() if name != "output"},
    }
    yield document
    document["other_work_share"] = other_work.share()
    if warning := other_work.warning():
        print(warning)
    write_whole(flags.output, json.dumps(named(document), indent=2) + "\n")
    print(f"written: {flags.output}")


def run_to_end(command: Sequence[str]) -> str:
    """Runs a command at the repository's root; what it printed.

    Raises:
        RuntimeError: it failed; the message ends with its last words.
    """
    done = subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[1:4]} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout

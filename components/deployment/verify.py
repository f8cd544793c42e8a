"""Offline proof that a version is what was released and answered what was logged: `evergreen verify VERSION`.

First the identity: the hashes of data, workflow, weights and graph as journal, manifest and files have them; that the
stored model still makes the same graph; that the golden rows hold. Then every logged row of the version is scored again
by its graph, in this process, and held against the score that was served. Reads only, needs no server and no
repository; memory is bounded by a batch of rows beside the graph.

Exit codes: 0 all the same, 1 something differs, 2 misuse (never released, no rows) or a lake that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from components.contracts.criteo import CATEGORICAL, DENSE
from components.deployment.graph.files import GRAPH_FILE
from components.deployment.graph.parity import open_graph, score
from components.deployment.identity import Check, check_golden, check_identity, read_recorded
from components.deployment.logged_rows import LoggedRows, read_logged_rows
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.storage.locations import open_objects
from components.storage.objects import Objects
from components.storage.uris import is_bucket_uri, typed_folder

DEFAULT_TOLERANCE = 1e-6
"""Largest accepted difference of one probability. What differs rightly is the order of sums: rows were served in other
batches than they are scored in here, on a GPU perhaps."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A logged row whose score is not what the graph says."""

    file: str
    place: int
    """Row in the file, from 0."""
    request_id: str
    row: int
    """Row of the request."""
    logged: float | None
    """None = the row was logged without a score."""
    recomputed: float | None
    """None = the graph gave no number."""
    values: dict[str, float | int | None]
    """Raw features by column; None = missing."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found about one version."""

    version: int
    model_id: str
    checks: list[Check]
    num_files: int
    """Files that hold rows of the version, as far as they were read."""
    num_rows: int
    num_different: int
    tolerance: float
    max_abs_diff: float | None
    """Of one row; None where there is no row, or a score is no number."""
    first_difference: Difference | None

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return self.num_different == 0 and all(check.held is not False for check in self.checks)


def verify(
    version: int, store: Path, lake: Path | Objects, *, tolerance: float = DEFAULT_TOLERANCE, limit: int | None = None
) -> Verification:
    """What was found about `version`.

    Args:
        version: Of the served model.
        store: The model store.
        lake: Folder or bucket with day partitions: the lake, or the monitor's archive.
        tolerance: Largest accepted difference of one probability.
        limit: Most rows that are scored, in the lake's order; None = all.

    Raises:
        ContractError: the version was never released, or a file of the lake is damaged.
    """
    recorded = read_recorded(store, version)
    with TemporaryDirectory(prefix="evergreen-verify-") as scratch:
        checks, graph = check_identity(recorded, store, Path(scratch))
        comparison = _Comparison(tolerance)
        if graph is not None:
            session = open_graph(graph / GRAPH_FILE)
            checks.append(check_golden(session, recorded, store))
            for logged in read_logged_rows(lake, version):
                rest = len(logged) if limit is None else limit - comparison.num_rows
                if rest <= 0:
                    break
                logged = logged.first(rest)
                comparison.add(logged, score(session, logged.asked))
    return Verification(
        version=version,
        model_id=recorded.model_id,
        checks=checks,
        num_files=len(comparison.files),
        num_rows=comparison.num_rows,
        num_different=comparison.num_different,
        tolerance=tolerance,
        max_abs_diff=comparison.max_abs_diff,
        first_difference=comparison.first,
    )


class _Comparison:
    """Logged scores against recomputed ones, batch by batch."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._largest = 0.0
        self.files: set[str] = set()
        self.num_rows = self.num_different = 0
        self.first: Difference | None = None

    @property
    def max_abs_diff(self) -> float | None:
        return self._largest if self.num_rows and math.isfinite(self._largest) else None

    def add(self, logged: LoggedRows, scores: Any) -> None:
        """Takes in a batch and what the graph says about it."""
        apart = np.abs(scores.astype(np.float64) - logged.asked.expected.astype(np.float64))
        # NaN must lose: it compares false with every tolerance.
        apart = np.where(np.isnan(apart), np.inf, apart)
        wrong = np.flatnonzero(apart > self._tolerance)
        self.files.add(logged.name)
        self.num_rows += len(logged)
        self.num_different += len(wrong)
        self._largest = max(self._largest, float(apart.max()))
        if len(wrong) and self.first is None:
            self.first = _difference(logged, int(wrong[0]), float(scores[wrong[0]]))


def _difference(logged: LoggedRows, at: int, recomputed: float) -> Difference:
    dense, categorical = logged.asked.dense[at].tolist(), logged.asked.categorical[at].tolist()
    values: dict[str, float | int | None] = {name: _number(value) for name, value in zip(DENSE, dense)}
    values |= {name: value if value >= 0 else None for name, value in zip(CATEGORICAL, categorical)}
    return Difference(
        file=logged.name,
        place=int(logged.places[at]),
        request_id=logged.request_ids[at],
        row=int(logged.rows[at]),
        logged=_number(float(logged.asked.expected[at])),
        recomputed=_number(recomputed),
        values=values,
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def build_parser() -> argparse.ArgumentParser:
    """The flags of a verification."""
    parser = argparse.ArgumentParser(prog="evergreen verify", description=__doc__.split("\n\n")[0])
    parser.add_argument("version", type=int, help="version of the served model")
    parser.add_argument("--store", required=True, help="model store, folder or its URI")
    parser.add_argument("--lake", required=True, help="lake, or the monitor's archive: folder, its URI, or gs://")
    parser.add_argument("--limit", type=int, default=None, help="most rows, in the lake's order (default: all)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=DEFAULT_TOLERANCE,
        help="largest accepted difference of one probability (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as one line of JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Verifies a version; answers the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        if not arguments.tolerance >= 0:
            raise ContractError(f"tolerance is {arguments.tolerance}, expected at least 0")
        if arguments.limit is not None and arguments.limit < 1:
            raise ContractError(f"limit is {arguments.limit}, expected at least 1")
        store, lake = typed_folder(arguments.store, "--store"), _lake(arguments.lake)
        found = verify(
            arguments.version,
            store,
            lake,
            tolerance=arguments.tolerance,
            limit=arguments.limit,
        )
    except (ContractError, TemporaryError, PermanentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({**asdict(found), "same": found.same}, allow_nan=False) if arguments.json else _told(found))
    if found.same and not found.num_rows:
        print(
            f"error: no row of {arguments.lake} was scored by version {found.version}, expected logged rows",
            file=sys.stderr,
        )
        return 2
    return 0 if found.same else 1


def _lake(text: str) -> Path | Objects:
    return open_objects(text) if is_bucket_uri(text) else typed_folder(text, "--lake")


def _told(found: Verification) -> str:
    """The findings as lines for people."""
    words = {True: "same", False: "DIFFERS", None: "unknown"}
    lines = [f"version {found.version}, model {found.model_id}"]
    lines += [f"  {words[check.held]:<8} {check.name}: {check.detail}" for check in found.checks]
    largest = "none" if found.max_abs_diff is None else f"{found.max_abs_diff:.3g}"
    lines.append(
        f"  {words[found.num_different == 0]:<8} scores: {found.num_rows:,} logged rows of {found.num_files} files "
        f"scored again, {found.num_different:,} differ by more than {found.tolerance:g}; largest difference {largest}"
    )
    if (first := found.first_difference) is not None:
        lines.append(
            f"first difference: {first.file} row {first.place}, request {first.request_id} row {first.row}: "
            f"logged {first.logged}, recomputed {first.recomputed}; the row is {first.values}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

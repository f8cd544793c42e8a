"""Verify offline that a version is unchanged since its release and gave its logged scores.

The command `evergreen audit verify VERSION` compares the hashes of data, workflow, weights and
graph in the journal, the manifest and the files. The command exports the stored model again, which
must give the same graph. The graph scores the golden rows and every logged row of the version again
in this process. Each score is compared with the served score or shadow score in the log. The
command only reads, and needs no server and no repository. Memory use is bounded by the graph and
one batch of rows.

docs/reference/exit-codes.md lists the exit codes. Code 1 means that a difference was found.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evergreen.config.features import Features
from evergreen.contracts.manifests import Model, Release
from evergreen.contracts.raw_rows import (
    MODEL_VERSION,
    REQUEST_ID,
    ROW,
    SCORE,
    SHADOW_SCORE,
    SHADOW_VERSION,
    category_matrix,
    feature_matrix,
)
from evergreen.registry.models import (
    GRAPH_FILE,
    graph_folder,
    graph_sha256,
    model_folder,
    release_path,
)
from evergreen.registry.promotion_journal import Promotion, read_entries
from evergreen.rows.archived_rows import ArchivedFile, archived_files
from evergreen.runtime.durable import sha256_file, sha256_tree
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.terminal import progress
from evergreen.serving.graph.export import export
from evergreen.serving.parity import GoldenRows, check_scores, open_graph, score
from evergreen.serving.repository.model_repository import GOLDEN_FILE
from evergreen.storage.objects import Objects
from evergreen.storage.uris import is_bucket_uri, open_objects, typed_folder

DEFAULT_TOLERANCE = 1e-6
"""Largest accepted difference of one probability. Serving may have added numbers in another order,
because it used other batches and possibly a GPU."""
BATCH_ROWS = 16_384
_SCORES = ((MODEL_VERSION, SCORE), (SHADOW_VERSION, SHADOW_SCORE))
"""Pairs of columns with the version and the score of a row. The second pair has values only in rows
with a shadow score."""


@dataclass(frozen=True, kw_only=True)
class HashCheck:
    """Result of one check of a version's identity."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class ScoreDifference:
    """Logged row whose score differs from the recomputed score."""

    file: str
    position: int
    """Position of the row in its file, counted from 0."""
    request_id: str
    row: int
    """Row in the request."""
    logged: float | None
    """Logged score, or None if the row was logged without a score."""
    recomputed: float | None
    """Recomputed score, or None if the graph returned NaN or infinity."""
    values: dict[str, float | int | None]
    """Raw features by column. None = missing."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of the verification of one version."""

    version: int
    model_id: str
    checks: list[HashCheck]
    num_files: int
    """Number of files that were read and have rows of the version."""
    num_rows: int
    num_different: int
    tolerance: float
    max_abs_diff: float | None
    """Largest difference over all rows. None if there is no row, or if a score is not finite."""
    first_difference: ScoreDifference | None

    @property
    def same(self) -> bool:
        """True if all checks passed and all scores are equal."""
        return self.num_different == 0 and all(check.passed for check in self.checks)


def verify(
    version: int,
    store: Path,
    lake: Objects,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    limit: int | None = None,
) -> Verification:
    """Verify one version.

    Args:
        version: Number of the version.
        store: Folder of the model registry.
        lake: Lake, or the monitor's archive.
        tolerance: Largest accepted difference of one probability.
        limit: Maximum number of rows to score, in the lake's order. None = all.

    Raises:
        ContractError: the version was never released, or a file of the lake is corrupt.
    """
    path = release_path(store, version)
    manifest = Release.read(path) if path.exists() else None
    entries = [entry for entry in read_entries(store) if entry.version == version]
    released = manifest or next(
        reversed(entries), None
    )  # a failed release has journal entries but no manifest
    if released is None:
        raise ContractError(
            f"version {version} was never released in model registry {store}, expected a version "
            "of the registry's promotion journal"
        )
    files: set[str] = set()
    num_rows = num_different = 0
    largest, first = 0.0, None
    with TemporaryDirectory(prefix="evergreen-verify-") as scratch:
        checks, graph = _check_hashes(released, store, Path(scratch))
        checks.insert(0, _check_journal(released, entries))
        if graph is not None:
            session = open_graph(graph / GRAPH_FILE)
            path = graph_folder(store, version) / GOLDEN_FILE
            check, features = _check_golden(session, path, released.sha256.get("golden"))
            checks.append(check)
            for logged in read_logged_rows(lake, version, features) if features else ():
                rest = len(logged.rows) if limit is None else limit - num_rows
                if rest <= 0:
                    break
                rows = logged.rows.take(slice(rest))
                scores = score(session, rows)
                apart = np.abs(scores.astype(np.float64) - rows.expected.astype(np.float64))
                # A comparison of NaN with any tolerance is false, but NaN must count as a
                # difference.
                apart = np.where(np.isnan(apart), np.inf, apart)
                wrong = np.flatnonzero(apart > tolerance)
                if len(wrong) and first is None:
                    first = _difference(logged, int(wrong[0]), float(scores[wrong[0]]))
                files.add(logged.file)
                num_rows += len(rows)
                num_different += len(wrong)
                largest = max(largest, float(apart.max()))
    return Verification(
        version=version,
        model_id=released.model_id,
        checks=checks,
        num_files=len(files),
        num_rows=num_rows,
        num_different=num_different,
        tolerance=tolerance,
        max_abs_diff=_finite(largest) if num_rows else None,
        first_difference=first,
    )


def _check_hashes(
    released: Release | Promotion, store: Path, scratch: Path
) -> tuple[list[HashCheck], Path | None]:
    """Check the hashes, and return a folder with the released graph, or None if none is intact."""
    stored_graph = graph_folder(store, released.version)
    folder = model_folder(store, released.model_id).absolute()

    def hash_exported_again() -> str:
        # Use the files of this registry, because the stored URIs may still point to its former
        # location.
        export(replace(Model.read(folder / Model.MANIFEST), uri=folder.as_uri()), scratch)
        return graph_sha256(scratch)

    sources: dict[str, Callable[[], str]] = {
        "data": lambda: Model.read(folder / Model.MANIFEST).raw_digest,
        "workflow": lambda: sha256_tree(folder / Model.WORKFLOW),
        "weights": lambda: sha256_tree(folder / Model.WEIGHTS),
        "graph": lambda: graph_sha256(stored_graph),
        "graph exported again": hash_exported_again,
    }
    checks = []
    for name, source in sources.items():
        expected = released.sha256.get(name.split()[0])
        try:
            found = source()
        except (ContractError, OSError) as error:
            checks.append(HashCheck(name=name, passed=False, detail=str(error)))
            continue
        detail = (
            f"sha256 {found}"
            if found == expected
            else f"sha256 is {found}, expected {expected} as in the release"
        )
        checks.append(HashCheck(name=name, passed=found == expected, detail=detail))
    passed = {check.name for check in checks if check.passed}
    graph = (
        stored_graph if "graph" in passed else scratch if "graph exported again" in passed else None
    )
    return checks, graph


def _check_journal(released: Release | Promotion, entries: list[Promotion]) -> HashCheck:
    """Check that every journal entry of the version agrees with its manifest."""
    faults = [] if entries else [f"version {released.version} has a manifest but no journal entry"]
    for entry in entries:
        if entry.model_id != released.model_id:
            faults.append(f"model is {entry.model_id}, expected {released.model_id}")
        for part in sorted(entry.sha256.keys() | released.sha256.keys()):
            if (digest := entry.sha256.get(part)) != (expected := released.sha256.get(part)):
                faults.append(
                    f"sha256 of {part} is {digest} in the journal entry of {entry.time}, expected "
                    f"{expected}"
                )
    if faults:
        return HashCheck(name="journal", passed=False, detail=faults[0])
    return HashCheck(
        name="journal",
        passed=True,
        detail=", ".join(f"{entry.action} {entry.time}" for entry in entries),
    )


def _check_golden(
    session: Any, path: Path, expected: str | None
) -> tuple[HashCheck, Features | None]:
    """Check that the graph reproduces the scores that are stored with the version's golden rows.

    Args:
        session: Inference session of the graph.
        path: File of the golden rows.
        expected: Hash of that file in the release, or None.

    Returns:
        The result of the check, and the features of the golden rows. The features are None if the
        rows cannot be read, because the columns of the graph are then unknown.
    """
    features = None
    try:
        golden = GoldenRows.load(path)
        features = golden.features
        largest = check_scores(score(session, golden), golden, source="graph")
        if expected is not None and (sha256 := sha256_file(path)) != expected:
            raise ContractError(f"sha256 is {sha256}, expected {expected} as in the release")
    except ContractError as error:
        return HashCheck(name="golden rows", passed=False, detail=str(error)), features
    found = HashCheck(
        name="golden rows",
        passed=True,
        detail=f"{len(golden)} rows, largest difference {largest:.3g}",
    )
    return found, features


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedRows:
    """Rows of one file that the version scored. Each batch contains at least one row."""

    file: str
    """Path relative to the lake."""
    positions: NDArray[np.int64]
    """[n] position of each row in its file, counted from 0."""
    log: Any
    """Arrow batch with the columns of the request id and the row in the request."""
    rows: GoldenRows
    """Raw features, with the logged scores as the expected scores. NaN = the row was logged without
    a score."""


def read_logged_rows(lake: Objects, version: int, features: Features) -> Iterator[LoggedRows]:
    """Yield the rows of `lake` that `version` scored, ordered by file and row.

    A batch contains either served scores or shadow scores, but not both. If a row group has no row
    of the version, only its version columns are read. A file of a bucket is downloaded completely.

    Raises:
        ContractError: a file is corrupt, or lacks a column. The message names the file.
        TemporaryError, PermanentError: the bucket cannot be read.
    """
    for archived in archived_files(lake):
        with archived.opened() as file:
            yield from _logged_rows_of(file, archived, version=version, features=features)


def _logged_rows_of(
    file: Any, archived: ArchivedFile, *, version: int, features: Features
) -> Iterator[LoggedRows]:
    names, needed, start = file.schema_arrow.names, (*features.names, REQUEST_ID, ROW), 0
    # Rows that were served by another system may lack the log's columns.
    pairs = [pair for pair in _SCORES if set(pair) <= set(names)]
    columns = [*needed, *(name for pair in pairs for name in pair)]
    for number in range(file.num_row_groups):
        versions = file.read_row_group(number, columns=[scored_by for scored_by, _ in pairs])
        position, start = start, start + versions.num_rows
        if not any(pc.any(pc.equal(column, version)).as_py() for column in versions.columns):
            continue
        if lacking := [name for name in needed if name not in names]:
            raise ContractError(
                f"{archived.uri} lacks columns {lacking}, expected all columns of archived rows"
            )
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[number], columns=columns):
            for scored_by, score_column in pairs:
                at = np.flatnonzero(
                    batch.column(scored_by).fill_null(-1).to_numpy(zero_copy_only=False) == version
                )
                if len(at):
                    taken = batch.take(pa.array(at))
                    rows = GoldenRows(
                        features=features,
                        dense=feature_matrix(taken, features.numeric, "float32", missing=np.nan),
                        categorical=category_matrix(taken, features),
                        expected=feature_matrix(
                            taken, [score_column], "float32", missing=np.nan
                        ).ravel(),
                    )
                    yield LoggedRows(
                        file=archived.name, positions=position + at, log=taken, rows=rows
                    )
            position += batch.num_rows


def _difference(logged: LoggedRows, at: int, recomputed: float) -> ScoreDifference:
    return ScoreDifference(
        file=logged.file,
        position=int(logged.positions[at]),
        request_id=logged.log.column(REQUEST_ID)[at].as_py(),
        row=logged.log.column(ROW)[at].as_py(),
        logged=_finite(float(logged.rows.expected[at])),
        recomputed=_finite(recomputed),
        values=logged.rows.values(at),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(prog="evergreen audit verify", description=__doc__.split("\n\n")[0])
    parser.add_argument("version", type=int, help="version of the served model")
    parser.add_argument("--store", required=True, help="folder or URI of the registry")
    parser.add_argument(
        "--lake", required=True, help="lake, or the monitor's archive: folder, its URI, or gs://"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=None,
        help="maximum rows to score, in the lake's order (default: all)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=DEFAULT_TOLERANCE,
        help="largest accepted difference of one probability",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Verify a version. The module's docstring explains the exit codes."""
    arguments = build_parser().parse_args(argv)
    if not arguments.tolerance >= 0:
        raise ContractError(f"tolerance is {arguments.tolerance}, expected at least 0")
    if arguments.limit is not None and arguments.limit < 1:
        raise ContractError(f"limit is {arguments.limit}, expected at least 1")
    store = typed_folder(arguments.store, "--store")
    uri = (
        arguments.lake
        if is_bucket_uri(arguments.lake)
        else str(typed_folder(arguments.lake, "--lake"))
    )
    with progress("scoring logged rows again"):
        found = verify(
            arguments.version,
            store,
            open_objects(uri),
            tolerance=arguments.tolerance,
            limit=arguments.limit,
        )
    print(
        json.dumps({**asdict(found), "same": found.same}, allow_nan=False)
        if arguments.json
        else _as_text(found)
    )
    if found.same and not found.num_rows:
        raise ContractError(
            f"no row of {arguments.lake} was scored by version {found.version}, expected logged "
            "rows"
        )
    return ExitCode.DONE if found.same else ExitCode.REFUSED


def _as_text(found: Verification) -> str:
    words = {True: "same", False: "DIFFERS"}
    lines = [f"version {found.version}, model {found.model_id}"]
    lines += [f"  {words[check.passed]:<8} {check.name}: {check.detail}" for check in found.checks]
    largest = "none" if found.max_abs_diff is None else f"{found.max_abs_diff:.3g}"
    lines.append(
        f"  {words[found.num_different == 0]:<8} scores: {found.num_rows:,} logged rows of "
        f"{found.num_files} files scored again, {found.num_different:,} differ by more than "
        f"{found.tolerance:g}; largest difference {largest}"
    )
    if (first := found.first_difference) is not None:
        lines.append(
            f"first difference: {first.file} row {first.position}, request {first.request_id} row "
            f"{first.row}: logged {first.logged}, recomputed {first.recomputed}; the row is "
            f"{first.values}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

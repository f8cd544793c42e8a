"""Offline proof that a version is what was released and answered what was logged: `evergreen verify VERSION`.

First the identity: the hashes of data, workflow, weights and graph as journal, manifest and files have them; that the
stored model still makes the same graph; that the golden rows hold. Then every logged row of the version is scored again
by its graph, in this process, and compared with the score that was served or given in the shadow. Reads only, needs no
server and no repository; memory is bounded by a batch of rows beside the graph.

Exit codes are those of every command (docs/pipeline.md); 1 means that something differs.
"""

from __future__ import annotations

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
from numpy.typing import NDArray

from components.contracts.criteo import (
    CATEGORICAL,
    DENSE,
    MISSING_CATEGORY,
    MODEL_VERSION,
    REQUEST_ID,
    ROW,
    SCORE,
    SHADOW_SCORE,
    SHADOW_VERSION,
    feature_matrix,
)
from components.contracts.manifests import Model, Release
from components.deployment.graph.export import export
from components.deployment.graph.files import GRAPH_FILE, graph_sha256
from components.deployment.graph.parity import TOLERANCE, GoldenRows, check_scores, open_graph, score
from components.deployment.repository.version_files import GOLDEN_FILE
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError
from components.runtime.exit_codes import ExitCode, exits_with_code
from components.storage.locations import open_objects
from components.storage.objects import Objects
from components.storage.uris import is_bucket_uri, typed_folder
from components.store.archived_rows import ArchivedFile, archived_files
from components.store.models import graph_folder, model_folder, release_path
from components.store.promotion_journal import Promotion, read_entries

DEFAULT_TOLERANCE = 1e-6
"""Largest accepted difference of one probability. What may differ is the order of sums: rows were served in other
batches than they are scored in here, on a GPU perhaps."""
BATCH_ROWS = 16_384
_LOGGED_COLUMNS = (*DENSE, *CATEGORICAL, REQUEST_ID, ROW)
_SCORES = ((MODEL_VERSION, SCORE), (SHADOW_VERSION, SHADOW_SCORE))
"""Who scored a row, and how; the second pair is there only where a row was scored in the shadow too."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that identifies a version."""

    name: str
    held: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class ScoreDifference:
    """A logged row whose score differs from the graph's."""

    file: str
    position: int
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
    first_difference: ScoreDifference | None

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return self.num_different == 0 and all(check.held for check in self.checks)


def verify(
    version: int, store: Path, lake: Objects, *, tolerance: float = DEFAULT_TOLERANCE, limit: int | None = None
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
            checks.append(_check_golden(session, graph_folder(store, version) / GOLDEN_FILE))
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


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the store records about a version."""

    version: int
    manifest: Release | None
    """None where a release came to nothing."""
    entries: list[Promotion]
    """The journal's lines about it, oldest first."""

    @property
    def model_id(self) -> str:
        """The model that the version serves."""
        return self.manifest.model_id if self.manifest else self.entries[-1].model_id

    @property
    def sha256(self) -> dict[str, str]:
        """Hashes as released."""
        return self.manifest.sha256 if self.manifest else self.entries[-1].sha256


def read_recorded(store: Path, version: int) -> Recorded:
    """What the store records about `version`.

    Raises:
        ContractError: nothing, since it was never released.
    """
    path = release_path(store, version)
    manifest = Release.read(path) if path.exists() else None
    entries = [entry for entry in read_entries(store) if entry.version == version]
    if manifest is None and not entries:
        raise ContractError(f"version {version} was never released in model store {store}, expected one of its journal")
    return Recorded(version=version, manifest=manifest, entries=entries)


def check_identity(recorded: Recorded, store: Path, scratch: Path) -> tuple[list[Check], Path | None]:
    """The checks of identity, and the folder of a graph with the released hash; None where there is none left."""
    kept = graph_folder(store, recorded.version)
    folder = model_folder(store, recorded.model_id).absolute()

    def exported_again() -> str:
        # The files are this store's, also where the store was moved or restored elsewhere since it wrote its URIs.
        export(replace(Model.read(folder / Model.MANIFEST), uri=folder.as_uri()), scratch)
        return graph_sha256(scratch)

    sources: dict[str, Callable[[], str]] = {
        "data": lambda: Model.read(folder / Model.MANIFEST).raw_digest,
        "workflow": lambda: sha256_tree(folder / Model.WORKFLOW),
        "weights": lambda: sha256_tree(folder / Model.WEIGHTS),
        "graph": lambda: graph_sha256(kept),
        "graph exported again": exported_again,
    }
    checks = [_check_journal(recorded)]
    for name, source in sources.items():
        checks.append(_check_hash(name, recorded.sha256.get(name.split()[0]), source))
    held = {check.name: check.held for check in checks}
    graph = kept if held["graph"] else scratch if held["graph exported again"] else None
    return checks, graph


def _check_hash(name: str, released: str | None, source: Callable[[], str]) -> Check:
    try:
        found = source()
    except (ContractError, OSError) as error:
        return Check(name=name, held=False, detail=str(error))
    detail = f"sha256 {found}" if found == released else f"sha256 is {found}, expected {released} as released"
    return Check(name=name, held=found == released, detail=detail)


def _check_journal(recorded: Recorded) -> Check:
    """That every line of the journal about the version names the hashes and the model of its manifest."""
    name, hashes = "journal", recorded.sha256
    if not recorded.entries:
        return Check(name=name, held=False, detail=f"no line names version {recorded.version}, but it has a manifest")
    for entry in recorded.entries:
        if entry.model_id != recorded.model_id:
            return Check(name=name, held=False, detail=f"model is {entry.model_id}, expected {recorded.model_id}")
        for part in sorted(entry.sha256.keys() | hashes.keys()):
            if (digest := entry.sha256.get(part)) != hashes.get(part):
                detail = f"sha256 of {part} is {digest} in the line of {entry.time}, expected {hashes.get(part)}"
                return Check(name=name, held=False, detail=detail)
    return Check(name=name, held=True, detail=", ".join(f"{entry.action} {entry.time}" for entry in recorded.entries))


def _check_golden(session: Any, path: Path) -> Check:
    """Whether the graph behind `session` answers the version's golden rows as training did."""
    try:
        golden = GoldenRows.load(path)
        largest = check_scores(score(session, golden), golden, tolerance=TOLERANCE, source="graph")
    except ContractError as error:
        return Check(name="golden rows", held=False, detail=str(error))
    return Check(name="golden rows", held=True, detail=f"{len(golden)} rows, largest difference {largest:.3g}")


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedRows:
    """Rows of one file that the version scored; at least one."""

    name: str
    """Of the file, below the lake."""
    positions: NDArray[np.int64]
    """[n] row in the file, from 0."""
    request_ids: list[str]
    """[n]."""
    rows: NDArray[np.int32]
    """[n] row of the request."""
    asked: GoldenRows
    """Raw features, and as what is expected of them the logged scores; NaN where a row was logged without one."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def first(self, num_rows: int) -> LoggedRows:
        """At most `num_rows` of the rows, the first ones."""
        asked = GoldenRows(
            dense=self.asked.dense[:num_rows],
            categorical=self.asked.categorical[:num_rows],
            expected=self.asked.expected[:num_rows],
        )
        return LoggedRows(
            name=self.name,
            positions=self.positions[:num_rows],
            request_ids=self.request_ids[:num_rows],
            rows=self.rows[:num_rows],
            asked=asked,
        )


def read_logged_rows(lake: Objects, version: int) -> Iterator[LoggedRows]:
    """The rows of `lake` that `version` scored, in the order of files and their rows.

    Scores that were served and those of the shadow come in batches of their own. Row groups whose statistics name
    other versions alone are not read; a file of a bucket is fetched whole.

    Raises:
        ContractError: a file is damaged, or lacks a column; names it.
        TemporaryError, PermanentError: the bucket cannot be read.
    """
    for archived in archived_files(lake):
        with archived.opened() as file:
            yield from _logged_rows_of(file, archived, version)


def _logged_rows_of(file: Any, archived: ArchivedFile, version: int) -> Iterator[LoggedRows]:
    names, start = file.schema_arrow.names, 0
    # Rows that no model of ours served may come without the log's columns.
    pairs = [pair for pair in _SCORES if set(pair) <= set(names)]
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        position = start
        start += group.num_rows
        held = [pair for pair in pairs if _may_hold(group.column(names.index(pair[0])).statistics, group, version)]
        if not held:
            continue
        if lacking := [name for name in _LOGGED_COLUMNS if name not in names]:
            raise ContractError(f"{archived.uri} lacks columns {lacking}, expected those of a row that was archived")
        columns = [*_LOGGED_COLUMNS, *(name for pair in held for name in pair)]
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[number], columns=columns):
            for scored_by, score_column in held:
                at = np.flatnonzero(batch.column(scored_by).fill_null(-1).to_numpy(zero_copy_only=False) == version)
                if len(at):
                    rows = batch.take(pa.array(at))
                    yield _logged_rows(rows, archived.name, positions=position + at, score=score_column)
            position += batch.num_rows


def _may_hold(statistics: Any, group: Any, version: int) -> bool:
    """Whether a row group's statistics allow that it holds rows of the version."""
    if statistics is None:
        return True
    if statistics.has_null_count and statistics.null_count == group.num_rows:
        return False
    return not statistics.has_min_max or bool(statistics.min <= version <= statistics.max)


def _logged_rows(batch: Any, name: str, *, positions: NDArray[np.int64], score: str) -> LoggedRows:
    return LoggedRows(
        name=name,
        positions=positions,
        request_ids=batch.column(REQUEST_ID).to_pylist(),
        rows=batch.column(ROW).to_numpy(zero_copy_only=False),
        asked=GoldenRows(
            dense=feature_matrix(batch, DENSE, "float32", np.nan),
            categorical=feature_matrix(batch, CATEGORICAL, "int64", MISSING_CATEGORY),
            expected=feature_matrix(batch, [score], "float32", np.nan).ravel(),
        ),
    )


class _Comparison:
    """Logged scores against recomputed ones, batch by batch."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._largest = 0.0
        self.files: set[str] = set()
        self.num_rows = self.num_different = 0
        self.first: ScoreDifference | None = None

    @property
    def max_abs_diff(self) -> float | None:
        return self._largest if self.num_rows and math.isfinite(self._largest) else None

    def add(self, logged: LoggedRows, scores: Any) -> None:
        """Adds a batch and the graph's scores of it."""
        apart = np.abs(scores.astype(np.float64) - logged.asked.expected.astype(np.float64))
        # NaN compares false with every tolerance, and must count as different.
        apart = np.where(np.isnan(apart), np.inf, apart)
        wrong = np.flatnonzero(apart > self._tolerance)
        self.files.add(logged.name)
        self.num_rows += len(logged)
        self.num_different += len(wrong)
        self._largest = max(self._largest, float(apart.max()))
        if len(wrong) and self.first is None:
            self.first = _difference(logged, int(wrong[0]), float(scores[wrong[0]]))


def _difference(logged: LoggedRows, at: int, recomputed: float) -> ScoreDifference:
    dense, categorical = logged.asked.dense[at].tolist(), logged.asked.categorical[at].tolist()
    values: dict[str, float | int | None] = {name: _finite(value) for name, value in zip(DENSE, dense)}
    values |= {name: value if value >= 0 else None for name, value in zip(CATEGORICAL, categorical)}
    return ScoreDifference(
        file=logged.name,
        position=int(logged.positions[at]),
        request_id=logged.request_ids[at],
        row=int(logged.rows[at]),
        logged=_finite(float(logged.asked.expected[at])),
        recomputed=_finite(recomputed),
        values=values,
    )


def _finite(value: float) -> float | None:
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


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Verifies a version; see the module for its exit codes."""
    arguments = build_parser().parse_args(argv)
    if not arguments.tolerance >= 0:
        raise ContractError(f"tolerance is {arguments.tolerance}, expected at least 0")
    if arguments.limit is not None and arguments.limit < 1:
        raise ContractError(f"limit is {arguments.limit}, expected at least 1")
    store = typed_folder(arguments.store, "--store")
    uri = arguments.lake if is_bucket_uri(arguments.lake) else str(typed_folder(arguments.lake, "--lake"))
    found = verify(arguments.version, store, open_objects(uri), tolerance=arguments.tolerance, limit=arguments.limit)
    print(json.dumps({**asdict(found), "same": found.same}, allow_nan=False) if arguments.json else _as_text(found))
    if found.same and not found.num_rows:
        raise ContractError(f"no row of {arguments.lake} was scored by version {found.version}, expected logged rows")
    return ExitCode.DONE if found.same else ExitCode.REFUSED


def _as_text(found: Verification) -> str:
    """The findings as lines for people."""
    words = {True: "same", False: "DIFFERS"}
    lines = [f"version {found.version}, model {found.model_id}"]
    lines += [f"  {words[check.held]:<8} {check.name}: {check.detail}" for check in found.checks]
    largest = "none" if found.max_abs_diff is None else f"{found.max_abs_diff:.3g}"
    lines.append(
        f"  {words[found.num_different == 0]:<8} scores: {found.num_rows:,} logged rows of {found.num_files} files "
        f"scored again, {found.num_different:,} differ by more than {found.tolerance:g}; largest difference {largest}"
    )
    if (first := found.first_difference) is not None:
        lines.append(
            f"first difference: {first.file} row {first.position}, request {first.request_id} row {first.row}: "
            f"logged {first.logged}, recomputed {first.recomputed}; the row is {first.values}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

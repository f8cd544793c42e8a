"""List the data of one user, and remove it with `--yes`: `evergreen admin forget`.

The command also lists the models that were trained on the user's rows.

The command reads all files through the packages that own them. The user is a category of the column
that the recommender calls `data.user`. A category of a user can also occur in lists that share the
embedding table of this column. If a list in another user's row contains the user, only this element
of the list is removed. Rows are removed file by file from lake, archive and quarantine. Incidents
and work folders of runs are removed as a whole, because they cannot be replayed or trained again
without some of their rows. Late outcomes contain only request ids. Late outcomes are therefore
removed first, while the rows still show which user made each request. A file that contains the
user's rows is replaced as a whole by a new file without these rows. If the command is killed, run
it again to remove the remaining rows. No other program may write to these folders during the
removal.

The command lists models and their golden rows. The command does not remove models or golden rows,
because the models serve until other models replace them. After the removal, no file shows which
models were trained on the removed rows. Therefore `--yes` records the names of these models
(`registry.forgotten`). The command reports that the live model still contains a removed user until
another model is live.
"""

import argparse
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.extraction.lake_files import base_name, replace_file
from components.extraction.lineage import find_lineages
from components.extraction.window import watermark
from components.preprocessing.parent import load_columns
from components.validation.quarantine import quarantine_folder
from evergreen.config.features import category_of
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import CURRENT, Model, Release
from evergreen.contracts.raw_rows import (
    EVENT_TIME,
    OUTCOME_PARTITION,
    REQUEST_ID,
    ROW,
    is_visible,
    list_lengths,
)
from evergreen.contracts.serving import ServedNames
from evergreen.contracts.values import NoCategory, text_of_value
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.registry.forgotten import keep_forgotten, removed_at
from evergreen.registry.models import graph_folder, model_folder, read_serving_target, release_path
from evergreen.registry.promotion_journal import current
from evergreen.registry.recommenders import accepted
from evergreen.rows.archived_rows import is_list, parquet_file, parquet_writer, reading_parquet
from evergreen.rows.raw_schema import BATCH_ROWS, TIME_TYPE, categories, in_lists, open_parquet
from evergreen.rows.times import to_iso
from evergreen.runtime.durable import fsync_path
from evergreen.runtime.errors import FROM_SCRATCH, ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag
from evergreen.runtime.terminal import progress
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import GOLDEN_FILE
from evergreen.statistics.reference import read_reference
from evergreen.storage.objects import ObjectInfo, Objects, local_copy
from evergreen.storage.uris import is_bucket_uri, local_path, open_objects, typed_folder, typed_uri
from monitoring.backtest.incident import MANIFEST as INCIDENT
from monitoring.state.store import STORE_FILE, StateStore, matured_rows_of, waiting_requests_of

logger = logging.getLogger(__name__)

LOCATIONS = {
    "lake": "lake: folder, file:// or gs:// URI",
    "archive": "the monitor's archive",
    "state": "the monitor's state folder, with rows of its windows and requests that are not "
    "archived yet",
    "incidents": "folder of recorded incidents",
    "work": "work folder of the pipeline's runs",
}
"""Flags of all folders and servers except the model registry. The model registry contains the
recommender, the quarantine, the models and the golden rows."""
_OUTCOMES = OUTCOME_PARTITION.format(day="")
_UNFINISHED = re.compile(r"\..+\.([0-9a-f]{32}|aside)")
"""Pattern for names of unfinished files and folders of killed programs."""
Cleaning = Callable[[Any], Any]
"""Function that filters an Arrow batch, and returns the rows to keep."""


@dataclass
class User:
    """One user of a recommender, and the user's rows that were found so far.

    Raises:
        ContractError: the recommender names no user column, or the text is not a value of that
            column.
    """

    text: str
    """Value of the user, spelled as in the ingested files."""
    recommender: Recommender
    keys: set[tuple[str, int]] = field(default_factory=set)
    """Request id and row number of each row found."""
    days: dict[str, int] = field(default_factory=dict)
    """Time of the first row found on each UTC day, in microseconds since the epoch, by day."""

    def __post_init__(self) -> None:
        if self.recommender.data.user is None:
            raise ContractError(
                f"recommender {self.recommender.name} has no data.user, expected the column of "
                "users"
            )
        if (
            not self._is_string
            and not re.fullmatch(r"[+-]?\d+", self.text, re.ASCII)
            or not self.text
        ):
            kind = "a string" if self._is_string else "an integer"
            raise ContractError(
                f"user is {self.text!r}, expected {kind}, the type of column {self.column}"
            )

    @property
    def column(self) -> str:
        """Name of the categorical feature with the user of each row."""
        return str(self.recommender.data.user)

    @property
    def _is_string(self) -> bool:
        return self.column in self.recommender.features.string_features

    @cached_property
    def category(self) -> int:
        """The user's category, which identifies the user in all packages after extraction."""
        return category_of(self.text if self._is_string else str(int(self.text)))

    @property
    def lists(self) -> list[str]:
        """Names of the list features with user ids.

        In rows of other users, these lists may contain this user.
        """
        return [name for name in self.recommender.columns_of_users if name != self.column]

    @cached_property
    def positions(self) -> list[int]:
        """Return the positions of the user's columns among the categorical columns of tensors."""
        features = self.recommender.features
        return [
            i
            for i, name in enumerate(features.position_features)
            if name in self.recommender.columns_of_users
        ]

    def _are_user(self, values: Any) -> Any:
        """Return a boolean Arrow array that is true for values that identify the user.

        Values are strings, numbers or categories, and are interpreted as extraction interprets
        them.
        """
        found = categories(_plain(values), is_string=self._is_string)
        return pc.fill_null(pc.equal(found, self.category), False)

    def rows(self, batch: Any) -> Any:
        """Return which rows of a batch are the user's, as a boolean Arrow array."""
        return self._are_user(batch.column(self.column))

    def mentions(self, batch: Any) -> Any:
        """Return a boolean Arrow array that is true for rows with the user in a list."""
        found = np.zeros(batch.num_rows, bool)
        for name in (each for each in self.lists if each in batch.schema.names):
            values = in_lists(batch.column(name), _plain)
            are_user = self._are_user(values.flatten()).to_numpy(zero_copy_only=False)
            found[np.repeat(np.arange(len(values)), list_lengths(values))[are_user]] = True
        return pa.array(found)

    def without(self, batch: Any) -> Any:
        """Return the batch without the user's rows and without the user's id in other rows."""
        batch = batch.filter(pc.invert(self.rows(batch)))
        for at, name in enumerate(batch.schema.names):
            if name in self.lists:
                left = in_lists(batch.column(name), self._other_users)
                batch = batch.set_column(at, name, left)
        return batch

    def _other_users(self, values: Any) -> Any:
        values = _plain(values)
        return pc.if_else(self._are_user(values), pa.scalar(None, values.type), values)

    def without_outcomes(self, batch: Any) -> Any:
        """Return the batch without the outcomes of the user's rows."""
        return batch.filter(pc.invert(self.outcomes(batch)))

    def outcomes(self, batch: Any) -> Any:
        """Return which outcomes of a batch belong to rows in `keys`, as a boolean Arrow array."""
        pairs = zip(batch.column(REQUEST_ID).to_pylist(), batch.column(ROW).to_pylist())
        return pa.array([pair in self.keys for pair in pairs], pa.bool_())

    def is_in_line(self, line: str) -> bool:
        """Return whether a line in a file of malformed rows contains the user.

        The text of a line is a row as JSON or a line of a text file.
        """
        try:
            text = str(json.loads(line)["text"])
            row = json.loads(text) if text.startswith("{") else None
        except (ValueError, KeyError, TypeError):
            return False
        if row is not None:
            lists = [row[name] for name in self.lists if isinstance(row.get(name), list)]
            values = [row.get(self.column), *itertools.chain(*lists)]
            return any(map(self._is_user, values))
        return re.search(rf"(?<!\w){re.escape(self.text)}(?!\w)", text) is not None

    def _is_user(self, value: object) -> bool:
        """Return whether a value of a malformed row is the user."""
        try:
            word = text_of_value(value, is_string=self._is_string)
        except NoCategory:
            return str(value) == self.text
        return word is not None and category_of(word) == self.category

    def count(self, path: Path) -> "UserRowCounts":
        """Count the rows of a Parquet file that contain the user, and record the user's own rows.

        Both counts are 0 if the file contains no raw rows.

        Raises:
            ContractError: the file is not a complete Parquet file, or its columns of users have
                another type.
        """
        names, num_rows, num_mentions = set(open_parquet(path).schema_arrow.names), 0, 0
        needed = [self.column, REQUEST_ID, ROW, EVENT_TIME]
        if not names.issuperset(needed):
            return UserRowCounts(0, 0)
        for batch in _batches(path, [*needed, *(name for name in self.lists if name in names)]):
            with reading_parquet(path):
                are_own, mentions = self.rows(batch), self.mentions(batch)
                own, held = batch.filter(are_own), batch.filter(pc.or_(are_own, mentions))
            num_rows += own.num_rows
            num_mentions += held.num_rows - own.num_rows
            self.keys.update(zip(own.column(REQUEST_ID).to_pylist(), own.column(ROW).to_pylist()))
            for time in (
                held.column(EVENT_TIME).cast(TIME_TYPE).cast(pa.int64()).drop_null().to_pylist()
            ):
                day = to_iso(time)[:10]
                self.days[day] = min(time, self.days.get(day, time))
        return UserRowCounts(num_rows, num_mentions)


class UserRowCounts(NamedTuple):
    """Counts of the rows in one file that contain a user."""

    num_rows: int
    """Number of the user's own rows."""
    num_mentions: int
    """Number of other users' rows that name the user in a list."""

    def __str__(self) -> str:
        mentions = f"{self.num_mentions} rows of other users whose lists contain the user"
        return ", ".join(
            [f"{self.num_rows} rows"] * bool(self.num_rows) + [mentions] * bool(self.num_mentions)
        )


class UserData(NamedTuple):
    """File or entry with data of the user, and the function that removes these data."""

    what: str
    remove: Callable[[], object]


def _batches(path: Path, columns: list[str] | None = None) -> Iterator[Any]:
    with reading_parquet(path), parquet_file(path) as file:
        for group in range(file.num_row_groups):
            yield from file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=columns)


def _at(objects: Objects, info: ObjectInfo) -> Path | str:
    """Return the location of an object, for people."""
    return objects.local(info.name) or f"{objects.uri}/{info.name}"


def plain_type(kind: Any) -> Any:
    """Return the Arrow type without dictionaries.

    A dictionary could still contain values that no row uses after the removal.
    """
    if is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _plain(values: Any) -> Any:
    return values.cast(plain_type(values.type))


def rewrite(objects: Objects, info: ObjectInfo, clean: Cleaning) -> None:
    """Rewrite a Parquet file with the rows that `clean` returns.

    Dictionary columns become plain columns.
    """
    with (
        TemporaryDirectory(prefix="evergreen-forget-") as scratch,
        local_copy(objects, info.name) as path,
    ):
        found, num_gone, copy = open_parquet(path).schema_arrow, 0, Path(scratch) / "rows.parquet"
        schema = pa.schema(
            [each.with_type(plain_type(each.type)) for each in found], found.metadata
        )
        with parquet_writer(copy, schema) as writer:
            for batch in _batches(path):
                left = pa.Table.from_batches([clean(batch)])
                num_gone += batch.num_rows - left.num_rows
                if left.num_rows:
                    writer.write_table(left.cast(schema))
        replace_file(objects, info, copy, num_gone=num_gone)


def find_in_rows(objects: Objects, user: User) -> Iterator[UserData]:
    """Yield the files of a lake, an archive or a quarantine with rows of the user.

    Files of malformed rows are included.
    """
    for info in objects.list():
        if info.name.endswith(".jsonl") and (stored := objects.read(info.name)):
            lines = stored.content.decode().splitlines(keepends=True)
            left = "".join(line for line in lines if not user.is_in_line(line)).encode()
            if left != stored.content:
                what = f"{_at(objects, info)}: malformed rows"
                yield UserData(
                    what, partial(objects.write, info.name, left, if_generation=info.generation)
                )
        elif info.name.endswith(".parquet") and not info.name.startswith(_OUTCOMES):
            try:
                with local_copy(objects, info.name) as path:
                    counted = user.count(path)
            except ContractError:
                if is_visible(base_name(info)):
                    raise
                logger.warning("%s is hidden from readers and cannot be read", _at(objects, info))
                continue
            if any(counted):
                yield UserData(
                    f"{_at(objects, info)}: {counted}",
                    partial(rewrite, objects, info, user.without),
                )


def find_in_outcomes(objects: Objects, user: User) -> Iterator[UserData]:
    """Yield the files with late outcomes of the found requests, in a lake or an archive."""
    for info in [
        each for each in objects.list(_OUTCOMES) if user.keys and each.name.endswith(".parquet")
    ]:
        with local_copy(objects, info.name) as path:
            num_rows = sum(
                pc.sum(user.outcomes(batch)).as_py() or 0
                for batch in _batches(path, [REQUEST_ID, ROW])
            )
        if num_rows:
            what = f"{_at(objects, info)}: {num_rows} late outcomes"
            yield UserData(what, partial(rewrite, objects, info, user.without_outcomes))


def find_in_folders(folders: Iterable[Path], user: User, *, kind: str) -> Iterator[UserData]:
    """Yield the folders with a row of the user or an incomplete Parquet file."""
    for folder in sorted(folders):
        if any(_is_in_file(path, user) for path in folder.rglob("*") if path.is_file()):
            yield UserData(f"{kind}: {folder}", partial(_remove, folder))


def _is_in_file(path: Path, user: User) -> bool:
    if path.suffix == ".jsonl":
        return any(user.is_in_line(line) for line in path.read_text("utf-8").splitlines())
    with open(path, "rb") as file:
        if file.read(4) != b"PAR1":
            return False
    try:
        return any(user.count(path))
    except ContractError:
        return True


def unfinished(folder: Path) -> Iterator[UserData]:
    """Yield the unfinished files and folders of killed programs below a folder.

    No program reads these files, but they may contain rows of any user.
    """
    for here, folders, files in os.walk(folder):
        left = [name for name in (*folders, *files) if _UNFINISHED.fullmatch(name)]
        folders[:] = [name for name in folders if name not in left]
        yield from (
            UserData(f"unfinished: {Path(here, name)}", partial(_remove, Path(here, name)))
            for name in left
        )


def _remove(path: Path) -> None:
    """Hide a folder or a file from its readers by one rename, then delete it."""
    if not _UNFINISHED.fullmatch(path.name):
        path = path.rename(path.with_name(f".{path.name}.{uuid4().hex}"))
        fsync_path(path.parent)
    shutil.rmtree(path) if path.is_dir() else path.unlink()


class TrainedOnUser(NamedTuple):
    """A stored model that was trained on rows of a user."""

    model_id: str
    is_live: bool
    why: str
    """Evidence that the model was trained on the user's rows."""

    def __str__(self) -> str:
        return f"model {self.model_id}{' (live)' if self.is_live else ''}: {self.why}"


def models_trained_on(store: Path, user: User) -> Iterator[TrainedOnUser]:
    """Yield the stored models that were trained on rows of the user, and their descendants."""
    lineages = find_lineages(store)
    traces = {
        each.models[0].model_id: _traces_of_user(store, each.models[0], user) for each in lineages
    }
    for lineage in lineages:
        own, *ancestors = [model.model_id for model in lineage.models]
        known = [*traces[own], *(f"it continues {each}" for each in ancestors if traces.get(each))]
        if known:
            yield TrainedOnUser(own, lineage.is_live, "; ".join(known))


def _traces_of_user(store: Path, model: Model, user: User) -> list[str]:
    folder, found, known = model_folder(store, model.model_id), list[str](), dict[str, Any]()
    # Garbage collection removes the workflow together with the weights.
    workflow = (
        FeatureWorkflow.load(folder / Model.WORKFLOW)
        if (folder / Model.WORKFLOW).exists()
        else None
    )
    if workflow is not None and user.column in workflow.features.slots:
        column = load_columns(folder / Model.WORKFLOW, workflow)[
            workflow.features.slots.index(user.column)
        ]
        known = {
            "vocabulary": column.vocabulary,
            "list of rare categories": column.candidates.categories,
        }
    if (folder / Model.REFERENCE).exists():
        listed = read_reference(folder / Model.REFERENCE).profile.columns.get(user.column)
        known["training profile"] = np.empty(0) if listed is None else listed.values
    found = [
        f"its {name} contains the user"
        for name, values in known.items()
        if (values == user.category).any()
    ]
    trained_on = sorted(
        {
            each["day"]
            for each in model.days
            if user.days.get(each["day"], np.inf) <= watermark(model)
        }
    )
    return [
        *found,
        *(
            [f"it was trained on {', '.join(trained_on)}, whose rows contain the user"]
            if trained_on
            else []
        ),
    ]


def golden_rows(store: Path, user: User) -> Iterator[str]:
    """Yield one line for each model version whose golden rows contain the user.

    The search covers versions in the registry and in Triton's repository.
    """
    serving_target, served = read_serving_target(store), ServedNames(user.recommender.name)
    stored_graphs = [(graph_folder(store, 0).parent.as_uri(), "")]
    stored_graphs += [
        (serving_target.repository_uri, f"{each}/")
        for each in (served.model, served.candidate, served.canary)
        if serving_target
    ]
    for uri, prefix in stored_graphs:
        objects = open_objects(uri)
        for info in [each for each in objects.list(prefix) if base_name(each) == GOLDEN_FILE]:
            with local_copy(objects, info.name) as path:
                golden = GoldenRows.load(path)
            version, columns = int(info.name.split("/")[-2]), user.recommender.columns_of_users
            at = [i for i, name in enumerate(golden.features.position_features) if name in columns]
            if (golden.categorical[:, at] == user.category).any():
                of_version = release_path(store, version)
                model = Release.read(of_version).model_id if of_version.exists() else "unknown"
                yield f"golden rows of version {version}, model {model}: {_at(objects, info)}"


def waiting_requests(state: Path, user: User) -> int:
    """Return the number of requests of the user that are not archived yet."""
    columns = user.recommender.features.columns
    with _reading_state(state) as connection:
        return waiting_requests_of(
            connection, user.category, columns=columns, positions=user.positions
        )


def find_in_windows(state: Path, user: User) -> Iterator[UserData]:
    """Yield the user's matured rows that the monitor has stored for its windows.

    The removal keeps these rows, but replaces the user by the unknown user.
    """

    def remove() -> None:
        with closing(StateStore(state / STORE_FILE)) as store:
            store.forget_user(user.category)

    with _reading_state(state) as connection:
        num_rows = matured_rows_of(connection, user.category)
    if num_rows:
        yield UserData(f"{state / STORE_FILE}: {num_rows} rows of the windows", remove)


@contextmanager
def _reading_state(state: Path) -> Iterator[sqlite3.Connection]:
    path = state / STORE_FILE
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise ContractError(f"{path} is not the database of a monitor's state: {error}") from error


def find(user: User, store: Path, locations: dict[str, str]) -> list[UserData]:
    """Return everything that can be removed, in the order of removal.

    Args:
        user: The user to find.
        store: Folder of the registry.
        locations: Values that the person passed for some of `LOCATIONS`.
    """
    roots = [
        open_objects(typed_uri(locations[name]))
        for name in ("archive", "lake")
        if name in locations
    ]
    folders = {
        name: typed_folder(locations[name], f"--{name}")
        for name in ("incidents", "work")
        if name in locations
    }
    quarantine = quarantine_folder(store)
    rows = [
        found
        for root in (open_objects(quarantine.as_uri()), *roots)
        for found in find_in_rows(root, user)
    ]
    local = [local_path(root.uri) for root in roots if not is_bucket_uri(root.uri)]
    # Search the monitor's windows first, because this search fails while a monitor runs.
    first = (
        list(find_in_windows(typed_folder(locations["state"], "--state"), user))
        if "state" in locations
        else []
    )
    first += [
        found for folder in (quarantine, *local, *folders.values()) for found in unfinished(folder)
    ]
    first += [found for root in roots for found in find_in_outcomes(root, user)]
    if incidents := folders.get("incidents"):
        first += find_in_folders(
            (path.parent for path in incidents.glob(f"[!.]*/{INCIDENT}")), user, kind="incident"
        )
    if work := folders.get("work"):
        runs = (
            path
            for path in work.iterdir()
            if path.is_dir() and not _UNFINISHED.fullmatch(path.name)
        )
        first += find_in_folders(runs, user, kind="files of a run")
    return first + rows


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen admin forget",
        description="List the files and models that contain one user (data.user of the accepted "
        "recommender). With --yes, remove the user. "
        "Also list the models that were trained on the user's rows, and the run that replaces "
        "them.",
    )
    parser.add_argument(
        "--user", required=True, metavar="ID", help="value of the column, as your files spell it"
    )
    add_store_flag(parser)
    for name, what in LOCATIONS.items():
        parser.add_argument(f"--{name}", help=what)
    parser.add_argument(
        "--yes",
        action="store_true",
        help="remove everything, while monitor, uploader and pipeline are stopped",
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. `evergreen.runtime.exit_codes` lists its exit codes."""
    arguments = build_parser().parse_args(argv)
    store, locations = (
        typed_folder(arguments.store, "--store"),
        {n: v for n, v in vars(arguments).items() if n in LOCATIONS and v},
    )
    user = User(arguments.user, accepted(store, CURRENT))
    with progress("searching"):
        found = find(user, store, locations)
    trained_on, golden = list(models_trained_on(store, user)), list(golden_rows(store, user))
    state = typed_folder(locations["state"], "--state") if "state" in locations else None
    num_waiting = waiting_requests(state, user) if state else 0
    print(f"user {user.text!r} is category {user.category} of {user.column}")
    print(
        "\n".join(
            [each.what for each in found] or ["no row, outcome, incident or run contains the user"]
        )
    )
    print(
        "\n".join(
            [*map(str, trained_on), *golden]
            or ["no model is known to be trained on the user's rows"]
        )
    )
    if arguments.yes:
        if trained_on and found:
            keep_forgotten(
                store, [each.model_id for each in trained_on], now=datetime.now(timezone.utc)
            )
        with progress("removing", total=len(found)) as advance:
            for each in found:
                each.remove()
                advance()
        print(f"removed all {len(found)}")
    elif found:
        print(
            "nothing was removed: repeat with --yes while monitor, uploader and pipeline are "
            "stopped"
        )
    print("\n".join(_what_serves(store, trained_on, locations)))
    if not any(each.is_live for each in trained_on) and (trained_on or golden):
        print("remove the folders of these models when no rollback to them is wanted")
    if num_waiting:
        print(
            f"{num_waiting} requests of the user are not archived yet: run this command again "
            "after the monitor has archived them"
        )
    if absent := [f"--{name}" for name in LOCATIONS if name not in locations]:
        print(f"not searched: {', '.join(absent)}")
    if is_bucket_uri(locations.get("lake", "")):
        print(
            "the bucket may still contain earlier versions of the objects: check its versioning "
            "and soft delete"
        )
    print(
        "not searched either: the event log's records and dead letters, reports of runs, your own "
        "files"
    )
    return ExitCode.DONE


def _what_serves(
    store: Path, trained_on: Sequence[TrainedOnUser], locations: dict[str, str]
) -> Iterator[str]:
    """Yield lines: whether the live model contains a removed user, and how to replace the model."""
    live = current(store)
    if live is None:
        yield "no model is live"
        return
    removed = removed_at(store, live.model_id)
    if any(each.is_live for each in trained_on):
        contained = "the user"
    elif removed is not None:
        contained = f"a user whose rows were removed at {removed}"
    else:
        yield f"the live version {live.version} was not trained on the user's rows"
        return
    yield (
        f"version {live.version} still contains {contained}, until a run from scratch is released:"
    )
    yield from (f"  {command}" for command in _full_run(store, locations))
    yield (
        "if the gate refuses that run's model, `evergreen release promote` makes it live "
        "nevertheless"
    )


def _full_run(store: Path, locations: dict[str, str]) -> Iterator[str]:
    """Yield the commands that train a model from scratch and release it."""
    package = Path("build/retraining.yaml")
    if (
        "lake" in locations
        and typed_uri(locations["lake"]) == str(store.parent / "lake")
        and store.name == "store"
    ):
        own = store.parent / package.name  # the demo writes its compiled pipeline here
        package = own if own.exists() else package
        words = ["evergreen", "run", "--package", str(package), "--folder", str(store.parent)]
    else:
        words = [
            "evergreen",
            "submit",
            "--package",
            str(package),
            "--host",
            "http://127.0.0.1:8888",
        ]
    if not package.exists():
        yield shlex.join(["evergreen", "compile", "--output", str(package)])
    yield shlex.join([*words, FROM_SCRATCH])


if __name__ == "__main__":
    sys.exit(main())

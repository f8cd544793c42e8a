"""Duplicate rows: keep one copy of each (request id, row), and count the dropped copies by kind.

Copies with equal content are redeliveries. Among copies with different content, the newest copy is
kept. The newest copy has the latest event time. If the event times are equal, a copy with a click
counts as newer, because a user first sees a row and then clicks. If the copies are still tied, the
content itself decides, so that the result never depends on the order of files. Rows of a
back-filled version are corrections, and are always kept.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evergreen.config.features import Features
from evergreen.contracts.raw_rows import EVENT_TIME, LABEL, REQUEST_ID, ROW
from evergreen.rows.archived_rows import is_list
from evergreen.runtime.errors import ContractError

KEY = [REQUEST_ID, ROW]
_NEWEST = [EVENT_TIME, LABEL]
"""Columns that decide which of two copies is newer: first the event time, then the label."""


@dataclass(kw_only=True)
class Copies:
    """Counts of rows that were left out because another copy was kept."""

    num_equal: int = 0
    """Copies with the same content as the kept copy (redeliveries)."""
    num_updated: int = 0
    """Copies with the same features as the kept copy, but with another label, time, weight or
    score."""
    num_conflicting: int = 0
    """Copies with other features than the kept copy."""
    example: str = ""
    """First conflict, for messages."""

    @property
    def num_rows(self) -> int:
        """Number of all rows that were left out."""
        return self.num_equal + self.num_updated + self.num_conflicting

    def add(self, other: "Copies") -> None:
        """Add the counts of `other`. Use the example of `other` if there is no example yet."""
        self.num_equal += other.num_equal
        self.num_updated += other.num_updated
        self.num_conflicting += other.num_conflicting
        self.example = self.example or other.example

    def check(
        self,
        num_kept: int,
        *,
        max_fraction: float,
        source: str,
        key: tuple[str, str] = (REQUEST_ID, ROW),
    ) -> None:
        """Check that the share of conflicting rows is small.

        Two rows conflict if they have the same key but different features.

        Args:
            num_kept: Number of rows that were kept.
            max_fraction: Largest share of all rows that may conflict, in [0, 1].
            source: Name of the rows' source, for the message.
            key: Names of the columns of request and row in the files.

        Raises:
            ContractError: a larger share of the rows conflicts. The message names the key and an
                example.
        """
        num_rows = num_kept + self.num_rows
        if self.num_conflicting > max_fraction * num_rows:
            raise ContractError(
                f"{source}: {self.num_conflicting} of {num_rows} rows "
                f"({self.num_conflicting / num_rows:.2%}) have the same {key[0]} and {key[1]} "
                f"as another row but other features, expected at most {max_fraction:.2%} "
                f"(extraction.max_conflicting_fraction); for example {self.example}"
            )


def newest_copies(table: Any, features: Features) -> tuple[Any, Copies]:
    """Sort rows by event time, request and row, and keep the newest copy of each (request id, row).

    Args:
        table: Rows in the raw schema or a lake's schema, in any order. Keys are not null.
        features: Features of the rows.

    Returns:
        The sorted rows, and the counts of the rows that were left out.
    """
    table = table.sort_by(
        [(EVENT_TIME, "ascending"), (REQUEST_ID, "ascending"), (ROW, "ascending")]
    )
    positions = _repeated(table)
    if not len(positions):
        return table, Copies()
    found = table.take(pa.array(positions))
    content = _comparable(found)
    others = [name for name in content.schema.names if name not in {*KEY, *_NEWEST}]
    order = pc.sort_indices(
        content, sort_keys=[(name, "ascending") for name in [*KEY, *_NEWEST, *others]]
    )
    content, positions = content.take(order), positions[order.to_numpy()]
    is_newest = np.append(~_equal_next(content, KEY), True)
    is_last_equal = np.append(~_equal_next(content, content.schema.names), True)
    older = np.flatnonzero(is_last_equal & ~is_newest)
    newest = np.flatnonzero(is_newest)[np.searchsorted(np.flatnonzero(is_newest), older)]
    has_features = _equal(
        content.take(pa.array(older)), content.take(pa.array(newest)), list(features.names)
    )
    num_conflicting = int(np.count_nonzero(~has_features))
    copies = Copies(
        num_equal=int(np.count_nonzero(~is_last_equal)),
        num_updated=len(older) - num_conflicting,
        num_conflicting=num_conflicting,
    )
    if num_conflicting:
        at = int(np.flatnonzero(~has_features)[0])
        copies.example = _example(
            table.take(pa.array(positions[[older[at], newest[at]]])), features
        )
    kept = np.ones(table.num_rows, dtype=bool)
    kept[positions[~is_newest]] = False
    return table.filter(pa.array(kept)), copies


def corrected_copies(corrected: Any, appended: Any, features: Features) -> tuple[Any, Copies]:
    """Sort the rows of a day that was back-filled, and keep one copy of each (request id, row).

    Args:
        corrected: Rows of the back-filled version. One copy of each row is kept, even if a
            copy among the appended rows is newer.
        appended: Rows that were added to the day later.
        features: Features of the rows.

    Returns:
        The sorted rows, and the counts of the rows that were left out.
    """
    corrected, copies = newest_copies(corrected, features)
    appended, among_appended = newest_copies(appended, features)
    appended, known = without_known(appended, corrected, features)
    copies.add(among_appended)
    copies.add(known)
    return newest_copies(pa.concat_tables([corrected, appended]), features)[0], copies


def without_known(table: Any, known: Any, features: Features) -> tuple[Any, Copies]:
    """Leave out the rows that have a copy among the `known` rows.

    Args:
        table: Rows, each (request id, row) once.
        known: Training rows of earlier runs, or rows of a correction. Known rows are always kept,
            even if their copies in `table` are newer.
        features: Features of both tables.

    Returns:
        The rows without a known copy, and the counts of the rows that were left out.
    """
    both = [each.select(KEY) for each in (table, known)]
    known = known.take(pa.array(_positions_in(both[1], both[0])))
    known, _ = newest_copies(known, features)
    _, copies = newest_copies(pa.concat_tables([table, known]), features)
    kept = np.ones(table.num_rows, dtype=bool)
    kept[_positions_in(both[0], both[1])] = False
    return table.filter(pa.array(kept)), copies


def _repeated(table: Any) -> NDArray[np.int64]:
    """Return the ascending positions of the rows whose key occurs more than once."""
    keyed = table.select(KEY).append_column("position", pa.array(np.arange(table.num_rows)))
    groups = keyed.group_by(KEY).aggregate([("position", "min"), ("position", "max")])
    if len(groups) == table.num_rows:
        return np.empty(0, np.int64)
    repeated = groups.filter(
        pc.not_equal(groups.column("position_min"), groups.column("position_max"))
    )
    return _positions_in(table.select(KEY), repeated.select(KEY))


def _positions_in(keys: Any, wanted: Any) -> NDArray[np.int64]:
    """Return the ascending positions of the keys that are in `wanted`."""
    keyed = keys.append_column("position", pa.array(np.arange(keys.num_rows)))
    found = keyed.join(wanted, KEY, join_type="left semi").column("position").to_numpy()
    positions: NDArray[np.int64] = np.sort(found).astype(np.int64)
    return positions


def _comparable(table: Any) -> Any:
    """Convert columns so that they can be sorted and compared: numbers to bits, lists to text."""
    columns = {}
    for name in table.schema.names:
        values = table.column(name).combine_chunks()
        if is_list(values.type):
            values = pc.binary_join(values.cast(pa.list_(pa.string())), "\0")
        elif pa.types.is_floating(values.type):
            values = values.view(pa.int32() if values.type == pa.float32() else pa.int64())
        columns[name] = values
    return pa.table(columns)


def _equal_next(table: Any, names: list[str]) -> NDArray[np.bool_]:
    """Return for each row, except the last, whether its values equal those of the next row."""
    return _equal(table.slice(0, table.num_rows - 1), table.slice(1), names)


def _equal(left: Any, right: Any, names: list[str]) -> NDArray[np.bool_]:
    """Return for each row whether both tables have equal values in these columns.

    Two nulls are equal.
    """
    equal = np.ones(left.num_rows, dtype=bool)
    for name in names:
        one, other = left.column(name).combine_chunks(), right.column(name).combine_chunks()
        same = pc.or_(
            pc.fill_null(pc.equal(one, other), False), pc.and_(pc.is_null(one), pc.is_null(other))
        )
        equal &= same.to_numpy(zero_copy_only=False)
    return equal


def _example(rows: Any, features: Features) -> str:
    """Describe how two rows with the same key differ, by the first feature that differs."""
    one, other = rows.to_pylist()
    name = next(name for name in features.names if one[name] != other[name])
    return (
        f"{REQUEST_ID} {one[REQUEST_ID]!r}, row {one[ROW]}, with {name} {one[name]!r} and "
        f"{other[name]!r}"
    )

"""Guesses for a click log: the probable role of each column, and questions to the user.

A role is guessed if the column's name and values agree. If the name and the values disagree, or if
two columns are equally likely, the drafted file asks a question. The command `check` refuses the
file until the user has answered the question.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.config.data import OWN_COLUMNS
from evergreen.config.features import Features
from evergreen.contracts.raw_rows import EVENT_TIME, LABEL, REQUEST_ID, ROW
from evergreen.recommender_file import names
from evergreen.recommender_file.columns import (
    BOOLEAN,
    DECIDING_AUC,
    FLOAT,
    INTEGER,
    OTHER,
    TEXT,
    TIME,
    TOLERATED,
    ColumnSample,
    SampledColumn,
    counted,
    deciding_auc,
    find_copies,
)
from evergreen.recommender_file.lists import (
    BRACKETS,
    DECIMAL_COMMA,
    OBJECTS,
    ListLooks,
    look_at_lists,
)
from evergreen.recommender_file.times import NoTimes, Times, read_times
from evergreen.rows.time_forms import ISO
from evergreen.runtime.errors import ContractError

_NUMERIC, _CATEGORICAL, LISTS = KINDS = ("numeric", "categorical", "lists")
"""Kinds of features."""
LEFT_OUT = "left out"
WEIGHT, USER, ITEM = "weight", "user", "item"
_MAX_ELEMENTS = 50
"""Maximum length of a list (`max`) that a draft proposes."""
_MAX_FEW = 50
"""Maximum number of distinct values of an integer column that is treated as categories."""
MANY = 20_000
"""If the sample of a column has at least this number of distinct categories, the column may need
more memory than a server has."""
_MAX_DATES = 100
"""Maximum number of values per column that are checked for unsupported date formats."""
_MAX_LABELS = 20_000
"""Maximum number of distinct values of a label column, even if nearly all of its rows are 0 or
1."""
_MIN_EACH = 5
"""Minimum number of rows of each label. With fewer rows, a column may be equal to the label or its
complement by chance."""
_MIN_ENTITIES = 5
"""Minimum number of distinct values of a column of users or items. A column with fewer distinct
values probably contains groups of users or items."""
_MAX_ENTITY_SHARE = 0.5
"""Maximum share of rows of a single user or item. A value with a larger share probably represents
"unknown"."""
_MAX_REQUEST_ROWS = 10_000
_FROM_ROWS = 100
"""Minimum number of rows to conclude that a column is a row id. Each row must have a different
value."""
_MAX_WORDS = 5
"""Maximum number of distinct texts in a column of numbers. Such texts are assumed to mean that the
number is missing."""
_WIDE = 10**9
"""Smallest whole number that is treated as an id, unless the column's name is typical of a
quantity."""


class Guess(NamedTuple):
    """Probable role of a column."""

    role: str
    """Role of the column: the name of a field of `ColumnNames`, a kind of feature, or
    `LEFT_OUT`."""
    why: str
    options: str = ""
    """Options of the feature in the text form of the file."""


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Probable roles of the columns of one file."""

    columns: list[tuple[SampledColumn, Guess]]
    """Columns and guesses in file order."""
    questions: dict[str, str]
    """Questions for the user. Each key is a field of `ColumnNames` that could not be guessed."""
    time_format: str | None = None
    """Value for `ColumnNames.time_format`. None if the times are ISO 8601."""
    entities: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Features that identify the user and the item, each with the reason. The keys are `user` and
    `item`."""


def guess_roles(
    sample: ColumnSample, *, now: float | None = None
) -> list[tuple[SampledColumn, Guess]]:
    """Return the guess for each column, in file order (see `guess_all`)."""
    return guess_all(sample, now=now).columns


def guess_all(sample: ColumnSample, *, now: float | None = None) -> Guesses:
    """Return the probable roles of the columns of a file.

    Args:
        sample: First rows of the file.
        now: Current time in seconds since 1970. A time more than a day after `now` is invalid. None
            = the machine's clock.
    """
    return _Guesser(sample, time.time() if now is None else now).guess()


class _Guesser:
    def __init__(self, sample: ColumnSample, now: float) -> None:
        self._sample, self._now = sample, now
        self._found: dict[str, Guess] = {}
        self._questions: dict[str, str] = {}
        self._times: dict[str, Times | NoTimes] = {}
        self._time_format: str | None = None

    def guess(self) -> Guesses:
        label = self._guess_label()
        self._guess_times()
        self._guess_keys()
        self._guess_weight()
        labels = None if label is None else label.row_values(label.labels, np.int8(-1))
        if label is not None and labels is not None:
            self._leave_out_outcomes(label, labels)
        for column in self._free:
            self._found[column.name] = self._guess_row_name(column) or self._guess_feature(column)
        if labels is not None:
            self._leave_out_deciding(labels)
        return Guesses(
            columns=[(column, self._found[column.name]) for column in self._sample.columns],
            questions=self._questions,
            time_format=self._time_format,
            entities=self._entities(),
        )

    @property
    def _free(self) -> list[SampledColumn]:
        return [column for column in self._sample.columns if column.name not in self._found]

    def _leave_out(self, column: SampledColumn, why: str) -> None:
        self._found[column.name] = Guess(LEFT_OUT, why)

    # -- the label

    def _guess_label(self) -> SampledColumn | None:
        """Find the label, or add a question about the label.

        Other columns that look like labels are excluded from the features.
        """
        candidates = [column for column in self._sample.columns if _is_label(column)]
        ranked = sorted(candidates, key=_label_tier)
        best = [column for column in ranked if _label_tier(column) == _label_tier(ranked[0])]
        named = [column.name for column in best]
        if not ranked:
            self._questions[LABEL] = self._without_label()
        elif _label_tier(best[0]) == _UNNAMED and (
            len(best) > 1 or names.words(named[0])[:1] in (["is"], ["has"])
        ):
            self._questions[LABEL] = f"which of {_listed(named)} says whether a row was clicked?"
        elif names.is_negated_label(named[0]):
            self._questions[LABEL] = (
                f"{named[0]!r} seems to be 1 where a row was not clicked: which column is 1 if it "
                "was?"
            )
        elif len(best) > 1 and not all(_are_same(best[0], each) for each in best[1:]):
            self._questions[LABEL] = f"which of {_listed(named)} is to be predicted?"
            for column in best:
                self._leave_out(column, "it may be the label")
        else:
            label = best[0]
            self._found[label.name] = Guess(LABEL, _why_label(label))
            for column in ranked:
                is_named = _label_tier(column) < _UNNAMED
                if column is not label and (
                    is_named or (_has_both(label) and _are_same(label, column))
                ):
                    self._leave_out(column, _why_other_label(label, column))
            return label
        return None

    def _without_label(self) -> str:
        likely = [
            each
            for each in self._sample.columns
            if names.letters(each.name) in names.LABELS + names.TARGETS
        ]
        if not likely:
            pairs = [
                f"{each.name!r} ({' and '.join(words)})"
                for each in self._sample.columns
                if (words := _answers(each))
            ]
            if pairs:
                return (
                    "no column holds only 0 and 1, or true and false. If "
                    f"{' or '.join(pairs)} says whether a row was clicked, write 0 and 1 in the "
                    "file"
                )
            return (
                "no column holds only 0 and 1, or true and false: which says whether a row was "
                "clicked?"
            )
        column = likely[0]
        self._leave_out(column, "named like the label, but its values are not labels")
        if column.num_present and column.rows_with(column.labels == 1) == column.num_present:
            return f"{column.name!r} holds 1 or nothing: write 0 in the rows without a click"
        values = [str(value) for value in column.values.slice(0, 4).to_pylist()]
        return (
            f"{column.name!r} is named like the label but has the values {', '.join(values)}: "
            "write 0 and 1, or true and false"
        )

    # -- times

    def _guess_times(self) -> None:
        """Find the column with the times when rows were shown.

        Other columns of times are excluded from the features.
        """
        for column in self._free:
            if _may_be_time(column):
                self._times[column.name] = read_times(column, now=self._now)
        usable = [each for each in self._free if isinstance(self._times.get(each.name), Times)]
        candidates = [
            each for each in usable if _is_complete(each) and not names.is_outcome(each.name)
        ]
        named = sorted(
            (each for each in candidates if _time_rank(each) is not None),
            key=lambda e: _time_rank(e) or 0,
        )
        unreadable = [
            each
            for each in self._free
            if isinstance(self._times.get(each.name), NoTimes) and _is_surely_time(each)
        ]
        chosen = None
        if named and not (
            unreadable and (_time_rank(unreadable[0]) or 0) < (_time_rank(named[0]) or 0)
        ):
            chosen = named[0]
        elif unreadable:
            self._ask_for_form(unreadable[0])
        elif len(candidates) == 1 and (_is_dated(candidates[0]) or _is_rising(candidates[0])):
            chosen = candidates[0]
        elif candidates := [each for each in candidates if _is_dated(each)]:
            listed = _listed([each.name for each in candidates])
            self._questions[EVENT_TIME] = f"which of {listed} says when a row was shown?"
        elif alike := [each.name for each in self._free if _is_like_time(each)]:
            self._questions[EVENT_TIME] = (
                f"{_listed(alike)} {'looks' if len(alike) == 1 else 'look'} like a time in an "
                "unsupported form. If it says when a row was shown, write it as "
                "2026-01-31T00:00:00Z. Or delete this line, and rows have no times"
            )
        if chosen is not None:
            self._take_time(chosen)
        for column in self._free:
            found = self._times.get(column.name)
            if _is_like_time(column):
                self._leave_out(
                    column,
                    f"it looks like a time in an unsupported form, such as {column.example}; write "
                    "2026-01-31T00:00:00Z for the time of a row, or hours or ages as numbers for a "
                    "feature",
                )
            elif isinstance(found, Times) and (_is_dated(column) or _time_rank(column) is not None):
                self._leave_out(column, self._why_no_event_time(column, found))
            elif column.kind == TIME:
                outside = f" ({found.why})" if isinstance(found, NoTimes) else ""
                self._leave_out(
                    column,
                    f"times{outside} are not supported as a feature; write hours or ages as "
                    "numbers",
                )

    def _take_time(self, column: SampledColumn) -> None:
        found = self._times[column.name]
        assert isinstance(found, Times)
        why = "by its name" if _time_rank(column) is not None else "the only column of times"
        wrong = (
            f"; {counted(found.num_wrong, 'row')} with no time from 1990 to tomorrow: malformed"
            if found.num_wrong
            else ""
        )
        gaps = (
            f"; {counted(column.num_rows - column.num_present, 'row')} without one: malformed"
            if column.missing
            else ""
        )
        form = "" if found.form == ISO else f", read as {found.form}"
        unusual = "" if found.span.is_usual else "; BEFORE 2000: is this correct?"
        self._found[column.name] = Guess(
            EVENT_TIME, f"{why}{form}: {found.span}{unusual}{wrong}{gaps}"
        )
        self._time_format = None if found.form == ISO else found.form

    def _ask_for_form(self, column: SampledColumn) -> None:
        found = self._times[column.name]
        assert isinstance(found, NoTimes)
        if found.forms:
            self._found[column.name] = Guess(EVENT_TIME, "by its name")
            self._questions["time_format"] = f"one of {', '.join(found.forms)}: {found.why}"
            return
        self._leave_out(column, found.why)
        if column.kind in (INTEGER, FLOAT):
            ways = f"Write {column.name} here and a line time_format: after it if these are times"
        else:
            ways = "Write its times in a known form and in the unit that the file says"
        rename = "rename the column and " if column.name == EVENT_TIME else ""
        self._questions[EVENT_TIME] = (
            f"{column.name!r} is named like the event time, but {found.why}. {ways}. "
            f"Or {rename}delete this line, and rows have no times"
        )

    def _why_no_event_time(self, column: SampledColumn, found: Times) -> str:
        if not _is_complete(column):
            return (
                f"times ({found.span}), missing in {column.missing:.1%} of the rows, and every "
                "row needs one"
            )
        return (
            f"times ({found.span}) beside the row's own are not supported as a feature; write "
            "hours or ages as numbers"
        )

    # -- keys

    def _guess_keys(self) -> None:
        # A row without a request id is its own request.
        request = self._first_of(names.REQUESTS, lambda it: it.kind in (INTEGER, TEXT))
        session = self._first_of(
            names.SESSIONS, lambda it: it.kind in (INTEGER, TEXT) and _is_complete(it)
        )
        position_column = self._first_of(names.ROWS, _is_position)
        for column in (each for each in (request, session) if each is not None):
            if column.name in self._found or REQUEST_ID in self._roles:
                continue
            if position_column is not None and (why := self._why_key([column, position_column])):
                self._found[column.name] = Guess(REQUEST_ID, f"with {position_column.name!r} {why}")
                self._found[position_column.name] = Guess(ROW, f"with {column.name!r} {why}")
            elif column is request and _are_groups(column):
                self._found[column.name] = Guess(REQUEST_ID, f"by its name; {_groups(column)}")
        if session is not None and session.name not in self._found:
            self._leave_out(
                session,
                "the id of a visit does not recur in later visits, and it is not the id of a "
                "request",
            )
        if request is not None and request.name not in self._found and request.name != REQUEST_ID:
            self._leave_out(request, f"named like a request id, but is not one: {_groups(request)}")
        for column in self._free:
            if column.name in (REQUEST_ID, ROW) and (
                column.name == REQUEST_ID or REQUEST_ID in self._roles
            ):
                self._leave_out(column, "named like a key, but is not one")
                self._questions[column.name] = (
                    f"{column.name!r} is not a key: rows with other content repeat it. Name a "
                    "column that differs "
                    "in each row, together with the other one; or rename it in the file and delete "
                    "this line"
                )

    @property
    def _roles(self) -> set[str]:
        return {guess.role for guess in self._found.values()}

    def _first_of(self, usual: Sequence[str], looks_so: Any) -> SampledColumn | None:
        free = self._free
        found = (
            each
            for name in usual
            for each in free
            if names.letters(each.name) == name and looks_so(each)
        )
        return next(found, None)

    def _why_key(self, key: list[SampledColumn]) -> str:
        """Return the reason why the columns identify a row, or "" if they do not."""
        content = [
            column for column in self._sample.columns if column not in key and not _is_label(column)
        ]
        content = [
            column for column in content if not isinstance(self._times.get(column.name), Times)
        ]
        num_copies, num_conflicting = find_copies(key, content)
        if not num_copies:
            return "it differs in each row"
        if num_conflicting > TOLERATED * self._sample.num_rows:
            return ""
        others = f", {num_conflicting:,} of them with other content" if num_conflicting else ""
        return (
            f"it is the key of a row; {counted(num_copies, 'row')} repeat a key{others}: the "
            "last one is used"
        )

    def _guess_weight(self) -> None:
        weight = self._first_of(
            names.WEIGHTS,
            lambda it: (
                it.kind in (INTEGER, FLOAT) and not it.missing and it.bounds and it.bounds[0] >= 0
            ),
        )
        if weight is not None and np.isfinite(weight.numbers[weight.counts > 0]).all():
            self._found[weight.name] = Guess(WEIGHT, "by its name")

    # -- columns that are known only after the label

    def _leave_out_outcomes(self, label: SampledColumn, labels: NDArray[np.int8]) -> None:
        for column in self._free:
            named = names.letters(column.name) in names.CONVERSIONS + names.REACTIONS + names.LABELS
            if (
                named
                and column.num_unfit(column.labels >= 0) <= TOLERATED * column.num_rows
                and _has_few(column)
            ):
                self._leave_out(
                    column,
                    f"by its name another outcome, not known when {label.name!r} is predicted",
                )
            elif names.is_outcome(column.name):
                self._leave_out(column, "by its name it is known only after the row was shown")
            elif _has_both(label) and _has_few(column) and _is_complement(column, labels):
                self._leave_out(
                    column, f"it is 1 where {label.name!r} is 0: the label's complement"
                )

    def _leave_out_deciding(self, labels: NDArray[np.int8]) -> None:
        for column in self._sample.columns:
            if self._found[column.name].role not in KINDS:
                continue
            auc = deciding_auc(column, labels)
            if auc is not None and auc > DECIDING_AUC:
                self._leave_out(
                    column,
                    f"it alone determines the label (AUC {auc:.3f}): was it known before the "
                    "click?",
                )

    # -- features

    def _guess_row_name(self, column: SampledColumn) -> Guess | None:
        """Return the guess that a column is left out because it is an id of the rows.

        Returns None if the column is not an id of the rows.
        """
        is_unique = column.distinct == column.num_rows and column.num_rows > 1
        if not is_unique or column.kind in (FLOAT, OTHER) or column.is_list:
            return None
        whole = names.letters(column.name)
        if whole in names.INDEXES or whole.startswith("unnamed"):
            return Guess(LEFT_OUT, "it identifies the rows: it differs in each")
        if names.is_number(column.name) or column.num_rows < _FROM_ROWS or self._is_entity(column):
            return None
        if column.kind == INTEGER:
            numbers = column.row_values(column.numbers, np.nan)
            if names.is_id(column.name) or (numbers[0] in (0, 1) and (np.diff(numbers) == 1).all()):
                return Guess(LEFT_OUT, "it numbers or identifies the rows: it differs in each")
            return None
        if column.kind == TEXT:
            return Guess(LEFT_OUT, "its text differs in each row, so there is nothing to learn")
        return None

    @staticmethod
    def _is_entity(column: SampledColumn) -> bool:
        return bool(
            names.is_named_as(column.name, names.USERS)
            or names.is_named_as(column.name, names.ITEMS)
        )

    def _guess_feature(self, column: SampledColumn) -> Guess:
        if column.name in OWN_COLUMNS:
            return Guess(
                LEFT_OUT, "every row has a column of this name; rename it to use it as a feature"
            )
        if not _is_name(column.name):
            return Guess(
                LEFT_OUT,
                "a feature has a printable name without a slash and without spaces around it; "
                "rename it",
            )
        if column.kind_of_type == OTHER or (column.kind == OTHER and column.type != TEXT):
            return Guess(LEFT_OUT, f"columns of type {column.type} are not supported yet")
        if column.distinct < 2:
            return Guess(LEFT_OUT, self._why_constant(column))
        if column.is_list or column.kind == TEXT:
            return self._guess_text(column)
        if column.kind == BOOLEAN:
            return Guess(_CATEGORICAL, f"true or false{_unfit(column)}", _STRING_OPTION)
        is_category = names.suffix_of(column.name) == "token" or names.is_id(column.name)
        is_category &= not column.rows_with(column.is_long_float) > TOLERATED * column.num_rows
        if names.suffix_of(column.name) == "float" or (column.kind == FLOAT and not is_category):
            return _guess_number(
                column, "numbers with fractions" if column.kind == FLOAT else "whole numbers"
            )
        if column.kind == FLOAT and column.type == TEXT:
            return Guess(
                _CATEGORICAL,
                "numbers with fractions, named like a category: kept as texts",
                _STRING_OPTION,
            )
        if column.kind == FLOAT:
            return Guess(
                LEFT_OUT,
                "named like ids, but floats that are not exact whole numbers; write whole numbers "
                "or texts",
            )
        return _guess_integer(column)

    def _why_constant(self, column: SampledColumn) -> str:
        rows = "all rows" if self._sample.is_whole else f"the first {column.num_rows:,} rows"
        if not column.num_present:
            return f"it has no value in {rows}"
        if column.num_present < column.num_rows:
            return (
                f"it has one value, in {counted(column.num_present, 'row')}, and none in the others"
            )
        return f"it has the same value in {rows}"

    def _guess_text(self, column: SampledColumn) -> Guess:
        looks = look_at_lists(column)
        if looks.problem == OBJECTS:
            return Guess(LEFT_OUT, "objects are not supported yet; write their fields as columns")
        if looks.problem == DECIMAL_COMMA:
            return Guess(
                LEFT_OUT,
                "numbers with a comma: write 3.5 for three and a half, 1234 for a thousand",
            )
        if looks.separator is None and (words := _words_among_numbers(column)):
            return Guess(
                LEFT_OUT,
                f"numbers, but {words} in "
                f"{counted(column.num_unfit(np.isfinite(column.numbers)), 'row')}: leave such "
                "fields empty to learn from the numbers, or list it under categorical with {type: "
                "string}",
            )
        if looks.separator is None:
            return Guess(
                _CATEGORICAL, f"texts{looks.remark}{_size(column.distinct)}", _STRING_OPTION
            )
        if looks.element == FLOAT:
            return Guess(LEFT_OUT, "lists of numbers with fractions are not supported yet")
        return _guess_list(column, looks)

    # -- columns of users and items

    def _entities(self) -> dict[str, tuple[str, str]]:
        found = {}
        for role, entities in ((USER, names.USERS), (ITEM, names.ITEMS)):
            ranked = [
                (entities.index(entity), column)
                for column, guess in (
                    (each, self._found[each.name]) for each in self._sample.columns
                )
                if guess.role == _CATEGORICAL
                and (entity := names.is_named_as(column.name, entities)) is not None
                and _is_entity_like(column)
            ]
            if ranked:
                column = min(ranked, key=lambda each: each[0])[1]
                found[role] = (column.name, f"by its name; {column.distinct:,} of them")
        return found


_UNNAMED = 4
"""Rank of a column that has labels as values, although its name is not typical of labels."""


def _label_tier(column: SampledColumn) -> int:
    name = names.letters(column.name)
    if names.is_negated_label(column.name):
        return _UNNAMED
    if name in names.LABELS + names.TARGETS:
        return 0
    if {"click", "clicked", "clk"} & set(names.words(column.name)):
        return 1
    if name in names.CONVERSIONS:
        return 2
    return 3 if name in names.REACTIONS else _UNNAMED


def _answers(column: SampledColumn) -> list[str]:
    """Return the values of a text column with exactly two distinct values, or an empty list."""
    if column.kind != TEXT or column.is_list or column.distinct != 2:
        return []
    present = np.flatnonzero(column.is_present & (column.counts > 0))
    return [str(column.values[int(at)].as_py()) for at in present]


def _has_few(column: SampledColumn) -> bool:
    return column.distinct <= _MAX_LABELS


def _is_label(column: SampledColumn) -> bool:
    """Return whether a column contains both labels, 0 and 1, and hardly any other values."""
    if not _has_few(column) or column.is_list or not column.num_present:
        return False
    is_named = _label_tier(column) < _UNNAMED
    num_unfit, num_missing = (
        column.num_unfit(column.labels >= 0),
        column.num_rows - column.num_present,
    )
    if (
        num_unfit > TOLERATED * column.num_rows
        or num_missing > (0.5 if is_named else TOLERATED) * column.num_rows
    ):
        return False
    has = [column.rows_with(column.labels == label) > 0 for label in (0, 1)]
    # A column with the name of a label may contain only zeros or only ones. A column of ones and
    # missing values is not accepted as a label, because a missing value may not mean 0.
    return all(has) or (is_named and any(has) and not num_missing)


def _has_both(label: SampledColumn) -> bool:
    """Return whether both labels have enough rows.

    With fewer rows, another column may be equal to the label by chance.
    """
    return min(label.rows_with(label.labels == each) for each in (0, 1)) >= _MIN_EACH


def _why_label(column: SampledColumn) -> str:
    why = (
        "by its name"
        if _label_tier(column) < _UNNAMED
        else "the only column that holds only 0 and 1"
    )
    num_clicks = column.rows_with(column.labels == 1)
    num_known = column.rows_with(column.labels >= 0)
    why += f"; {num_clicks / num_known:.2%} clicks"
    if num_clicks in (0, num_known):
        why += f": ALL ROWS ARE {1 if num_clicks else 0}, and a model needs rows of both labels"
    if num_wrong := column.num_rows - num_known:
        why += f"; {counted(num_wrong, 'row')} with another value or none: malformed"
        if num_wrong > TOLERATED * column.num_rows:
            why += (
                f", more than the {TOLERATED:.0%} that is tolerated "
                "(extraction.max_malformed_fraction)"
            )
    return why


def _are_same(one: SampledColumn, other: SampledColumn) -> bool:
    return bool((one.row_values(one.labels, -1) == other.row_values(other.labels, -1)).all())


def _is_complement(column: SampledColumn, labels: NDArray[np.int8]) -> bool:
    own = column.row_values(column.labels, np.int8(-1))
    known = (own >= 0) & (labels >= 0)
    agreeing = int((own[known] != labels[known]).sum())
    return int(known.sum()) >= (1 - TOLERATED) * len(labels) and agreeing >= (1 - TOLERATED) * max(
        int(known.sum()), 1
    )


def _why_other_label(label: SampledColumn, column: SampledColumn) -> str:
    if _are_same(label, column):
        return f"it is the same as {label.name!r}"
    if _is_complement(column, label.row_values(label.labels, np.int8(-1))):
        return f"it is 1 where {label.name!r} is 0: the label's complement"
    return f"another outcome beside {label.name!r}, and not known when it is predicted"


def _is_complete(column: SampledColumn) -> bool:
    return column.missing <= TOLERATED


def _time_rank(column: SampledColumn) -> int | None:
    name = names.letters(column.name)
    return names.TIMES.index(name) if name in names.TIMES else None


_ISO_LIKE = ("-", "/")


def _is_dated(column: SampledColumn) -> bool:
    """Return whether a column's values look like times, whatever its name is."""
    return column.kind == TIME or (column.kind == TEXT and len(column.example) >= 10)


def _is_surely_time(column: SampledColumn) -> bool:
    """Return whether a column certainly contains times.

    If the name is used only for times, the values are not checked. If the name is only common for
    times, the values must look like times. Small numbers do not look like times.
    """
    if names.letters(column.name) in names.CERTAIN_TIMES:
        return True
    is_large = column.kind in (INTEGER, FLOAT) and bool(column.bounds and column.bounds[1] >= 10**5)
    return _time_rank(column) is not None and (column.kind in (TEXT, TIME) or is_large)


_OTHER_TIME = re.compile(
    r"(\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2})|\d{4}\.\d{1,2}\.\d{1,2}"
    r"|([A-Za-z]{3,9},? )?\d{1,2}[. -] ?[A-Za-z]{3,9}[., -] ?\d{4}|[A-Za-z]{3,9} \d{1,2},? \d{4})"
    r"([ T,]+\d{1,2}[:.]\d{2}.*)?"
)
"""Dates in forms that the reader of times does not accept, such as 31.01.2026 or Jan 31, 2026."""


def _is_like_time(column: SampledColumn) -> bool:
    """Return whether all inspected values are dates in an unsupported form."""
    if column.kind != TEXT or column.is_list or not column.num_present:
        return False
    present = np.flatnonzero(column.is_present & (column.counts > 0))[:_MAX_DATES]
    texts = [str(column.values[int(at)].as_py()).strip() for at in present]
    return all(_OTHER_TIME.fullmatch(text) for text in texts)


def _is_rising(column: SampledColumn) -> bool:
    numbers = column.row_values(column.numbers, np.nan)
    return column.distinct > 1 and bool((np.diff(numbers[np.isfinite(numbers)]) >= 0).all())


def _may_be_time(column: SampledColumn) -> bool:
    if column.is_list or not column.num_present:
        return False
    if column.kind == TIME or _time_rank(column) is not None:
        return True
    if column.kind == TEXT:
        return (
            any(character in column.example[4:5] for character in _ISO_LIKE)
            and column.example[:4].isdigit()
        )
    # The column's name is not typical of times, so the numbers count as times only if they are
    # sorted in ascending order.
    if (
        column.kind not in (INTEGER, FLOAT)
        or names.is_id(column.name)
        or names.is_number(column.name)
    ):
        return False
    return bool(column.bounds and column.bounds[0] >= 10**9 and _is_rising(column))


def _is_position(column: SampledColumn) -> bool:
    return (
        column.kind == INTEGER
        and not column.missing
        and bool(column.bounds and column.bounds[0] >= 0)
    )


def _are_groups(column: SampledColumn) -> bool:
    """Return whether all rows with the same value can belong to one request."""
    most = int(column.counts[column.is_present].max(initial=0))
    return column.distinct > 1 and most <= _MAX_REQUEST_ROWS and most <= column.num_rows / 2


def _groups(column: SampledColumn) -> str:
    most = int(column.counts[column.is_present].max(initial=0))
    return "each row is its own request" if most == 1 else f"up to {counted(most, 'row')} each"


def _is_entity_like(column: SampledColumn) -> bool:
    most = int(column.counts[column.is_present].max(initial=0))
    return column.distinct >= _MIN_ENTITIES and most <= _MAX_ENTITY_SHARE * column.num_rows


def _listed(found: Sequence[str]) -> str:
    return ", ".join(map(repr, found[:5])) + (
        f" and {len(found) - 5} more" if len(found) > 5 else ""
    )


def _size(num_categories: int) -> str:
    """Return a remark about the memory of a feature with many categories, else ""."""
    if num_categories < MANY:
        return ""
    return "; each of them has a vector (docs/kubernetes/scale.md has the memory)"


_STRING_OPTION = "{type: string}"
"""Options of a categorical feature with string values, as text for the drafted file."""
_BELOW_ZERO = "{transform: [standardize]}"
"""Options of a numeric feature with values below 0, which the default transform would clip."""


def _is_name(name: str) -> bool:
    try:
        Features(numeric=(name,), categorical=())
    except ContractError:
        return False
    return True


def _words_among_numbers(column: SampledColumn) -> str:
    """Return the few texts in a column that otherwise has numbers, or "" for other columns."""
    is_number = np.isfinite(column.numbers)
    unexpected = np.flatnonzero(column.is_present & ~is_number & (column.counts > 0))
    is_one = (
        0 < len(unexpected) <= _MAX_WORDS
        and column.rows_with(is_number) >= 0.5 * column.num_present
    )
    if (
        not is_one
        or names.is_id(column.name)
        or int((column.counts[is_number] > 0).sum()) <= _MAX_WORDS
    ):
        return ""
    return _listed([str(value) for value in column.values.take(unexpected).to_pylist()])


def _unfit(column: SampledColumn) -> str:
    """Return a remark about values that do not have the column's kind, or "" if there are none."""
    num_unfit = column.num_unfit(column.is_fitting)
    return (
        f"; {counted(num_unfit, 'row')} with another value, such as {column.unfit_example!r}: "
        "malformed"
        if num_unfit
        else ""
    )


def _guess_number(column: SampledColumn, why: str) -> Guess:
    if (
        column.kind_of_type == FLOAT
        and column.num_unfit(np.isfinite(column.numbers)) > TOLERATED * column.num_rows
    ):
        return Guess(LEFT_OUT, "infinite values are not supported; leave them empty")
    num_long = column.rows_with(column.is_long_float)
    if num_long > TOLERATED * column.num_rows:
        return Guess(
            LEFT_OUT,
            "floats of 2^53 or more, which are ambiguous whole numbers; write ids as whole numbers "
            "or texts",
        )
    assert column.bounds is not None
    return Guess(_NUMERIC, f"{why}{_unfit(column)}", _BELOW_ZERO if column.bounds[0] < 0 else "")


def _guess_integer(column: SampledColumn) -> Guess:
    is_zero_led = column.rows_with(column.is_zero_led) > 0
    size = _size(column.distinct)
    options = _STRING_OPTION if is_zero_led else ""
    zeros = ", some with leading zeros, so they are kept as texts" if is_zero_led else ""
    assert column.bounds is not None
    low, high = column.bounds
    if names.suffix_of(column.name) == "token" or names.is_id(column.name):
        return Guess(
            _CATEGORICAL,
            f"whole numbers, named like a category{zeros}{_unfit(column)}{size}",
            options,
        )
    is_named_number = names.is_number(column.name)
    if not is_named_number:
        if high >= _WIDE or low < -_WIDE:
            return Guess(
                _CATEGORICAL,
                f"whole numbers too large for quantities{zeros}{_unfit(column)}{size}",
                options,
            )
        if is_zero_led:
            return Guess(_CATEGORICAL, f"digits{zeros}{_unfit(column)}{size}", options)
        if low >= 10_000 and len(str(low)) == len(str(high)) and column.distinct > _MAX_FEW:
            return Guess(
                _CATEGORICAL, f"whole numbers of equal length, like ids{_unfit(column)}{size}"
            )
    if low < 0:
        return Guess(_NUMERIC, f"it has values below 0{_unfit(column)}", _BELOW_ZERO)
    if column.distinct <= _MAX_FEW and not is_named_number:
        return Guess(_CATEGORICAL, f"few distinct whole numbers{_unfit(column)}")
    return Guess(_NUMERIC, f"whole numbers, not named like a category{_unfit(column)}")


def _guess_list(column: SampledColumn, looks: ListLooks) -> Guess:
    most = min(looks.longest, _MAX_ELEMENTS)
    beyond = f", the newest {most} of {looks.longest} count" if most != looks.longest else ""
    options = [] if looks.element == INTEGER else ["type: string"]
    options.append(f"max: {most}")
    if looks.separator not in ("|", BRACKETS):
        options.append(f"separator: '{looks.separator}'")
    elements = counted(looks.num_elements, "distinct element")
    size = _size(looks.num_elements)
    why = (
        f"a list, {elements}{size}{beyond}; `table: NAME` shares the vectors of a categorical "
        "feature"
    )
    return Guess(LISTS, why, f"{{{', '.join(options)}}}")

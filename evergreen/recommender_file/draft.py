"""A first `recommender.yaml` for a click log, with a guess and a reason for each column.

`columns` reads the first rows as `ingest` does, and `guesses` decides the role of each column. The
user corrects the guesses and answers the questions. Comments in the file list the columns that
cannot be used, with the reasons.
"""

import re
from collections.abc import Sequence

from evergreen.contracts.raw_rows import EVENT_TIME, LABEL, REQUEST_ID, ROW
from evergreen.recommender_file.columns import (
    FLOAT,
    OTHER,
    TEXT,
    ColumnSample,
    SampledColumn,
    counted,
    read_sample,
)
from evergreen.recommender_file.document import dump_text
from evergreen.recommender_file.form import FILL_IN, FORMAT
from evergreen.recommender_file.guesses import (
    ITEM,
    KINDS,
    LEFT_OUT,
    LISTS,
    MANY,
    USER,
    WEIGHT,
    Guess,
    Guesses,
    guess_all,
    guess_roles,
)
from evergreen.runtime.errors import ContractError

__all__ = ["KINDS", "LEFT_OUT", "MANY", "draft", "guess_roles", "read_sample", "recommender_name"]

_ABSENT = {
    EVENT_TIME: "none found: `evergreen data ingest` needs --last-day and --days, over which the "
    "rows are spread",
    REQUEST_ID: "none found: each row is its own request",
    ROW: "none found: the rows of a request are numbered in their order",
}
"""Remarks in the draft about roles without a suitable column."""
_ROLES = (LABEL, EVENT_TIME, "time_format", REQUEST_ID, ROW, WEIGHT, USER, ITEM)


def draft(sample: ColumnSample, *, name: str, now: float | None = None) -> str:
    """Return the text of a file with a comment on each column.

    The file becomes valid when the user has answered its questions.

    Args:
        sample: The first rows of the click log.
        name: Name of the recommender.
        now: Current time in seconds since 1970. A time more than a day after `now` is invalid. None
            = the machine's clock.

    Raises:
        ContractError: No column can be a feature.
    """
    guesses = guess_all(sample, now=now)
    if not any(guess.role in KINDS for _, guess in guesses.columns):
        reasons = "; ".join(
            f"{column.name}: {guess.why}"
            for column, guess in guesses.columns
            if guess.role == LEFT_OUT
        )
        raise ContractError(
            f"{sample.path} has no column that can be a feature: {reasons or 'there is none'}"
        )
    lines = [
        f"# Drafted by `evergreen init` from {_read(sample)}.",
        *_rejected(sample),
        "# The columns' roles are guesses. Correct them, then: evergreen data check FILE "
        "--data ROWS",
        f"format: {FORMAT}",
        f"name: {name}",
        "",
        "# Names of the columns that every row has, in the files.",
        "data:",
        *_lines_of_data(guesses),
        "",
        "# The columns to learn from.",
        "features:",
    ]
    for kind in KINDS:
        of_kind = [(column, guess) for column, guess in guesses.columns if guess.role == kind]
        if kind == LISTS and not of_kind:
            continue
        lines += [f"  {kind}:"] if of_kind else [f"  {kind}: []  # none found"]
        lines += _aligned([(_line_of_feature(each, of_kind), _remark(*each)) for each in of_kind])
    left = [
        f"#   {_printable(column.name)}: {_remark(column, guess)}"
        for column, guess in guesses.columns
        if guess.role == LEFT_OUT
    ]
    left += [
        f"#   column {number}: it has no name; give it one to use it as a feature"
        for number in sample.unnamed
    ]
    lines += ["", "# Left out:", *left] if left else []
    lines += [
        "",
        "# docs/reference/settings.md lists every setting with its default. Example of a change:",
        "# training:",
        "#   learning_rate: 0.003",
    ]
    return "\n".join(lines) + "\n"


def recommender_name(text: str) -> str:
    """Convert `text` to a valid name of a recommender.

    >>> recommender_name("My Clicks-2026"), recommender_name("2026")
    ('my_clicks_2026', 'recommender')
    """
    return (
        re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:63].lstrip("0123456789_")
        or "recommender"
    )


def _read(sample: ColumnSample) -> str:
    which = "all" if sample.is_whole else "the first"
    return f"{which} {sample.num_rows:,} rows of {_printable(sample.path.name)!r}"


def _rejected(sample: ColumnSample) -> list[str]:
    """Return comments about the lines that are not rows."""
    num_rejected = sample.counts.rejected
    if not num_rejected:
        return []
    examples = [f"#   line {line}: {_printable(reason)}" for line, reason, _ in sample.rejected]
    return [
        f"# {counted(num_rejected, 'line')} beside these could not be read as rows, first:",
        *examples,
    ]


def _lines_of_data(guesses: Guesses) -> list[str]:
    by_role = {guess.role: (column, guess) for column, guess in guesses.columns}
    lines = []
    for role in _ROLES:
        if question := guesses.questions.get(role):
            lines.append(f"  {role}: {FILL_IN}  # {_printable(question)}")
        elif role in by_role:
            column, guess = by_role[role]
            lines.append(f"  {role}: {dump_text(column.name)}  # {_remark(column, guess)}")
        elif role == "time_format" and guesses.time_format is not None:
            lines.append(f"  {role}: {guesses.time_format}")
        elif role in guesses.entities:
            name, why = guesses.entities[role]
            lines.append(f"  {role}: {dump_text(name)}  # {why.capitalize()}")
        elif role in _ABSENT:
            lines.append(f"  # {role}: {role}  # {_ABSENT[role]}")
    return lines


def _line_of_feature(
    feature: tuple[SampledColumn, Guess], of_kind: Sequence[tuple[SampledColumn, Guess]]
) -> str:
    """Return the line that describes a feature in the drafted file.

    The line contains only a name. If another feature of the same kind has options, the line
    contains the name and the options.
    """
    name = dump_text(feature[0].name)
    if any(guess.options for _, guess in of_kind):
        return f"    {name}: {feature[1].options or '{}'}"
    return f"    - {name}"


def _remark(column: SampledColumn, guess: Guess) -> str:
    facts = [column.kind if column.type == TEXT else column.type]
    if guess.role == LISTS:
        facts = ["list of texts" if "type: string" in guess.options else "list of integers"]
    if (
        column.missing
        and column.kind_of_type != OTHER
        and (column.type == TEXT or column.num_present)
    ):
        words = (
            f" ({', '.join(map(_printable, column.missing_texts[:3]))})"
            if column.missing_texts
            else ""
        )
        facts.append(f"{column.missing:.1%} missing{words}")
    if column.kind != OTHER or column.num_present:
        facts.append(
            counted(column.distinct, f"distinct {'list' if guess.role == LISTS else 'value'}")
        )
        if column.bounds is not None:
            low, high = (f"{bound:g}" if column.kind == FLOAT else bound for bound in column.bounds)
            facts[-1] += f", {low} to {high}"
        elif column.example:
            facts[-1] += f" such as {_printable(column.example)}"
    return f"{'; '.join(facts)}. {guess.why[:1].upper()}{guess.why[1:]}"


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    width = min(max(len(text) for text, _ in lines), 40) if lines else 0
    return [f"{text:<{width}}  # {remark}" for text, remark in lines]

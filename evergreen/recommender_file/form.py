"""Conversion of a user's file to a `Recommender`, and of a `Recommender` to a file.

An error names the line, the path, the value, and the expected value. The classes of the sections
check their own settings (`config.sections`), and `document` reads YAML. `compare` lists the
differences between two descriptions by key.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evergreen.config.data import OWN_COLUMNS, WEIGHT, ColumnNames
from evergreen.config.features import (
    MAX_COLUMNS,
    CategoricalOptions,
    Features,
    ListOptions,
    NumericOptions,
)
from evergreen.config.reader import nearest, read_mapping
from evergreen.config.sections import check_settings
from evergreen.config.spec import SECTIONS, Recommender
from evergreen.recommender_file.document import (
    MAX_BYTES,
    Document,
    NameRange,
    collapse_names,
    dump_document,
    expand_range,
    load_document,
)
from evergreen.runtime.errors import ContractError

FORMAT = "evergreen/recommender/1"
"""Version of the file format: the value of the key `format`."""
FILL_IN = "FILL IN"
"""Placeholder in a drafted file for a value that the user must fill in. A file that still has a
placeholder is refused."""
REQUIRED = ("format", "name", "features")
_KEYS = ("format", "name", "data", "features", *SECTIONS)
OPTIONS: dict[str, type[Any]] = {
    "numeric": NumericOptions,
    "categorical": CategoricalOptions,
    "lists": ListOptions,
}
"""Class of the options for each kind of column."""
_FIELDS = {
    "numeric": "numeric_options",
    "categorical": "categorical_options",
    "lists": "list_options",
}
"""For each kind of column, the name of the field of `Features` that contains the options."""
KINDS = tuple(OPTIONS)


def read_recommender(path: Path) -> Recommender:
    """Return the recommender that the file at `path` describes.

    Raises:
        ContractError: the file cannot be read, or `parse_recommender` refuses it.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ContractError(f"{path} has more than {MAX_BYTES:,} bytes, expected a recommender")
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ContractError(f"{path} is not text in UTF-8, expected a recommender") from error
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
    return parse_recommender(text, source=str(path))


def parse_recommender(text: str, *, source: str) -> Recommender:
    """Return the recommender that `text` describes.

    Args:
        text: The YAML.
        source: Name of the source, for errors.

    Raises:
        ContractError: the text is not YAML, a key is unknown, missing or repeated, or a value is
            wrong.
    """
    document = load_document(text, source=source)
    values = _mapping(document, "", document.value, keys=_KEYS)
    for key in REQUIRED:
        if key not in values:
            raise document.refusal("", f"{key} is missing, expected the keys {', '.join(REQUIRED)}")
    for path, value in _texts(document.value, ""):
        if value == FILL_IN:
            raise document.refusal(
                path, f"{path} is {FILL_IN}, expected the answer to the question in its comment"
            )
    if values["format"] != FORMAT:
        raise document.refusal("format", f"format is {values['format']!r}, expected {FORMAT}")
    with document.located("data"):
        data = read_mapping(
            ColumnNames, _mapping(document, "data", values.get("data", {})), path="data"
        )
    features = _features(document, values["features"], data)
    settings = {name: _mapping(document, name, values[name]) for name in SECTIONS if name in values}
    with document.located("name"):
        recommender = Recommender(
            name=values["name"],
            features=features,
            data=data,
            settings={name: each for name, each in settings.items() if each},
        )
        check_settings(recommender)
    return recommender


def format_recommender(recommender: Recommender) -> str:
    """Return the text of a file that describes `recommender`.

    Settings with default values are omitted.
    """
    features = {kind: _written_columns(recommender.features, kind) for kind in KINDS}
    named = {kind: columns for kind, columns in features.items() if columns}
    own = _non_defaults(recommender.data)
    data = {"data": own} if own else {}
    return dump_document(
        {
            "format": FORMAT,
            "name": recommender.name,
            **data,
            "features": named,
            **recommender.settings,
        }
    )


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield all texts in nested plain values, each with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _texts(each, f"{path}[{number}]")


def _written_columns(features: Features, kind: str) -> list[str] | dict[str, Any]:
    """Return the columns of a kind as values for a YAML file.

    The result is a list of names. If a column has options, the result is a mapping from names to
    options.
    """
    names = getattr(features, kind)
    options = getattr(features, _FIELDS[kind])
    if not options:
        return collapse_names(names)
    return {name: _non_defaults(options[name]) if name in options else {} for name in names}


def _non_defaults(options: Any) -> dict[str, Any]:
    """Return an object's fields that differ from their defaults, as plain values for a file."""
    values, usual = dataclasses.asdict(options), dataclasses.asdict(type(options)())
    changed = {name: value for name, value in values.items() if value != usual[name]}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()
    }


def _features(document: Document, value: Any, data: ColumnNames) -> Features:
    kinds = _mapping(document, "features", value, keys=KINDS)
    taken = dict.fromkeys(OWN_COLUMNS, "which every row has, expected another name")
    taken[data.label] = "which is the label, expected a feature known before it"
    if data.weight is not None:
        taken |= dict.fromkeys(
            (data.weight, WEIGHT), "which is the weight of the rows, expected another name"
        )
    names: dict[str, list[str]] = {kind: [] for kind in KINDS}
    options: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for kind, listed in kinds.items():
        for path, name, found in _columns(document, kind, listed):
            if name in taken:
                raise document.refusal(path, f"{path} is {name!r}, {taken[name]}")
            taken[name] = f"which is in line {document.lines[path]} too, expected each feature once"
            names[kind].append(name)
            if found is not None:
                options[kind][name] = found
    if not any(names.values()):
        raise document.refusal("features", "features names no column, expected one or more")
    with document.located("features"):
        fields: dict[str, Any] = {kind: tuple(each) for kind, each in names.items()}
        fields |= {_FIELDS[kind]: each for kind, each in options.items()}
        return Features(**fields)


def _columns(document: Document, kind: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the name and the options of each column of a kind.

    The options are empty if the file gives no options. Ranges are expanded.
    """
    path = f"features.{kind}"
    if isinstance(value, dict):
        entries = [
            (f"{path}.{name}", name, {} if options is None else options)
            for name, options in value.items()
        ]
    elif isinstance(value, list):
        entries = [(f"{path}[{number}]", name, {}) for number, name in enumerate(value)]
    else:
        raise document.refusal(
            path, f"{path} is {value!r}, expected a list of columns' names, or names with options"
        )
    total = 0
    for inner, name, options in entries:
        if not isinstance(name, str) or not name:
            raise document.refusal(
                inner,
                f"{inner} is {name!r}, expected a column's name; in quotes where it is a number",
            )
        found = _options(document, kind, inner, value=options)
        try:
            expanded = expand_range(name) if isinstance(name, NameRange) else [name]
        except ContractError as error:
            raise document.refusal(inner, f"{inner} is {error}") from error
        # The limit is checked before the names are created, because a range in a single line may
        # have thousands of names.
        total += len(expanded)
        if total > MAX_COLUMNS:
            problem = f"{inner} makes {total:,} columns of {path}, expected at most {MAX_COLUMNS:,}"
            raise document.refusal(inner, problem)
        for each in expanded:
            yield inner, each, found


def _options(document: Document, kind: str, path: str, *, value: Any) -> Any:
    """Return the options at `path` as an object of the kind's class, or None if there are none."""
    options = _mapping(document, path, value)
    with document.located(path):
        return read_mapping(OPTIONS[kind], options, path=path) if options else None


def _mapping(
    document: Document, path: str, value: Any, *, keys: Sequence[str] = ()
) -> dict[str, Any]:
    """Return `value` after checking that it is a mapping.

    If `keys` is not empty, the mapping may have no other keys.
    """
    if not isinstance(value, dict):
        found = "empty" if value is None else repr(value)
        raise document.refusal(path, f"{path or 'the file'} is {found}, expected keys with values")
    for key in value:
        if keys and key not in keys:
            inner = f"{path}.{key}" if path else key
            raise document.refusal(inner, f"{inner} is not a key{nearest(key, keys)}")
    return value


def compare(old: Recommender, new: Recommender) -> list[str]:
    """Return one line for each difference of two recommenders, in the order of the file's keys.

    >>> from evergreen.config.features import Features
    >>> features = Features(numeric=("price",), categorical=("item",))
    >>> shop = Recommender(name="shop", features=features)
    >>> compare(shop, shop.with_settings({"training.seed": 7}))
    ['training.seed: not named -> 7']
    """
    return [f"{path}: {before} -> {after}" for path, before, after in _differences(old, new)]


def _differences(old: Recommender, new: Recommender) -> Iterator[tuple[str, object, object]]:
    before, after = _values(old), _values(new)
    for path in [*before, *(path for path in after if path not in before)]:
        if before.get(path) != after.get(path):
            yield path, before.get(path, "not named"), after.get(path, "not named")
    for kind in KINDS:
        names_before, names_after = getattr(old.features, kind), getattr(new.features, kind)
        gone = [name for name in names_before if name not in names_after]
        came = [name for name in names_after if name not in names_before]
        if gone or came:
            yield f"features.{kind}", f"without {_listed(gone)}", f"with {_listed(came)}"
        elif names_before != names_after:
            yield f"features.{kind}", _listed(names_before), _listed(names_after)
        for name in names_before:
            one, other = (_named_options(each.features, kind, name) for each in (old, new))
            if name in names_after and one != other:
                yield f"features.{kind}.{name}", one, other


def _named_options(features: Features, kind: str, name: str) -> dict[str, object]:
    found = getattr(features, _FIELDS[kind]).get(name)
    return _non_defaults(found) if found else {}


def _values(recommender: Recommender) -> dict[str, object]:
    """Return all settings of a recommender except the features, by path."""
    parts: dict[str, Mapping[str, object]] = {
        "data": asdict(recommender.data),
        **recommender.settings,
    }
    settings = {
        f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()
    }
    return {"name": recommender.name, **settings}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(collapse_names(names)) or "none"

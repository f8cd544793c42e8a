"""What two descriptions of a recommender say differently, key by key, for people."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from components.contracts.features import Features
from components.contracts.recommender import Recommender
from pipelines.recommender_file.document import collapse_names
from pipelines.recommender_file.form import FIELDS, KINDS, non_defaults


def compare(old: Recommender, new: Recommender) -> list[str]:
    """Every difference, one line each, in the order of the file's keys; empty where both say the same.

    >>> from components.contracts.features import Features
    >>> shop = Recommender(name="shop", features=Features(numeric=("price",), categorical=("item",)))
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
            one, other = (_options(each.features, kind, name) for each in (old, new))
            if name in names_after and one != other:
                yield f"features.{kind}.{name}", one, other


def _options(features: Features, kind: str, name: str) -> dict[str, object]:
    found = getattr(features, FIELDS[kind]).get(name)
    return non_defaults(found) if found else {}


def _values(recommender: Recommender) -> dict[str, object]:
    """What is said beside the features, by path."""
    parts: dict[str, Mapping[str, object]] = {"data": asdict(recommender.data), **recommender.settings}
    said = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    return {"name": recommender.name, **said}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(collapse_names(names)) or "none"

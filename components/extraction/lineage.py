"""`evergreen data lineage`: list on which days and versions each model was trained.

The command changes nothing. A model that continues a parent also depends on the parent's training
rows. If a day is back-filled later, the replaced rows still affect every descendant, up to the next
model that is trained from scratch.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.extraction.lake_files import newest_complete, objects_by_day
from evergreen.contracts.manifests import CURRENT, Model
from evergreen.contracts.raw_rows import DAY_PARTITION
from evergreen.registry import promotion_journal
from evergreen.registry.models import trained_later
from evergreen.rows.times import parse_day
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import show
from evergreen.runtime.terminal import TableColumn, add_listing_flags, print_table
from evergreen.storage.uris import is_bucket_uri, local_path, open_objects, typed_folder, typed_uri


@dataclass(frozen=True, kw_only=True)
class ModelLineage:
    """A model and its ancestors."""

    models: list[Model]
    """The model, its parent, the parent's parent and so on, as far as the registry has these
    models."""
    is_live: bool
    lost: str | None
    """Id of the first ancestor that is no longer in the registry. None if the registry has all
    ancestors."""
    trained_later: list[str]
    """See `evergreen.registry.models.trained_later`."""

    def document(self, day: str | None, versions: dict[str, int] | None) -> dict[str, Any]:
        """Return the lineage as a JSON document.

        Args:
            day: The only day to report. None means all days.
            versions: Newest version of each day in the lake. None if no lake was named.

        Returns:
            A dictionary with these entries. `model_id`, `parent_model_id`, `is_live` and
            `trained_later` describe the model. The model's holdout rows are between `watermark` and
            `last_event_time`. `days` starts with the days of the model's own run. Each entry has
            day, version, num_rows, num_late_rows, num_holdout_rows, replay, and the model_id of the
            model that was trained on it. If `versions` is given, each entry also has lake_version
            and outdated. The entry lake_version is the newest version of the day, or None if the
            lake lacks the day. The entry outdated is true if lake_version is newer than version.
            `unknown` lists the ancestors whose days were not recorded.
        """
        days = []
        for model, entry in [(each, entry) for each in self.models for entry in each.days]:
            seen = {
                "num_late_rows": 0,
                "num_holdout_rows": 0,
                "replay": False,
                **entry,
                "model_id": model.model_id,
            }
            seen.pop("digest", None)
            if versions is not None:
                newest = versions.get(entry["day"])
                seen |= {
                    "lake_version": newest,
                    "outdated": newest is not None and newest > entry["version"],
                }
            if day in (None, entry["day"]):
                days.append(seen)
        unknown = [model.model_id for model in self.models if not model.days] + (
            [self.lost] if self.lost else []
        )
        return {
            "model_id": self.models[0].model_id,
            "parent_model_id": self.models[0].parent_model_id,
            "is_live": self.is_live,
            "watermark": self.models[0].watermark,
            "last_event_time": self.models[0].last_event_time,
            "trained_later": self.trained_later,
            "days": days,
            "unknown": unknown,
        }


def find_lineages(store: Path, *, model: str | None = None) -> list[ModelLineage]:
    """Return the lineage of each model in the registry, oldest first, or of only one model.

    Args:
        store: Folder of the model registry.
        model: Id of the only model, or `current`. None means all models.

    Raises:
        ContractError: there is no such model, no version is live, or a manifest is corrupt.
    """
    if not store.is_dir():
        raise ContractError(f"model registry {store} does not exist, expected a folder")
    manifests = sorted((store / "models").glob(f"[!.]*/{Model.MANIFEST}"))
    models = {each.model_id: each for each in map(Model.read, manifests)}
    live = promotion_journal.current(store)
    live_id = live.model_id if live else None
    wanted = list(models)
    if model is not None:
        wanted = [live_id if model == CURRENT else model]  # type: ignore[list-item]
        if wanted[0] not in models:
            raise ContractError(
                f"model {model!r} is not in the model registry {store}, "
                f"expected one of {list(models)}"
            )
    return [_descent(model_id, models, is_live=model_id == live_id) for model_id in wanted]


def lake_versions(lake: str) -> dict[str, int]:
    """Return the newest complete version of each day of a lake.

    Only the names of the lake's objects are read.

    Raises:
        ContractError: the lake is not a folder, or the name of a partition contains no date.
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    if not is_bucket_uri(lake) and not local_path(lake).is_dir():
        raise ContractError(
            f"lake {local_path(lake)} does not exist, expected a folder of day partitions"
        )
    days = objects_by_day(lake, open_objects(lake).list(), DAY_PARTITION)
    return {str(day): newest_complete(names) for day, names in days.items()}


def _descent(model_id: str, models: dict[str, Model], *, is_live: bool) -> ModelLineage:
    line, parent = [models[model_id]], models[model_id].parent_model_id
    while parent in models and models[parent] not in line:
        line.append(models[parent])
        parent = models[parent].parent_model_id
    later = trained_later(line[0], models)
    return ModelLineage(models=line, is_live=is_live, lost=parent, trained_later=later)


def build_parser() -> argparse.ArgumentParser:
    """Build the command's parser. The text of `--help` documents the command."""
    parser = CommandParser(
        prog="evergreen data lineage",
        description="Lists the days, and the version of each day, on which a model of a "
        "registry and its ancestors were trained. With --lake, it also lists which of these "
        "versions a later back-fill has replaced.",
    )
    parser.add_argument("--store", required=True, help="folder or URI of the registry")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--day", help=("report only this UTC day, YYYY-MM-DD"))
    only.add_argument("--model", help=("report only the model with this id, or current"))
    parser.add_argument("--lake", help=("lake: folder, file:// URI or gs:// URI"))
    add_listing_flags(parser)
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code (`evergreen.runtime.exit_codes`)."""
    arguments = build_parser().parse_args(argv)
    day = str(parse_day("day", arguments.day)) if arguments.day else None
    found = find_lineages(typed_folder(arguments.store, "--store"), model=arguments.model)
    versions = lake_versions(typed_uri(arguments.lake)) if arguments.lake else None
    documents = [each.document(day, versions) for each in found]
    if arguments.json:
        print(json.dumps({"models": documents}, indent=2))
        return 0
    # A model with unknown ancestors is printed too, because its ancestors may have been trained on
    # the day.
    to_print = [each for each in documents if day is None or each["days"] or each["unknown"]]
    if not to_print:
        print("no model saw it" if found else "there is no model in the store")
        return 0
    rows = [row for each in to_print for row in _rows(each)]
    if rows:
        print_table(COLUMNS, rows, wide=arguments.wide)
    for sentence in (sentence for each in to_print for sentence in _sentences(each)):
        show(sentence)
    return 0


COLUMNS = (
    TableColumn(name="model", is_flexible=True),
    TableColumn(name="day"),
    TableColumn(name="version", is_number=True),
    TableColumn(name="rows", is_number=True),
    TableColumn(name="late", is_number=True, is_wide_only=True),
    TableColumn(name="held out", is_number=True),
    TableColumn(name="through", is_flexible=True),
    TableColumn(name="note", is_flexible=True),
)


def _rows(document: dict[str, Any]) -> Iterator[tuple[str | None, ...]]:
    """Yield one table row for each day that has training rows of the model or an ancestor."""
    for seen in document["days"]:
        notes = ["replayed"] if seen["replay"] else []
        if seen.get("outdated"):
            notes.append(f"OUTDATED: the lake has version {seen['lake_version']}")
        yield (
            document["model_id"],
            seen["day"],
            str(seen["version"]),
            f"{seen['num_rows']:,}",
            f"{seen['num_late_rows']:,}",
            f"{seen['num_holdout_rows']:,}",
            seen["model_id"] if seen["model_id"] != document["model_id"] else None,
            ", ".join(notes),
        )


def _sentences(document: dict[str, Any]) -> Iterator[str]:
    """Yield facts about a model that the table does not contain, as sentences."""
    model_id = document["model_id"]
    parent = document["parent_model_id"]
    yield (
        f"model {model_id}{' (live)' if document['is_live'] else ''}, "
        f"{f'from {parent}' if parent else 'from scratch'}: trained on rows up to "
        f"{document['watermark']}, evaluated on rows up to {document['last_event_time']}"
    )
    if document["trained_later"]:
        later = ", ".join(document["trained_later"])
        yield f"  its evaluation rows were later used to train {later}"
    for unknown in document["unknown"]:
        yield f"  the days of {unknown} are unknown"


if __name__ == "__main__":
    sys.exit(main())

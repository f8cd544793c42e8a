"""Which model saw which version of which day: `evergreen lineage`, the command line.

What a model saw is told by its manifest, what its line of descent saw by `descent`. Nothing is changed here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.extraction.descent import Descent


def build_parser() -> argparse.ArgumentParser:
    """The tool's flags; `--help` is its documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m components.extraction.lineage",
        description="Tells for the models of a store which version of which day of the lake they learnt from, "
        "themselves or through the models that they continued; and with --lake, which of these rows a later back-fill "
        "has replaced since.",
    )
    parser.add_argument("--store", required=True, help="model store, folder or its URI")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--day", help="this day alone, UTC, YYYY-MM-DD")
    only.add_argument("--model", help="this model's id alone, or current")
    parser.add_argument("--lake", help="lake, folder or its URI, or gs://")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of lines")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; 0 told, 2 misuse or an unknown model, 3 the lake cannot be reached; told on stderr."""
    arguments = build_parser().parse_args(argv)
    from components.extraction.descent import descents, lake_versions
    from components.extraction.times import parse_day
    from components.runtime.errors import ContractError, PermanentError, TemporaryError
    from components.storage.uris import typed_folder, typed_uri

    try:
        day = parse_day("day", arguments.day) if arguments.day else None
        found = descents(typed_folder(arguments.store, "--store"), model=arguments.model)
        versions = lake_versions(typed_uri(arguments.lake)) if arguments.lake else None
    except (ContractError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PermanentError, TemporaryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    if arguments.json:
        print(json.dumps({"models": [each.document(day, versions) for each in found]}, indent=2))
    else:
        nothing = "no model saw it" if found else "there is no model in the store"
        print("\n".join(line for each in found for line in _lines(each, day, versions)) or nothing)
    return 0


def _lines(descent: Descent, day: date | None, versions: dict[str, int] | None) -> list[str]:
    """What people read of one model; nothing where it certainly did not see the day asked about."""
    document = descent.document(day, versions)
    if day is not None and not document["days"] and not document["unknown"]:
        return []
    continued = f", continues {document['parent_model_id']}" if document["parent_model_id"] else ", from scratch"
    lines = [f"{document['model_id']}{' (live)' if document['is_live'] else ''}{continued}"]
    for seen in document["days"]:
        through = "" if seen["model_id"] == document["model_id"] else f", through {seen['model_id']}"
        replayed = ", replayed" if seen["replay"] else ""
        late = f", {seen['num_late_rows']} of them late" if seen["num_late_rows"] else ""
        lines.append(f"  {seen['day']} version {seen['version']}: {seen['num_rows']} rows{late}{replayed}{through}")
        if seen.get("outdated"):
            lines.append(f"    OUTDATED: the lake has version {seen['lake_version']}")
    lines += [f"  what {model_id} saw is not known" for model_id in document["unknown"]]
    return lines


if __name__ == "__main__":
    sys.exit(main())

"""Record an incident (`evergreen audit incident`) and replay it (`evergreen audit replay`).

An incident is a time span of records with the monitor's decisions, in one folder:

- `records/day=*/part.parquet`: served rows of the time span, and the earlier rows from which the
  first windows are filled
- `statistics/<version>/`: the training profile of each model
- `decisions.jsonl`: the decision lines that the monitor wrote
- `incident.json`: rules, the evaluator's state at the start, hashes of models, and SHA-256 of every
  other file

The folder is written under a temporary name and renamed, so it is complete when it exists. The
decisions are computed by `monitoring.backtest.backtest`.

A decision also depends on predictions up to nearly one attribution window after its decision point,
because these predictions show which version served. The archive contains a prediction only after it
has matured. An incident that is recorded before these predictions have matured is incomplete. The
manifest contains the time up to which the incident is complete. Decisions after this time cannot be
compared, and the replay lists them.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path
from typing import Any

from evergreen.config.features import Features
from evergreen.config.monitor import DecisionSettings
from evergreen.config.reader import flat_values, make_settings, read_mapping
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import Model, Release
from evergreen.registry.models import model_folder, release_path, scores_path
from evergreen.registry.recommenders import logged_recommender
from evergreen.rows.archived_rows import write_parquet
from evergreen.runtime.durable import fsync_path, sha256_file
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import show
from evergreen.statistics.reference import TrainingReference, read_reference
from evergreen.storage.folder import FolderObjects
from evergreen.storage.objects import Objects
from evergreen.storage.uris import open_objects, typed_folder, typed_uri
from monitoring.backtest.backtest import (
    Span,
    evaluate_requests,
    parse_time,
    read_days,
    read_requests,
)
from monitoring.journal import DECISIONS_FILE
from monitoring.policies.evaluation import serving_ahead
from monitoring.policies.policy import Baseline
from monitoring.state.rules_file import read_rules

MANIFEST = "incident.json"
_RECORDS = "records"
STATISTICS = "statistics"
_DECISIONS = "decisions.jsonl"
_REFERENCE, _SCORES = "reference.npz", "scores.json"


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns `REFUSED` if a replayed decision differs."""
    arguments = build_parser().parse_args(argv)
    return int(arguments.call(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `evergreen audit incident` and `evergreen audit replay`."""
    parser = CommandParser(prog="evergreen audit", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    text = "copy a time span of records and its decisions into a folder"
    recorded = commands.add_parser("record", help=text, prog="evergreen audit incident")
    add = recorded.add_argument
    add("--state", required=True, help="the monitor's state folder")
    add("--archive", required=True, help="its archive, or the lake: folder or gs://bucket/path")
    add("--store", required=True, help="folder or URI of the registry")
    add(
        "--start",
        type=parse_time,
        default=0.0,
        help="ISO 8601 or seconds (default: before the first decision)",
    )
    add("--end", type=parse_time, help="the last decision point (default: the last decision)")
    add("--out", type=Path, required=True, help="folder to create")
    recorded.set_defaults(call=_record)
    replayed = commands.add_parser(
        "replay", help="replay a recorded incident and compare the decisions"
    )
    replayed.add_argument("incident", type=Path, metavar="INCIDENT", help="folder of the incident")
    replayed.add_argument("--json", action="store_true", help="print JSON")
    replayed.set_defaults(call=_replay)
    return parser


def _record(arguments: argparse.Namespace) -> int:
    recorded = record(
        arguments.out,
        state=typed_folder(arguments.state, "--state"),
        archive=open_objects(typed_uri(arguments.archive)),
        store=typed_folder(arguments.store, "--store"),
        start=arguments.start,
        end=arguments.end,
    )
    print(f"{recorded.points} decision points recorded in {arguments.out}")
    if recorded.open_points:
        print(
            f"{_open_text(recorded.open_points, recorded.complete_until)}; "
            f"{_again_text(recorded.needs_until)}"
        )
    return ExitCode.DONE


def _open_text(points: int, complete_until: float) -> str:
    """Return a text about the decisions that cannot be replayed reliably yet, with the reason."""
    which = (
        f"the last {points} of them, after {_format_time(complete_until)}, cannot be "
        "replayed reliably"
    )
    return f"{which}: the rows that show which version served then had not matured"


def _again_text(needs_until: float) -> str:
    return f"record it again once the archive has rows from after {_format_time(needs_until)}"


def _format_time(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="milliseconds")


def _replay(arguments: argparse.Namespace) -> int:
    found = replay(arguments.incident)
    differs = found.first_difference
    is_equal = differs is None or (differs >= found.num_complete > 0)
    code = ExitCode.DONE if is_equal else ExitCode.REFUSED
    if arguments.json:
        summary = {
            "points": len(found.lines),
            "digest": _digest_of(found.lines),
            "first_difference": None if is_equal else differs,
            "recorded_digest": _digest_of(found.recorded),
            "complete_until": found.complete_until,
            "open_points": len(found.recorded) - found.num_complete,
        }
        print(json.dumps(summary, indent=2))
        return code
    for line in found.lines:
        known = json.loads(line)
        decision = f"{known['policy']}: {known['action']}: {known['reason']}"
        show(f"{_format_time(known['time'])}  version {known['version']}  {decision}")
    print(f"{len(found.lines)} decision points, digest {_digest_of(found.lines)}")
    if differs is None:
        print("every decision is the recorded one")
        return code
    if is_equal:
        print(f"each of the first {differs} decisions is the recorded one")
    else:
        print(f"decision {differs + 1} differs from the recorded one:")
        for name, lines in (("recorded", found.recorded), ("replayed", found.lines)):
            show(f"  {name}: {lines[differs] if differs < len(lines) else 'none'}")
    if open_points := len(found.recorded) - found.num_complete:
        print(_open_text(open_points, found.complete_until))
    return code


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Result of a replay."""

    lines: tuple[str, ...]
    """One line per decision point, as `policies.policy.DecisionPoint` writes it."""
    recorded: tuple[str, ...]
    complete_until: float
    """Time of the last decision point that can be replayed reliably."""

    @property
    def num_complete(self) -> int:
        """Number of recorded decisions that can be replayed reliably."""
        return sum(json.loads(line)["time"] <= self.complete_until for line in self.recorded)

    @property
    def first_difference(self) -> int | None:
        """Index of the first decision line that differs from the recorded line, or None."""
        pairs = zip_longest(self.lines, self.recorded)
        return next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def _digest_of(lines: Sequence[str]) -> str:
    """Return the SHA-256 of lines, each with its newline."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read the incident's manifest and verify the hash of every file."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ContractError(
            f"{path} cannot be read: {error}; expected the folder of a recorded incident"
        ) from error
    for name, expected in manifest["sha256"].items():
        file = folder / name
        if not file.is_file() or sha256_file(file) != expected:
            raise ContractError(
                f"{file} is missing or is not the file that was recorded, expected sha256 "
                f"{expected}"
            )
    return manifest


def replay(incident: Path) -> Replayed:
    """Repeat the decisions of an incident. The only clock is the event time of the records.

    Raises:
        ContractError: The folder is not an incident, or a file is missing or changed.
    """
    manifest = _read_manifest(incident)

    def baseline(version: int) -> Baseline | None:
        known = manifest["baselines"].get(str(version))
        return Baseline(**known) if known else None

    def reference(version: int) -> TrainingReference | None:
        folder = incident / STATISTICS / str(version)
        return (
            read_reference(folder / _REFERENCE, scores=folder / _SCORES)
            if (folder / _REFERENCE).exists()
            else None
        )

    features = (
        read_mapping(Features, manifest["features"], path="features")
        if (incident / STATISTICS).exists()
        else None
    )
    points = evaluate_requests(
        read_requests(FolderObjects(incident / _RECORDS), features=features, user=manifest["user"]),
        make_settings(DecisionSettings, **manifest["settings"]),
        baseline=baseline,
        reference=reference,
        features=features,
        state=manifest["state"],
    )
    lines = tuple(
        each.line() for each in points if manifest["start"] < each.time <= manifest["end"]
    )
    recorded = tuple((incident / _DECISIONS).read_text().splitlines())
    return Replayed(
        lines=lines,
        recorded=recorded,
        complete_until=manifest.get("complete_until", manifest["end"]),
    )


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Summary of a recorded incident."""

    points: int
    open_points: int
    """Number of newest decision points without a reliable replay, because the archive still lacks
    rows."""
    complete_until: float
    needs_until: float
    """To replay all points, the archive must contain the rows up to this event time."""


def record(
    out: Path,
    *,
    state: Path,
    archive: Objects,
    store: Path,
    start: float = 0.0,
    end: float | None = None,
) -> Recorded:
    """Write the incident of the decision points in (start, end] to the folder `out`.

    Args:
        out: Folder to create, which must not exist.
        state: State folder of the monitor.
        archive: Archive or lake with the rows of the span.
        store: Model registry.
        start: Seconds since the epoch, exclusive.
        end: Seconds since the epoch, inclusive. None means the time of the last decision. The
            labels of all rows before `end` must be final.

    Raises:
        ContractError: `out` exists, the span has no decision, or the archive has no row of the
            span.
    """
    settings = read_rules(state)
    before, lines = _decisions(state, start, math.inf if end is None else end)
    end = json.loads(lines[-1])["time"] if end is None else end
    saved = json.loads(before)["state"] if before else None
    aside = _begin_folder(out, lines)
    evaluation = settings.evaluation
    until = end + evaluation.attribution_window_seconds + 2 * evaluation.decide_seconds
    recommender = logged_recommender(store)
    features = recommender.features if recommender else None
    user = recommender.data.user if recommender else None
    versions = _copy_rows(
        archive,
        aside / _RECORDS,
        features=features,
        window_rows=settings.evaluation.window_rows,
        decided=None if saved is None else saved["decided"] / 1e6,
        until=until,
    )
    ahead = serving_ahead(settings.evaluation)
    complete_until = min(_newest_row(archive) - ahead, end)
    manifest = {
        "start": start,
        "end": end,
        "complete_until": complete_until,
        "settings": flat_values(settings),
        "features": asdict(features) if features else None,
        "user": user,
        "state": saved,
        "baselines": _baselines(([before] if before else []) + lines),
        "models": _copy_models(aside / STATISTICS, store, versions),
    }
    _seal(aside, manifest, out)
    return Recorded(
        points=len(lines),
        open_points=sum(json.loads(line)["time"] > complete_until for line in lines),
        complete_until=complete_until,
        needs_until=end + ahead,
    )


def _begin_folder(out: Path, lines: Sequence[str]) -> Path:
    """Create the temporary folder of an incident, and write its decisions.

    Raises:
        ContractError: The folder `out` exists already.
    """
    if out.exists():
        raise ContractError(f"{out} exists, expected the name of a folder to create")
    aside = out.with_name(f".{out.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    (aside / _RECORDS).mkdir(parents=True)
    (aside / _DECISIONS).write_text("".join(f"{line}\n" for line in lines))
    return aside


def _seal(aside: Path, manifest: dict[str, Any], out: Path) -> None:
    """Write the manifest with the hash of every file, flush the folder and rename it."""
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    manifest["sha256"] = {path.relative_to(aside).as_posix(): sha256_file(path) for path in files}
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in aside.rglob("*"):
        fsync_path(path)
    os.rename(aside, out)
    fsync_path(out.parent)


def _newest_row(archive: Objects) -> float:
    """Return the event time of the newest served row in the archive, or -inf."""
    for _, table in read_days(archive, newest_first=True):
        if len(table):
            return float(table[raw_rows.EVENT_TIME].cast("int64").to_numpy().max()) / 1e6
    return -math.inf


def _baselines(lines: Sequence[str]) -> dict[str, Any]:
    """Return for each version the baseline that its first decision used.

    The baselines of old versions are missing in later decision lines.
    """
    known: dict[str, Any] = {}
    for line in lines:
        known = {**json.loads(line)["state"]["baselines"], **known}
    return known


def _decisions(state: Path, start: float, end: float) -> tuple[str | None, list[str]]:
    """Return the last decision line at or before `start`, and all later lines up to `end`.

    If the line at `start` was already removed from the file, the first remaining line is returned
    instead. A replay needs the evaluator's state before the first decision.

    Raises:
        ContractError: There is no line after `start`.
    """
    before, lines = None, []
    for path in (state / f"{DECISIONS_FILE}.1", state / DECISIONS_FILE):
        if not path.exists():
            continue
        # The text after the last newline is incomplete or being written.
        for line in path.read_text().split("\n")[:-1]:
            time = json.loads(line)["time"]
            if time <= start:
                before = line
            elif time <= end:
                lines.append(line)
    if before is None and lines and (state / f"{DECISIONS_FILE}.1").exists():
        before, lines = lines[0], lines[1:]
    if not lines:
        span = f"{start} and {'now' if end == math.inf else end}"
        raise ContractError(f"{state} has no decision between {span}")
    return before, lines


def _copy_rows(
    archive: Objects,
    folder: Path,
    *,
    features: Features | None,
    window_rows: int,
    decided: float | None,
    until: float,
) -> set[int]:
    """Copy the archived days up to `until` that are needed to fill the window of every version.

    The copied rows are enough to fill the windows at the event time `decided`.
    """
    window: Counter[int] = Counter()
    needed: set[int] = set()
    for day, table in read_days(archive, Span(end=until), features=features, newest_first=True):
        versions = table[raw_rows.MODEL_VERSION].to_numpy()
        times = table[raw_rows.EVENT_TIME].cast("int64").to_numpy()
        window.update(versions[times <= (decided or 0.0) * 1e6].tolist())
        needed |= set(versions.tolist())
        target = folder / raw_rows.DAY_PARTITION.format(day=day)
        target.mkdir()
        write_parquet(table, target / "part.parquet")
        if decided is not None and all(window[version] >= window_rows for version in needed):
            break
    if not needed:
        raise ContractError(f"{archive.uri} has no served row before {until}")
    return needed


def _copy_models(folder: Path, store: Path, versions: set[int]) -> dict[str, Any]:
    """Copy the training profiles of released models, and return ids and hashes by version."""
    models: dict[str, Any] = {}
    for version in sorted(versions):
        if not release_path(store, version).exists():
            continue
        release = Release.read(release_path(store, version))
        models[str(version)] = {"model_id": release.model_id, "sha256": release.sha256}
        target = folder / str(version)
        reference, scores = (
            model_folder(store, release.model_id) / Model.REFERENCE,
            scores_path(store, release.model_id),
        )
        for path, name in ((reference, _REFERENCE), (scores, _SCORES)):
            if path.exists():
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / name)
    return models


if __name__ == "__main__":
    sys.exit(main())

"""Records an incident: copies out of a monitor's state, its archive or lake, and the model store all that it takes.

What an incident is, and replaying it, is `monitoring.backtest.incident`'s. Written aside and renamed: a folder of that
name is a whole incident.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from components.contracts import criteo
from components.contracts.manifests import Model, Release
from components.runtime.durable import fsync_path, sha256_file
from components.runtime.errors import ContractError
from components.storage.objects import Objects
from components.store import promotion_journal
from components.store.models import model_folder, release_path, scores_path
from monitoring.backtest import incident
from monitoring.backtest.archived_requests import Span, read_days
from monitoring.backtest.settings import JudgingSettings
from monitoring.flags import flat_values
from monitoring.journal import DECISIONS_FILE


def record(
    out: Path,
    *,
    state: Path,
    archive: Objects,
    store: Path,
    settings: JudgingSettings,
    start: float,
    end: float | None,
) -> int:
    """Writes the incident of the decision points in (start, end] to the folder `out`; how many there are.

    Args:
        out: Must not exist.
        state: The monitor's state folder.
        archive: Its archive, or the lake: wherever the rows of the span lie by now.
        store: The model store.
        settings: As the monitor had them.
        start: Seconds since the epoch.
        end: Seconds since the epoch; the labels of the rows before must be final. None = the last decision written.

    Raises:
        ContractError: `out` exists, no decision was written in the span, or the archive holds no row of it.
    """
    if out.exists():
        raise ContractError(f"{out} exists, expected the name of a folder to make")
    before, lines = _decisions(state, start, math.inf if end is None else end)
    if not lines:
        raise ContractError(f"{state} holds no decision between {start} and {'now' if end is None else end}")
    end = json.loads(lines[-1])["time"] if end is None else end
    memory = json.loads(before)["memory"] if before else None
    aside = out.with_name(f".{out.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    (aside / incident.RECORDS).mkdir(parents=True)
    (aside / incident.DECISIONS).write_text("".join(f"{line}\n" for line in lines))
    until = end + settings.judge.attribution_window_seconds + 2 * settings.judge.decide_seconds
    versions = _copy_rows(aside / incident.RECORDS, archive, settings, _judged(memory), until)
    manifest = {
        "format_version": incident.FORMAT_VERSION,
        "start": start,
        "end": end,
        "settings": flat_values(settings),
        "memory": memory,
        "baselines": json.loads(lines[-1])["memory"]["baselines"],
        "models": _copy_models(aside / incident.STATISTICS, store, versions),
    }
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    manifest["sha256"] = {path.relative_to(aside).as_posix(): sha256_file(path) for path in files}
    (aside / incident.MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in aside.rglob("*"):
        fsync_path(path)
    os.rename(aside, out)
    fsync_path(out.parent)
    return len(lines)


def _decisions(state: Path, start: float, end: float) -> tuple[str | None, list[str]]:
    """The last line up to `start`, and the lines after it up to `end`.

    Where lines may have rolled away before all that are left, the first one left stands for `start`: without its memory
    the decisions after it could not be made again.
    """
    before, lines = None, []
    for path in (state / f"{DECISIONS_FILE}.1", state / DECISIONS_FILE):
        if not path.exists():
            continue
        # What follows the last newline is torn, or being written.
        for line in path.read_text().split("\n")[:-1]:
            time = json.loads(line)["time"]
            if time <= start:
                before = line
            elif time <= end:
                lines.append(line)
    if before is None and (state / f"{DECISIONS_FILE}.1").exists():
        return (lines[0], lines[1:]) if lines else (None, [])
    return before, lines


def _judged(memory: Mapping[str, Any] | None) -> float | None:
    return None if memory is None else memory["judged"] / 1e6


def _copy_rows(
    folder: Path, archive: Objects, settings: JudgingSettings, judged: float | None, until: float
) -> set[int]:
    """Whole days up to `until`, as many as fill every version's window at `judged`; the versions in them."""
    window: Counter[int] = Counter()
    needed: set[int] = set()
    for day, table in read_days(archive, Span(end=until), features=True, newest_first=True):
        versions = table[criteo.MODEL_VERSION].to_numpy()
        times = table[criteo.EVENT_TIME].cast("int64").to_numpy()
        window.update(versions[times <= (judged or 0.0) * 1e6].tolist())
        needed |= set(versions.tolist())
        target = folder / criteo.DAY_PARTITION.format(day=day)
        target.mkdir()
        pq.write_table(table, target / "part.parquet")
        if judged is not None and all(window[version] >= settings.judge.window_rows for version in needed):
            break
    if not needed:
        raise ContractError(f"{archive.uri} holds no served row before {until}")
    return needed


def _copy_models(folder: Path, store: Path, versions: set[int]) -> dict[str, Any]:
    """Copies what the models were trained on; their ids and hashes by version, as far as the store knows them.

    Statistics are looked for as the live monitor does, by the version's release.
    """
    models: dict[str, Any] = {}
    for entry in promotion_journal.read_entries(store):
        if entry.version in versions:
            models[str(entry.version)] = {"model_id": entry.model_id, "sha256": entry.sha256}
    for number in sorted(versions):
        if release_path(store, number).exists():
            release = Release.read(release_path(store, number))
            models[str(number)] = {"model_id": release.model_id, "sha256": release.sha256}
    for version, model in models.items():
        reference = model_folder(store, model["model_id"]) / Model.REFERENCE
        if reference.exists():
            target = folder / version
            target.mkdir(parents=True)
            shutil.copyfile(reference, target / incident.REFERENCE)
            scores = scores_path(store, model["model_id"])
            if scores.exists():
                shutil.copyfile(scores, target / incident.SCORES)
    return models

"""What the demo starts from: an empty folder of its own, and a lake to learn from, simulated or of the user's rows.

Turning the loop on them is `pipelines.local.demo`'s.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from components.runtime.errors import ContractError, PermanentError
from pipelines.local.demo_plan import DemoPlan, DemoSettings, plan_for_data, plan_for_world
from pipelines.local.observations import last_word
from pipelines.local.run import LocalFolders
from pipelines.local.screen import Screen

_MARKER = ".evergreen-demo"


def check_data(settings: DemoSettings) -> None:
    """Refuses data that is not there, or that cleaning the demo's folder would remove."""
    data = settings.data
    if data is None:
        return
    if not data.exists():
        raise ContractError(f"{data} does not exist, expected a Criteo file or a folder of them")
    if data == settings.folder or settings.folder in data.parents:
        raise ContractError(f"{data} lies in {settings.folder}, which the demo empties, expected it elsewhere")


def start_clean(folder: Path) -> None:
    """Removes what an earlier demo wrote; refuses a folder that holds anything else.

    Raises:
        ContractError: the folder exists and is not a demo's.
    """
    marker = folder / _MARKER
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise ContractError(f"{folder} is not empty and no demo wrote it, expected a folder of the demo's own")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.touch()


def prepare_lake(settings: DemoSettings, folders: LocalFolders, screen: Screen) -> DemoPlan:
    """Writes the lake and what is replayed after it; the sizes that fit them."""
    root = folders.root
    last_day = (datetime.now(timezone.utc) - timedelta(days=1)).date().isoformat()
    lake = ["--lake", str(folders.lake), "--last-day", last_day, "--days", "4"]
    if settings.data is None:
        seed, world = ["--seed", str(settings.seed)], ["--world", str(root / "world.json")]
        simulate = ["simulate", *lake, *world, *seed, "--rows", str(settings.rows)]
        made = _run_to_end(folders.logs, "inference_client", *simulate)
        drift = ["drift", *world, *seed, "--output", str(root / "drifted_world.json")]
        _run_to_end(folders.logs, "inference_client", *drift)
        screen.say(f"  {made['rows']:,} simulated rows over 4 days, {made['clicks'] / made['rows']:.1%} clicks")
        return plan_for_world(settings)
    ingest = [*lake, "--data", str(settings.data), "--max-rows", str(settings.rows), "--lake-fraction", "0.6"]
    made = _run_to_end(folders.logs, "components.extraction.ingest", *ingest, "--replay", str(root / "replay.parquet"))
    screen.say(
        f"  {made['lake_rows']:,} rows to learn from, the {made['replay_rows']:,} after them to replay, "
        f"{made['malformed']:,} malformed rows set aside"
    )
    plan = plan_for_data(settings, replay_rows=made["replay_rows"], lake_rows=made["lake_rows"])
    screen.say(f"  drift will permute the values of {', '.join(plan.drift_columns)}")
    return plan


def _run_to_end(logs: Path, module: str, *words: str) -> dict[str, Any]:
    """Runs one of our commands and returns the JSON of its last line.

    Raises:
        ContractError: it could not use what it was given.
        PermanentError: it failed; carries its last word.
    """
    log = logs / f"{module.rsplit('.', 1)[-1]}.log"
    with open(log, "ab") as output:
        command = [sys.executable, "-m", module, *words]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=output, stdin=subprocess.DEVNULL, text=True)
    if result.returncode:
        word = last_word(log)
        if result.returncode == 2:
            raise ContractError(word.removeprefix("error: "))
        raise PermanentError(f"{module}: {word} (see {log})")
    answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return answer

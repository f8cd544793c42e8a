"""The demo's sizes: how fast traffic flows, how long windows are, what the gate asks; chosen from the rows there are.

Running it is `pipelines.local.demo`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.contracts.manifests import Verdict
from components.runtime.errors import ContractError, PermanentError
from components.store import promotion_journal
from pipelines.local.run import LocalFolders

LOW_CARDINALITY_COLUMNS = ("C2", "C5", "C6", "C8", "C9", "C14", "C17", "C20", "C22", "C23", "C25")
"""Criteo's columns with few values: what a permutation breaks, a short window can learn again."""

MIN_DATA_ROWS = 1_000
"""Fewest rows of a user's own; a held-out tenth of fewer has no AUC worth the name."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the user chose."""

    folder: Path
    """Where everything is written; an earlier demo's content is removed."""
    data: Path | None = None
    """Criteo file or folder; None = simulated clicks."""
    rows: int = 400_000
    """Rows of the simulated lake, or most rows read of `data`."""
    seed: int = 7
    log: str = "sqlite"
    """Kind of the record log, see `log_server.LOG_KINDS`."""
    drift_columns: tuple[str, ...] = ()
    """With `data`: columns whose values are permuted; empty = `LOW_CARDINALITY_COLUMNS`."""
    training_threads: int = 2


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """Sizes of one demo."""

    rate: float
    """Rows per second of traffic."""
    rows_per_request: int
    window_rows: int
    """Rows in the monitor's window."""
    min_clicks: int
    """Clicks and non-clicks that a window needs before it is judged."""
    min_rows_since_breach: int
    """Rows below the threshold before a run is asked for: what the next model learns the new world from."""
    archive_roll_rows: int
    auc_drop: float
    """How far below the gate's AUC the threshold lies."""
    label_delay_seconds: float = 0.6
    """Mean; no label takes longer than four times this."""
    attribution_window_seconds: float = 3.0
    drift_bucket_seconds: float = 2.0
    """Event time over which features are compared with the training rows."""
    drift_grace_seconds: float = 1.5
    """How long a bucket waits for predictions that are late; the client publishes every 0.15 s."""
    drift_min_rows: int = 2_000
    """Fewest rows of a bucket that is judged; a smaller one joins the next."""
    drift_columns: tuple[str, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    """Pipeline parameters that differ from their defaults."""

    @property
    def detection_rows(self) -> int:
        """About how many rows pass between drift and decision; for the bar."""
        return self.window_rows // 2 + self.min_rows_since_breach

    def threshold(self, folders: LocalFolders) -> float:
        """The AUC below which the monitor asks for a run: the live model's at the gate, less `auc_drop`.

        The lower end of the gate's interval is taken where it exists, so that a gate with few rows does not promise
        more than it saw.

        Raises:
            PermanentError: the gate could not tell the live model's AUC.
        """
        live = promotion_journal.current(folders.store)
        verdict = next((v for v in read_verdicts(folders) if live and v.candidate_model_id == live.model_id), None)
        auc = verdict.candidate["auc_low"] if verdict else None
        if auc is None:
            raise PermanentError(
                "the gate could not tell the first model's auc: too few held-out rows with both labels"
            )
        return auc - self.auc_drop


def read_verdicts(folders: LocalFolders) -> list[Verdict]:
    """The gate's verdicts of all runs, oldest first."""
    return [Verdict.read(path) for path in sorted(folders.artifacts.glob("*/evaluation/verdict"))]


def plan_for_world(settings: DemoSettings) -> DemoPlan:
    """Sizes for simulated traffic, which never runs out."""
    # A model of fewer rows knows less, and a shorter window is enough to see it fail.
    window = max(8_000, min(20_000, settings.rows // 20))
    return DemoPlan(
        rate=2000,
        rows_per_request=64,
        window_rows=window,
        min_clicks=500,
        min_rows_since_breach=window * 4 // 5,
        archive_roll_rows=window,
        auc_drop=0.03,
        parameters={"min_auc": 0.65, "seed": settings.seed},
    )


def plan_for_data(settings: DemoSettings, *, replay_rows: int, lake_rows: int) -> DemoPlan:
    """Sizes for a file's rows: the replay lasts at most two minutes, whatever their number.

    A sixth of the rows fills the baseline's window, a quarter passes until the decision, another sixth fills the new
    version's window; what is left must pass while the run trains, which is 45 s at this rate. Few rows make small
    windows; gate and monitor then say how uncertain they are.

    Raises:
        ContractError: the file holds too few rows to hold some out, learn from others and replay the rest.
    """
    if lake_rows + replay_rows < MIN_DATA_ROWS:
        raise ContractError(f"the data holds {lake_rows + replay_rows} rows, expected at least {MIN_DATA_ROWS:,}")
    window = max(200, min(20_000, replay_rows // 6))
    rate = min(2000.0, replay_rows / min(110.0, 50 + replay_rows / 200))
    return DemoPlan(
        rate=rate,
        rows_per_request=int(max(1, min(64, rate // 8))),
        window_rows=window,
        min_clicks=max(20, min(500, window // 40)),
        min_rows_since_breach=window,
        archive_roll_rows=max(500, window),
        auc_drop=0.02,
        drift_min_rows=max(200, min(2_000, window // 4)),
        drift_columns=settings.drift_columns or LOW_CARDINALITY_COLUMNS,
        parameters={
            "min_auc": 0.55,
            "seed": settings.seed,
            "frequency_threshold": 5 if lake_rows > 100_000 else 2,
            "batch_size": 2048 if lake_rows > 100_000 else 256,
            "holdout_fraction": 0.1 if lake_rows > 20_000 else 0.2,
        },
    )

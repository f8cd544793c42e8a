"""Rules for the rows of a run: the window, the watermark, and immature rows.

This module defines which rows belong to a run and reads no rows. `components.extraction.lake` lists
the files, and `components.extraction.holdout` selects the holdout.

- Watermark: without an explicit window, a run begins after its parent's newest training row. The
  parent's holdout rows are newer, so this run trains on them. If a run fails, or validation or the
  gate refuses it, its model does not become a parent. The next run then reads the same rows again.
  If there is no parent, the window begins `full_days` days before its end. If `full_days` is 0, the
  window begins with the lake's first row.
- Late rows: see `components.extraction.seen_files`.
- Clock: rows ahead of the clock by more than a tolerance are in no window and do not move the
  watermark. A later run reads these rows once the clock has passed their time.
- Maturity: a row is mature if it is at least `attribution_hours` old at the requested end of the
  window. A younger row without a click may still get a click. The window therefore ends before the
  younger rows, and the next run reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evergreen.config.features import Features
from evergreen.contracts.manifests import Model
from evergreen.registry import models as registry
from evergreen.rows.times import DAY_MICROS, TimeSpan, parse_time, to_iso
from evergreen.runtime.errors import FROM_SCRATCH, ContractError, run_again


def resolve_window(
    *,
    start: str,
    end: str,
    parent: Model | None,
    full_days: float = 0.0,
    attribution: int = 0,
    newest: Callable[[], int | None] = lambda: None,
) -> TimeSpan:
    """Return the window [start, end) of a run.

    The window ends `attribution` before its requested end, or before the end of the lake. The next
    run reads the younger rows. A row's age does not depend on this machine's clock, so a retry
    reads the same rows.

    Args:
        start: ISO 8601, inclusive. If it is empty, the window starts after the parent's last
            training row.
        end: ISO 8601, exclusive. If it is empty, the window ends with the last row.
        parent: Model that the run continues. Used only if `start` is empty.
        full_days: Length of the window in days if there is neither a start nor a parent. With 0,
            the window starts with the first row.
        attribution: Microseconds after which a row's label is final.
        newest: Function that returns the time of the newest row, microseconds since the epoch, or
            None. The function is called only if the window depends on the result, because the call
            may download a file.

    Raises:
        ContractError: a time is not ISO 8601, or the window is empty.
    """
    days = full_days if not start and parent is None else 0.0
    requested = parse_time("window_end", end) if end else None
    if requested is None and (days or attribution) and (newest_row := newest()) is not None:
        requested = newest_row + 1
    last = None if requested is None else requested - attribution
    first = parse_time("window_start", start) if start else None
    if days:
        first = None if last is None else last - round(days * DAY_MICROS)
    elif not start and parent:
        first = watermark(parent) + 1
    window = TimeSpan(first, last)
    if window.is_empty and attribution:
        raise ContractError(
            f"window {window} has no mature row: the rows of the last "
            f"{attribution / DAY_MICROS * 24:g} hours (attribution_hours) before "
            f"{to_iso(requested or 0)} are left for the next run"
        )
    if window.is_empty:
        raise ContractError(f"window {window} is empty, expected its start before its end")
    return window


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """The stored models of a run: the parent and the champion.

    All steps of the run use the same models.
    """

    parent: Model | None = None
    """Model that the candidate continues."""
    champion: Model | None = None
    """Model that the candidate must beat."""

    @property
    def models(self) -> list[Model]:
        """Return parent and champion, or only one model if they are the same."""
        return list(
            {model.model_id: model for model in (self.parent, self.champion) if model}.values()
        )

    @property
    def watermark(self) -> int | None:
        """Return the time of the models' newest training row, in microseconds since the epoch.

        Returns None if there are no models.
        """
        return max(map(watermark, self.models), default=None)


NO_BASELINES = Baselines()


def find_baselines(store: Path, *, parent: str, champion: str, features: Features) -> Baselines:
    """Find the parent and the champion of a run.

    Args:
        store: Folder of the model registry.
        parent: `current`, `none`, or a model's id.
        champion: `current`, `none`, or a released model's id.
        features: Features of the run's recommender.

    Raises:
        ContractError: a model is unknown, or its manifest is corrupt. The error is also raised if a
            column has another kind in the parent, or if the champion needs a column that `features`
            lacks.
    """
    continued = registry.parent(store, parent)
    if continued is not None:
        features.expect_continues(continued.recommender.features, parent=continued.model_id)
    release = registry.champion(store, champion)
    found = registry.stored_model(store, release.model_id, role="champion") if release else None
    if found is not None and (lost := features.missing_columns(found.recommender.features)):
        raise ContractError(
            f"the champion {found.model_id} needs columns {lost}, which this run does not "
            "have, so both models cannot be compared on the same rows; to run without a "
            f"champion, {run_again('-p champion=none' if continued else FROM_SCRATCH)}"
        )
    return Baselines(parent=continued, champion=found)


def expect_past(baselines: Baselines, ahead_from: int) -> None:
    """Check that no model was trained on a row that is ahead of the clock.

    Otherwise the model's watermark would be later than the rows of the following runs.

    Args:
        baselines: The parent and the champion of the run.
        ahead_from: First time that is ahead of the clock, microseconds since the epoch.

    Raises:
        ContractError: a model was trained on a row that is ahead of the clock. The message says how
            to continue.
    """
    for model in baselines.models:
        if (newest := watermark(model)) >= ahead_from:
            raise ContractError(
                f"model {model.model_id} was trained on rows up to {to_iso(newest)}, expected "
                f"rows before {to_iso(ahead_from)}, because later times are ahead of the "
                f"clock; to train without this model, {run_again(FROM_SCRATCH)}"
            )


def watermark(model: Model) -> int:
    """Return the time of the model's newest training row, microseconds since the epoch.

    Raises:
        ContractError: the manifest contains an invalid time.
    """
    return parse_time(f"watermark of model {model.model_id}", model.watermark)

"""Changes of each feature and of the click rate since the rows of the champion's lineage.

The rows are compared with all windows of the lineage, merged into one
(`evergreen.statistics.comparison`). A change is not reported if the champion was already trained on
it. A champion counts as trained on a change if its newest window is large enough to show the change
but does not differ from these rows.
"""

from dataclasses import dataclass

from components.validation.windows import KeptWindows
from evergreen.config.validation import ValidationSettings
from evergreen.contracts.words import ShownValues
from evergreen.statistics.column_profile import TableProfile
from evergreen.statistics.comparison import ColumnDrift, compare_tables, design_of_totals
from evergreen.statistics.two_sample import proportion, share_change


@dataclass(frozen=True, kw_only=True)
class LabelShift:
    """Change of the click rate.

    The rows of one request are alike. The interval and the p-value therefore count them as fewer
    rows.
    """

    rate_now: float
    rate_before: float
    difference: float
    low: float
    high: float
    """Upper end of the difference's 95 % interval."""
    p_value: float | None
    design_effect: float
    num_rows_now: int
    num_rows_before: int
    newest: "LabelShift | None" = None
    """The same change against the champion's newest window. None if the champion has only one
    window."""


def measure_drift(
    now: TableProfile, kept: KeptWindows, settings: ValidationSettings, *, shown: ShownValues
) -> list[ColumnDrift]:
    """Return one entry for each feature that both sides have, in column order.

    `kept` has at least one window.
    """
    mean, newest = settings.mean_drift, {}
    compared = compare_tables(now, kept.merged, settings, mean_drift=mean, shown=shown)
    if len(kept.windows) > 1:
        newest = compare_tables(now, kept.newest, settings, mean_drift=mean, shown=shown)
    return [
        column.entry(name, learned=name in newest and column.learned_by(newest[name]))
        for name, column in compared.items()
    ]


def measure_label_shift(now: TableProfile, kept: KeptWindows) -> LabelShift | None:
    """Return the change of the click rate, or None if a side has no rows.

    A fall often means that labels have not all arrived. `checks` decides whether it is reported.
    """
    newest = _compare_click_rates(now, kept.newest) if len(kept.windows) > 1 else None
    return _compare_click_rates(now, kept.merged, newest)


def _compare_click_rates(
    now: TableProfile, before: TableProfile, newest: LabelShift | None = None
) -> LabelShift | None:
    n, m = now.rows, before.rows
    if not n or not m:
        return None
    design = design_of_totals(now.clicks, before.clicks, (now, before))
    effect = share_change(now.clicks.rows, n, b=before.clicks.rows, m=m, design=design)
    assert effect is not None
    return LabelShift(
        rate_now=now.clicks.rows / n,
        rate_before=before.clicks.rows / m,
        difference=effect.value,
        low=effect.low,
        high=effect.high,
        p_value=proportion(now.clicks.rows, n, b=before.clicks.rows, m=m, design=design),
        design_effect=design,
        num_rows_now=n,
        num_rows_before=m,
        newest=newest,
    )

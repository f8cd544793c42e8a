"""Screening as the step does it: rules made ready, rows taken back, what goes aside kept in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.contracts.manifests import RawDataset
from components.validation.quarantine import kept
from components.validation.quarantine.returning import Returning
from components.validation.quarantine.row_rules import make_row_rules
from components.validation.quarantine.screening import ASIDE, Screened, screen
from components.validation.rules import DATASET, INFO, Judging


def screen_and_keep(
    raw: RawDataset,
    files: Sequence[Path],
    aside: Path,
    folder: Path,
    *,
    run: str,
    store: Path,
    champion: Path | None,
    schema: Any | None,
    before: Any | None,
    judging: Judging,
) -> Screened:
    """The rows that pass the rules about rows, with those that people took back.

    Args:
        raw: The run's rows.
        files: Its training rows, in order; all of them have all columns.
        aside: The step's folder while it is made.
        folder: The step's folder, which manifests name.
        run: Name of the run.
        store: Keeps what is set aside, and what people took back.
        champion: Folder of the champion; None = none.
        schema: In force; None = none yet.
        before: TFDV's statistics of the champion's rows.
        judging: Rules.

    Raises:
        ContractError: a file, or what is kept, cannot be read.
    """
    row_rules, idle = make_row_rules(judging, schema, before, excluded=frozenset(raw.excluded_columns))
    nothing = "found nothing to compare with: there is no schema or no champion yet"
    told = [
        finding
        for name in idle
        for finding in judging.find(DATASET, "rule", name, f"rule {name} {nothing}", at_most=INFO)
    ]
    back = Returning(store, champion, raw)
    screened = Screened(raw, list(files))
    if row_rules or back.taken:
        screened = screen(
            raw,
            files,
            aside,
            folder,
            judging=judging,
            rules=row_rules,
            exempt=back.exempt,
            come_back=back.write,
        )
    if screened.num_by_rule:
        rows = kept.keep(store, run, aside / ASIDE, raw, screened.num_by_rule)
        screened.dataset = replace(screened.dataset, quarantine_uri=rows.as_uri())
    else:
        kept.forget(store, run)
    if back.taken:
        kept.write_taken(store, run, screened.dataset.digest, back.taken)
    screened.findings = told + screened.findings
    return screened

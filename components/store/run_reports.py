"""Reports of a run's steps that outlive the folder for big files: `<store>/runs/<run>/<step>_report.html` and `.json`.

Joins the steps that judge (validation, evaluation) to the exit handler, which says where they are, and to the monitor,
whose page leads to them. What is in a report is its step's.
"""

from __future__ import annotations

from pathlib import Path

from components.runtime.durable import write_whole
from components.store.run_notes import STEPS, run_folder

HTML, JSON = "html", "json"


def report_path(store: Path, run: str, step: str, kind: str = HTML) -> Path:
    """Where the report of `step` lies, whether or not it does.

    Raises:
        ContractError: `run` is no name of a folder.
    """
    return run_folder(store, run) / f"{step}_report.{kind}"


def keep_report(store: Path, run: str, step: str, *, html: str | bytes, document: str | bytes | None = None) -> None:
    """Writes the report of a step, each file whole or not at all, over that of an earlier try."""
    if document is not None:
        write_whole(report_path(store, run, step, JSON), document)
    write_whole(report_path(store, run, step), html)


def forget_report(store: Path, run: str, step: str) -> None:
    """Removes what an earlier try of the step left: it must not stand for a try that ends without one."""
    for kind in (HTML, JSON):
        report_path(store, run, step, kind).unlink(missing_ok=True)


def reports_of(store: Path, run: str) -> dict[str, str]:
    """URI of the report for people, by step, of the steps that left one; in the steps' order."""
    paths = {step: report_path(store, run, step) for step in STEPS}
    return {step: path.as_uri() for step, path in paths.items() if path.is_file()}

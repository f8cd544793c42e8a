"""The `load` command: where its rows come from, and its report as a table and as JSON. Loading itself is `load`'s."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from components.runtime.durable import write_whole
from inference_client.client import ClientSettings, ScoringClient
from inference_client.load import LoadSettings, run_load, run_precisely
from inference_client.load_report import LoadReport
from inference_client.scorer import FeatureRows
from inference_client.simulation.world import World

POOL_ROWS = 65_536
"""Rows that a load repeats, drawn or read before it starts: making rows must not take its time."""


def load_server(server: str, rows: FeatureRows, settings: LoadSettings, client: ClientSettings) -> LoadReport:
    """Loads the Triton at `server` (host:port).

    Raises:
        TemporaryError, PermanentError, ContractError: the first request, sent before the load, was not answered: an
            absent server or model is one clear error and not a load of failures.
    """

    async def run() -> LoadReport:
        async with ScoringClient(server, client) as scorer:
            await scorer.score(rows.dense[:1], rows.categorical[:1])
            return await run_load(scorer, rows, settings)

    return run_precisely(run())


def rows_of_world(path: Path, seed: int, num_rows: int = POOL_ROWS) -> FeatureRows:
    """Rows drawn from a simulated world."""
    drawn = World.load(path).draw(num_rows, np.random.default_rng([seed, 12]))
    return FeatureRows(dense=drawn.dense, categorical=drawn.categorical)


def write_report(path: Path, server: str, settings: LoadSettings, report: LoadReport) -> None:
    """Writes {server, settings, report} as JSON."""
    document = {"server": server, "settings": asdict(settings), "report": report.as_document()}
    write_whole(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(report: LoadReport, settings: LoadSettings, out: IO[str]) -> None:
    """Prints the report for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title=_title(settings), show_header=False, title_justify="left")
    for name, value in _lines(report):
        table.add_row(name, value)
    Console(file=out, width=None if out.isatty() else 120).print(table)


def _title(settings: LoadSettings) -> str:
    if settings.rate is None:
        loop = f"closed loop, {settings.concurrency} callers"
    else:
        loop = f"open loop, {settings.rate:g} requests/s ({settings.arrivals})"
    return f"{loop}, {settings.rows_per_request} rows a request, {settings.seconds:g} s"


def _lines(report: LoadReport) -> Iterable[tuple[str, str]]:
    yield "requests", f"{report.sent} sent, {report.answered} answered, {report.unsent} due and never sent"
    for kind, count in report.failed.items():
        yield f"failed: {kind}", f"{count} (first: {report.first_errors[kind]})"
    yield "rate", f"{_figure(report.requests_per_second)} requests/s, {_figure(report.rows_per_second)} rows/s"
    for name, latencies in (("latency from due", report.latency_ms), ("from sent", report.service_ms)):
        parts = ("p50", "p95", "p99", "max")
        yield f"{name}, ms", "  ".join(f"{part} {_figure(getattr(latencies, part))}" for part in parts)
    if report.late_share is not None:
        yield "sent late", f"{report.late_share:.2%} of requests, at most {_figure(report.most_behind_ms)} ms"
    yield "versions", ", ".join(f"{version}: {count}" for version, count in report.versions.items()) or "none"


def _figure(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

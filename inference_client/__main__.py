"""Command line of the inference client: score, rank, replay, put load on a server, simulate a lake, drift a world.

Parses, calls, and turns errors into exit codes: 0 done, 2 misuse, bad input or a file that cannot be read or written,
3 the server or the log failed, 130 stopped by Ctrl-C, 141 nobody reads the output any more (`... | head`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from components.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client import arguments

if TYPE_CHECKING:
    from inference_client.traffic import Traffic

DONE, MISUSE, FAILED, STOPPED, UNREAD = 0, 2, 3, 130, 141


def build_parser() -> argparse.ArgumentParser:
    """The command line; importing it needs the standard library only."""
    parser = argparse.ArgumentParser(prog="python -m inference_client", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run_command, add_arguments, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(run_command=run_command)
        add_arguments(command)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    command: Callable[[argparse.Namespace], None] = options.run_command
    try:
        command(options)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISUSE
    except (TemporaryError, PermanentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # What is still buffered would fail once more when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except OSError as error:
        print(f"error: {error.filename or options.command}: {error.strerror or error}", file=sys.stderr)
        return MISUSE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    return DONE


def _score(options: argparse.Namespace) -> None:
    from inference_client.client import ClientSettings
    from inference_client.scoring import score_file

    if options.limit is not None and options.limit < 1:
        raise ContractError(f"limit is {options.limit}, expected at least 1")
    settings = ClientSettings(deadline_seconds=options.deadline_seconds)
    score_file(options.server, options.data, sys.stdout, settings=settings, limit=options.limit)


def _replay(options: argparse.Namespace) -> None:
    from uuid import uuid4

    from inference_client.client import ClientSettings
    from inference_client.replay import ReplaySettings
    from inference_client.session import SessionSettings, run_session

    session = SessionSettings(
        server=options.server,
        log_url=options.log,
        seed=options.seed,
        stats_path=options.stats,
        summary_path=options.summary,
        run=options.run_name or f"replay-{uuid4().hex[:12]}",
        plan_uri=options.plan,
    )
    replay = ReplaySettings(
        rate=options.rate,
        rows_per_request=options.rows_per_request,
        label_delay_seconds=options.label_delay_seconds,
        max_rows=options.max_rows,
        max_in_flight=options.max_in_flight,
        max_consecutive_failures=options.max_consecutive_failures,
    )
    client = ClientSettings(deadline_seconds=options.deadline_seconds, max_in_flight=options.max_in_flight)
    summary = run_session(session, replay, client, lambda: _traffic(options))
    print(json.dumps({"requests": summary["requests"], "rows": summary["rows"], "outcomes": summary["outcomes"]}))


def _traffic(options: argparse.Namespace) -> Traffic:
    import numpy as np

    from inference_client.simulation.world import World
    from inference_client.traffic import FileTraffic, WorldTraffic

    if options.data:
        if options.drifted_world:
            raise ContractError("--drifted-world goes with --world, expected --drift-columns with --data")
        return FileTraffic(options.data, drift_columns=options.drift_columns, seed=options.seed)
    if options.drift_columns:
        raise ContractError("--drift-columns goes with --data, expected --drifted-world with --world")
    drifted = World.load(options.drifted_world) if options.drifted_world else None
    return WorldTraffic(World.load(options.world), drifted, np.random.default_rng([options.seed, 9]))


def _rank(options: argparse.Namespace) -> None:
    from inference_client.client import ClientSettings
    from inference_client.ranking_command import RankSettings, rank_files

    settings = RankSettings(
        server=options.server,
        context=options.context,
        context_row=options.context_row,
        candidates=options.candidates,
        k=options.k,
        key=options.key,
        session_id=options.session_id,
        log_url=options.log,
        plan_uri=options.plan,
    )
    rank_files(settings, ClientSettings(deadline_seconds=options.deadline_seconds), sys.stdout)


def _load(options: argparse.Namespace) -> None:
    from inference_client.client import ClientSettings
    from inference_client.load import LoadSettings
    from inference_client.load_command import POOL_ROWS, load_server, print_table, rows_of_world, write_report
    from inference_client.row_files import first_rows

    settings = LoadSettings(
        rate=options.rate,
        concurrency=1 if options.concurrency is None else options.concurrency,
        rows_per_request=options.rows_per_request,
        seconds=options.seconds,
        warm_up_seconds=options.warm_up_seconds,
        seed=options.seed,
        arrivals=options.arrivals,
        max_in_flight=options.max_in_flight,
    )
    in_flight = settings.max_in_flight if options.rate else settings.concurrency
    # One attempt: a retry would hide an error, and its wait is no latency of the server.
    client = ClientSettings(deadline_seconds=options.deadline_seconds, max_attempts=1, max_in_flight=in_flight)
    rows = first_rows(options.data, POOL_ROWS) if options.data else rows_of_world(options.world, options.seed)
    report = load_server(options.server, rows, settings, client)
    print_table(report, settings, sys.stdout)
    if options.json:
        write_report(options.json, options.server, settings, report)


def _simulate(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from inference_client.simulation.lake import store_lake
    from inference_client.simulation.world import World

    world = World.create(options.seed, click_rate=options.click_rate, bayes_auc=options.bayes_auc)
    report = store_lake(
        world,
        options.lake,
        rows=options.rows,
        days=options.days,
        last_day=options.last_day,
        seed=options.seed,
    )
    world.save(options.world)
    print(json.dumps(asdict(report)))


def _drift(options: argparse.Namespace) -> None:
    import numpy as np

    from inference_client.simulation.world import Drift, World, measured_bayes_auc

    world = World.load(options.world)
    plain = Drift(seed=options.seed)
    columns = plain.columns if options.columns is None else options.columns
    fresh = columns[:2] if options.new_category_columns is None else options.new_category_columns
    drift = Drift(
        seed=options.seed,
        columns=columns,
        new_category_columns=fresh,
        new_category_share=options.new_category_share,
        dense_shift=options.dense_shift,
    )
    drifted = world.drifted(drift)
    drifted.save(options.output)
    sample = drifted.draw(50_000, np.random.default_rng([options.seed, 10]))
    print(json.dumps({"columns": columns, "new_category_columns": fresh, "bayes_auc": measured_bayes_auc(sample)}))


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None], str]] = {
    "score": (_score, arguments.add_score, "score the rows of a file; prints a JSON line per row"),
    "replay": (_replay, arguments.add_replay, "send traffic at a stated rate and publish records"),
    "rank": (_rank, arguments.add_rank, "rank the rows of a file for one context, log the list"),
    "load": (_load, arguments.add_load, "put a stated load on a server and report latencies, errors and rates"),
    "simulate": (_simulate, arguments.add_simulate, "write a lake of rows of a new synthetic world"),
    "drift": (_drift, arguments.add_drift, "write a drifted copy of a world"),
}


if __name__ == "__main__":
    sys.exit(main())

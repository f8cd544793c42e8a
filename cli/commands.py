"""All commands of `evergreen`: their modules, their summaries and their parsers.

A module is imported when its command runs, so that `evergreen --help` stays fast. Each module
defines the flags of its own commands with `build_parser`, and runs them with `main`.
"""

import argparse
import importlib
from collections.abc import Sequence
from typing import NamedTuple

from evergreen.runtime.flags import CommandParser


class Command(NamedTuple):
    """The module that runs a command."""

    module: str
    summary: str
    words: tuple[str, ...] = ()
    """Words that select the command in the module's parser."""
    environment: str = ""
    """Environment that has the packages of the command, or "" for this environment."""


GROUPS = {
    "data": "recommender file, lake, schema, quarantine and lineage",
    "models": "released models: journal, cards, scores, other registries",
    "monitor": "the monitor, the uploader and the record log",
    "release": "what is served: rollback, promotion, canary, controller",
    "audit": "check, repeat or compare what happened",
    "admin": "backup, disk space, removal of a user",
    "simulate": "simulated clicks, traffic and autoscaling",
}
"""Groups of commands, with a summary of each group."""

_FILE, _PIPELINE, _MODELS, _SIMULATION = (
    "cli.recommender",
    "cli.pipeline",
    "cli.models",
    "demo.simulation.__main__",
)

COMMANDS: dict[tuple[str, ...], Command] = {
    ("demo",): Command("cli.demo", "run the complete loop once on this machine", ("demo",)),
    ("open",): Command("cli.demo", "serve a finished demo again, until Ctrl-C", ("open",)),
    ("init",): Command(_FILE, "draft the file that describes your columns", ("init",)),
    ("compile",): Command(_PIPELINE, "compile the retraining pipeline", ("compile",)),
    ("run",): Command(_PIPELINE, "run the compiled pipeline on this machine", ("run",)),
    ("submit",): Command(_PIPELINE, "run or schedule the pipeline on Kubeflow", ("submit",)),
    ("runs",): Command("cli.runs", "list runs with their result, rows, AUC and verdict"),
    ("search",): Command("cli.search", "try settings and rank them", environment="search"),
    ("status",): Command(
        "cli.status", "show the live version, its quality, and what needs a person"
    ),
    ("doctor",): Command("cli.doctor", "check an installation on a cluster"),
    ("data", "check"): Command(
        _FILE, "check a recommender file, or check rows against the file", ("check",)
    ),
    ("data", "accept"): Command(_FILE, "use a recommender file in the next runs", ("accept",)),
    ("data", "show"): Command(_FILE, "print an accepted recommender as a file", ("show",)),
    ("data", "diff"): Command(_FILE, "compare two recommenders key by key", ("diff",)),
    ("data", "history"): Command(_FILE, "list the accepted versions", ("history",)),
    ("data", "records"): Command(_FILE, "print the schema of the log records", ("records",)),
    ("data", "ingest"): Command("cli.ingest", "convert click logs to a lake"),
    ("data", "backfill"): Command("cli.backfill", "replace a past day of the lake"),
    ("data", "schema"): Command(
        "components.validation.schema_versions",
        "show, compare and accept schemas of the rows",
        environment="validation",
    ),
    ("data", "quarantine"): Command("cli.quarantine", "list quarantined rows"),
    ("data", "lineage"): Command(
        "components.extraction.lineage",
        "list the days that each model was trained on, with the version of each day",
    ),
    ("models", "list"): Command(_MODELS, "list releases, rollbacks and promotions", ("list",)),
    ("models", "show"): Command(_MODELS, "print a model's card, or write it as a page", ("show",)),
    ("models", "live-at"): Command(_MODELS, "show which version was live at a time", ("live-at",)),
    ("models", "score"): Command("cli.score", "score rows of a file on a server"),
    ("models", "export"): Command(
        "cli.export", "write a model's weights for NVIDIA's converter", environment="training"
    ),
    ("models", "sync"): Command(
        "cli.registries.__main__",
        "bring MLflow or Kubeflow's Model Registry up to date",
        environment="export",
    ),
    ("monitor", "run"): Command(
        "monitoring.__main__", "read the record log, and decide when to retrain"
    ),
    ("monitor", "upload"): Command("monitoring.uploader", "move archived records into the lake"),
    ("monitor", "log"): Command(
        "evergreen.events.__main__", "check the record log; list or replay its dead letters"
    ),
    ("release", "rollback"): Command("controller.rollback", "make an earlier version live again"),
    ("release", "promote"): Command(
        "controller.promote", "make a model live although the gate refused it"
    ),
    ("release", "canary"): Command(
        "controller.canary.__main__", "give a new version a growing share, or roll it back"
    ),
    ("release", "controller"): Command(
        "controller.__main__", "carry out requests, repair servers, advance canaries, roll back"
    ),
    ("audit", "verify"): Command(
        "controller.verify", "check logged scores against the released graph, offline"
    ),
    ("audit", "reproduce"): Command(
        "cli.reproduce", "train a stored model again, and compare each step"
    ),
    ("audit", "backtest"): Command(
        "monitoring.backtest.__main__", "show when policies would have fired over an archive"
    ),
    ("audit", "incident"): Command(
        "monitoring.backtest.incident",
        "copy a time span of records and decisions to a folder",
        ("record",),
    ),
    ("audit", "replay"): Command(
        "monitoring.backtest.incident",
        "decide a recorded incident again, and compare",
        ("replay",),
    ),
    ("audit", "compare"): Command(
        "cli.compare",
        "compare two models on rows that neither was trained on",
        environment="training",
    ),
    ("admin", "backup"): Command("cli.backup", "copy an installation while it runs", ("backup",)),
    ("admin", "restore"): Command(
        "cli.backup", "bring a backup back, with all programs stopped", ("restore",)
    ),
    ("admin", "collect"): Command(
        "evergreen.registry.collect", "list or remove files that no rollback needs"
    ),
    ("admin", "forget"): Command("cli.forget", "list or remove the data of one user"),
    ("simulate", "lake"): Command(_SIMULATION, "write a lake of simulated clicks", ("lake",)),
    ("simulate", "drift"): Command(_SIMULATION, "write a drifted copy of a simulator", ("drift",)),
    ("simulate", "traffic"): Command(
        _SIMULATION, "send traffic to Triton, log predictions and clicks", ("traffic",)
    ),
    ("simulate", "autoscaler"): Command(
        "tools.autoscaling.__main__", "run the autoscaler over a trace of requests"
    ),
}
"""All commands by their names, which are the words after `evergreen`. The help lists the commands
in this order."""


def find_command(line: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words of the command that the line begins with, or None.

    >>> find_command(["data", "check", "shop.yaml"]), find_command(["data"])
    (('data', 'check'), None)
    """
    return next((path for n in (1, 2) if (path := tuple(line[:n])) in COMMANDS), None)


def parser_of(path: tuple[str, ...]) -> argparse.ArgumentParser:
    """Return the parser of one command.

    The parser's program name is `evergreen` plus the words of the command.

    Raises:
        ImportError: a package of the command's environment is not installed here.
    """
    command = COMMANDS[path]
    parser: argparse.ArgumentParser = importlib.import_module(command.module).build_parser()
    for word in command.words:
        parser = _choices(parser)[word]
    return parser


def complete_parser() -> argparse.ArgumentParser:
    """Return one parser of all commands with their flags, for shell completion and the pages.

    If the packages of a command are not installed here, its flags are missing. Use `parser_of` to
    parse a command line, because the parser returned here lacks the defaults of its subparsers.
    """
    parser = build_parser()
    groups = _choices(parser)
    for path, command in COMMANDS.items():
        owner = parser if len(path) == 1 else groups[path[0]]
        try:
            full = parser_of(path)
        except ImportError:
            continue
        full.description = full.description or command.summary
        _choices(owner)[path[-1]] = full
    return parser


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the subcommands of a parser, or {} if it has none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices  # type: ignore[return-value]
    return {}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the commands' names, without their flags."""
    parser = Overview(
        prog="evergreen",
        description="Keep a recommender's click model fresh.",
        epilog="`evergreen COMMAND --help` shows a command's flags and an example.\n`evergreen "
        "--print-completion bash` (or zsh) prints a script for your shell.",
    )
    first = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    levels = {"": first}
    for path, command in COMMANDS.items():
        *group, name = path
        if group and group[0] not in levels:
            inner = first.add_parser(group[0], help=GROUPS[group[0]], description=GROUPS[group[0]])
            levels[group[0]] = inner.add_subparsers(metavar="COMMAND", required=True)
        levels["".join(group)].add_parser(name, help=command.summary, add_help=False)
    return parser


class Overview(CommandParser):
    """Parser whose help lists commands and groups of commands in two sections."""

    def format_help(self) -> str:
        """Return the help text of the parser."""
        names = _choices(self)
        group = self.prog.partition(" ")[2]
        summaries = {
            path[-1]: each.summary
            for path, each in COMMANDS.items()
            if path[-1] in names and path[:-1] == ((group,) if group else ())
        }
        sections = {"commands": summaries} | ({} if group else {"groups of commands": GROUPS})
        width = max(len(name) for name in names) + 2
        lines = [f"usage: {self.prog} COMMAND ...", "", str(self.description)]
        for title, members in sections.items():
            lines += ["", f"{title}:"]
            lines += [f"  {name.ljust(width)}{summary}" for name, summary in members.items()]
        return "\n".join([*lines, *(["", self.epilog] if self.epilog else [])]) + "\n"

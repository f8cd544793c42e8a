"""The `evergreen` command line: parses, and calls the room that does the work.

Commands of other rooms (monitor, traffic, ...) replace this process by `python -m <room>` with the rest of the line, so
that each room's flags are defined once, there. What needs kfp is imported when its command runs: kfp takes seconds.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from demo.environments import REPOSITORY, python_of
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser, whoami
from evergreen.runtime.kubeflow import (
    EXPERIMENT,
    PIPELINE_NAME,
    SERVICE_ACCOUNT,
    KubeflowServer,
    PipelineVersion,
    describe_end,
    wait,
)
from evergreen.runtime.plain_text import log_as_text

ROOMS = {
    "monitor": ("monitoring", (), "watch the click log, decide when to retrain"),
    "uploader": ("monitoring.uploader", (), "move archived records into the lake"),
    "log": ("evergreen.events", (), "check the record log; list or replay its dead letters"),
    "simulate": ("demo.simulation", ("simulate",), "write a lake of simulated clicks"),
    "drift": ("demo.simulation", ("drift",), "write a drifted copy of a simulated world"),
    "traffic": ("demo.simulation", ("traffic",), "send traffic to Triton and log predictions and clicks"),
    "backtest": ("monitoring.backtest", (), "would these policies have fired over an archive's records?"),
    "scale": ("tools.autoscaling", (), "try the autoscaler without a cluster: simulate it over a trace of requests"),
    "incident": ("monitoring.backtest.incident", (), "record a span of the monitor's records and decisions"),
    "replay": ("monitoring.backtest.incident", ("replay",), "decide a recorded incident again, and compare"),
    "score": ("cli.score", (), "score rows of a file"),
    "recommender": ("cli.recommender", (), "draft, check and accept the file that describes a recommender"),
    "schema": ("components.validation.schema_versions", (), "show, compare and accept schemas of the rows"),
    "quarantine": ("components.validation.quarantine_store", (), "list quarantined rows"),
    "ingest": ("cli.ingest", (), "convert click logs to a lake"),
    "backfill": ("cli.backfill", (), "replace a past day of the lake by a new version of it"),
    "lineage": ("components.extraction.lineage", (), "which model saw which version of which day"),
    "forget": ("cli.forget", (), "name, or remove, all that holds a user; name the models that learnt it"),
    "collect": ("evergreen.registry.collect", (), "name, or remove, old work and models that nothing goes back to"),
    "backup": ("cli.backup", ("backup",), "copy an installation while it runs"),
    "restore": ("cli.backup", ("restore",), "bring a backup back, with all programs stopped"),
    "compare": ("cli.compare", (), "what differs between two models, on rows that neither learned"),
    "search": ("cli.search", (), "try settings on the same held-out rows; say which are best"),
    "reproduce": ("cli.reproduce", (), "train a model again from the lake and its parent; compare step by step"),
    "export": ("cli.registries", (), "bring MLflow or Kubeflow's Model Registry up to date with the store"),
    "doctor": ("cli.doctor", (), "look at a live installation: what is right, wrong and how to mend it"),
    "verify": ("controller.verify", (), "prove offline that a version answered as it was released"),
    "canary": ("controller.canary", (), "give a new version a growing share of traffic, or take it back"),
    "controller": ("controller", (), "probe servers, reload, take a bad release back"),
    "rollback": ("controller.rollback", (), "make an earlier version live again"),
    "promote": ("controller.promote", (), "make a model live although the gate refused it"),
}
ENVIRONMENT_OF_ROOM = {"schema": "validation", "compare": "training", "export": "export", "search": "search"}
"""Rooms that need packages of another environment than this one's."""


_NO_PLACEMENT = ("command", "output", "placement")
_SERVERS = "Triton servers to release to, each host:grpc_port or dns:///name:grpc_port, comma-separated"


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = CommandParser(prog="evergreen", description="Keeps a recommender's click model fresh.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_compile(commands)
    run = commands.add_parser("run", help="run the compiled pipeline on this machine")
    run.add_argument("--package", type=Path, required=True, help="compiled pipeline")
    run.add_argument("--folder", type=Path, required=True, help="holds lake, store, work, repository, logs")
    run.add_argument("--request", type=Path, help="retrain request (JSON) to run for")
    run.add_argument("--lake", default="", help="click logs, folder or gs:// (default: lake in the folder)")
    run.add_argument("--triton-urls", default="", help=f"{_SERVERS}; empty = only publish")
    _add_parameters(run)
    _add_submit(commands)
    _add_journal(commands)
    _add_model(commands.add_parser("model", help="look into one stored model"))
    for name, (_, _, summary) in ROOMS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="turn the whole loop once on this machine")
    demo.add_argument("--data", type=Path, help="your file of rows, or a folder of them, instead of simulated clicks")
    demo.add_argument(
        "--recommender",
        type=Path,
        help="with --data: file that describes the rows (default: Criteo's where they are Criteo's, else a draft)",
    )
    demo.add_argument("--folder", type=Path, default=Path("build/demo"), help="where everything is written")
    demo.add_argument("--rows", type=int, default=250_000, help="rows of the first lake, or most rows read of --data")
    demo.add_argument("--seed", type=int, default=7, help="seed of the simulated world")
    demo.add_argument(
        "--log",
        default="sqlite",
        help="record log: sqlite, pubsub (Google's emulator, where installed) or kafka (librdkafka's mock cluster)",
    )
    demo.add_argument(
        "--drift-columns",
        default="",
        help="with --data: columns whose values change their meaning, comma-separated (default: the numeric ones and "
        "those of few categories)",
    )

    opened = commands.add_parser("open", help="serve a finished demo again, with its status page, until Ctrl-C")
    opened.add_argument("folder", type=Path, nargs="?", default=Path("build/demo"), help="what the demo left")


def _add_compile(commands: Any) -> None:
    # A flag that is not given is absent, so that the placement file's value counts.
    parser = commands.add_parser(
        "compile", help="compile the retraining pipeline to KFP IR YAML", argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--output", type=Path, default=Path("build/retraining.yaml"), help="file to write")
    parser.add_argument(
        "--placement",
        type=Path,
        default=None,
        help="YAML of the cluster, such as k8s/overlays/gke/placement.yaml; ${NAME} comes from cluster.env beside it, "
        "and flags override it (default: a laptop's)",
    )
    parser.add_argument("--lake", help="click logs, folder or gs:// (default: lake on the volume)")
    parser.add_argument("--store", help="folder of the model registry (default: store on the volume)")
    parser.add_argument("--work", help="folder of the runs' intermediate files (default: work on the volume)")
    parser.add_argument("--repository", help="Triton's model repository, folder or gs:// (default: on the volume)")
    parser.add_argument("--triton-urls", help=f"{_SERVERS} (default: none, only publish)")
    parser.add_argument("--registry", help="prefix of the images (default: none)")
    parser.add_argument("--tag", help="tag of the images; on a cluster the git revision (default: dev)")
    parser.add_argument(
        "--accelerator", help="resource of GPU steps, as nvidia.com/mig-1g.5gb; empty = none (nvidia.com/gpu)"
    )
    parser.add_argument("--backend", choices=("pytorch", "hugectr", "torchrec"), help="whose image trains (pytorch)")
    parser.add_argument("--training-gpus", type=int, help="GPUs of the training step (hugectr, torchrec; default: 1)")
    parser.add_argument("--training-processes", type=int, help="processes of the training step (torchrec; default: 1)")


def _add_submit(commands: Any) -> None:
    parser = commands.add_parser(
        "submit", help="upload to, or start a run or a schedule on, a Kubeflow Pipelines server"
    )
    parser.add_argument("--package", type=Path, required=True, help="compiled pipeline")
    parser.add_argument("--host", required=True, help="address of the KFP API")
    parser.add_argument("--namespace", default="", help="of a multi-user installation; none on a single-user one")
    parser.add_argument("--token-file", default="", help="token to show the server, read anew at each request")
    parser.add_argument("--experiment", default=EXPERIMENT, help="created if absent")
    parser.add_argument(
        "--service-account",
        default=SERVICE_ACCOUNT,
        help="Kubernetes service account of the steps' pods; empty = the server's choice",
    )
    parser.add_argument("--upload", action="store_true", help="upload the file as a pipeline version, and run it")
    parser.add_argument("--upload-version", help="name of that version (default: the tag of the compiled images)")
    parser.add_argument("--pipeline", default=PIPELINE_NAME, help="of which pipeline")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--no-run", action="store_true", help="only upload")
    instead.add_argument(
        "--recurring",
        metavar="CRON",
        help="instead of one run, a schedule in UTC of 6 fields, seconds first, such as '0 0 3 * * *'; replaces the "
        "previous one",
    )
    instead.add_argument("--wait", action="store_true", help="wait for the run's end; 0 = succeeded, 3 = anything else")
    parser.add_argument("--wait-hours", type=float, default=24.0, help="longest wait")
    _add_parameters(parser)


def _add_journal(commands: Any) -> None:
    models = commands.add_parser("models", help="list every release, rollback and promotion: who, when, why, hashes")
    live_at = commands.add_parser("live-at", help="show which version was live at a time")
    live_at.add_argument("time", metavar="TIME", help="ISO 8601, UTC where it has no zone; or now")
    runs = commands.add_parser("runs", help="list runs: how each ended, its rows, model, AUC and verdict")
    for parser in (models, live_at, runs):
        parser.add_argument("--store", required=True, help="model store, folder or its URI")
        parser.add_argument("--json", action="store_true", help="print JSON")
    runs.add_argument("--newest", type=int, default=50, metavar="N", help="runs that began last, at most; 0 = all")
    runs.add_argument("--host", default="", help="address of the KFP API: names failed runs that left nothing, too")
    runs.add_argument("--namespace", default="", help="of a multi-user installation, for --host")
    runs.add_argument("--token-file", default="", help="token to show the server of --host")


def _add_model(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    card = actions.add_parser("card", help="print, or write as a page, what is known of a model: its card")
    card.add_argument("model", metavar="VERSION|MODEL_ID", help="a released version, or a model of the store")
    card.add_argument("--store", required=True, help="model store, folder or its URI")
    card.add_argument("--output", type=Path, help="page to write, HTML; default: the card is printed as JSON")


def _add_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="continue no model and compare with none: parent=none and champion=none; for columns that changed their "
        "kind, another recommender, or a user to forget",
    )
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="pipeline parameter, such as parent=none or window_end=2026-03-02 (repeatable)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="SECTION.NAME=VALUE",
        help="setting that this run has other than its recommender, such as training.learning_rate=0.0005 (repeatable)",
    )


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit codes are those of docs/pipeline.md."""
    line = list(sys.argv[1:] if argv is None else argv)
    if line and line[0] in ROOMS:
        module, words, _ = ROOMS[line[0]]
        python = _python_of_room(line[0])
        os.execv(python, [python, "-m", module, *words, *line[1:]])
    arguments = build_parser().parse_args(line)
    log_as_text("%(asctime)s %(name)s %(message)s")
    return _COMMANDS[arguments.command](arguments)


def _python_of_room(room: str) -> str:
    """The interpreter that runs a room's commands: this one, or another environment's, which must have been built."""
    if room not in ENVIRONMENT_OF_ROOM:
        return sys.executable
    python = python_of(ENVIRONMENT_OF_ROOM[room])
    if not python.exists():
        name = ENVIRONMENT_OF_ROOM[room]
        raise ContractError(
            f"{room} needs {python}, which is absent; `make environments ENVIRONMENTS={name}` builds it"
        )
    # The environment does not hold our code; the working folder stays the user's.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return str(python)


def _run_demo(arguments: argparse.Namespace) -> int:
    from demo.demo import run_demo
    from demo.plan import DemoSettings

    settings = DemoSettings(
        folder=arguments.folder.resolve(),
        data=arguments.data.resolve() if arguments.data else None,
        recommender=arguments.recommender.resolve() if arguments.recommender else None,
        rows=arguments.rows,
        seed=arguments.seed,
        log=arguments.log,
        drift_columns=tuple(filter(None, arguments.drift_columns.split(","))),
    )
    return run_demo(settings)


def _run_open(arguments: argparse.Namespace) -> int:
    from demo.demo import open_demo

    return open_demo(arguments.folder.resolve())


def _run_compile(arguments: argparse.Namespace) -> int:
    from pipelines.package import compile_pipeline
    from pipelines.placement import read_placement
    from pipelines.places import describe_places

    flags = {name: value for name, value in vars(arguments).items() if name not in _NO_PLACEMENT}
    placement = read_placement(arguments.placement, flags)
    compile_pipeline(arguments.output, placement)
    print(f"{arguments.output}: {describe_places(placement.places)}")
    return 0


def _parameters_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The pipeline parameters that a run's flags set."""
    from pipelines.package import read_parameters

    return read_parameters(
        arguments.package, arguments.parameter, arguments.settings, from_scratch=arguments.from_scratch
    )


def _own_places(arguments: argparse.Namespace) -> dict[str, str]:
    """What the run's flags name in place of the folder's lake and of no server."""
    from evergreen.storage.uris import typed_uri

    named = {"lake": typed_uri(arguments.lake), "triton_urls": arguments.triton_urls}
    return {name: place for name, place in named.items() if place}


def _words_of(arguments: argparse.Namespace) -> list[str]:
    """The flags that say what kind of run it is, as words of a command."""
    words = [word for name, place in _own_places(arguments).items() for word in (f"--{name.replace('_', '-')}", place)]
    words += ["--from-scratch"] if arguments.from_scratch else []
    for flag, values in (("-p", arguments.parameter), ("--set", arguments.settings)):
        words += [word for value in values for word in (flag, value)]
    return words


def _run_pipeline(arguments: argparse.Namespace) -> int:
    from cli.runs import describe_run, what_next
    from demo.runner import EXIT_CODES, LocalFolders, run_once
    from evergreen.contracts.manifests import CURRENT, RetrainRequest
    from evergreen.registry.recommenders import check_run

    request = RetrainRequest.read(arguments.request) if arguments.request else None
    folders = LocalFolders(root=arguments.folder.resolve())
    parameters = _parameters_of(arguments)
    reference, settings = parameters.get("recommender", CURRENT), parameters.get("settings", "")
    check_run(folders.store, reference=reference, settings=settings)
    outcome = run_once(
        arguments.package, folders, parameters=parameters, request=request, places=_own_places(arguments)
    )
    print(describe_run(folders.store, outcome))
    command = ["evergreen", "run", "--package", str(arguments.package), "--folder", str(arguments.folder)]
    if sentence := what_next(folders.store, outcome, command=[*command, *_words_of(arguments)]):
        print(f"next: {sentence}")
    return EXIT_CODES[outcome.state]


def _run_submit(arguments: argparse.Namespace) -> int:
    """Uploads, runs or schedules, and prints the id of the run, the schedule or (with --no-run) the version; 0.

    Raises:
        ContractError: flags that exclude each other, a wrong parameter, or a version without a name.
    """
    uploads = arguments.upload or arguments.upload_version is not None
    if arguments.no_run and not uploads:
        raise ContractError("--no-run without --upload leaves nothing to do")
    from cli.runs import describe_run
    from evergreen.config.sections import check_changes
    from evergreen.registry.runs import find_outcome, store_name
    from evergreen.storage.uris import local_path
    from pipelines import submit
    from pipelines.package import image_tag, read_places
    from pipelines.places import describe_places

    parameters, places = _parameters_of(arguments), read_places(arguments.package)
    check_changes(parameters.get("settings", ""))
    version = (arguments.upload_version or image_tag(arguments.package)) if uploads else ""
    if arguments.recurring:
        submit.check_cron(arguments.recurring)
    server = KubeflowServer(arguments.host, namespace=arguments.namespace, token_file=arguments.token_file)
    source: Path | PipelineVersion = arguments.package
    if uploads:
        source = submit.upload(
            server, arguments.package, version, pipeline=arguments.pipeline, about=describe_places(places)
        )
    run = submit.RunRequest(
        source=source,
        parameters=parameters,
        experiment=arguments.experiment,
        service_account=arguments.service_account,
    )
    if isinstance(source, PipelineVersion) and arguments.no_run:
        print(source.version_id)
    elif arguments.recurring:
        print(submit.schedule(server, run, arguments.recurring, name=arguments.pipeline))
    else:
        by = whoami().partition("@")[0]
        name = parameters.get("trigger_id") or f"manual {datetime.now(timezone.utc):%Y-%m-%d %H:%M} by {by}"
        run_id = submit.start(server, run, name=name)
        print(run_id, flush=True)
        if arguments.wait:
            ended = wait(server, run_id, seconds=arguments.wait_hours * 3600)
            store = local_path(places["store"])
            outcome = find_outcome(store, store_name(name, "", run_id))
            if ended.state != "SUCCEEDED":
                step = f"; {outcome.step}: {outcome.reason}" if outcome else ""
                raise PermanentError(f"{describe_end(ended)}{step}; see {server.link_to(run_id)}")
            hint = f"{store} is not mounted here; where it is, `evergreen runs --store {store}` tells of run {name}"
            print(describe_run(store, outcome) if outcome else hint)
    return 0


def _run_model(arguments: argparse.Namespace) -> int:
    from cli.models import show_card
    from evergreen.storage.uris import typed_folder

    show_card(typed_folder(arguments.store, "--store"), arguments.model, output=arguments.output)
    return 0


def _run_journal(arguments: argparse.Namespace) -> int:
    from cli.models import print_live_at, print_models
    from cli.runs import print_lost_runs, print_runs
    from evergreen.registry.promotion_journal import JOURNAL_FILE
    from evergreen.storage.uris import typed_folder

    store = typed_folder(arguments.store, "--store")
    known = ("models", "runs", "recommender", JOURNAL_FILE)
    if any(store.iterdir()) and not any((store / name).exists() for name in known):
        raise ContractError(f"--store {store} holds none of {', '.join(known)}, expected a model store")
    if arguments.command == "runs":
        if arguments.newest < 0:
            raise ContractError(f"--newest is {arguments.newest}, expected at least 0")
        if arguments.host and arguments.json:
            raise ContractError("--host and --json are given, expected one of them: JSON has the store's runs alone")
        print_runs(store, newest=arguments.newest, as_json=arguments.json)
        if arguments.host:
            from evergreen.runtime.kubeflow import KubeflowServer

            server = KubeflowServer(arguments.host, namespace=arguments.namespace, token_file=arguments.token_file)
            print_lost_runs(store, server, newest=arguments.newest)
    elif arguments.command == "live-at":
        print_live_at(store, arguments.time, as_json=arguments.json)
    else:
        print_models(store, as_json=arguments.json)
    return 0


_COMMANDS = {
    "demo": _run_demo,
    "open": _run_open,
    "compile": _run_compile,
    "run": _run_pipeline,
    "submit": _run_submit,
    "models": _run_journal,
    "runs": _run_journal,
    "live-at": _run_journal,
    "model": _run_model,
}

if __name__ == "__main__":
    raise SystemExit(main())

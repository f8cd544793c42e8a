"""Parse the `evergreen` command line and call the package that does the work.

Commands of other packages (monitor, traffic, ...) replace this process by `python -m <package>`
with the rest of the command line. Each package therefore defines its own flags. Modules that need
kfp are imported when their command runs, because importing kfp takes seconds.
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

FORWARDED = {
    "monitor": ("monitoring", (), "watch the click log, decide when to retrain"),
    "uploader": ("monitoring.uploader", (), "move archived records into the lake"),
    "log": ("evergreen.events", (), "check the record log; list or replay its dead letters"),
    "simulate": ("demo.simulation", ("simulate",), "write a lake of simulated clicks"),
    "drift": ("demo.simulation", ("drift",), "write a drifted copy of a simulator"),
    "traffic": (
        "demo.simulation",
        ("traffic",),
        "send traffic to Triton and log predictions and clicks",
    ),
    "backtest": (
        "monitoring.backtest",
        (),
        "show when policies would have fired over an archive's records",
    ),
    "scale": (
        "tools.autoscaling",
        (),
        "simulate the autoscaler over a trace of requests, without a cluster",
    ),
    "incident": (
        "monitoring.backtest.incident",
        (),
        "record a span of the monitor's records and decisions",
    ),
    "replay": (
        "monitoring.backtest.incident",
        ("replay",),
        "replay a recorded incident, and compare the decisions",
    ),
    "score": ("cli.score", (), "score rows of a file"),
    "recommender": (
        "cli.recommender",
        (),
        "draft, check and accept the file that describes a recommender",
    ),
    "schema": (
        "components.validation.schema_versions",
        (),
        "show, compare and accept schemas of the rows",
    ),
    "quarantine": ("components.validation.quarantine_store", (), "list quarantined rows"),
    "ingest": ("cli.ingest", (), "convert click logs to a lake"),
    "backfill": ("cli.backfill", (), "replace a past day of the lake by a new version of it"),
    "lineage": (
        "components.extraction.lineage",
        (),
        "show which model was trained on which version of which day",
    ),
    "forget": (
        "cli.forget",
        (),
        "list or remove everything that holds a user; list the models trained on it",
    ),
    "collect": (
        "evergreen.registry.collect",
        (),
        "list or remove old work files and models that no rollback needs",
    ),
    "backup": ("cli.backup", ("backup",), "copy an installation while it runs"),
    "restore": ("cli.backup", ("restore",), "bring a backup back, with all programs stopped"),
    "compare": ("cli.compare", (), "compare two models on rows that are new to both"),
    "search": ("cli.search", (), "try settings on the same held-out rows, and rank them"),
    "reproduce": ("cli.reproduce", (), "train a stored model again, and compare each step"),
    "export": (
        "cli.registries",
        (),
        "bring MLflow or Kubeflow's Model Registry up to date with the store",
    ),
    "doctor": ("cli.doctor", (), "check a running installation, and say how to mend what is wrong"),
    "verify": (
        "controller.verify",
        (),
        "check offline that a version's logged scores match its released graph",
    ),
    "canary": (
        "controller.canary",
        (),
        "give a new version a growing share of traffic, or roll it back",
    ),
    "controller": ("controller", (), "probe servers, reload models, roll back a bad release"),
    "rollback": ("controller.rollback", (), "make an earlier version live again"),
    "promote": ("controller.promote", (), "make a model live although the gate refused it"),
}
_ENVIRONMENT_OF_COMMAND = {
    "schema": "validation",
    "compare": "training",
    "export": "export",
    "search": "search",
}
"""Environment of each command whose packages are not installed in this environment."""


_NO_PLACEMENT = ("command", "output", "placement")
_SERVERS = (
    "Triton servers to release to, each host:grpc_port or dns:///name:grpc_port, comma-separated"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their flags."""
    parser = CommandParser(prog="evergreen", description="Keep a recommender's click model fresh.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_compile(commands)
    run = commands.add_parser("run", help="run the compiled pipeline on this machine")
    run.add_argument("--package", type=Path, required=True, help="compiled pipeline")
    run.add_argument(
        "--folder", type=Path, required=True, help="folder with lake, store, work, repository, logs"
    )
    run.add_argument(
        "--request", type=Path, help="file of the retrain request (JSON) that the run answers"
    )
    run.add_argument(
        "--lake", default="", help="click logs, folder or gs:// (default: lake in the folder)"
    )
    run.add_argument(
        "--triton-urls",
        default="",
        help=f"{_SERVERS}, if no controller is running; default: only publish the model",
    )
    _add_parameters(run)
    _add_submit(commands)
    _add_journal(commands)
    _add_model(commands.add_parser("model", help="show one stored model"))
    for name, (_, _, summary) in FORWARDED.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="run the complete loop once on this machine")
    demo.add_argument(
        "--data",
        type=Path,
        help="your file of rows, or a folder of them, instead of simulated clicks",
    )
    demo.add_argument(
        "--recommender",
        type=Path,
        help="with --data: file that describes the rows (default: Criteo's for Criteo's files, "
        "else a draft)",
    )
    demo.add_argument("--folder", type=Path, default=Path("build/demo"), help="folder to write to")
    demo.add_argument(
        "--rows",
        type=int,
        default=250_000,
        help="rows of the first lake, or maximum rows read from --data",
    )
    demo.add_argument("--seed", type=int, default=7, help="seed of the simulator")
    demo.add_argument(
        "--log",
        default="sqlite",
        help="record log: sqlite, pubsub (Google's emulator, if installed) or kafka (librdkafka's "
        "mock cluster)",
    )
    demo.add_argument(
        "--drift-columns",
        default="",
        help=(
            "with --data: comma-separated columns whose values change their meaning (default: "
            "numeric columns and "
            "columns with few categories)"
        ),
    )

    opened = commands.add_parser(
        "open", help="serve a finished demo again, with its status page, until Ctrl-C"
    )
    opened.add_argument(
        "folder", type=Path, nargs="?", default=Path("build/demo"), help="folder of the demo"
    )


def _add_compile(commands: Any) -> None:
    # A missing flag is absent from the namespace, so that the placement file's value counts.
    parser = commands.add_parser(
        "compile",
        help="compile the retraining pipeline to KFP IR YAML",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/retraining.yaml"), help="file to write"
    )
    parser.add_argument(
        "--placement",
        type=Path,
        default=None,
        help=(
            "YAML of the cluster, such as k8s/overlays/gke/placement.yaml; ${NAME} comes from "
            "cluster.env next to it,"
            " and flags override it (default: placement of a laptop)"
        ),
    )
    parser.add_argument("--lake", help="click logs, folder or gs:// (default: lake on the volume)")
    parser.add_argument(
        "--store", help="folder of the model registry (default: store on the volume)"
    )
    parser.add_argument(
        "--work", help="folder of the runs' intermediate files (default: work on the volume)"
    )
    parser.add_argument("--registry", help="prefix of the images (default: none)")
    parser.add_argument(
        "--tag", help="tag of the images; on a cluster the git revision (default: dev)"
    )
    parser.add_argument(
        "--accelerator",
        help="resource of GPU steps, such as nvidia.com/mig-1g.5gb; empty = no GPU (default: "
        "nvidia.com/gpu)",
    )
    parser.add_argument(
        "--backend",
        choices=("pytorch", "hugectr", "torchrec"),
        help="library of the training image (default: pytorch)",
    )
    parser.add_argument(
        "--training-gpus",
        type=int,
        help="GPUs of the training step (hugectr, torchrec; default: 1)",
    )
    parser.add_argument(
        "--training-processes",
        type=int,
        help="processes of the training step (torchrec; default: 1)",
    )


def _add_submit(commands: Any) -> None:
    parser = commands.add_parser(
        "submit",
        help="upload the pipeline to a Kubeflow Pipelines server, or start or schedule a run there",
    )
    parser.add_argument("--package", type=Path, required=True, help="compiled pipeline")
    parser.add_argument("--host", required=True, help="address of the KFP API")
    parser.add_argument(
        "--namespace", default="", help="namespace, only for a multi-user installation"
    )
    parser.add_argument(
        "--token-file", default="", help="file of the server's token, read at each request"
    )
    parser.add_argument("--experiment", default=EXPERIMENT, help="experiment, created if absent")
    parser.add_argument(
        "--service-account",
        default=SERVICE_ACCOUNT,
        help="Kubernetes service account of the steps' pods; empty = the server's choice",
    )
    parser.add_argument(
        "--upload", action="store_true", help="upload the file as a pipeline version, and run it"
    )
    parser.add_argument(
        "--upload-version", help="name of that version (default: the tag of the compiled images)"
    )
    parser.add_argument(
        "--pipeline", default=PIPELINE_NAME, help="name of the pipeline to upload to"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--no-run", action="store_true", help="only upload")
    instead.add_argument(
        "--recurring",
        metavar="CRON",
        help=(
            "schedule runs instead: a UTC cron line of 6 fields, seconds first, such as '0 0 3 * * "
            "*'; replaces the "
            "previous schedule"
        ),
    )
    instead.add_argument(
        "--wait",
        action="store_true",
        help="wait for the run's end; exit code 0 if it succeeded, else 3",
    )
    parser.add_argument("--wait-hours", type=float, default=24.0, help="maximum wait in hours")
    _add_parameters(parser)


def _add_journal(commands: Any) -> None:
    models = commands.add_parser(
        "models",
        help="list all releases, rollbacks and promotions, with person, time, reason and hashes",
    )
    live_at = commands.add_parser("live-at", help="show which version was live at a time")
    live_at.add_argument(
        "time", metavar="TIME", help="ISO 8601, in UTC if it has no zone, or `now`"
    )
    runs = commands.add_parser(
        "runs", help="list runs: how each ended, its rows, model, AUC and verdict"
    )
    for parser in (models, live_at, runs):
        parser.add_argument("--store", required=True, help="model store, folder or its URI")
        parser.add_argument("--json", action="store_true", help="print JSON")
    runs.add_argument(
        "--newest",
        type=int,
        default=50,
        metavar="N",
        help="list at most the newest N runs; 0 = all",
    )
    runs.add_argument(
        "--host",
        default="",
        help="address of the KFP API, to list also failed runs that left nothing in the store",
    )
    runs.add_argument(
        "--namespace", default="", help="with --host: namespace of a multi-user installation"
    )
    runs.add_argument("--token-file", default="", help="with --host: file of the server's token")


def _add_model(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    card = actions.add_parser("card", help="print a model's card, or write it as a page")
    card.add_argument(
        "model", metavar="VERSION|MODEL_ID", help="a released version, or a model of the store"
    )
    card.add_argument("--store", required=True, help="model store, folder or its URI")
    card.add_argument("--output", type=Path, help="HTML page to write (default: print JSON)")


def _add_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help=(
            "train without a parent and compare with no champion, for columns that changed their "
            "kind, another recommender, or after `evergreen forget`"
        ),
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
        help=(
            "setting of this run that overrides the recommender's, such as "
            "training.learning_rate=0.0005 (repeatable)"
        ),
    )


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. docs/pipeline.md lists the exit codes."""
    line = list(sys.argv[1:] if argv is None else argv)
    if line and line[0] in FORWARDED:
        module, words, _ = FORWARDED[line[0]]
        python = _python_of_command(line[0])
        os.execv(python, [python, "-m", module, *words, *line[1:]])
    arguments = build_parser().parse_args(line)
    log_as_text("%(asctime)s %(name)s %(message)s")
    return _COMMANDS[arguments.command](arguments)


def _python_of_command(command: str) -> str:
    """Return the interpreter that runs a command: this one, or that of another environment.

    Raises:
        ContractError: the other environment was not built.
    """
    if command not in _ENVIRONMENT_OF_COMMAND:
        return sys.executable
    python = python_of(_ENVIRONMENT_OF_COMMAND[command])
    if not python.exists():
        name = _ENVIRONMENT_OF_COMMAND[command]
        raise ContractError(
            f"{command} needs {python}, which is absent; `make environments ENVIRONMENTS={name}` "
            "builds it"
        )
    # The other environment does not contain this repository. The working folder is still the
    # user's.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    )
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
    """Return the pipeline parameters that a run's flags set."""
    from pipelines.package import read_parameters

    return read_parameters(
        arguments.package,
        arguments.parameter,
        arguments.settings,
        from_scratch=arguments.from_scratch,
    )


def _words_of(arguments: argparse.Namespace) -> list[str]:
    """Return the flags that describe the kind of run, as words of a command."""
    places = {"--lake": arguments.lake, "--triton-urls": arguments.triton_urls}
    words = [word for flag, place in places.items() if place for word in (flag, place)]
    words += ["--from-scratch"] if arguments.from_scratch else []
    for flag, values in (("-p", arguments.parameter), ("--set", arguments.settings)):
        words += [word for value in values for word in (flag, value)]
    return words


def _run_pipeline(arguments: argparse.Namespace) -> int:
    from cli.runs import describe_run, what_next
    from demo.runner import EXIT_CODES, LocalFolders, run_once
    from evergreen.contracts.manifests import CURRENT, RetrainRequest
    from evergreen.registry.recommenders import check_run
    from evergreen.storage.uris import typed_uri

    request = RetrainRequest.read(arguments.request) if arguments.request else None
    folders = LocalFolders(root=arguments.folder.resolve())
    parameters = _parameters_of(arguments)
    reference, settings = parameters.get("recommender", CURRENT), parameters.get("settings", "")
    check_run(folders.store, reference=reference, settings=settings)
    outcome = run_once(
        arguments.package,
        folders,
        parameters=parameters,
        request=request,
        places={"lake": typed_uri(arguments.lake)} if arguments.lake else {},
        triton_urls=arguments.triton_urls,
    )
    print(describe_run(folders.store, outcome))
    command = [
        "evergreen",
        "run",
        "--package",
        str(arguments.package),
        "--folder",
        str(arguments.folder),
    ]
    if sentence := what_next(folders.store, outcome, command=[*command, *_words_of(arguments)]):
        print(f"next: {sentence}")
    return EXIT_CODES[outcome.state]


def _run_submit(arguments: argparse.Namespace) -> int:
    """Upload, run or schedule the pipeline, and return 0.

    Prints the id of the run, of the schedule, or with --no-run of the version.

    Raises:
        ContractError: flags exclude each other, a parameter is wrong, or a version has no name.
    """
    uploads = arguments.upload or arguments.upload_version is not None
    if arguments.no_run and not uploads:
        raise ContractError(
            "--no-run is given without --upload, expected both: else there is nothing to do"
        )
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
    server = KubeflowServer(
        arguments.host, namespace=arguments.namespace, token_file=arguments.token_file
    )
    source: Path | PipelineVersion = arguments.package
    if uploads:
        source = submit.upload(
            server,
            arguments.package,
            version,
            pipeline=arguments.pipeline,
            about=describe_places(places),
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
        name = (
            parameters.get("trigger_id")
            or f"manual {datetime.now(timezone.utc):%Y-%m-%d %H:%M} by {by}"
        )
        run_id = submit.start(server, run, name=name)
        print(run_id, flush=True)
        if arguments.wait:
            ended = wait(server, run_id, seconds=arguments.wait_hours * 3600)
            store = local_path(places["store"])
            outcome = find_outcome(store, store_name(name, "", run_id))
            if ended.state != "SUCCEEDED":
                step = f"; {outcome.step}: {outcome.reason}" if outcome else ""
                raise PermanentError(f"{describe_end(ended)}{step}; see {server.link_to(run_id)}")
            hint = (
                f"{store} is not mounted here. `evergreen runs --store {store}` shows run {name} "
                "on a machine that "
                "mounts it"
            )
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
        raise ContractError(
            f"--store {store} holds none of {', '.join(known)}, expected a model store"
        )
    if arguments.command == "runs":
        if arguments.newest < 0:
            raise ContractError(f"--newest is {arguments.newest}, expected at least 0")
        if arguments.host and arguments.json:
            raise ContractError(
                "--host and --json are given, expected one of them: JSON has only the store's runs"
            )
        print_runs(store, newest=arguments.newest, as_json=arguments.json)
        if arguments.host:
            from evergreen.runtime.kubeflow import KubeflowServer

            server = KubeflowServer(
                arguments.host, namespace=arguments.namespace, token_file=arguments.token_file
            )
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

"""`evergreen compile`, `run` and `submit`: the retraining pipeline, here or on Kubeflow.

Modules that need kfp are imported when their command runs, because importing kfp takes seconds.
"""

import argparse
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

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

_NO_PLACEMENT = ("command", "output", "placement")
_SERVERS = (
    "Triton servers to release to, each host:grpc_port or dns:///name:grpc_port, comma-separated"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the three commands."""
    parser = CommandParser(prog="evergreen", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_compile(commands)
    _add_run(commands)
    _add_submit(commands)
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. docs/reference/exit-codes.md lists the exit codes."""
    arguments = build_parser().parse_args(argv)
    log_as_text("%(asctime)s %(name)s %(message)s")
    commands = {"compile": _run_compile, "run": _run_pipeline, "submit": _run_submit}
    return commands[arguments.command](arguments)


def _add_run(commands: Any) -> None:
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


def _add_compile(commands: Any) -> None:
    # If a flag is missing, it is absent from the namespace, and the placement file sets its value.
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
            "cluster.env next to it, and flags override it (default: placement of a laptop)"
        ),
    )
    parser.add_argument("--lake", help="click logs, folder or gs:// (default: lake on the volume)")
    parser.add_argument("--store", help="folder of the registry (default: store on the volume)")
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
            "*'; replaces the previous schedule"
        ),
    )
    instead.add_argument(
        "--wait",
        action="store_true",
        help="wait for the run's end; exit code 0 if it succeeded, else 3",
    )
    parser.add_argument("--wait-hours", type=float, default=24.0, help="maximum wait in hours")
    _add_parameters(parser)


def _add_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help=(
            "train without a parent and compare with no champion, for columns that changed their "
            "kind, another recommender, or after `evergreen admin forget`"
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


def _run_compile(arguments: argparse.Namespace) -> int:
    from pipelines.locations import describe_locations
    from pipelines.package import compile_pipeline
    from pipelines.placement import read_placement

    flags = {name: value for name, value in vars(arguments).items() if name not in _NO_PLACEMENT}
    placement = read_placement(arguments.placement, flags)
    compile_pipeline(arguments.output, placement)
    print(f"{arguments.output}: {describe_locations(placement.locations)}")
    print("(on this machine, `evergreen run --folder FOLDER` uses the folders in FOLDER instead)")
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
    """Return the flags that select the kind of run, as words of a command line."""
    locations = {"--lake": arguments.lake, "--triton-urls": arguments.triton_urls}
    words = [word for flag, value in locations.items() if value for word in (flag, value)]
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
        locations={"lake": typed_uri(arguments.lake)} if arguments.lake else {},
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

    Prints the id of the run or of the schedule. With --no-run, prints the id of the version.

    Raises:
        ContractError: flags exclude each other, a parameter is wrong, or a version has no name.
    """
    uploads = arguments.upload or arguments.upload_version is not None
    if arguments.no_run and not uploads:
        raise ContractError(
            "--no-run is given without --upload, expected --upload too: without it, the command "
            "would do nothing"
        )
    from cli.runs import describe_run
    from evergreen.config.sections import check_changes
    from evergreen.registry.runs import find_outcome, store_name
    from evergreen.storage.uris import local_path
    from pipelines import submit
    from pipelines.locations import describe_locations
    from pipelines.package import image_tag, read_locations

    parameters, locations = _parameters_of(arguments), read_locations(arguments.package)
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
            about=describe_locations(locations),
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
            store = local_path(locations["store"])
            outcome = find_outcome(store, store_name(name, "", run_id))
            if ended.state != "SUCCEEDED":
                step = f"; {outcome.step}: {outcome.reason}" if outcome else ""
                raise PermanentError(f"{describe_end(ended)}{step}; see {server.link_to(run_id)}")
            hint = (
                f"{store} is not mounted here. `evergreen runs --store {store}` shows run {name} "
                "on a machine that mounts it"
            )
            print(describe_run(store, outcome) if outcome else hint)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

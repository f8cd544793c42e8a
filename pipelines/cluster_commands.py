"""`evergreen compile` and `evergreen submit`: their flags, and the calls that they become.

What a placement means is `pipelines.placement`'s, what a server is asked `pipelines.submit`'s; both are imported when a
command runs, because kfp takes seconds to load.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from components.runtime.errors import ContractError
from components.runtime.kubeflow import EXPERIMENT, PIPELINE_NAME, SERVICE_ACCOUNT, KubeflowServer, PipelineVersion

_NO_PLACEMENT = ("command", "output", "placement")


def add_compile(commands: Any) -> None:
    """The flags of `compile`; those of a placement are absent from the answer unless given, so that the file counts."""
    parser = commands.add_parser(
        "compile", help="compile the retraining pipeline to KFP IR YAML", argument_default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/retraining.yaml"), help="file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--placement",
        type=Path,
        default=None,
        help="YAML of the cluster, such as k8s/overlays/gke/placement.yaml; ${NAME} comes from cluster.env beside it, "
        "and flags override it (default: a laptop's)",
    )
    parser.add_argument("--registry", help="prefix of the images (default: none)")
    parser.add_argument("--tag", help="tag of the images; on a cluster the git revision (default: dev)")
    parser.add_argument("--volume", help="name of the shared volume claim (default: evergreen)")
    parser.add_argument(
        "--accelerator", help="GPU resource of GPU steps, such as nvidia.com/mig-1g.5gb; empty = none (nvidia.com/gpu)"
    )
    parser.add_argument("--repository", help="default model repository, folder or gs:// (default: on the volume)")
    parser.add_argument("--lake", help="default lake, folder or gs:// (default: on the volume)")
    parser.add_argument("--triton-urls", help="default servers that a release reaches (default: none)")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default device of serving (default: cpu)")
    parser.add_argument(
        "--backend", choices=("pytorch", "hugectr"), help="trainer; its image runs the training step (pytorch)"
    )
    parser.add_argument("--training-gpus", type=int, help="GPUs of the training step (hugectr; default: 1)")
    parser.add_argument("--num-retries", type=int, help="tries of any other failed step after the first (default: 2)")
    parser.add_argument(
        "--training-retries",
        type=int,
        help="tries of a failed training after the first; each goes on from its last save (default: 4)",
    )


def run_compile(arguments: argparse.Namespace) -> int:
    """Writes the compiled pipeline; 0."""
    from pipelines.compile import compile_pipeline
    from pipelines.placement_file import read_placement

    flags = {name: value for name, value in vars(arguments).items() if name not in _NO_PLACEMENT}
    compile_pipeline(arguments.output, read_placement(arguments.placement, flags))
    return 0


def add_submit(commands: Any) -> argparse.ArgumentParser:
    """The flags of `submit`, without `--parameter`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "submit", help="upload to, or start a run or a schedule on, a Kubeflow Pipelines server"
    )
    parser.add_argument("--package", type=Path, required=True, help="compiled pipeline")
    parser.add_argument("--host", required=True, help="address of the KFP API")
    parser.add_argument("--namespace", default="", help="of a multi-user installation; none on a single-user one")
    parser.add_argument("--token-file", default="", help="token to show the server, read anew at each request")
    parser.add_argument("--experiment", default=EXPERIMENT, help="created if absent (default: %(default)s)")
    parser.add_argument(
        "--service-account",
        default=SERVICE_ACCOUNT,
        help="Kubernetes service account of the steps' pods; empty = the server's choice (default: %(default)s)",
    )
    parser.add_argument("--upload", action="store_true", help="offer the file as a version of the pipeline, and run it")
    parser.add_argument("--upload-version", help="name of that version (default: the tag of the compiled images)")
    parser.add_argument("--pipeline", default=PIPELINE_NAME, help="of which pipeline (default: %(default)s)")
    parser.add_argument("--no-run", action="store_true", help="only upload")
    parser.add_argument(
        "--recurring",
        metavar="CRON",
        help="instead of one run, a schedule in UTC of 6 fields, seconds first, such as '0 0 3 * * *'; replaces the "
        "one before",
    )
    parser.add_argument("--wait", action="store_true", help="until the run ends; 0 = succeeded, 3 = anything else")
    parser.add_argument("--wait-hours", type=float, default=24.0, help="longest wait (default: %(default)s)")
    return parser


def run_submit(arguments: argparse.Namespace) -> int:
    """Does what was asked, printing the id of the run or schedule, or of the version where nothing else was asked; 0.

    Raises:
        ContractError: flags that exclude each other, a wrong parameter, or a version without a name.
    """
    uploads = arguments.upload or arguments.upload_version is not None
    if arguments.no_run and not uploads:
        raise ContractError("--no-run without --upload leaves nothing to do")
    if arguments.recurring and arguments.no_run:
        raise ContractError("--recurring and --no-run exclude each other: a schedule runs")
    if arguments.wait and (arguments.recurring or arguments.no_run):
        raise ContractError("--wait needs a run, and there is none with --recurring or --no-run")
    if not arguments.wait_hours > 0:
        raise ContractError(f"--wait-hours is {arguments.wait_hours}, expected above 0")
    from pipelines import submit
    from pipelines.package import image_tag, read_parameters

    parameters = read_parameters(arguments.package, arguments.parameter)
    version = (arguments.upload_version or image_tag(arguments.package)) if uploads else ""
    if arguments.recurring:
        submit.check_cron(arguments.recurring)
    server = KubeflowServer(arguments.host, namespace=arguments.namespace, token_file=arguments.token_file)
    source: Path | PipelineVersion = arguments.package
    if uploads:
        source = submit.upload(server, arguments.package, version, pipeline=arguments.pipeline)
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
        run_id = submit.start(server, run)
        print(run_id, flush=True)
        if arguments.wait:
            submit.wait(server, run_id, seconds=arguments.wait_hours * 3600)
    return 0

"""Check a running installation part by part.

The result for each part is right, wrong or unknown. For a wrong part, the report includes a command
or a change that corrects it. The checks send requests to Kubeflow's API server, and use the user's
own `kubectl` to read Kubernetes. The checks change nothing. The pages docs/kubernetes/kfp.md and
manifests.md describe what each part must be.
"""

import argparse
import json
import logging
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from evergreen.registry.runs import left_anything
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.kubeflow import EXPERIMENT, PIPELINE_NAME, SERVICE_ACCOUNT, KubeflowServer
from evergreen.storage.uris import typed_folder

RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"
NAMESPACE, KUBEFLOW = "evergreen", "kubeflow"
_MONITOR_ROLE = "evergreen-monitor"
"""Role that gives the monitor its rights on an installation with several users."""
OLDEST_KUBEFLOW = (2, 16)
MAX_SKEW_SECONDS = 5.0
OPEN_BITS = 0o022
"""Mode bits that allow users other than the owner to write to a file."""
LOOKED_AT_RUNS = 20
RETRY_PATCH = '{"templateDefaults":{"retryStrategy":{"retryPolicy":"Always","limit":"0"}}}'
_SET_SERVER = f"kubectl -n {KUBEFLOW} set env deployment/ml-pipeline"
_OPEN_FILES = (
    "from pathlib import Path; found = [p for n in ('store', 'work', 'repository') for p in "
    f"Path('/evergreen', n).rglob('*') if not p.is_symlink() and p.lstat().st_mode & {OPEN_BITS}]; "
    "print(len(found), *found[:1])"
)
_LIST_OBJECTS = (
    "import os; from evergreen.storage.uris import open_objects; "
    "open_objects(os.environ[{variable!r}]).list('day=0')"
)
"""Program that lists a prefix without objects. The program needs only the permission to list
objects, and runs fast."""
_CONTROLLER = ("deploy/release-controller", "-c", "release-controller", "--")
"""Arguments of `kubectl exec` for the container with write access to the complete share."""


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """Finding about one part of the installation."""

    part: str
    state: str
    """`right`, `wrong` or `unknown`."""
    text: str
    fix: str = ""
    """Command or change that repairs a wrong part."""


class Kubectl:
    """Kubernetes, read through `kubectl`."""

    def __init__(self, context: str = "", *, run: Callable[..., Any] = subprocess.run) -> None:
        """Store the command without running it.

        An empty `context` means kubectl's current context.
        """
        self._command = ["kubectl", *(["--context", context] if context else [])]
        self._run = run

    def find(self, what: str, *, namespace: str) -> dict[str, Any] | None:
        """Return the object named `kind/name`, or the list of a kind, or None if it is absent.

        Raises:
            TemporaryError: kubectl is absent or failed.
        """
        text = self.call("-n", namespace, "get", *what.split(), "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def call(self, *words: str) -> str:
        """Run kubectl, and return its standard output.

        Raises:
            TemporaryError: kubectl is absent or failed.
        """
        try:
            done = self._run(
                [*self._command, *words], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TemporaryError(f"kubectl does not answer: {error}") from error
        if done.returncode:
            lines = [*done.stdout.strip().splitlines(), *done.stderr.strip().splitlines()]
            # The last line of `kubectl exec` contains only the program's exit code.
            output = [line for line in lines if not line.startswith("command terminated")] or [
                "it failed"
            ]
            raise TemporaryError(f"kubectl: {output[-1]}")
        return str(done.stdout)


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The installation to check."""

    server: KubeflowServer
    cluster: Kubectl
    store: Path | None
    """Path of the model registry on this machine, or None if it is not mounted."""
    clock: Callable[[], float] = time.time

    @property
    def runs_namespace(self) -> str:
        """Namespace of the pipeline's pods."""
        return self.server.namespace or KUBEFLOW


def diagnose(installation: Installation) -> Iterator[PartReport]:
    """Check each part in turn.

    If a part cannot be checked, its state is unknown and the finding contains the reason.
    """
    for part, check in _CHECKS.items():
        try:
            found = list(check(installation))
        except (
            TemporaryError,
            PermanentError,
            ContractError,
            KeyError,
            ValueError,
            TypeError,
        ) as error:
            found = [_unknown(f"{type(error).__name__}: {error}")]
        for state, text, fix in found:
            yield PartReport(part=part, state=state, text=text, fix=fix)


_Found = tuple[str, str, str]


def _right(text: str) -> _Found:
    return RIGHT, text, ""


def _wrong(text: str, fix: str) -> _Found:
    return WRONG, text, fix


def _unknown(text: str) -> _Found:
    return UNKNOWN, text, ""


def _check_api(each: Installation) -> Iterator[_Found]:
    server = each.server
    try:
        has_users, date = server.health()
    except (TemporaryError, PermanentError) as error:
        yield _wrong(
            str(error), f"kubectl -n {KUBEFLOW} port-forward svc/ml-pipeline 8888, and --host"
        )
        return
    if has_users != bool(server.namespace):
        fix = "--namespace PROFILE" if has_users else "leave out --namespace"
        kind = "several users" if has_users else "one user"
        yield _wrong(
            f"{server.host} is an installation of {kind}, namespace is {server.namespace!r}", fix
        )
    else:
        yield _right(f"{server.host} answers")
    if date is None:
        yield _unknown("the server's response has no time")
        return
    skew = each.clock() - date.timestamp()
    text = f"this clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the server's"
    is_right = abs(skew) <= MAX_SKEW_SECONDS
    yield (
        _right(text)
        if is_right
        else _wrong(text, "timedatectl set-ntp true, on the machine whose clock is wrong")
    )


def _check_kubeflow(each: Installation) -> Iterator[_Found]:
    deployment = each.cluster.find("deployment/ml-pipeline", namespace=KUBEFLOW)
    if deployment is None:
        yield _wrong(
            f"namespace {KUBEFLOW} has no deployment ml-pipeline",
            "install it: docs/kubernetes/gke.md, section 5",
        )
        return
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    if version := re.search(r":v?(\d+)\.(\d+)", container["image"]):
        is_new = (int(version[1]), int(version[2])) >= OLDEST_KUBEFLOW
        text = f"Kubeflow Pipelines {version[1]}.{version[2]}"
        yield (
            _right(text)
            if is_new
            else _wrong(text, "security_context: omit in the placement, or 2.16 and newer")
        )
    else:
        yield _unknown(f"image {container['image']} has no version in its name")
    variables = {one["name"]: one.get("value", "") for one in container.get("env", [])}
    patch = variables.get("COMPILED_PIPELINE_SPEC_PATCH", "")
    try:
        policy = (
            json.loads(patch or "{}")
            .get("templateDefaults", {})
            .get("retryStrategy", {})
            .get("retryPolicy")
        )
    except (ValueError, AttributeError):
        policy = None
    if policy == "Always":
        yield _right("failed steps are retried")
    else:
        text = f"failed steps are not retried: COMPILED_PIPELINE_SPEC_PATCH is {patch!r}"
        yield _wrong(text, f"{_SET_SERVER} 'COMPILED_PIPELINE_SPEC_PATCH={RETRY_PATCH}'")
    if (
        account := variables.get("DEFAULTPIPELINERUNNERSERVICEACCOUNT")
    ) == SERVICE_ACCOUNT or each.server.namespace:
        yield _right(f"runs from the page act as {account or 'an account of their profile'}")
    else:
        text = (
            f"runs from the page act as {account or 'pipeline-runner'}, expected {SERVICE_ACCOUNT}"
        )
        yield _wrong(text, f"{_SET_SERVER} DEFAULTPIPELINERUNNERSERVICEACCOUNT={SERVICE_ACCOUNT}")


def _check_rights(each: Installation) -> Iterator[_Found]:
    wanted = [("serviceaccount", SERVICE_ACCOUNT), ("rolebinding", SERVICE_ACCOUNT)]
    if each.server.namespace:
        wanted += [("role", _MONITOR_ROLE), ("rolebinding", _MONITOR_ROLE)]
    for kind, name in wanted:
        what = f"{kind} {each.runs_namespace}/{name}"
        there = each.cluster.find(f"{kind}/{name}", namespace=each.runs_namespace)
        yield (
            _right(what)
            if there
            else _wrong(f"{what} is absent", "kubectl apply -k k8s/overlays/$OVERLAY")
        )


def _check_share(each: Installation) -> Iterator[_Found]:
    for namespace in (NAMESPACE, each.runs_namespace):
        claim = each.cluster.find("pvc/evergreen", namespace=namespace)
        phase = claim["status"]["phase"] if claim else "absent"
        text = f"claim {namespace}/evergreen is {phase}"
        yield (
            _right(text)
            if phase == "Bound"
            else _wrong(text, f"kubectl -n {namespace} describe pvc evergreen")
        )


def _check_modes(each: Installation) -> Iterator[_Found]:
    if each.store:
        found = [
            path
            for path in each.store.rglob("*")
            if path.lstat().st_mode & OPEN_BITS and not path.is_symlink()
        ]
        count, first = len(found), str(found[0]) if found else ""
    else:
        words = ("python", "-c", _OPEN_FILES)
        number, _, first = (
            each.cluster.call("-n", NAMESPACE, "exec", *_CONTROLLER, *words).strip().partition(" ")
        )
        count = int(number)
    if not count:
        yield _right("only the owner of the share can write to it")
        return
    chmod = "chmod -R go-w /evergreen/store /evergreen/work /evergreen/repository"
    fix = f"kubectl -n {NAMESPACE} exec {' '.join(_CONTROLLER)} {chmod}"
    yield _wrong(
        f"{count} files and folders of the share are writable by other users, such as {first}", fix
    )


def _check_pipeline(each: Installation) -> Iterator[_Found]:
    server, fix = each.server, "evergreen submit --package build/retraining.yaml --upload --no-run"
    pipeline_id = server.find_pipeline(PIPELINE_NAME)
    newest = server.newest_version(pipeline_id) if pipeline_id else None
    if newest is None:
        yield _wrong(f"pipeline {PIPELINE_NAME} is not uploaded", fix)
        return
    yield _right(f"the newest version of {PIPELINE_NAME} is {newest.name}")
    with server.requests():
        version = server.client.get_pipeline_version(newest.pipeline_id, newest.version_id)
    spec = version.pipeline_spec or {}
    executors = spec.get("pipeline_spec", spec)["deploymentSpec"]["executors"]
    steps = {one["container"]["image"].rpartition(":")[2] for one in executors.values()}
    monitor = each.cluster.find("deployment/monitor", namespace=NAMESPACE)
    if monitor is None:
        yield _wrong("the monitor is absent", "kubectl apply -k k8s/overlays/$OVERLAY")
        return
    tag = monitor["spec"]["template"]["spec"]["containers"][0]["image"].rpartition(":")[2]
    text = f"steps have images of {', '.join(sorted(steps))}, the monitor of {tag}"
    yield (
        _right(text)
        if steps == {tag}
        else _wrong(text, f"evergreen compile --tag {tag}, then {fix}")
    )


def _check_runs(each: Installation) -> Iterator[_Found]:
    """Find failed runs that left nothing in the registry.

    No other command reports these runs.
    """
    if each.store is None:
        yield _unknown("the model registry is not given, expected --store")
        return
    experiment = each.server.find_experiment(EXPERIMENT)
    if experiment is None:
        yield _unknown(f"experiment {EXPERIMENT} has no run yet")
        return
    failed = each.server.failed_runs(experiment, among=LOOKED_AT_RUNS)
    lost = [run for run in failed if not left_anything(each.store, run.run_id)]
    for run in lost:
        yield _wrong(f"{run.name} left nothing: {run.text}", run.link)
    if not lost:
        yield _right(f"none of the newest {LOOKED_AT_RUNS} runs failed before its first step")


def _check_workloads(each: Installation) -> Iterator[_Found]:
    for name in ("monitor", "release-controller", "triton"):
        found = each.cluster.find(f"deployment/{name}", namespace=NAMESPACE)
        if found is None:
            yield _wrong(f"deployment {name} is absent", "kubectl apply -k k8s/overlays/$OVERLAY")
            continue
        ready, wanted = found["status"].get("readyReplicas", 0), found["spec"].get("replicas", 1)
        text = f"{ready} of {wanted} pods of {name} are ready"
        hint = (
            " (Triton is ready once a model is released)" if name == "triton" and not ready else ""
        )
        fix = f"kubectl -n {NAMESPACE} describe pod -l app.kubernetes.io/name={name}{hint}"
        yield _right(text) if ready == wanted else _wrong(text, fix)
    pods = each.cluster.find("pods", namespace=NAMESPACE) or {"items": []}
    digests: dict[str, set[str]] = {}
    for pod in pods["items"]:
        for status in pod["status"].get("containerStatuses", []):
            digests.setdefault(status["image"], set()).add(status["imageID"].rpartition("@")[2])
    mixed = sorted(image for image, found in digests.items() if len(found) > 1)
    if mixed:
        fix = (
            f"push the image under a new tag, then kubectl -n {NAMESPACE} rollout restart "
            "deployment"
        )
        yield _wrong(f"pods run different images named {mixed[0]}", fix)
    elif digests:
        yield _right(f"each of {len(digests)} images has the same digest in all pods")


def _check_scaling(each: Installation) -> Iterator[_Found]:
    found = each.cluster.find("hpa", namespace=NAMESPACE) or {"items": []}
    if not found["items"]:
        yield _unknown("no autoscaler: the number of Triton's pods is fixed")
    for one in found["items"]:
        name, active = one["metadata"]["name"], None
        for condition in one.get("status", {}).get("conditions", []):
            active = condition if condition["type"] == "ScalingActive" else active
        if active is None:
            yield _unknown(f"autoscaler {name} has not read its metric yet")
        elif active["status"] == "True":
            source = "KEDA" if name.startswith("keda-hpa-") else "an adapter"
            yield _right(f"autoscaler {name} gets its metric from {source}")
        else:
            fix = (
                f"kubectl -n {NAMESPACE} describe hpa {name} (KEDA or adapter, and Prometheus: "
                "docs/kubernetes/autoscaling.md)"
            )
            yield _wrong(f"autoscaler {name} has no metric: {active.get('message', '')}", fix)


def _check_prometheus(each: Installation) -> Iterator[_Found]:
    pods = each.cluster.find(
        "pods -l app.kubernetes.io/name=prometheus", namespace="monitoring"
    ) or {"items": []}
    running = [pod for pod in pods["items"] if pod["status"]["phase"] == "Running"]
    if running:
        yield _right(f"{len(running)} pods of Prometheus run")
    else:
        yield _unknown(
            "namespace monitoring has no running pod of Prometheus, which is right if yours runs "
            "elsewhere"
        )


def _check_log(each: Installation) -> Iterator[_Found]:
    check = ("sh", "-c", 'exec python -m evergreen.events check "$EVERGREEN_MONITOR_LOG"')
    yield _run_in_container(each, "deploy/monitor", "-c", "monitor", "--", *check)


def _check_lake(each: Installation) -> Iterator[_Found]:
    program = _LIST_OBJECTS.format(variable="EVERGREEN_UPLOADER_LAKE")
    yield _run_in_container(each, "deploy/monitor", "-c", "uploader", "--", "python", "-c", program)


def _check_repository(each: Installation) -> Iterator[_Found]:
    yield _run_in_container(
        each, *_CONTROLLER, "python", "-c", _LIST_OBJECTS.format(variable="MODEL_REPOSITORY")
    )


def _run_in_container(each: Installation, *words: str) -> _Found:
    """Run a command in a container, and return a finding about its result.

    The command runs with the permissions and the environment of the container.

    Args:
        each: The installation.
        words: Deployment, `-c`, container, `--` and the command.
    """
    try:
        output = each.cluster.call("-n", NAMESPACE, "exec", *words).strip().splitlines()
    except TemporaryError as error:
        return _wrong(str(error), f"kubectl -n {NAMESPACE} exec {shlex.join(words)}")
    return _right(f"container {words[2]} reaches it" + (f": {output[0]}" if output else ""))


_CHECKS: dict[str, Callable[[Installation], Iterator[_Found]]] = {
    "Kubeflow's API and clock": _check_api,
    "Kubeflow's settings": _check_kubeflow,
    "rights of the steps": _check_rights,
    "share": _check_share,
    "modes of files": _check_modes,
    "pipeline": _check_pipeline,
    "runs": _check_runs,
    "programs": _check_workloads,
    "autoscaler": _check_scaling,
    "Prometheus": _check_prometheus,
    "record log": _check_log,
    "lake": _check_lake,
    "model repository": _check_repository,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(prog="evergreen doctor", description=__doc__)
    parser.add_argument("--host", required=True, help="address of the KFP API")
    parser.add_argument(
        "--namespace", default="", help="namespace, only for a multi-user installation"
    )
    parser.add_argument("--token-file", default="", help="file of the server's token")
    parser.add_argument(
        "--context", default="", help="kubectl's context (default: its current one)"
    )
    parser.add_argument("--store", default="", help="folder of the registry, if it is mounted here")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per part of the installation. Return 1 if a part is wrong, and 0 otherwise."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    server = KubeflowServer(
        arguments.host, namespace=arguments.namespace, token_file=arguments.token_file
    )
    store = typed_folder(arguments.store, "--store") if arguments.store else None
    num_wrong = 0
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC")
    for found in diagnose(
        Installation(server=server, cluster=Kubectl(arguments.context), store=store)
    ):
        print(f"{found.state:8}{found.part}: {found.text}")
        if found.state == WRONG:
            num_wrong += 1
            print(f"        fix: {found.fix}")
    return ExitCode.REFUSED if num_wrong else ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())

"""Define where and how each step runs: image, nodes, GPU, volume, memory, variables, and retries.

The placement for a cluster can be a YAML file with the fields of `Placement`. In this file,
`${NAME}` is replaced by the value from `cluster.env` in the same folder. The cluster's manifests
are rendered from the same values. The runner on a laptop uses the same compiled file, and ignores
volumes, GPUs and limits. `pipelines.retraining` defines the steps and their data flow.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml
from kfp import dsl, kubernetes

from evergreen.config.reader import read_mapping
from evergreen.runtime.errors import ContractError, expect
from evergreen.runtime.kubeflow import POD_NAME, POD_UID
from evergreen.runtime.onnx_runtime import SILENT
from pipelines.images import TRAINING_IMAGES, image_reference
from pipelines.locations import LOCATIONS


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Resources that a step requests."""

    cpu: str
    memory: str
    timeout_seconds: int
    gpu: bool = False


TRAINING_RUNTIME = "evergreen-torch"
"""Name of the training runtime of the Kustomize component `kubeflow-trainer`."""
_MAX_WAIT_SECONDS = 600
"""Maximum wait between two tries in seconds. The wait includes the time until a node and the image
are ready."""

NO_REPOSITORY = "no-repository"
"""Name of the empty volume that covers Triton's model repository in every pod of the pipeline."""

NEEDS = {
    "extraction": Needs(cpu="4", memory="8Gi", timeout_seconds=2 * 3600),
    "validation": Needs(cpu="4", memory="16Gi", timeout_seconds=2 * 3600),
    "preprocessing": Needs(cpu="8", memory="32Gi", timeout_seconds=4 * 3600),
    "training": Needs(cpu="8", memory="32Gi", timeout_seconds=8 * 3600, gpu=True),
    "evaluation": Needs(cpu="4", memory="16Gi", timeout_seconds=3600),
    "deployment": Needs(cpu="2", memory="16Gi", timeout_seconds=1800),
    "run_outcome": Needs(cpu="1", memory="512Mi", timeout_seconds=600),
}
"""Resources of each step. Only training uses a GPU. Preprocessing encodes on CPUs in both of its
images."""


@dataclass(frozen=True, kw_only=True)
class NeedsChange:
    """Changes to the resources (`NEEDS`) of one step. A value of None keeps the default."""

    cpu: str | None = None
    memory: str | None = None
    timeout_seconds: int | None = None


@dataclass(frozen=True, kw_only=True)
class Toleration:
    """Toleration for one taint of nodes."""

    key: str
    operator: typing.Literal["Exists", "Equal"] = "Exists"
    """`Exists` tolerates any value of the taint. `Equal` tolerates only the value in `value`."""
    value: str = ""
    effect: typing.Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Nodes on which a step's pods may run."""

    selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have. If there are none, any node is used."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the pods tolerate."""


@dataclass(frozen=True, kw_only=True)
class Variables:
    """Environment variables from a Secret of the pipeline's namespace.

    The Secret is optional. Without the Secret, the pod starts without these variables.
    """

    name: str
    """Name of the Secret."""
    keys: Mapping[str, str]
    """Name of the environment variable for each key of the Secret."""
    steps: tuple[str, ...] = ()
    """Steps whose pods get the variables. Empty means all."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Properties of the cluster, fixed when the pipeline is compiled."""

    registry: str = ""
    """Prefix of the images, such as `europe-docker.pkg.dev/project/repository`. An empty text means
    local image names."""
    tag: str = "dev"
    """Tag of the images. On a cluster, the tag is the git revision and never `latest`."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets with credentials for the image registry, if the nodes' own credentials are
    not sufficient."""
    volume: str = "evergreen"
    """Name of a ReadWriteMany volume claim for the work files and the model registry. If the lake
    is not in a bucket, it is on this volume too."""
    mount_path: str = "/evergreen"
    """Folder in the pods where the volume is mounted."""
    accelerator: str = "nvidia.com/gpu"
    """Kubernetes resource of the GPUs for the training step. An empty text means no GPU. On GKE, a
    MIG slice is also called `nvidia.com/gpu`, and `gpu_nodes` selects its nodes by their partition
    size. With the strategy `mixed`, NVIDIA's device plugin names a slice by its size, such as
    `nvidia.com/mig-1g.5gb`."""
    gpu_nodes: Nodes = Nodes(tolerations=(Toleration(key="nvidia.com/gpu"),))
    """Nodes for steps that request an accelerator. The setting has no effect without an
    accelerator."""
    cpu_nodes: Nodes = Nodes()
    """Nodes for all other steps."""
    shared_memory: str = "8Gi"
    """Size of /dev/shm in the steps with a GPU. This size counts as memory of the step."""
    needs: Mapping[str, NeedsChange] = field(default_factory=dict)
    """Changed resources of steps, by the name of the step."""
    run_as_user: int | None = None
    """User id for the steps' containers. With a user id, the containers cannot run as root. With
    None, the containers have the image's own user, and root is not refused. The images of this
    project use the user id 10001."""
    security_context: typing.Literal["set", "omit"] = "set"
    """Whether the pods get the settings of `run_as_user`. Set `omit` for Kubeflow Pipelines before
    2.16, which refuses pods with a security context."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Additional labels of the steps' pods, such as a cost centre."""
    secrets: tuple[Variables, ...] = ()
    """Environment variables from Secrets."""
    lake: str = ""
    """Folder or gs://bucket/prefix of the click logs, with day=YYYY-MM-DD partitions of Parquet. An
    empty text means the folder `lake` on the volume."""
    store: str = ""
    """Folder of the model registry: models, releases, promotion journal, notes of runs. An empty
    text means the folder `store` on the volume."""
    work: str = ""
    """Folder for the runs' intermediate files. An empty text means the folder `work` on the
    volume."""
    server: typing.Literal["onnxruntime", "python"] = "onnxruntime"
    """Serving runtime. `onnxruntime` is in NGC's Triton images, and `python` is in the server that
    is bundled for laptops."""
    device: typing.Literal["cpu", "gpu"] = "cpu"
    """Device on which onnxruntime runs. A MIG slice is a GPU."""
    backend: typing.Literal["pytorch", "hugectr", "torchrec"] = "pytorch"
    """Training engine. The training step runs in the image of this engine."""
    fbgemm: typing.Literal["cpu", "gpu"] = "cpu"
    """Build of FBGEMM (TorchRec's kernels) in the training image. Set `gpu` if the image was built
    with `--build-arg FBGEMM=fbgemm-gpu`. The backend `torchrec` needs this build if there is an
    accelerator."""
    training_gpus: int = 1
    """Number of GPUs of the training step, which share each batch. Only `hugectr` and `torchrec`
    support more than one GPU."""
    training_processes: int = 1
    """Number of processes of the training step, which share each batch. Only `torchrec` supports
    more than one process. With an accelerator, the number of processes must equal the number of
    GPUs."""
    trainer: typing.Literal["step", "kubeflow"] = "step"
    """Place of training: the step's own pod, or a TrainJob of Kubeflow Trainer that the step
    creates and follows. The TrainJob uses the runtimes of the Kustomize component
    `kubeflow-trainer`."""
    training_nodes: int = 1
    """Number of pods of the TrainJob, each with `training_gpus`. Only `torchrec` supports more than
    one pod."""
    served: str = ""
    """Folder or gs://bucket/prefix of the archive of served rows. Validation compares the training
    rows with these rows. An empty text means no comparison."""
    extraction_dask_scheduler: str = ""
    """Address of a running Dask scheduler whose workers have extraction's image. With an empty
    text, the step uses processes in its own pod."""
    preprocessing_dask_scheduler: str = ""
    """Address of a running Dask scheduler whose workers have preprocessing's image. With an empty
    text, the step uses processes in its own pod."""
    beam_options: str = ""
    """Beam pipeline options for statistics of very large windows, such as
    `--runner=DataflowRunner`. With an empty text, the step computes the statistics in its own
    process."""
    num_retries: int = 2
    """Number of retries of a step, whatever its exit code. Steps replace their own partial output.
    If a pod vanishes together with its node, it has no exit code. KFP retries a pod without an exit
    code only if its API server is configured with `retryPolicy: Always`
    (docs/kubernetes/kfp-runs.md)."""
    training_retries: int = 4
    """Number of retries of training, the longest step. A retry resumes from the checkpoint, so that
    the loss of a node costs only minutes. Choose a larger number for preemptible nodes. Retry n,
    counted from 0, delays the report of a permanent error by 10 s * 3^n. The four default retries
    delay the report by 7 minutes."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "training_gpus", "training_processes")
        if self.training_gpus > 1 and self.backend == "pytorch":
            raise ContractError(
                f"training_gpus is {self.training_gpus}, expected 1 with backend {self.backend}; "
                "only hugectr and torchrec train on several GPUs"
            )
        if self.training_processes > 1 and self.backend != "torchrec":
            raise ContractError(
                f"training_processes is {self.training_processes}, expected 1 with backend "
                f"{self.backend}; only torchrec trains in several processes"
            )
        if self.backend == "torchrec" and self.accelerator and self.fbgemm != "gpu":
            raise ContractError(
                f"fbgemm is {self.fbgemm!r}, expected 'gpu' for backend torchrec with accelerator "
                f"{self.accelerator!r}. Build the training image with --build-arg "
                "FBGEMM=fbgemm-gpu, because its default FBGEMM has only CPU kernels"
            )
        if (
            self.backend == "torchrec"
            and self.accelerator
            and self.training_processes != self.training_gpus
        ):
            raise ContractError(
                f"training_processes is {self.training_processes} with {self.training_gpus} "
                "training_gpus, expected equal numbers: backend torchrec has one process for each "
                "GPU"
            )
        many = self.trainer == "kubeflow" and self.backend == "torchrec"
        if self.training_nodes < 1 or (self.training_nodes > 1 and not many):
            raise ContractError(
                f"training_nodes is {self.training_nodes} with trainer {self.trainer} and backend "
                f"{self.backend}, expected 1: several nodes need trainer kubeflow and backend "
                "torchrec"
            )
        if self.backend == "hugectr" and not self.accelerator:
            raise ContractError(
                "backend is hugectr without an accelerator, expected an accelerator: hugectr "
                "trains only on GPUs"
            )
        named = [*self.needs, *(step for each in self.secrets for step in each.steps)]
        if unknown := [step for step in named if step not in NEEDS]:
            raise ContractError(f"step is {unknown[0]!r}, expected one of {', '.join(NEEDS)}")

    def needs_of(self, step: str) -> Needs:
        """Return the resources of `step` on this cluster.

        For training, these are the resources of each pod.
        """
        change = dataclasses.asdict(self.needs.get(step, NeedsChange()))
        return dataclasses.replace(
            NEEDS[step], **{name: value for name, value in change.items() if value is not None}
        )

    def nodes_of(self, needs: Needs) -> Nodes:
        """Return the nodes for pods with these needs."""
        return self.gpu_nodes if needs.gpu and self.accelerator else self.cpu_nodes

    @property
    def locations(self) -> dict[str, str]:
        """Folders and servers of the runs. The keys are names of step arguments."""
        folders = {name: f"{self.mount_path}/{name}" for name in ("lake", "store", "work")}
        return {name: getattr(self, name) or folders.get(name, "") for name in LOCATIONS}


def configure_task(task: dsl.PipelineTask, step: str, placement: Placement) -> dsl.PipelineTask:
    """Configure the task of `step` according to the placement, and return the task."""
    needs, follows = (
        placement.needs_of(step),
        step == "training" and placement.trainer == "kubeflow",
    )
    if follows:
        needs = dataclasses.replace(needs, cpu="1", memory="1Gi", gpu=False)
        for variable, path in ((POD_NAME, "metadata.name"), (POD_UID, "metadata.uid")):
            kubernetes.use_field_path_as_env(task, variable, path)
    image = TRAINING_IMAGES[placement.backend] if step == "training" else step
    task.set_container_image(image_reference(image, registry=placement.registry, tag=placement.tag))
    task.set_display_name(step.replace("_", " "))
    for name, value in SILENT.items():
        task.set_env_variable(name, value)
    task.set_cpu_limit(needs.cpu)
    task.set_memory_limit(needs.memory)
    # Disable caching for all steps. The run's name is an argument of every task, and outputs are
    # stored under this name, so a cached output would belong to another run.
    task.set_caching_options(False)
    num_retries = placement.training_retries if step == "training" else placement.num_retries
    if num_retries:
        # Argo measures the timeout from the start of the first try. The limit must cover all tries,
        # each with its maximum time. With a lower limit, Argo would end or skip a retry.
        longest = (num_retries + 1) * (needs.timeout_seconds + _MAX_WAIT_SECONDS)
        task.set_retry(
            num_retries,
            backoff_duration="10s",
            backoff_factor=3.0,
            backoff_max_duration=f"{longest}s",
        )
    uses_gpu = needs.gpu and bool(placement.accelerator)
    if uses_gpu:
        task.set_accelerator_type(placement.accelerator)
        task.set_accelerator_limit(placement.training_gpus if step == "training" else 1)
    nodes = placement.nodes_of(needs)
    for key, value in nodes.selector.items():
        kubernetes.add_node_selector(task, label_key=key, label_value=value)
    for each in nodes.tolerations:
        kubernetes.add_toleration(
            task, key=each.key, operator=each.operator, value=each.value or None, effect=each.effect
        )
    if uses_gpu:
        # NCCL exchanges gradients between GPUs over shared memory. The default size of 64 MB on
        # Kubernetes is too small for this exchange.
        kubernetes.empty_dir_mount(
            task,
            volume_name="shared-memory",
            mount_path="/dev/shm",
            medium="Memory",
            size_limit=placement.shared_memory,
        )
    kubernetes.set_timeout(task, needs.timeout_seconds)
    kubernetes.mount_pvc(task, pvc_name=placement.volume, mount_path=placement.mount_path)
    # Only the controller changes Triton's model repository. If the repository is on the volume, an
    # empty folder covers it.
    kubernetes.empty_dir_mount(
        task,
        volume_name=NO_REPOSITORY,
        mount_path=f"{placement.mount_path}/repository",
        size_limit="1Mi",
    )
    _label(task, step, placement)
    _set_access(task, step, placement)
    return task


def _label(task: dsl.PipelineTask, step: str, placement: Placement) -> None:
    """Set the pod's labels. KFP adds the label `pipeline/runid` with the id of the run."""
    kubernetes.add_pod_label(task, "app.kubernetes.io/part-of", "evergreen")
    kubernetes.add_pod_label(task, "app.kubernetes.io/component", step.replace("_", "-"))
    for key, value in placement.labels.items():
        kubernetes.add_pod_label(task, key, value)


def _set_access(task: dsl.PipelineTask, step: str, placement: Placement) -> None:
    """Set the container's user, the registry's credentials and the step's variables."""
    if placement.run_as_user is not None and placement.security_context == "set":
        kubernetes.set_security_context(
            task, run_as_user=placement.run_as_user, run_as_non_root=True
        )
    if placement.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(placement.image_pull_secrets))
    for each in placement.secrets:
        if not each.steps or step in each.steps:
            kubernetes.use_secret_as_env(task, each.name, dict(each.keys), optional=True)


def train_job_spec(placement: Placement) -> str:
    """Return the specification of the training's TrainJob as JSON, without the workers' flags.

    Returns "" if training runs in the step's own pod.
    """
    if placement.trainer != "kubeflow":
        return ""
    needs, by_torch = placement.needs_of("training"), placement.backend != "hugectr"
    limits = {"cpu": needs.cpu, "memory": needs.memory}
    if placement.accelerator:
        limits[placement.accelerator] = str(placement.training_gpus)
    variables: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in SILENT.items()
    ]
    for each in placement.secrets:
        if not each.steps or "training" in each.steps:
            variables += [
                {
                    "name": name,
                    "valueFrom": {
                        "secretKeyRef": {"name": each.name, "key": key, "optional": True}
                    },
                }
                for key, name in each.keys.items()
            ]
    image = TRAINING_IMAGES[placement.backend]
    trainer = {
        "image": image_reference(image, registry=placement.registry, tag=placement.tag),
        "command": ["torchrun" if by_torch else "python", "-m", "components.training"],
        "env": variables,
        "numNodes": placement.training_nodes,
        "numProcPerNode": placement.training_processes,
        "resourcesPerNode": {"limits": limits},
    }
    pods = [{"name": "node", "template": {"spec": {"template": _pods_patch(placement, needs)}}}]
    patch = {"template": {"spec": {"replicatedJobs": pods}}}
    spec = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": TRAINING_RUNTIME,
        },
        "trainer": trainer,
        "runtimePatches": [{"manager": "evergreen/training", "trainingRuntimeSpec": patch}],
        "activeDeadlineSeconds": needs.timeout_seconds,
    }
    return json.dumps(spec)


def _pods_patch(placement: Placement, needs: Needs) -> dict[str, Any]:
    """Return the patch for the pods that a TrainJob's runtime creates."""
    nodes = placement.nodes_of(needs)
    tolerations = [
        {name: of for name, of in dataclasses.asdict(each).items() if of}
        for each in nodes.tolerations
    ]
    memory = {"medium": "Memory", "sizeLimit": placement.shared_memory}
    volumes = [
        {"name": "share", "persistentVolumeClaim": {"claimName": placement.volume}},
        {"name": NO_REPOSITORY, "emptyDir": {"sizeLimit": "1Mi"}},
        {"name": "shared-memory", "emptyDir": memory},
    ]
    mounts = {
        "share": placement.mount_path,
        NO_REPOSITORY: f"{placement.mount_path}/repository",
        "shared-memory": "/dev/shm",
    }
    spec = {
        "nodeSelector": dict(nodes.selector),
        "tolerations": tolerations,
        "volumes": volumes,
        "containers": [
            {
                "name": "node",
                "volumeMounts": [
                    {"name": name, "mountPath": path} for name, path in mounts.items()
                ],
            }
        ],
        "imagePullSecrets": [{"name": name} for name in placement.image_pull_secrets],
    }
    if placement.run_as_user is not None:
        spec["securityContext"] = {"runAsUser": placement.run_as_user, "runAsNonRoot": True}
    return {"metadata": {"labels": dict(placement.labels)}, "spec": spec}


_VALUES_FILE = "cluster.env"


def read_placement(path: Path | None, overrides: Mapping[str, Any]) -> Placement:
    """Return the placement of the file `path`, changed by `overrides`.

    Args:
        path: YAML file, or None for the defaults.
        overrides: Values that replace fields of the file, such as values of a command's flags.

    Raises:
        ContractError: the file cannot be read, is not a mapping, has an unknown field or a wrong
            type, or names a value that `cluster.env` lacks. This error is also raised if two fields
            contradict each other.
    """
    fields: Any = dict(overrides)
    if path:
        try:
            fields = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ContractError(f"placement {path} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ContractError(
                f"placement {path} is not YAML: {' '.join(str(error).split())}"
            ) from error
        if not isinstance(fields, dict):
            raise ContractError(f"placement {path} is {fields!r}, expected a mapping of fields")
        fields = _with_values({**fields, **overrides}, path.with_name(_VALUES_FILE))
    try:
        return read_mapping(Placement, fields, path="placement")
    except ContractError as error:
        raise ContractError(f"{path}: {error}" if path else str(error)) from error


def read_values(path: Path) -> dict[str, str]:
    """Return the NAME=VALUE lines of an env file, as kustomize reads them.

    A line that starts with `#` is a comment. Quotes are part of the value.

    Raises:
        ContractError: the file cannot be read, or a line has no `=`.
    """
    values: dict[str, str] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"{path} cannot be read: {error}") from error
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition("=")
        if not separator:
            raise ContractError(f"{path}: line {line!r} has no '=', expected NAME=VALUE")
        values[name.strip()] = value.strip()
    return values


def _with_values(value: Any, source: Path) -> Any:
    """Return a copy of `value` in which each `${NAME}` is replaced, at any depth.

    The file `source` is read only if a `${NAME}` occurs.
    """
    if isinstance(value, dict):
        return {key: _with_values(each, source) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_values(each, source) for each in value]
    if not isinstance(value, str) or "$" not in value:
        return value
    try:
        return Template(value).substitute(read_values(source))
    except KeyError as error:
        raise ContractError(f"{value!r} names {error.args[0]}, which {source} lacks") from error
    except ValueError as error:
        raise ContractError(
            f"{value!r} contains a '$' without a name, expected ${{NAME}}"
        ) from error

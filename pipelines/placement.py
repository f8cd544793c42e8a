"""Where each step runs and with what: image, nodes, GPU, volume, memory, variables, user, retries, timeout, caching.

A cluster's placement may be a YAML file with the fields of `Placement`, in which `${NAME}` is replaced by the value
from `cluster.env` beside it; the cluster's manifests are rendered from the same values. The laptop's runner ignores
what a laptop does not have (volumes, GPUs, limits); the compiled file is the same. What the steps do and how data flows
between them is `pipelines.retraining`'s.
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
from pipelines.places import PLACES


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one step asks of the node that runs it."""

    cpu: str
    memory: str
    timeout_seconds: int
    gpu: bool = False


TRAINING_RUNTIME = "evergreen-torch"
"""Of component `kubeflow-trainer`."""
MAX_WAIT_SECONDS = 600
"""Between two tries, and for a node and the image to be there."""

NEEDS = {
    "extraction": Needs(cpu="4", memory="8Gi", timeout_seconds=2 * 3600),
    "validation": Needs(cpu="4", memory="16Gi", timeout_seconds=2 * 3600),
    "preprocessing": Needs(cpu="8", memory="32Gi", timeout_seconds=4 * 3600),
    "training": Needs(cpu="8", memory="32Gi", timeout_seconds=8 * 3600, gpu=True),
    "evaluation": Needs(cpu="4", memory="16Gi", timeout_seconds=3600),
    "deployment": Needs(cpu="2", memory="16Gi", timeout_seconds=1800),
    "run_outcome": Needs(cpu="1", memory="512Mi", timeout_seconds=600),
}
"""Only training computes on a GPU: preprocessing encodes on CPU in either of its images."""


@dataclass(frozen=True, kw_only=True)
class NeedsChange:
    """What one step asks for instead of its `NEEDS`; None = as it stands there."""

    cpu: str | None = None
    memory: str | None = None
    timeout_seconds: int | None = None


@dataclass(frozen=True, kw_only=True)
class Toleration:
    """One taint that a pod may be scheduled in spite of."""

    key: str
    operator: typing.Literal["Exists", "Equal"] = "Exists"
    """`Exists`: whatever the taint's value; `Equal`: that `value`."""
    value: str = ""
    effect: typing.Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Which nodes take a step's pods."""

    selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have; empty = any node."""
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Variables:
    """Environment variables from a Secret of the pipeline's namespace.

    Always optional: without the object the pod starts, and the variable is absent.
    """

    name: str
    """Of the Secret."""
    keys: Mapping[str, str]
    """Its keys -> names of variables."""
    steps: tuple[str, ...] = ()
    """Steps that get them; empty = all."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The cluster's side of the pipeline; fixed when it is compiled."""

    registry: str = ""
    """Prefix of the images, such as `europe-docker.pkg.dev/project/repository`; empty = local names."""
    tag: str = "dev"
    """Tag of the images; on a cluster the git revision, never `latest`."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with the registry's credentials, where the nodes' own do not suffice."""
    volume: str = "evergreen"
    """Name of the ReadWriteMany volume claim that holds work and model store, and the lake where it is no bucket's."""
    mount_path: str = "/evergreen"
    accelerator: str = "nvidia.com/gpu"
    """Extended resource asked for by training; empty = none. GKE offers a MIG slice as `nvidia.com/gpu` too, on
    nodes that `gpu_nodes` selects by their partition size; NVIDIA's device plugin in its mixed strategy names it, such
    as `nvidia.com/mig-1g.5gb`."""
    gpu_nodes: Nodes = Nodes(tolerations=(Toleration(key="nvidia.com/gpu"),))
    """For the steps that ask for the accelerator; of no effect without one."""
    cpu_nodes: Nodes = Nodes()
    """For all other steps."""
    shared_memory: str = "8Gi"
    """Size of /dev/shm of the steps with a GPU; counts against their memory."""
    needs: Mapping[str, NeedsChange] = field(default_factory=dict)
    """Step -> what it asks for instead of `NEEDS`."""
    run_as_user: int | None = None
    """User id of the steps' containers, which are then refused as root; None = the image's own user, unchecked. The
    images' own user is 10001."""
    security_context: typing.Literal["set", "omit"] = "set"
    """Whether the steps' tasks carry `run_as_user`. Kubeflow Pipelines before 2.16 refuses them with it: `omit`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of the pods, such as a cost centre."""
    secrets: tuple[Variables, ...] = ()
    lake: str = ""
    """The click logs, day=YYYY-MM-DD partitions of Parquet in a folder or gs://bucket/prefix; empty = `lake` on the
    volume."""
    store: str = ""
    """Folder of the model registry: models, releases, promotion journal, notes of runs; empty = `store` on the
    volume."""
    work: str = ""
    """Folder for the runs' intermediate files; empty = `work` on the volume."""
    repository: str = ""
    """Triton's model repository, folder or gs://bucket/prefix; empty = `repository` on the volume."""
    triton_urls: str = ""
    """Triton servers to load a new version, each host:grpc_port or dns:///name:grpc_port (every address of a headless
    Service), comma-separated; empty = it is only published."""
    server: typing.Literal["onnxruntime", "python"] = "onnxruntime"
    """Which Triton serves the model: NGC's images, or the server bundled for laptops."""
    device: typing.Literal["cpu", "gpu"] = "cpu"
    """What onnxruntime runs on; a MIG slice is a GPU."""
    backend: typing.Literal["pytorch", "hugectr", "torchrec"] = "pytorch"
    """Which trainer the training step runs, in its image."""
    training_gpus: int = 1
    """GPUs of the training step, which share a batch; more than one only for `hugectr` and `torchrec`."""
    training_processes: int = 1
    """Processes of the training step, which share a batch; more than one only for `torchrec`, and with an accelerator
    as many as GPUs."""
    trainer: typing.Literal["step", "kubeflow"] = "step"
    """Where training runs: in the step's own pod, or as a TrainJob of Kubeflow Trainer that the step creates and
    follows, by the runtimes of component `kubeflow-trainer`."""
    training_nodes: int = 1
    """Pods of the TrainJob, each with `training_gpus`; more than one only for `torchrec`."""
    served: str = ""
    """Archive of served rows that training rows are compared with, folder or gs://bucket/prefix; empty = they are not
    compared."""
    extraction_dask_scheduler: str = ""
    """Address of a running Dask scheduler whose workers have extraction's image; empty = the step's own processes."""
    preprocessing_dask_scheduler: str = ""
    """The same of preprocessing."""
    beam_options: str = ""
    """Beam pipeline options for statistics of very large windows, such as `--runner=DataflowRunner`; empty = the step's
    own process."""
    num_retries: int = 2
    """Tries after the first, whatever the exit code: steps replace their own partial output. A pod that vanished with
    its node has no exit code; KFP tries any of them again only where its API server was told
    `retryPolicy: Always` (docs/pipeline.md)."""
    training_retries: int = 4
    """The same of training, which is the longest step and goes on from its checkpoint, so that each loss of a node
    costs it minutes. More on nodes that come and go; an error that no try can mend is reported 10 s * 3^n
    later for each, with 4 of them after 7 minutes."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "training_gpus", "training_processes")
        if self.training_gpus > 1 and self.backend == "pytorch":
            raise ContractError(
                f"training_gpus is {self.training_gpus} with backend {self.backend}, which trains on one GPU; "
                "expected 1, or backend hugectr or torchrec"
            )
        if self.training_processes > 1 and self.backend != "torchrec":
            raise ContractError(
                f"training_processes is {self.training_processes} with backend {self.backend}, which trains in one "
                "process; expected 1, or backend torchrec"
            )
        if self.backend == "torchrec" and self.accelerator and self.training_processes != self.training_gpus:
            raise ContractError(
                f"training_processes is {self.training_processes} with {self.training_gpus} training_gpus, expected as "
                "many: backend torchrec has a process for each GPU"
            )
        many = self.trainer == "kubeflow" and self.backend == "torchrec"
        if self.training_nodes < 1 or (self.training_nodes > 1 and not many):
            raise ContractError(
                f"training_nodes is {self.training_nodes} with trainer {self.trainer} and backend {self.backend}, "
                "expected 1, or more with trainer kubeflow and a backend that trains on several nodes"
            )
        if self.backend == "hugectr" and not self.accelerator:
            raise ContractError("backend is hugectr without an accelerator, expected one: it trains on GPUs only")
        named = [*self.needs, *(step for each in self.secrets for step in each.steps)]
        if unknown := [step for step in named if step not in NEEDS]:
            raise ContractError(f"step {unknown[0]!r} is none of {', '.join(NEEDS)}")

    def needs_of(self, step: str) -> Needs:
        """What `step` asks for on this cluster; of training, what each of its pods does."""
        change = dataclasses.asdict(self.needs.get(step, NeedsChange()))
        return dataclasses.replace(NEEDS[step], **{name: value for name, value in change.items() if value is not None})

    def nodes_of(self, needs: Needs) -> Nodes:
        """The nodes for pods with these needs."""
        return self.gpu_nodes if needs.gpu and self.accelerator else self.cpu_nodes

    @property
    def places(self) -> dict[str, str]:
        """Where runs read and write and what they release to, by name of the steps' arguments."""
        folders = {name: f"{self.mount_path}/{name}" for name in ("lake", "store", "work", "repository")}
        return {name: getattr(self, name) or folders.get(name, "") for name in PLACES}


def place(task: dsl.PipelineTask, step: str, placement: Placement) -> dsl.PipelineTask:
    """Applies the image, nodes, resources, volume, variables, retries and timeout of `step` to its task; returns it."""
    needs, follows = placement.needs_of(step), step == "training" and placement.trainer == "kubeflow"
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
    # Outputs lie under the run's name, which every task takes, so a cached one would be another run's: off for all.
    task.set_caching_options(False)
    num_retries = placement.training_retries if step == "training" else placement.num_retries
    if num_retries:
        # Argo counts this limit from the start of the first try, and the tries themselves into it: less than all of
        # them at their longest would end a retry, or forbid it, in the middle of its work.
        longest = (num_retries + 1) * (needs.timeout_seconds + MAX_WAIT_SECONDS)
        task.set_retry(num_retries, backoff_duration="10s", backoff_factor=3.0, backoff_max_duration=f"{longest}s")
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
        # NCCL exchanges gradients between GPUs over shared memory; Kubernetes gives 64 MB by default.
        kubernetes.empty_dir_mount(
            task,
            volume_name="shared-memory",
            mount_path="/dev/shm",
            medium="Memory",
            size_limit=placement.shared_memory,
        )
    kubernetes.set_timeout(task, needs.timeout_seconds)
    kubernetes.mount_pvc(task, pvc_name=placement.volume, mount_path=placement.mount_path)
    _label(task, step, placement)
    _let_in(task, step, placement)
    return task


def _label(task: dsl.PipelineTask, step: str, placement: Placement) -> None:
    """The pod's labels; the run's own id is `pipeline/runid`, which KFP adds."""
    kubernetes.add_pod_label(task, "app.kubernetes.io/part-of", "evergreen")
    kubernetes.add_pod_label(task, "app.kubernetes.io/component", step.replace("_", "-"))
    for key, value in placement.labels.items():
        kubernetes.add_pod_label(task, key, value)


def _let_in(task: dsl.PipelineTask, step: str, placement: Placement) -> None:
    """The container's user, the registry's credentials and the step's variables."""
    if placement.run_as_user is not None and placement.security_context == "set":
        kubernetes.set_security_context(task, run_as_user=placement.run_as_user, run_as_non_root=True)
    if placement.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(placement.image_pull_secrets))
    for each in placement.secrets:
        if not each.steps or step in each.steps:
            kubernetes.use_secret_as_env(task, each.name, dict(each.keys), optional=True)


def train_job_spec(placement: Placement) -> str:
    """The spec of training's TrainJob as JSON, but for the workers' flags; empty where the step's own pod trains."""
    if placement.trainer != "kubeflow":
        return ""
    needs, by_torch = placement.needs_of("training"), placement.backend != "hugectr"
    limits = {"cpu": needs.cpu, "memory": needs.memory}
    if placement.accelerator:
        limits[placement.accelerator] = str(placement.training_gpus)
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in SILENT.items()]
    for each in placement.secrets:
        if not each.steps or "training" in each.steps:
            variables += [
                {"name": name, "valueFrom": {"secretKeyRef": {"name": each.name, "key": key, "optional": True}}}
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
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": TRAINING_RUNTIME},
        "trainer": trainer,
        "runtimePatches": [{"manager": "evergreen/training", "trainingRuntimeSpec": patch}],
        "activeDeadlineSeconds": needs.timeout_seconds,
    }
    return json.dumps(spec)


def _pods_patch(placement: Placement, needs: Needs) -> dict[str, Any]:
    """What the pods of a TrainJob have beyond its runtime's."""
    nodes = placement.nodes_of(needs)
    tolerations = [{name: of for name, of in dataclasses.asdict(each).items() if of} for each in nodes.tolerations]
    memory = {"medium": "Memory", "sizeLimit": placement.shared_memory}
    volumes = [
        {"name": "share", "persistentVolumeClaim": {"claimName": placement.volume}},
        {"name": "shared-memory", "emptyDir": memory},
    ]
    mounts = {"share": placement.mount_path, "shared-memory": "/dev/shm"}
    spec = {
        "nodeSelector": dict(nodes.selector),
        "tolerations": tolerations,
        "volumes": volumes,
        "containers": [
            {"name": "node", "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()]}
        ],
        "imagePullSecrets": [{"name": name} for name in placement.image_pull_secrets],
    }
    if placement.run_as_user is not None:
        spec["securityContext"] = {"runAsUser": placement.run_as_user, "runAsNonRoot": True}
    return {"metadata": {"labels": dict(placement.labels)}, "spec": spec}


VALUES_FILE = "cluster.env"


def read_placement(path: Path | None, overrides: Mapping[str, Any]) -> Placement:
    """The placement in `path`, with `overrides` over it.

    Overrides are fields that were given otherwise, such as on a command line; one of text may be `${NAME}` no longer.
    Without a path there are the defaults.

    Raises:
        ContractError: the file cannot be read, is no mapping, has an unknown field or a wrong type, names a value that
            `cluster.env` lacks, or describes a placement that cannot work.
    """
    fields: Any = dict(overrides)
    if path:
        try:
            fields = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ContractError(f"placement {path} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ContractError(f"placement {path} is no YAML: {' '.join(str(error).split())}") from error
        if not isinstance(fields, dict):
            raise ContractError(f"placement {path} is {fields!r}, expected a mapping of fields")
        fields = _with_values({**fields, **overrides}, path.with_name(VALUES_FILE))
    try:
        return read_mapping(Placement, fields, path="placement")
    except ContractError as error:
        raise ContractError(f"{path}: {error}" if path else str(error)) from error


def read_values(path: Path) -> dict[str, str]:
    """NAME=VALUE lines, as kustomize reads an env file: `#` opens a comment, quotes are part of the value.

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
    """`value` with its `${NAME}`s replaced, at any depth; the file is read only where there is one."""
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
        raise ContractError(f"{value!r} holds a '$' that begins no ${{NAME}}") from error

"""Where each step runs and with what: image, shared volume, GPU, memory, retries, timeout, caching.

The laptop's runner ignores what a laptop has not (volumes, GPUs, limits); the compiled file is the same. What the
steps do and how data flows between them is `pipelines.retraining`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kfp import dsl, kubernetes

from components.contracts.errors import ContractError
from pipelines.images import TRAINING_IMAGES, image_reference


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The cluster's side of the pipeline; fixed when it is compiled."""

    registry: str = ""
    """Prefix of the images, such as `europe-docker.pkg.dev/project/repository`; empty = local names."""
    tag: str = "dev"
    """Tag of the images; on a cluster the git revision, never `latest`."""
    volume: str = "evergreen"
    """Name of the ReadWriteMany volume claim that holds lake, work and model store."""
    mount_path: str = "/evergreen"
    accelerator: str = "nvidia.com/gpu"
    """Extended resource asked for by the GPU steps, such as `nvidia.com/mig-1g.5gb`; empty = none."""
    backend: str = "pytorch"
    """Which trainer's image runs the training step, and the default of the pipeline's parameter of that name."""
    training_gpus: int = 1
    """GPUs of the training step; more than one only for `hugectr`, whose setting `vvgpu` then names them."""
    num_retries: int = 2
    """Tries after the first, whatever the exit code: steps replace their own partial output. A pod that vanished with
    its node has no exit code; Argo tries it again only where the workflow controller's defaults say
    `retryPolicy: Always`."""
    training_retries: int = 4
    """The same of training, which is the longest step and goes on from its checkpoint, so that each loss of a node
    costs it minutes. More on nodes that come and go; an error that no try can mend waits 10 s * 3^n longer for each
    to be told, with 4 of them 7 minutes."""

    def __post_init__(self) -> None:
        """Refuses GPUs that nobody would use."""
        if self.training_gpus < 1:
            raise ContractError(f"training_gpus is {self.training_gpus}, expected at least 1")
        if self.training_gpus > 1 and self.backend != "hugectr":
            raise ContractError(
                f"training_gpus is {self.training_gpus} with backend {self.backend}, which trains on one GPU; "
                "expected 1, or backend hugectr"
            )

    @property
    def solver(self) -> str:
        """Default of the pipeline's parameter of that name: HugeCTR trains on all GPUs of its step."""
        return "" if self.training_gpus == 1 else json.dumps({"vvgpu": [list(range(self.training_gpus))]})


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one step asks of the node that runs it."""

    cpu: str
    memory: str
    timeout_seconds: int
    gpu: bool = False


MAX_WAIT_SECONDS = 600
"""Between two tries, and for a node and the image to be there."""

NEEDS = {
    "extraction": Needs(cpu="4", memory="8Gi", timeout_seconds=2 * 3600),
    "validation": Needs(cpu="4", memory="16Gi", timeout_seconds=2 * 3600),
    "preprocessing": Needs(cpu="8", memory="32Gi", timeout_seconds=4 * 3600, gpu=True),
    "training": Needs(cpu="8", memory="32Gi", timeout_seconds=8 * 3600, gpu=True),
    "evaluation": Needs(cpu="4", memory="16Gi", timeout_seconds=3600),
    "deployment": Needs(cpu="2", memory="16Gi", timeout_seconds=1800),
    "run_outcome": Needs(cpu="1", memory="512Mi", timeout_seconds=600),
}


def place(task: dsl.PipelineTask, step: str, placement: Placement) -> dsl.PipelineTask:
    """Applies the image, resources, volume, retries and timeout of `step` to its task; returns the task."""
    needs = NEEDS[step]
    image = TRAINING_IMAGES[placement.backend] if step == "training" else step
    task.set_container_image(image_reference(image, registry=placement.registry, tag=placement.tag))
    task.set_display_name(step.replace("_", " "))
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
    if needs.gpu and placement.accelerator:
        task.set_accelerator_type(placement.accelerator)
        task.set_accelerator_limit(placement.training_gpus if step == "training" else 1)
        kubernetes.add_toleration(task, key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")
        # NVTabular and DataLoader workers exchange batches over shared memory; Kubernetes gives 64 MB by default.
        kubernetes.empty_dir_mount(
            task, volume_name="shared-memory", mount_path="/dev/shm", medium="Memory", size_limit="8Gi"
        )
    kubernetes.set_timeout(task, needs.timeout_seconds)
    kubernetes.mount_pvc(task, pvc_name=placement.volume, mount_path=placement.mount_path)
    kubernetes.add_pod_label(task, "app.kubernetes.io/part-of", "evergreen")
    kubernetes.add_pod_label(task, "app.kubernetes.io/component", step.replace("_", "-"))
    return task

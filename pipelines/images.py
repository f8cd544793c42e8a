"""Which image runs which step, and which local environment stands in for each image.

One image per step (its Dockerfile lies beside it), one pinned lock per environment; steps with the same needs share a
lock. Validation's image has a newer TFDV than its environment, by `validation-trixie.lock`. Where a step runs and with
what resources is `pipelines.placement`'s; building is `tools.build_images`'s.
"""

ENVIRONMENT_OF_STEP = {
    "extraction": "driver",
    "validation": "validation",
    "preprocessing": "preprocessing",
    "training": "training",
    "evaluation": "training",
    "deployment": "driver",
    "run_outcome": "driver",
}
"""Step -> the environment whose lock its image installs (validation's: `validation-trixie`); on a laptop the step runs
in `.venvs/<environment>`."""

TRAINING_IMAGES = {"pytorch": "training", "torchrec": "training", "hugectr": "training_hugectr"}
"""Training backend -> the image with its library. `components/training/Dockerfile.hugectr` is NVIDIA's image with our
code: no lock and no environment of ours stands for it."""

DOCKERFILES = {
    **{step: f"components/{step}/Dockerfile" for step in ENVIRONMENT_OF_STEP},
    "training_hugectr": "components/training/Dockerfile.hugectr",
    "preprocessing_gpu": "components/preprocessing/Dockerfile.gpu",
    "inference_client": "demo/simulation/Dockerfile",
    "monitoring": "monitoring/Dockerfile",
}
"""Every image of the project -> its Dockerfile, from the repository's root, where all are built."""

STEP_OF_VARIANT = {"training_hugectr": "training", "preprocessing_gpu": "preprocessing"}
"""Image -> the step that it runs on NVIDIA's Merlin image instead of the step's own lock."""

_PREFIX = "evergreen-"


def image_name(step: str) -> str:
    """The image of `step` (or of another key of `DOCKERFILES`), without registry and tag.

    So it stands in the component until the pipeline is compiled.

    >>> image_name("run_outcome"), image_name(TRAINING_IMAGES["hugectr"])
    ('evergreen-run-outcome', 'evergreen-training-hugectr')
    """
    return _PREFIX + step.replace("_", "-")


def image_reference(step: str, *, registry: str, tag: str) -> str:
    """The image of `step` as a cluster pulls it.

    The tag should be immutable (a git revision): KFP's cache key holds the image string, not the code inside.

    >>> image_reference("training", registry="europe-docker.pkg.dev/p/r", tag="3f2a9c1")
    'europe-docker.pkg.dev/p/r/evergreen-training:3f2a9c1'
    """
    name = image_name(step)
    return f"{registry.rstrip('/')}/{name}:{tag}" if registry else f"{name}:{tag}"


def step_of_image(reference: str) -> str:
    """The step whose image `reference` is, whatever its registry and tag.

    Raises:
        ValueError: no step of ours has such an image.

    >>> step_of_image("europe-docker.pkg.dev/p/r/evergreen-run-outcome:3f2a9c1")
    'run_outcome'
    >>> step_of_image("evergreen-preprocessing-gpu:3f2a9c1")
    'preprocessing'
    """
    name = reference.rsplit("/", 1)[-1].split(":", 1)[0].split("@", 1)[0]
    step = name.removeprefix(_PREFIX).replace("-", "_")
    step = STEP_OF_VARIANT.get(step, step)
    if not name.startswith(_PREFIX) or step not in ENVIRONMENT_OF_STEP:
        raise ValueError(f"image {reference!r} belongs to no step, expected one of {sorted(ENVIRONMENT_OF_STEP)}")
    return step

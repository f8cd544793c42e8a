"""Map each step to its image, and each image to its local environment.

There is one image per step, built by the Dockerfile of its component. There is one pinned lock per
environment. Steps with the same needs share a lock. TFDV is newer in validation's image than in its
environment. The lock of the image is `validation-trixie.lock`. `pipelines.placement` decides the
nodes and resources of each step, and `tools.build_images` builds the images.
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
"""Environment of each step. The image of a step installs the lock file of this environment.
Validation's image installs the lock `validation-trixie` instead. On a laptop, the step runs in
`.venvs/<environment>`."""

TRAINING_IMAGES = {"pytorch": "training", "torchrec": "training", "hugectr": "training_hugectr"}
"""Image of the training step for each training backend. `components/training/Dockerfile.hugectr`
adds the project's code to NVIDIA's image. This image has no lock and no local environment."""

DOCKERFILES = {
    **{step: f"components/{step}/Dockerfile" for step in ENVIRONMENT_OF_STEP},
    "training_hugectr": "components/training/Dockerfile.hugectr",
    "preprocessing_gpu": "components/preprocessing/Dockerfile.gpu",
    "inference_client": "demo/simulation/Dockerfile",
    "monitoring": "monitoring/Dockerfile",
}
"""Path of each image's Dockerfile, relative to the repository. All images are built from the
repository's root."""

STEP_OF_VARIANT = {"training_hugectr": "training", "preprocessing_gpu": "preprocessing"}
"""For each image that is based on NVIDIA's Merlin image, the step that runs in it. These images do
not install the step's lock."""

_PREFIX = "evergreen-"


def image_name(step: str) -> str:
    """Return the name of an image without registry and tag.

    Until the pipeline is compiled, components have this name as their image.

    Args:
        step: A step, or another key of `DOCKERFILES`.

    >>> image_name("run_outcome"), image_name(TRAINING_IMAGES["hugectr"])
    ('evergreen-run-outcome', 'evergreen-training-hugectr')
    """
    return _PREFIX + step.replace("_", "-")


def image_reference(step: str, *, registry: str, tag: str) -> str:
    """Return the reference by which a cluster pulls an image.

    Args:
        step: A step, or another key of `DOCKERFILES`.
        registry: Prefix of the images, or "" for local names.
        tag: Immutable tag, such as a git revision. KFP's cache key contains this reference but not
            the code of the image.

    >>> image_reference("training", registry="europe-docker.pkg.dev/p/r", tag="3f2a9c1")
    'europe-docker.pkg.dev/p/r/evergreen-training:3f2a9c1'
    """
    name = image_name(step)
    return f"{registry.rstrip('/')}/{name}:{tag}" if registry else f"{name}:{tag}"


def step_of_image(reference: str) -> str:
    """Return the pipeline step to which an image belongs.

    The reference of the image may have any registry and any tag.

    Raises:
        ValueError: the image belongs to no step.

    >>> step_of_image("europe-docker.pkg.dev/p/r/evergreen-run-outcome:3f2a9c1")
    'run_outcome'
    >>> step_of_image("evergreen-preprocessing-gpu:3f2a9c1")
    'preprocessing'
    """
    name = reference.rsplit("/", 1)[-1].split(":", 1)[0].split("@", 1)[0]
    step = name.removeprefix(_PREFIX).replace("-", "_")
    step = STEP_OF_VARIANT.get(step, step)
    if not name.startswith(_PREFIX) or step not in ENVIRONMENT_OF_STEP:
        raise ValueError(
            f"image {reference!r} belongs to no step, expected one of {sorted(ENVIRONMENT_OF_STEP)}"
        )
    return step

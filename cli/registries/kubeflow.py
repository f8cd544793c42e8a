"""Export one store to the model registry of Kubeflow Hub.

Each version that served traffic becomes a model version with the URI of its graph, so that graphs
are not uploaded. The registry's own client reads its token from the usual path in a pod. Kubeflow's
registry has no aliases. Therefore the registered model's properties `champion` and `candidate` name
the versions. The property is empty if no such version exists.
"""

import logging

import aiohttp
from model_registry import ModelRegistry
from model_registry.exceptions import StoreError
from mr_openapi.exceptions import NotFoundException, OpenApiException

from cli.registries.exported import Exported, metrics_of, tags_of
from evergreen.runtime.errors import TemporaryError, first_line

_FORMAT = {"model_format_name": "onnx", "model_format_version": "1"}

logger = logging.getLogger(__name__)


def export(address: str, exported: Exported) -> None:
    """Bring the registry at `address` up to date.

    Raises:
        TemporaryError: the registry is unreachable or rejects the request.
    """
    try:
        _export(_connected(address), exported)
    except (StoreError, OpenApiException, aiohttp.ClientError, TimeoutError) as error:
        raise TemporaryError(f"Model Registry: {first_line(error)}") from error


def _connected(address: str) -> ModelRegistry:
    """Return the client, which requests the registry's models when it is created."""
    try:
        return ModelRegistry(address, author="evergreen", log_level=logging.ERROR)
    except NotFoundException as error:
        text = (
            f"Model Registry: {address} answers 404 to the API v1, expected a Kubeflow Hub with "
            "this API"
        )
        raise TemporaryError(text) from error


def _export(registry: ModelRegistry, exported: Exported) -> None:
    name = exported.name
    known = registry.get_registered_model(name)
    present = (
        {each.name: each for each in registry.get_model_versions(name).page_size(100)}
        if known
        else {}
    )
    last = max((int(each) for each in present if each.isdecimal()), default=None)
    for release, card in exported.versions:
        number, uri = str(release.version), release.graph_uri
        if number not in present:
            common = {
                "metadata": {**tags_of(card), **metrics_of(card)},
                "version_description": card.verdict.reason,
            }
            registry.register_model(name, uri, version=number, **common, **_FORMAT)
            logger.info("Model Registry: created version %s", number)
        elif release.version == last and registry.get_model_artifact(name, number) is None:
            # If an export was killed between two calls of the client, only the newest version can
            # lack its artifact.
            registry.async_runner(
                registry._register_model_artifact(present[number], name, uri, **_FORMAT)
            )
    model = registry.get_registered_model(name)
    aliases = {alias: str(number or "") for alias, number in exported.aliases.items()}
    if model and not aliases.items() <= (properties := model.custom_properties or {}).items():
        model.custom_properties = {**properties, **aliases}
        registry.update(model)
        logger.info(
            "Model Registry: %s",
            ", ".join(f"{alias} is {n or 'none'}" for alias, n in aliases.items()),
        )

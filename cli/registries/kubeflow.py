"""One store in the model registry of Kubeflow Hub: a model version with its graph's URI for each version that answered.

By the registry's own client, which finds a token where pods have theirs. The registry has no aliases: the registered
model's properties `champion` and `candidate` name the versions, empty where there is none. Graphs stay where they are.
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
    """Brings the registry at `address` up to date.

    Raises:
        TemporaryError: it is away, or refuses.
    """
    try:
        _export(_connected(address), exported)
    except (StoreError, OpenApiException, aiohttp.ClientError, TimeoutError) as error:
        raise TemporaryError(f"Model Registry: {first_line(error)}") from error


def _connected(address: str) -> ModelRegistry:
    """Return the client, which asks the registry for its models at once."""
    try:
        return ModelRegistry(address, author="evergreen", log_level=logging.ERROR)
    except NotFoundException as error:
        text = f"Model Registry: {address} answers 404 to the API v1, expected a Kubeflow Hub that has it"
        raise TemporaryError(text) from error


def _export(registry: ModelRegistry, exported: Exported) -> None:
    name = exported.name
    known = registry.get_registered_model(name)
    present = {each.name: each for each in registry.get_model_versions(name).page_size(100)} if known else {}
    last = max((int(each) for each in present if each.isdecimal()), default=None)
    for release, card in exported.versions:
        number, uri = str(release.version), release.graph_uri
        if number not in present:
            told = {"metadata": {**tags_of(card), **metrics_of(card)}, "version_description": card.verdict.reason}
            registry.register_model(name, uri, version=number, **told, **_FORMAT)
            logger.info("Model Registry: version %s is there", number)
        elif release.version == last and registry.get_model_artifact(name, number) is None:
            # Its export was killed between the client's calls; those of the versions before it went on to the next.
            registry.async_runner(registry._register_model_artifact(present[number], name, uri, **_FORMAT))
    model = registry.get_registered_model(name)
    aliases = {alias: str(number or "") for alias, number in exported.aliases.items()}
    if model and not aliases.items() <= (properties := model.custom_properties or {}).items():
        model.custom_properties = {**properties, **aliases}
        registry.update(model)
        logger.info("Model Registry: %s", ", ".join(f"{alias} is {n or 'none'}" for alias, n in aliases.items()))

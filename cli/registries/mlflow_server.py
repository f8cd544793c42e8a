"""Export one store to MLflow.

Each evaluated model becomes a run, and each version becomes a model version. The aliases follow the
promotion journal. MLflow's own client reads user, token and certificates from its environment
variables (`MLFLOW_TRACKING_TOKEN`, ...). A run in MLflow becomes `FINISHED` once its entries are
complete. An incomplete run is written again.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from mlflow import MlflowClient, pyfunc
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import Schema, TensorSpec
from requests import RequestException

from cli.registries.exported import Exported, metrics_of, parameters_of, tags_of
from evergreen.config.features import Features
from evergreen.contracts.manifests import Release
from evergreen.contracts.serving import PROBABILITY_OUTPUT, input_tensors
from evergreen.registry.model_cards import ModelCard
from evergreen.registry.models import DATA_FILE, GRAPH_FILE
from evergreen.registry.promotion_journal import moment_of
from evergreen.reports.model_card import card_page
from evergreen.runtime.errors import TemporaryError, first_line
from evergreen.storage.uris import local_path

VERSION_TAG = "evergreen.version"
"""Tag of a model version in MLflow. The value of the tag is the version's number in Evergreen's
registry. Each run has the tag `model_id`. The export finds existing entries by these tags."""
_MAX_RUNS = 50_000
"""Maximum number of runs that a server returns in one response, enough for five years of hourly
runs."""
_TYPES = {"FP32": np.dtype(np.float32), "INT64": np.dtype(np.int64)}

logger = logging.getLogger(__name__)


def export(uri: str, exported: Exported) -> None:
    """Bring the server at `uri` up to date.

    Raises:
        TemporaryError: the server is unreachable or rejects the request.
    """
    try:
        mlflow.set_tracking_uri(uri)
        client, experiment = MlflowClient(), mlflow.set_experiment(exported.name).experiment_id
        known = {
            each.data.tags.get("model_id"): each
            for each in client.search_runs([experiment], max_results=_MAX_RUNS)
        }
        runs = {
            card.model_id: _run_of(client, experiment, card, found=known.get(card.model_id))
            for card in exported.cards
        }
        numbers = {
            each.version: _number_of(client, each, card, run_id=runs[card.model_id])
            for each, card in exported.versions
        }
        if numbers:
            _set_aliases(
                client,
                exported.name,
                {alias: numbers.get(n or 0) for alias, n in exported.aliases.items()},
            )
    except (MlflowException, RequestException) as error:
        raise TemporaryError(f"MLflow: {first_line(error)}") from error


@dataclass(frozen=True)
class Graph:
    """MLflow flavor `onnx` that uploads existing files.

    MLflow's own module would read the graph into memory and write it again.
    """

    path: Path
    features: Features

    def save_model(self, path: str, mlflow_model: Model, **_: Any) -> None:
        """Create the folder `path` with the model's files, for `Model.log`.

        MLflow calls this method for each flavor. The folder contains symbolic links to the files in
        the store, and the upload reads the linked files.
        """
        folder = Path(path)
        folder.mkdir()
        for source in (self.path.with_name(name) for name in (GRAPH_FILE, DATA_FILE)):
            if source.exists():
                (folder / source.name).symlink_to(source)
        (folder / "requirements.txt").write_text("mlflow\nonnx\nonnxruntime\n")
        mlflow_model.signature = ModelSignature(
            *(
                Schema(
                    [
                        TensorSpec(_TYPES[each.datatype], (-1, each.width), each.name)
                        for each in tensors
                    ]
                )
                for tensors in (input_tensors(self.features), [PROBABILITY_OUTPUT])
            )
        )
        mlflow_model.add_flavor("onnx", data=GRAPH_FILE, providers=["CPUExecutionProvider"])
        pyfunc.add_to_model(mlflow_model, loader_module="mlflow.onnx", data=GRAPH_FILE)
        mlflow_model.save(str(folder / "MLmodel"))


def _run_of(client: MlflowClient, experiment: str, card: ModelCard, *, found: Run | None) -> str:
    """Return the id of the model's run, and create the run if it was not `found`."""
    if found and found.info.status == "FINISHED":
        return str(found.info.run_id)
    made = int(moment_of(card.model.created_at).timestamp() * 1000)
    tags = {"mlflow.note.content": card.verdict.reason, **tags_of(card)}
    run = found or client.create_run(experiment, start_time=made, tags=tags, run_name=card.run)
    run_id = str(run.info.run_id)
    metrics = [Metric(name, value, made, 0) for name, value in metrics_of(card).items()]
    client.log_batch(
        run_id, metrics=metrics, params=[Param(*each) for each in parameters_of(card).items()]
    )
    client.log_text(run_id, card_page(card), "card.html")
    client.set_terminated(run_id, end_time=made)
    logger.info("MLflow: created run %s of model %s", card.run, card.model_id)
    return run_id


def _number_of(client: MlflowClient, release: Release, card: ModelCard, *, run_id: str) -> str:
    """Return MLflow's number of the version, and register the graph if it is not registered yet."""
    name = card.model.recommender.name
    if found := client.search_model_versions(
        f"name = '{name}' and tags.`{VERSION_TAG}` = '{release.version}'"
    ):
        return str(found[0].version)
    graph = Graph(local_path(release.graph_uri), card.model.recommender.features)
    made = Model.log(
        artifact_path=None,
        name=name,
        flavor=graph,
        run_id=run_id,
        registered_model_name=name,
        await_registration_for=0,
        tags={VERSION_TAG: str(release.version), **tags_of(card)},
    )
    number = str(made.registered_model_version)
    logger.info("MLflow: created version %d, with MLflow's number %s", release.version, number)
    return str(client.update_model_version(name, number, description=card.verdict.reason).version)


def _set_aliases(client: MlflowClient, name: str, aliases: dict[str, str | None]) -> None:
    """Set each alias to the MLflow version with this number.

    Remove each alias whose number is None.
    """
    found = client.get_registered_model(name).aliases
    for alias, number in aliases.items():
        if number == found.get(alias):
            continue
        if number is None:
            client.delete_registered_model_alias(name, alias)
        else:
            client.set_registered_model_alias(name, alias, number)
        logger.info("MLflow: alias %s is %s", alias, number or "removed")

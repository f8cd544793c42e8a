"""Prepare a version in the model registry: export the graph and check its parity.

The requester of a release prepares the version, because the export takes time and memory. The
controller only copies the prepared files. The controller also assigns the version number, because
only the controller has a list of all numbers in use. A prepared version therefore has the id of its
request.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from evergreen.contracts.manifests import Manifest, Model, RawDataset, Verdict
from evergreen.contracts.requests import RELEASE, ServingRequest
from evergreen.registry.models import GRAPH_FILE, graph_sha256
from evergreen.registry.requests import new_id, new_request
from evergreen.runtime.durable import sha256_file, whole_directory
from evergreen.runtime.errors import ContractError
from evergreen.serving.repository.model_repository import GOLDEN_FILE
from evergreen.serving.repository.triton_config import ServingOptions

logger = logging.getLogger(__name__)

PREPARED_FOLDER = "prepared"
"""Folder in the model registry. This folder contains one folder for each open request."""


@dataclass(frozen=True, kw_only=True)
class ParityProof(Manifest):
    """Result of the parity check, beside the graph."""

    sha256: dict[str, str]
    """SHA-256 of `graph` and `golden`."""
    parity_max_abs_diff: float
    """Largest absolute difference between the scores of the graph and those of training."""
    parity_rows: int


@dataclass(frozen=True, kw_only=True)
class PreparedVersion:
    """Files of one prepared version."""

    folder: Path
    """Folder with the graph and its golden rows."""
    model: Model
    verdict: Verdict
    raw: RawDataset
    proof: ParityProof


def prepared_folder(store: Path, request_id: str) -> Path:
    """Return the folder of the version that a request releases."""
    return store / PREPARED_FOLDER / request_id


def check_belonging(model: Model, verdict: Verdict) -> None:
    """Check that the verdict evaluates this model.

    Raises:
        ContractError: the verdict is about another model.
    """
    if verdict.candidate_model_id != model.model_id:
        raise ContractError(
            f"verdict is about model {verdict.candidate_model_id}, expected {model.model_id}"
        )


def prepare_request(
    kind: str,
    candidate: tuple[Model, Verdict, RawDataset],
    *,
    store: Path,
    options: ServingOptions,
    who: str,
    now: Callable[[], datetime],
    seconds: float,
    run: str | None = None,
    trigger_id: str | None = None,
    share: float | None = None,
    override: str | None = None,
) -> ServingRequest:
    """Prepare a version, and return the request to serve it. The request is not appended yet.

    Args:
        kind: `release` or `canary`.
        candidate: Model, the verdict about it, and the data with the holdout rows.
        store: Folder of the model registry.
        options: Serving options of the version.
        who: Person or pipeline run that makes the request.
        now: Returns the current time. The time to the deadline starts when the version is prepared.
        seconds: Time until the deadline in seconds.
        run: Pipeline run that makes the request, or None if a person makes it.
        trigger_id: Id of the retrain request that led to the version, or None.
        share: First share of a canary.
        override: A person's reason to release the model even if the verdict does not accept it, or
            None.

    Raises:
        ContractError: the verdict does not accept the model that is to be released, or `prepare`
            fails.
    """
    model, verdict, _ = candidate
    check_belonging(model, verdict)
    if kind == RELEASE and not verdict.accepted and override is None:
        raise ContractError(
            f"verdict on model {model.model_id} is {verdict.decision!r}, expected an accepted "
            "verdict"
        )
    request_id = new_id()
    prepare(store, request_id, candidate)
    request = new_request(
        kind,
        who=who,
        reason=verdict.reason if override is None else override,
        now=now(),
        seconds=seconds,
        request_id=request_id,
    )
    return replace(
        request,
        model_id=model.model_id,
        run=run,
        trigger_id=trigger_id,
        options=asdict(options),
        share=share,
        is_override=override is not None,
    )


def prepare(store: Path, request_id: str, candidate: tuple[Model, Verdict, RawDataset]) -> None:
    """Export the graph and the golden rows of a model to the folder of a request.

    For the holdout rows, the graph must compute the scores on which the verdict is based.

    Raises:
        ContractError: the verdict is about another model, or the graph's scores differ from
            training. No file remains after an error.
    """
    # Import these modules late, so that the controller and commands that only read prepared
    # versions start faster.
    from evergreen.serving.graph.export import export
    from evergreen.serving.parity import open_graph, prove_parity, read_held_out

    model, verdict, raw = candidate
    check_belonging(model, verdict)
    with whole_directory(prepared_folder(store, request_id), replace=True) as building:
        export(model, building)
        rows = read_held_out(raw, verdict)
        difference = prove_parity(open_graph(building / GRAPH_FILE), rows)
        logger.info("parity: %.3g over %d rows", difference, len(rows))
        rows.sample().save(building / GOLDEN_FILE)
        proof = ParityProof(
            sha256={
                "graph": graph_sha256(building),
                "golden": sha256_file(building / GOLDEN_FILE),
            },
            parity_max_abs_diff=difference,
            parity_rows=len(rows),
        )
        for each in (model, verdict, raw, proof):
            each.write(building / _file_of(type(each)))


def read_prepared(store: Path, request_id: str) -> PreparedVersion:
    """Return the prepared version of a request.

    Raises:
        ContractError: a file is absent or corrupt.
    """
    folder = prepared_folder(store, request_id)
    return PreparedVersion(
        folder=folder,
        model=Model.read(folder / _file_of(Model)),
        verdict=Verdict.read(folder / _file_of(Verdict)),
        raw=RawDataset.read(folder / _file_of(RawDataset)),
        proof=ParityProof.read(folder / _file_of(ParityProof)),
    )


def remove_prepared(store: Path, request_id: str) -> None:
    """Remove the prepared version of a request, if there is one."""
    shutil.rmtree(prepared_folder(store, request_id), ignore_errors=True)


def _file_of(kind: type[Manifest]) -> str:
    return f"{kind.__name__.lower()}.json"

"""A campaign of flipped bits in all files that a release reads.

No reader accepts a file with a flipped bit.
"""

import pytest

from evergreen.contracts.manifests import Model, RawDataset, Release, Verdict
from evergreen.registry.models import graph_folder, release_path
from evergreen.registry.promotion_journal import read_entries
from evergreen.runtime.errors import ContractError
from evergreen.serving.graph.export import export
from evergreen.serving.intact import check_stored_copy, find_corrupt, golden_rows
from evergreen.storage.uris import local_path
from testing.served_names import MODEL_NAME
from tests.support.flips import QUIET, count_flips


def check_served(deployment):
    if problems := find_corrupt(deployment.repository.published, deployment.settings.store, 1):
        raise ContractError("; ".join(problems))


def rows_of(deployment):
    found = golden_rows(deployment.repository, deployment.settings.store, 1)
    return (
        found.dense.tobytes(),
        found.categorical.tobytes(),
        found.expected.tobytes(),
        found.features,
    )


@pytest.mark.parametrize(
    "flips", [pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]), 25]
)
def test_flipped_bit_in_manifest_journal_or_graph_is_never_read_as_other(
    deployment, tmp_path, flips
):
    model, verdict, raw = deployment.candidate(1)
    done = deployment.release(1)
    store, folder = deployment.settings.store, local_path(model.uri)
    kept, served = graph_folder(store, 1), deployment.repository.objects.root / MODEL_NAME / "1"

    def exported():
        export(model, tmp_path / "again")

    manifests = {"model": (Model, model), "verdict": (Verdict, verdict), "raw": (RawDataset, raw)}
    for name, (_, manifest) in manifests.items():
        manifest.write(tmp_path / f"{name}.json")
    files = {
        each: exported
        for part in (Model.WEIGHTS, Model.WORKFLOW)
        for each in sorted((folder / part).rglob("*"))
    }
    files = {path: read for path, read in files.items() if path.is_file()}
    files |= {
        tmp_path / f"{name}.json": lambda n=name, k=kind: k.read(tmp_path / f"{n}.json")
        for name, (kind, _) in manifests.items()
    }
    files |= {release_path(store, 1): lambda: Release.read(release_path(store, 1))}
    files |= {store / "journal.jsonl": lambda: read_entries(store)}
    files |= {
        kept / name: lambda: check_stored_copy(store, done) for name in ("model.onnx", "golden.npz")
    }
    files |= {each: lambda: check_served(deployment) for each in sorted(served.iterdir())}
    found = {path: count_flips(path, read, flips=flips) for path, read in files.items()}
    for path, counts in found.items():
        print(path.name, dict(counts))
    assert {path: counts[QUIET] for path, counts in found.items() if counts[QUIET]} == {}
    # If one copy is corrupt, the other copy is read.
    for path in (kept / "golden.npz", served / "golden.npz"):
        assert count_flips(path, lambda: rows_of(deployment), flips=flips)[QUIET] == 0

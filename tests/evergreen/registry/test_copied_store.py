"""Tests that a copied or moved registry reads its own files and checks their hashes."""

import json
import shutil
from dataclasses import asdict, replace

import pytest

from evergreen.contracts.manifests import CURRENT, Model
from evergreen.registry import models as registry
from evergreen.registry import runs
from evergreen.registry.models import GRAPH_FILE, graph_folder, model_folder
from evergreen.runtime.durable import sha256_tree
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path
from testing.releases import make_live, release, store_model

PARTS = {
    "weights/weights.bin": b"w",
    "workflow/workflow.json": b"{}",
    "statistics/statistics.pb": b"s",
}


def stored(store, model_id="m1"):
    """Store a model with files, and its manifest with their hashes."""
    folder = model_folder(store, model_id)
    for name, content in PARTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content * 100)
    hashes = {part: sha256_tree(folder / part) for part in Model.PARTS}
    return store_model(store, model_id, sha256=hashes, watermark="2026-03-01T00:00:00+00:00")


@pytest.fixture(params=["copied", "moved"])
def there(tmp_path, request):
    """A registry that was copied or moved to a new path, with a live version.

    The URIs of the registry's other models point to the old path.
    """
    store, there = tmp_path / "my store #1", tmp_path / "backups" / "the store"
    stored(store)
    graph_folder(store, 3).mkdir(parents=True)
    (graph_folder(store, 3) / GRAPH_FILE).write_bytes(b"graph")
    make_live(store, release(store, 3, graph_uri=(graph_folder(store, 3) / GRAPH_FILE).as_uri()))
    runs.keep_report(store, "r1", "training", html="<p>1</p>")
    fields = dict(
        run="r1",
        trigger_id="",
        state="released",
        step="deployment",
        reason="",
        version=3,
        ended_at="2026-03-01T00:00:00+00:00",
    )
    runs.write_outcome(store, runs.RunOutcome(**fields, reports=runs.reports_of(store, "r1")))
    there.parent.mkdir()
    if request.param == "moved":
        store.rename(there)
    else:
        shutil.copytree(store, there)
        for path in [p for p in store.rglob("*") if p.is_file()]:
            path.write_bytes(b"another's")
    return there


def test_every_reader_of_copied_registry_reads_copy(there):
    live, parent = registry.champion(there, CURRENT), registry.parent(there, CURRENT)
    by_name = registry.stored_model(there, "m1"), registry.referenced_model(there, "3")
    assert live == registry.champion(there, "m1")
    assert parent == by_name[0] == by_name[1]
    assert local_path(live.model_uri) == local_path(parent.uri) == model_folder(there, "m1")
    assert local_path(live.graph_uri).read_bytes() == b"graph"
    assert [registry.verified_part(parent, part).parent for part in Model.PARTS] == [
        model_folder(there, "m1")
    ] * 3
    (outcome,) = runs.read_outcomes(there)
    assert outcome == runs.find_outcome(there, "r1")
    assert local_path(outcome.reports["training"]).read_text() == "<p>1</p>"
    named = json.dumps([asdict(live), asdict(parent), asdict(outcome)])
    assert "my%20store" not in named


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("fault", ["flip", "shorter", "gone", "more"])
def test_changed_part_is_refused_by_name(tmp_path, name, fault):
    model = stored(tmp_path / "store")
    path = model_folder(tmp_path / "store", "m1") / name
    content = bytearray(path.read_bytes())
    if fault == "flip":
        content[7] ^= 1
        path.write_bytes(content)
    elif fault == "shorter":
        path.write_bytes(content[:-1])
    elif fault == "gone":
        path.unlink()
    else:
        path.with_name("another").write_bytes(b"")
    for part in Model.PARTS:
        if not name.startswith(part):
            registry.verified_part(model, part)
            continue
        with pytest.raises(ContractError) as caught:
            registry.verified_part(model, part)
        assert f"{path.parent} with" in str(caught.value)
        assert f"expected {model.sha256[part]} as in the manifest of model m1" in str(caught.value)
    registry.verified_part(replace(model, sha256={}), Model.PARTS[0])

"""A canary in a bucket: the same writes in the same order, seen by whoever reads the plan there."""

from __future__ import annotations

import pytest

from components.contracts.serving import CANARY_NAME
from components.deployment.canary import steps as canary
from components.deployment.canary.start import start
from components.deployment.release import ReleaseSettings, release
from components.deployment.repository.model_repository import ModelRepository
from components.runtime.errors import TemporaryError
from components.storage.locations import open_objects
from components.store.promotion_journal import current, read_entries

ROOT = "gs://models/serving"


def test_a_canary_in_a_bucket_starts_grows_and_ends(cloud_storage, make_candidate, tmp_path):
    store = tmp_path / "store"
    settings = ReleaseSettings(store=store, repository=ROOT)
    release(*make_candidate(store, 1), settings)
    start(*make_candidate(store, 2), settings)
    objects = open_objects(ROOT)
    repository = ModelRepository(objects)
    assert repository.read_plan().canary_share == 0.01
    names = {each.name for each in objects.list(f"{CANARY_NAME}/")}
    assert {f"{CANARY_NAME}/config.pbtxt", f"{CANARY_NAME}/2/model.onnx"} <= names
    of_canary = canary.CanarySettings(site=settings, drain_seconds=0.0)
    assert canary.advance(of_canary, "for the test").share == 0.05
    with repository.locked(), pytest.raises(TemporaryError, match="another deployment"):
        canary.abort(of_canary, "two at once")
    assert canary.abort(of_canary, "for the test").action == "aborted"
    assert canary.step(of_canary).action == "ended"
    assert repository.read_plan().canary is None
    assert objects.list(f"{CANARY_NAME}/") == []
    assert [entry.action for entry in read_entries(store)] == [
        "intent", "release", "intent", "canary", "canary", "canary_ended",
    ]  # fmt: skip
    assert current(store).version == 1

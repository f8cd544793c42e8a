"""Tests of a manifest's references: a step finds earlier outputs, and refuses changed outputs."""

import re

import pytest

from evergreen.contracts.manifests import RawDataset, Reference, TrainingSet
from evergreen.runtime.errors import ContractError
from evergreen.storage.references import keep, read_reference
from testing.validation_models import make_dataset
from tests.support.errors import raises


@pytest.fixture
def stored(tmp_path):
    """The stored manifest of a step, the reference to the manifest, and the manifest's file."""
    file = tmp_path / "a folder" / "raw_dataset.json"
    raw = make_dataset(tmp_path, 5)
    return raw, keep(raw, file), file


def test_reference_leads_to_manifest_that_was_stored(stored):
    raw, reference, file = stored
    assert reference.uri == file.as_uri()
    assert read_reference(reference, RawDataset, source="the training set") == raw


def test_reference_survives_manifest_that_carries_it(stored, tmp_path):
    raw, reference, _ = stored
    (carrier := tmp_path / "carrier").write_bytes(raw.dumps())
    carrying = RawDataset(**{**vars(RawDataset.read(carrier)), "validation_report": reference})
    carrying.write(carrier)
    assert RawDataset.read(carrier).validation_report == Reference(
        uri=reference.uri, sha256=reference.sha256
    )


def test_file_that_was_changed_is_refused_with_both_hashes(stored):
    _, reference, file = stored
    file.write_bytes(file.read_bytes() + b"\n")
    expected = (
        f"{re.escape(str(file))} has sha256 [0-9a-f]{{64}}, expected {reference.sha256} as the set"
    )
    with pytest.raises(ContractError, match=expected):
        read_reference(reference, RawDataset, source="the set")


def test_absent_files_and_other_kinds_are_named(stored):
    _, reference, file = stored
    with raises(ContractError, "RawDataset", "expected TrainingSet"):
        read_reference(reference, TrainingSet, source="the model")
    with raises(ContractError, "no reference to a TrainingSet manifest"):
        read_reference(None, TrainingSet, source="the model")
    file.unlink()
    with raises(ContractError, file, "cannot be read"):
        read_reference(reference, RawDataset, source="the set")

"""Tests that manifests can be written and read back, and that readers refuse unknown manifests."""

import contextlib
import dataclasses
import json
import random
import typing

import pytest

from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.contracts import manifests
from evergreen.contracts.manifests import RetrainRequest
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises, raises_text

KINDS = [
    manifests.RawDataset,
    manifests.ValidationReport,
    manifests.TrainingSet,
    manifests.Model,
    manifests.Verdict,
    manifests.Release,
    RetrainRequest,
]
SHOP = Recommender(
    name="shop",
    features=Features(numeric=("Preis in €",), categorical=("item",)),
    settings={"gate": {}},
)


def example(kind):
    """Return a manifest of `kind` with a valid value for each field."""
    samples = {
        str: "text with ü and space",
        int: 3,
        float: 0.25,
        bool: True,
        list: ["a"],
        dict: {"a": None},
    }

    def fitting(annotation):
        if annotation is Recommender:
            return SHOP
        if dataclasses.is_dataclass(annotation):
            return example(annotation)
        options = [a for a in typing.get_args(annotation) if a is not type(None)]
        origin = typing.get_origin(annotation)
        if origin is list and dataclasses.is_dataclass(options[0]):
            return [example(options[0])]
        if origin in samples:
            return samples[origin]
        return samples[annotation] if annotation in samples else fitting(options[0])

    hints = typing.get_type_hints(kind)
    return kind(**{f.name: fitting(hints[f.name]) for f in dataclasses.fields(kind)})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a folder" / "manifest.json"


def changed(manifest, path, **changes):
    manifest.write(path)
    document = {**json.loads(path.read_text()), "crc32": "absent", **changes}
    path.write_text(json.dumps({k: v for k, v in document.items() if v != "absent"}))
    return path


@pytest.mark.parametrize(
    "manifest", [example(kind) for kind in KINDS], ids=lambda manifest: type(manifest).__name__
)
def test_manifest_survives_disk(manifest, path):
    manifest.write(path)
    assert type(manifest).read(path) == manifest


@pytest.mark.parametrize("kind", [manifests.Model, manifests.Release, RetrainRequest])
def test_no_flipped_bit_of_manifest_is_read_as_other_values(kind, path):
    manifest = example(kind)
    content = manifest.dumps()
    for bit in random.Random(2).sample(range(8 * len(content)), 400):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ContractError):
            # The reader may accept a flip that does not change the value, such as another case of a
            # hexadecimal digit.
            assert kind.loads(bytes(flipped), source="flipped") == manifest


def test_manifest_that_differs_from_its_checksum_is_reported(path):
    content = example(RetrainRequest).dumps().replace(b"text with", b"next with", 1)
    with pytest.raises(
        ContractError, match=r"crc32 \w{8}, expected '\w{8}'; .* not remove the key crc32"
    ):
        RetrainRequest.loads(content, source="request.json")


@pytest.mark.parametrize("version", [4, "3", None])
def test_unknown_format_version_is_refused(path, version):
    with raises_text(ContractError, "manifest-version", file=path, found=version):
        manifests.Model.read(changed(example(manifests.Model), path, format_version=version))


def test_another_kind_is_refused(path):
    example(manifests.Model).write(path)
    with raises_text(
        ContractError, "another-manifest", file=path, found="Model", expected="Verdict"
    ):
        manifests.Verdict.read(path)


@pytest.mark.parametrize(
    "changes", [{"surprise": 1}, {"reason": "absent"}], ids=["unknown", "missing"]
)
def test_unknown_or_missing_field_is_refused_by_name(path, changes):
    with pytest.raises(ContractError, match=next(iter(changes))):
        manifests.Verdict.read(changed(example(manifests.Verdict), path, **changes))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", ""), (b"\xff\xfe", ""), (b"[]", ""), (None, " cannot be read: No such file")],
)
def test_value_that_is_no_json_object_is_refused_by_name(path, content, message):
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ContractError, match=rf"manifest\.json{message}"):
        manifests.Verdict.read(path)


def test_nan_is_never_written(path):
    with raises(ValueError, "JSON"):
        dataclasses.replace(
            example(manifests.Verdict), candidate=manifests.ModelQuality(auc=float("nan"))
        ).write(path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ({"auc": 0.5, "surprise": 1}, "candidate has unknown or missing fields .'surprise'"),
        (3, "expected an object"),
    ],
)
def test_nested_object_with_wrong_fields_is_refused(path, candidate, message):
    with pytest.raises(ContractError, match=message):
        manifests.Verdict.read(changed(example(manifests.Verdict), path, candidate=candidate))


def test_defaults_may_be_absent(path):
    release = changed(example(manifests.Release), path, parent_model_id="absent")
    assert manifests.Release.read(release).parent_model_id is None


def test_retrain_request_without_reason_is_refused():
    with raises(ContractError, "'r'", "reason ''"):
        RetrainRequest(
            request_id="r", reason="", requested_at="", window_start="", window_end="", observed={}
        )

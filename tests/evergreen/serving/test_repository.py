"""Tests of the model repository in a folder and in a bucket: its content, and who may change it."""

import dataclasses

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from evergreen.registry.models import DATA_FILE, GRAPH_FILE, graph_sha256
from evergreen.registry.traffic_plan import Arm, TrafficPlan
from evergreen.runtime.errors import ContractError, TemporaryError
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions, read_options, warmup_files_of
from evergreen.storage.objects import Changed
from testing.served_names import MODEL_NAME, NAMES
from tests.support.clocks import Clock
from tests.support.errors import raises
from tests.support.model_repository import OPTIONS, everything, named, with_versions


@pytest.fixture
def repository(open_objects):
    return ModelRepository(open_objects(), NAMES)


def test_version_is_published_by_configuration_and_by_nothing_before(open_objects, make_version):
    repository, reader = (
        ModelRepository(open_objects(), NAMES),
        ModelRepository(open_objects(), NAMES),
    )
    with repository.locked():
        repository.stage(1, make_version(1), OPTIONS)
        assert (reader.versions(), named(reader)) == ([], [])
        repository.publish(1)
        assert (reader.versions(), named(reader)) == ([1], [])
        repository.write_config(repository.config_for(1, OPTIONS))
        assert (reader.versions(), named(reader)) == ([1], [1])


def test_published_version_holds_what_was_staged_byte_for_byte(repository, make_version):
    graph = make_version(1, data=b"tables" * 50_000)
    golden = GoldenRows.load(graph / "golden.npz")
    with repository.locked():
        repository.stage(1, graph, OPTIONS)
        staged = everything(repository.objects)
        repository.publish(1)
    published = everything(repository.objects)
    for file in (GRAPH_FILE, DATA_FILE):
        assert staged[f"click_model_candidate/1/{file}"] == (graph / file).read_bytes()
        assert published[f"click_model/1/{file}"] == (graph / file).read_bytes()
    assert repository.published.record(1).graph_sha256 == graph_sha256(graph)
    hashes = {file.name: file.sha256 for file in repository.published.record(1).files}
    assert repository.published.hashes(1).items() >= hashes.items()
    found = repository.published.golden_rows(1)
    for name in ("dense", "categorical", "expected"):
        np.testing.assert_array_equal(getattr(found, name), getattr(golden, name))
    assert repository.published.record(1).options == OPTIONS
    assert repository.published.record(1).options.server == "python"
    repository.published.check(1)
    assert sorted(everything(repository.objects)) == [
        f"click_model/1/{name}"
        for name in ("golden.npz", "model.data", "model.onnx", "model.py", "version.json")
    ]


def test_version_for_triton_itself_has_no_code(repository, make_version):
    with repository.locked():
        repository.stage(1, make_version(1), ServingOptions(server="onnxruntime"))
        repository.publish(1)
    assert sorted(everything(repository.objects)) == [
        f"click_model/1/{name}" for name in ("golden.npz", "model.onnx", "version.json")
    ]
    assert repository.published.record(1).options.server == "onnxruntime"


@pytest.mark.parametrize("where", ["click_model_candidate", "click_model", "click_model_canary"])
def test_warm_up_rows_are_golden_ones_as_triton_reads_them(
    repository, make_version, put_live, where
):
    golden = GoldenRows.load(make_version(1) / "golden.npz")
    with repository.locked():
        options = ServingOptions(warmup_rows=3)
        put_live(repository, 1, options=options)
        repository.place_canary(1, options)
        repository.stage(2, make_version(1), options)
    files = everything(repository.objects)
    config = text_format.Parse(
        files[f"{where}/config.pbtxt"].decode(), model_config_pb2.ModelConfig()
    )
    assert len(config.model_warmup) == 4
    for at, sample in enumerate(list(config.model_warmup)[:3]):
        dense = files[f"{where}/warmup/{sample.inputs['dense'].input_data_file}"]
        categorical = files[f"{where}/warmup/{sample.inputs['categorical'].input_data_file}"]
        np.testing.assert_array_equal(np.frombuffer(dense, "<f4"), golden.dense[at])
        assert np.array_equal(np.frombuffer(categorical, "<i8"), golden.categorical[at])


def test_rehearsal_has_one_instance_and_no_response_cache(open_objects, make_version):
    repository, options = (
        ModelRepository(open_objects(), NAMES),
        ServingOptions(response_cache=True, warmup_rows=0),
    )
    with repository.locked():
        repository.stage(1, make_version(1), options)
        rehearsed = read_options(
            everything(repository.objects)["click_model_candidate/config.pbtxt"].decode()
        )
        assert (rehearsed.instances, rehearsed.response_cache) == (1, False)
        repository.publish(1)
        assert (
            read_options(repository.config_for(1, repository.published.record(1).options))
            == options
        )


def test_only_rows_of_configuration_outlive_pruning(repository, put_live):
    with repository.locked():
        for number in (1, 2, 3):
            put_live(repository, number)
        repository.prune(set(), num_kept=2)
    there = {
        each.name.rpartition("/")[2] for each in repository.objects.list("click_model/warmup/")
    }
    assert there == warmup_files_of(repository.read_config())


def test_pruning_keeps_newest_requested_and_served_versions(repository, put_live):
    with repository.locked():
        for number in range(7, 13):
            put_live(repository, number)
        repository.write_config(with_versions(repository.read_config(), [8]))
        assert repository.prune({9}, num_kept=1) == [7, 10, 11]
        assert repository.versions() == [8, 9, 12]
        assert repository.prune({9}, num_kept=1) == []


def test_served_version_cannot_be_withdrawn(repository, put_live):
    with repository.locked():
        put_live(repository, 1)
        with raises(ContractError, "version 1", "served"):
            repository.withdraw(1)
        repository.write_config(None)
        repository.withdraw(1)
        repository.withdraw(1)
    assert (repository.versions(), repository.taken_numbers(), repository.read_config()) == (
        [],
        [],
        None,
    )


def test_rehearsals_leavings_are_not_published(repository, make_version):
    with repository.locked():
        repository.stage(1, make_version(1), OPTIONS)
        repository.objects.write(
            "click_model_candidate/1/__pycache__/model.cpython-311.pyc", b"cache"
        )
        repository.publish(1)
    assert not [
        name for name in everything(repository.objects) if "pycache" in name or "candidate" in name
    ]


def test_canary_is_published_version_under_its_own_name(repository, put_live):
    with repository.locked():
        put_live(repository, 1)
        put_live(repository, 2, beside=[1])
        before = {
            n: c for n, c in everything(repository.objects).items() if n.startswith("click_model/")
        }
        repository.place_canary(1, OPTIONS)
        assert repository.canary.whole() == [1]
        repository.place_canary(2, ServingOptions(instances=1, warmup_rows=0))
        assert repository.canary.whole() == [2]
        files = everything(repository.objects)
        config = text_format.Parse(
            files["click_model_canary/config.pbtxt"].decode(), model_config_pb2.ModelConfig()
        )
        assert (config.name, list(config.version_policy.specific.versions)) == (
            "click_model_canary",
            [2],
        )
        assert config.instance_group[0].count == 1
        for name in ("model.onnx", "model.py", "golden.npz", "version.json"):
            assert files[f"click_model_canary/2/{name}"] == files[f"click_model/2/{name}"]
        repository.remove_canary()
        repository.remove_canary()
        assert repository.canary.whole() == []
    assert everything(repository.objects) == before
    repository.published.check(2)


def plan(sequence, **more):
    return TrafficPlan(
        sequence=sequence,
        stable=Arm(model_name="click_model", version=1),
        canary=None,
        canary_share=0.0,
        shadow_share=0.0,
        salt="s",
        published_at="2026-01-01T00:00:00+00:00",
        reason="test",
        **more,
    )


def test_traffic_plans_follow_one_another_by_number(open_objects):
    repository = ModelRepository(open_objects(), NAMES)
    assert repository.read_plan() is None
    with repository.locked():
        with raises(ContractError, "traffic plan", 2, "expected 1"):
            repository.write_plan(plan(2))
        repository.write_plan(plan(1))
        with raises(ContractError, "traffic plan", 1, "expected 2"):
            repository.write_plan(plan(1))
        repository.write_plan(plan(2))
    written = dataclasses.replace(plan(2), lease=repository.lease)
    assert ModelRepository(open_objects(), NAMES).read_plan() == written


def test_configuration_is_not_written_over_anothers(open_objects, put_live):
    repository = ModelRepository(open_objects(), NAMES)
    with repository.locked():
        put_live(repository, 1)
        mine = with_versions(repository.read_config(), [1])
        open_objects().write("click_model/config.pbtxt", b"by another")
        for text in (mine, None):
            with raises(Changed, "another controller changed", "config.pbtxt"):
                repository.write_config(text)
    assert repository.read_config() == "by another"


def test_expired_holder_that_still_writes_is_refused_everywhere(
    open_bucket, put_live, make_version
):
    clock = Clock()
    settings = {"clock": clock, "monotonic": clock}
    with ModelRepository(open_bucket(), NAMES).locked():
        pass
    late = ModelRepository(open_bucket(), NAMES, holder="late", **settings)
    with late.locked():
        put_live(late, 1)
        clock.advance(61.0)
        heir = ModelRepository(open_bucket(), NAMES, holder="heir", **settings)
        with heir.locked():
            put_live(heir, 2)
            text = with_versions(heir.read_config(), [1])
            for call in (
                lambda: late.write_config(text),
                lambda: late.write_config(None),
                lambda: late.stage(3, make_version(3), OPTIONS),
                lambda: late.publish(2),
                lambda: late.withdraw(1),
                late.remove_canary,
                lambda: late.prune(set(), num_kept=2),
            ):
                with raises(TemporaryError, "late", "no longer"):
                    call()
        assert named(heir) == [2]
    assert ModelRepository(open_bucket(), NAMES).versions() == [1, 2]


def test_expired_holder_that_passed_its_check_is_stopped_by_generation(open_bucket, put_live):
    late = ModelRepository(open_bucket(), NAMES, holder="late")
    with late.locked():
        put_live(late, 1)
        text = late.read_config()
        # The lease expires between the check and the write. Meanwhile, another deployment acquires
        # the lease and publishes.
        late.check_held = lambda: None
        open_bucket().delete(f"{MODEL_NAME}.lease")
        heir = ModelRepository(open_bucket(), NAMES, holder="heir")
        with heir.locked():
            put_live(heir, 2)
        with raises(Changed, "another controller changed"):
            late.write_config(text)
    assert named(heir) == [2]

"""`evergreen model inspect`: figures beside NumPy's own, faults by name, and misuse in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from components.contracts.dcn import DcnConfig
from components.contracts.graph_json import EmbeddingTable, Graph, write_graph
from components.contracts.manifests import Model
from components.contracts.model_files import RowChunk, num_dense_parameters, unflatten, write_model_chunks
from components.contracts.workflow import TOMBSTONE, FeatureWorkflow
from components.runtime.durable import sha256_tree
from pipelines.__main__ import main
from pipelines.model_inspection import inspect_model

CONFIG = DcnConfig(embedding_dim=3, num_cross_layers=1, tower=(4,), projection_dim=2)
VOCABULARIES = [np.array([5, TOMBSTONE, 9, TOMBSTONE]), np.zeros(0, np.int64), *[np.arange(4)] * 24]
SLOT_SIZES = [3 + len(vocabulary) for vocabulary in VOCABULARIES]
KEYS = np.array([0, 1, 2, 3, 4, 6, 7, *range(11, sum(SLOT_SIZES))])  # of slot 0: 0..6 but 5; of slot 1: 7 of 7..9


@pytest.fixture
def table():
    """Vectors and moments of `KEYS`; the rows of both of slot 0's tombstones' first are zero."""
    random = np.random.default_rng(3)
    arrays = [random.normal(size=(len(KEYS), 3)).astype(np.float32) for _ in range(3)]
    for array in arrays:
        array[KEYS == 4] = 0
    return arrays


@pytest.fixture
def store_model(tmp_path, table):
    """Writes the model into a folder of a store; answers the folder."""

    def make(*, moments=True, workflow=True):
        folder = tmp_path / "models" / "m1"
        flat = np.linspace(-1, 1, num_dense_parameters(CONFIG), dtype=np.float32)
        write_model_chunks(
            folder / Model.WEIGHTS,
            CONFIG,
            num_rows=len(KEYS),
            dense=unflatten(flat, CONFIG),
            dense_moments=(flat, flat**2) if moments else None,
            chunks=[RowChunk(keys=KEYS, vectors=table[0], moments=(table[1], table[2]))],
            with_moments=moments,
        )
        if workflow:
            FeatureWorkflow(
                vocabularies=tuple(VOCABULARIES),
                fill=0.0,
                clip_min=0.0,
                means=np.zeros(13, np.float32),
                stds=np.ones(13, np.float32),
                frequency_threshold=1,
            ).save(folder / Model.WORKFLOW)
        Model(
            model_id="m1",
            uri=folder.as_uri(),
            backend="pytorch",
            config=CONFIG.as_document(),
            slot_sizes=SLOT_SIZES,
            parent_model_id=None,
            seed=1,
            num_train_rows=1234,
            optimizer_step=56,
            early_stopping={},
            last_event_time="2026-01-01T00:00:00+00:00",
            raw_digest="",
            sha256={part: sha256_tree(folder / part) for part in (Model.WEIGHTS, Model.WORKFLOW)},
            created_at="2026-01-02T00:00:00+00:00",
        ).write(folder / Model.MANIFEST)
        return folder

    return make


def test_figures_of_each_slot_are_those_of_its_rows(store_model, table):
    inspection = inspect_model(store_model())
    assert [slot.column for slot in inspection.slots] == [f"C{i}" for i in range(1, 27)]
    ends = np.cumsum(SLOT_SIZES)
    for slot, start, end in zip(inspection.slots, [0, *ends], ends):
        norms = [np.linalg.norm(array[(start <= KEYS) & (end > KEYS)].astype(float), axis=1) for array in table]
        assert (slot.num_ids, slot.num_rows) == (end - start, len(norms[0]))
        np.testing.assert_allclose(slot.mean_norm, norms[0].mean())
        np.testing.assert_allclose(slot.max_norm, norms[0].max())
        np.testing.assert_allclose(slot.mean_moment_norms, [norms[1].mean(), norms[2].mean()])
        assert slot.num_zero_rows == (1 if start == 0 else 0)
    assert [slot.num_rows for slot in inspection.slots[:3]] == [6, 1, 6]
    assert [slot.num_tombstones for slot in inspection.slots] == [2, *[0] * 25]


def test_figures_of_each_dense_parameter_are_its_own(store_model):
    inspection = inspect_model(store_model())
    flat = np.linspace(-1, 1, num_dense_parameters(CONFIG), dtype=np.float32)
    shapes = {array.name: array.shape for array in inspection.dense}
    assert shapes["cross.0.u"] == (91, 2)
    assert shapes["final.bias"] == (1,)
    for array, values in zip(inspection.dense, unflatten(flat, CONFIG).values()):
        np.testing.assert_allclose(array.norm, np.linalg.norm(values.astype(float)))
        assert (array.minimum, array.maximum) == (values.min(), values.max())
    first, second = inspection.dense_moments
    np.testing.assert_allclose([first.norm, second.maximum], [np.linalg.norm(flat.astype(float)), 1])


def test_command_prints_model_network_hashes_tables_and_parameters(store_model, capsys):
    folder = store_model()
    assert main(["model", "inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "model    m1 of backend pytorch, parent none, seed 1" in said
    assert "network  DCN v2 of rank 2: embedding 3, 1 cross layers, tower 4, dropout 0" in said
    assert f"sha256   weights {sha256_tree(folder / 'weights')}, as promised" in said
    lines = [line.split() for line in said.splitlines()]
    assert next(line for line in lines if line[:1] == ["C1"])[1:6] == ["7", "6", "2", "1", "0"]
    total = next(line for line in lines if line[:1] == ["all"])
    assert total[1:6] == [str(sum(SLOT_SIZES)), str(len(KEYS)), "2", "1", "0"]
    assert next(line for line in lines if line[:1] == ["cross.0.u"])[1] == "91x2"


def test_bare_weights_are_inspected_with_the_shape_of_another_file(store_model, tmp_path, capsys):
    folder = store_model(moments=False)
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({"config": CONFIG.as_document(), "slot_sizes": SLOT_SIZES}))
    for config in (shape, folder / Model.MANIFEST):
        assert main(["model", "inspect", str(folder / "weights"), "--config", str(config)]) == 0
        said = capsys.readouterr().out
        assert "nothing promised" in said
        assert "the table's optimizer state was not kept" in said
        assert "the dense optimizer state was not kept" in said
    slot = inspect_model(folder / "weights", shape).slots[0]
    assert (slot.num_tombstones, slot.mean_moment_norms) == (None, None)


def test_changed_part_and_numbers_that_are_not_finite_are_faults_with_exit_code_1(store_model, table, capsys):
    table[0][0, 1] = np.nan  # key 0 of slot 0
    table[2][-1, 2] = np.inf  # the last key, of slot 25, in its state only
    folder = store_model()
    inspection = inspect_model(folder)
    assert [slot.num_not_finite for slot in inspection.slots] == [1, *[0] * 24, 1]
    assert np.isfinite([inspection.slots[0].mean_norm, inspection.slots[25].mean_norm]).all()
    (folder / "workflow" / "stray").write_text("")
    dense = folder / "weights" / "dcn_dense_0.model"
    dense.write_bytes(np.float32(np.nan).tobytes() + dense.read_bytes()[4:])
    assert main(["model", "inspect", str(folder)]) == 1
    said = capsys.readouterr().out
    promised = Model.read(folder / Model.MANIFEST).sha256["weights"]
    assert f"FAULT    weights has sha256 {sha256_tree(folder / 'weights')}, expected {promised}" in said
    assert "FAULT    workflow has sha256" in said
    assert "FAULT    2 rows of the table hold numbers that are not finite" in said
    assert "FAULT    cross.0.u holds 1 numbers that are not finite" in said


def test_graph_of_another_network_beside_the_weights_is_a_fault(store_model, capsys):
    folder = store_model()
    table = EmbeddingTable.for_rows(len(KEYS), 3, beta1=0.9, beta2=0.999, epsilon=1e-7)
    other = DcnConfig(embedding_dim=3, num_cross_layers=2, tower=(4,), projection_dim=2)
    for config, fault in ((CONFIG, False), (other, True)):
        write_graph(folder / "weights" / "dcn.json", Graph(config=config, table=table))
        main(["model", "inspect", str(folder / "weights"), "--config", str(folder / "model.json")])
        said = capsys.readouterr().out
        assert ("is of DcnConfig(embedding_dim=3, num_cross_layers=2" in said) == fault
    (folder / "weights" / "dcn.json").write_text("{}")
    assert main(["model", "inspect", str(folder)]) == 1
    assert "dcn.json has unknown or missing keys ['layers']" in capsys.readouterr().out


def test_workflow_that_cannot_be_read_is_a_fault_and_the_rest_is_told(store_model, capsys):
    folder = store_model()
    (folder / "workflow" / "workflow.json").write_text("{")
    assert main(["model", "inspect", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "FAULT    workflow has sha256" in said
    assert said.count("FAULT") == 2
    total = next(line.split() for line in said.splitlines() if line.startswith("all"))
    assert total[1:5] == [str(sum(SLOT_SIZES)), str(len(KEYS)), "-", "1"]


def test_absent_part_is_a_fault(store_model, capsys):
    folder = store_model()
    for path in (folder / "workflow").iterdir():
        path.unlink()
    (folder / "workflow").rmdir()
    assert main(["model", "inspect", str(folder)]) == 1
    assert "sha256   workflow absent, differs" in capsys.readouterr().out


STORE = "expected a folder of the model store, or a bare weights folder and --config with its shape"


def test_folder_that_is_no_model_is_misuse(store_model, tmp_path, capsys):
    folder = store_model()
    wrong = tmp_path / "elsewhere" / "wrong.json"
    wrong.parent.mkdir()
    tries = [
        ([str(wrong.parent)], f"has no model.json, {STORE}"),
        ([str(tmp_path / "absent")], "absent does not exist, expected a folder of the model store"),
        ([str(folder / "weights")], f"weights has no model.json, {STORE}; {folder} is one"),
        ([str(folder / "model.json")], f"; {folder} is one"),
        ([str(folder.parent)], f"; {folder} is one"),
        ([str(folder.parent.parent)], f"; {folder} is one"),
        ([str(folder / "weights"), "--config", str(wrong)], "cannot be read as JSON with `config` and `slot_sizes`"),
        ([str(tmp_path), "--config", str(folder / "model.json")], "key cannot be read: No such file"),
    ]
    for content in (None, "{", "[]", '{"config": {}, "slot_sizes": []}', '{"config": null}'):
        if content is not None:
            wrong.write_text(content)
        for arguments, expected in tries:
            assert main(["model", "inspect", *arguments]) == 2
            assert expected in capsys.readouterr().err
    wrong.write_text(json.dumps({"config": CONFIG.as_document(), "slot_sizes": SLOT_SIZES[:-1]}))
    assert main(["model", "inspect", str(folder / "weights"), "--config", str(wrong)]) == 2
    assert "has 25 slot sizes, expected 26" in capsys.readouterr().err


def test_weights_that_cannot_be_read_are_a_fault_beside_the_hashes_of_all_parts(store_model, capsys):
    folder = store_model()
    (folder / "weights" / "dcn_dense_0.model").write_bytes(b"\0" * 12)
    assert main(["model", "inspect", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "model    m1 of backend pytorch" in said
    assert f"sha256   weights {sha256_tree(folder / 'weights')}, differs" in said
    assert f"sha256   workflow {sha256_tree(folder / 'workflow')}, as promised" in said
    assert "FAULT    model file " in said
    assert "dcn_dense_0.model has 12 bytes, expected" in said
    assert "C1" not in said


def test_state_that_belongs_to_no_rows_is_a_fault_and_the_vectors_are_told(store_model, table, capsys):
    folder = store_model()
    key, vectors = (folder / "weights" / "dcn0_sparse_0.model" / name for name in ("key", "emb_vector"))
    key.write_bytes(KEYS[::-1].astype("<i8").tobytes())
    vectors.write_bytes(table[0][::-1].tobytes())
    # One MiB of rows of three floats and twice that of state.
    (folder / "weights" / "dcn0_opt_sparse_0.model").write_bytes(bytes(2 * (2**20 // 36) * 12))
    inspection = inspect_model(folder)
    assert inspection.slots[0].mean_moment_norms is None
    np.testing.assert_allclose(inspection.slots[1].mean_norm, np.linalg.norm(table[0][KEYS == 7].astype(float)))
    assert main(["model", "inspect", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "FAULT    optimizer state " in said
    assert "do not ascend" in said
    assert "optimizer state was not kept" not in said

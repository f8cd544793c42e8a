"""`evergreen model inspect`: figures beside NumPy's own, faults by name, and misuse in one line."""

import numpy as np
import pytest

from components.contracts.criteo import CRITEO_RECOMMENDER
from components.contracts.manifests import Model
from components.contracts.workflow import TOMBSTONE
from components.models.configs import DcnConfig
from components.models.files import TABLE, new_model
from components.runtime.durable import sha256_tree
from pipelines.__main__ import main
from tests.support.workflows import workflow_of

CONFIG = DcnConfig(num_dense=13, num_categorical=26, embedding_dim=3, num_cross_layers=1, tower=(4,), projection_dim=2)
VOCABULARIES = [np.array([5, TOMBSTONE, 9, TOMBSTONE]), np.zeros(0, np.int64), *[np.arange(4)] * 24]
SLOT_SIZES = [3 + len(vocabulary) for vocabulary in VOCABULARIES]
SHAPES = {TABLE: (sum(SLOT_SIZES), 3), "cross_u": (1, 91, 2), "bias": (1,)}


@pytest.fixture
def tensors():
    """Vectors and moments by name; the row of slot 0's first tombstone is zero."""
    random = np.random.default_rng(3)
    parts = [{name: random.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(3)]
    for part in parts:
        part[TABLE][4] = 0
    return parts


@pytest.fixture
def store_model(tmp_path, tensors):
    """Writes the model into a folder of a store; answers the folder."""

    def make(*, with_moments=True):
        folder = tmp_path / "models" / "m1"
        with new_model(folder / Model.WEIGHTS, SHAPES, step=56, with_moments=with_moments) as stored:
            for into, values in zip(stored.parts, tensors):
                into.table[:] = values[TABLE]
                for name, array in into.dense.items():
                    array[:] = values[name]
        workflow_of(VOCABULARIES).save(folder / Model.WORKFLOW)
        Model(
            model_id="m1", uri=folder.as_uri(), backend="pytorch", config=CONFIG.as_document(), slot_sizes=SLOT_SIZES,
            parent_model_id=None, seed=1, num_train_rows=1234, optimizer_step=56, progressive={},
            last_event_time="2026-01-01T01:00:00+00:00", last_learned_time="2026-01-01T00:00:00+00:00",
            raw_digest="", created_at="2026-01-02T00:00:00+00:00", recommender=CRITEO_RECOMMENDER,
            sha256={part: sha256_tree(folder / part) for part in (Model.WEIGHTS, Model.WORKFLOW)},
        ).write(folder / Model.MANIFEST)  # fmt: skip
        return folder

    return make


def lines_of(printed):
    """The printed lines by their first word."""
    return {cells[0]: cells[1:] for cells in map(str.split, printed.splitlines()) if cells}


def test_figures_of_each_slot_and_parameter_are_those_of_their_numbers(store_model, tensors, capsys):
    assert main(["model", "inspect", str(store_model())]) == 0
    lines = lines_of(capsys.readouterr().out)
    ends = np.cumsum(SLOT_SIZES)
    for number, (start, end) in enumerate(zip([0, *ends], ends)):
        found = lines[f"C{number + 1}"]
        norms = [np.linalg.norm(part[TABLE][start:end], axis=1) for part in tensors]
        assert [int(cell) for cell in found[:4]] == [end - start, 0 if number else 2, 0 if number else 1, 0]
        expected = [norms[0].max(), *(norm.mean() for norm in norms)]
        np.testing.assert_allclose([float(cell) for cell in found[4:]], expected, rtol=1e-3)
    for part, suffix in zip(tensors, ("", ".exp_avg", ".exp_avg_sq")):
        for name, shape in (("cross_u", "1x91x2"), ("bias", "1")):
            found, values = lines[f"{name}{suffix}"], part[name]
            assert (found[0], found[4]) == (shape, "0")
            expected = [np.linalg.norm(values), values.min(), values.max()]
            np.testing.assert_allclose([float(cell) for cell in found[1:4]], expected, rtol=1e-3)


def test_command_prints_model_network_and_hashes(store_model, capsys):
    folder = store_model()
    assert main(["model", "inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "model    m1 of backend pytorch, parent none, seed 1" in printed
    assert "network  dcn: num_dense 13, num_categorical 26, embedding_dim 3, tower [4]" in printed
    assert f"sha256   weights {sha256_tree(folder / 'weights')}, as promised" in printed


def test_changed_part_and_numbers_that_are_not_finite_are_faults_with_exit_code_1(store_model, tensors, capsys):
    tensors[0][TABLE][0, 1] = np.nan
    tensors[2][TABLE][-1, 2] = np.inf  # in its state only
    tensors[1]["bias"][0] = np.inf
    folder = store_model()
    (folder / Model.WORKFLOW / "note").write_text("later")
    assert main(["model", "inspect", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "FAULT    C1 has 1 rows with numbers that are not finite" in printed
    assert "FAULT    C26 has 1 rows with numbers that are not finite" in printed
    assert "FAULT    bias.exp_avg has 1 numbers that are not finite" in printed
    assert "FAULT    workflow has sha256" in printed
    assert "FAULT    weights has" not in printed


@pytest.mark.parametrize("part", ["weights/weights.safetensors", "workflow/workflow.json"])
def test_a_part_that_cannot_be_read_is_a_fault(store_model, capsys, part):
    path = store_model() / part
    path.write_bytes(path.read_bytes()[:-12])
    assert main(["model", "inspect", str(path.parents[1])]) == 1
    printed = capsys.readouterr().out
    assert f"FAULT    {path.parent.name} has sha256" in printed
    assert "cannot be read" in printed
    assert printed.count("FAULT    ") == 2


def test_a_folder_that_is_no_models_is_refused(tmp_path, capsys):
    assert main(["model", "inspect", str(tmp_path)]) == 2
    assert "model.json cannot be read" in capsys.readouterr().err

"""Tests of the files for NVIDIA's converter.

The slow tests run the converter itself if `hugectr2onnx` can be imported. To import it, set
PYTHONPATH to `onnx_converter` of HugeCTR 25.03.
"""

import json
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from cli import export
from components.training.hugectr.converter import write_for_converter
from components.training.start import write_initial
from evergreen.config.features import FeaturePositions, PooledPositions
from evergreen.config.model import DcnConfig
from evergreen.networks.files import one_id_per_slot
from evergreen.networks.scoring import load_scorer
from evergreen.runtime.errors import ContractError
from testing.networks import shaped
from tests.support.errors import raises

SIZES = [9, 7, 12, 5]
LISTS = FeaturePositions(
    (0, 2, 1, 1, 1, 3, 3), (PooledPositions(2, 5, "sum"), PooledPositions(5, 7, "sum"))
)
BASE = DcnConfig(num_dense=3, num_categorical=4, embedding_dim=4, num_cross_layers=2, tower=(16, 8))
SHAPES = {
    "two cross layers": (BASE, one_id_per_slot(SIZES)),
    "one cross layer, one hidden layer": (
        replace(BASE, num_cross_layers=1, tower=(8,)),
        one_id_per_slot(SIZES),
    ),
    "six cross layers": (replace(BASE, num_cross_layers=6), one_id_per_slot(SIZES)),
    "dropout": (replace(BASE, dropout=0.5), one_id_per_slot(SIZES)),
    "width 1": (replace(BASE, embedding_dim=1), one_id_per_slot(SIZES)),
    "width 128": (replace(BASE, embedding_dim=128), one_id_per_slot(SIZES)),
    "two widths": (replace(BASE, widths=(4, 2, 4, 2)), one_id_per_slot(SIZES)),
    "lists": (BASE, LISTS),
    "lists of two widths": (replace(BASE, widths=(3, 5, 3, 5)), LISTS),
}


def exported(tmp_path, config, positions):
    write_initial(tmp_path / "weights", config, SIZES, click_rate=0.3, seed=1, positions=positions)
    columns = [f"c{at}" for at in range(len(positions.slots))]
    write_for_converter(
        tmp_path / "weights",
        config,
        SIZES,
        positions=positions,
        columns=columns,
        folder=tmp_path / "out",
    )
    return tmp_path / "out"


def read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize(("config", "positions"), SHAPES.values(), ids=SHAPES)
def test_graph_describes_every_number_of_weight_files(tmp_path, config, positions):
    folder = exported(tmp_path, config, positions)
    layers, width_of = read(folder / "dcn.json")["layers"], {"dense": 3}
    num_numbers, vectors = 0, 0
    slots = {each["top"]: each["slot_num"] for each in layers[0]["sparse"]}
    for layer in layers[1:]:
        bottoms, tops = (
            [each] if isinstance(each, str) else each for each in (layer["bottom"], layer["top"])
        )
        match layer["type"]:
            case "DistributedSlotSparseEmbeddingHash":
                width = layer["sparse_embedding_hparam"]["embedding_vec_size"]
                width_of[tops[0]] = slots[bottoms[0]] * width
                sparse = folder / f"dcn{vectors}_sparse_0.model"
                num_keys = (sparse / "key").stat().st_size // 8
                assert (sparse / "emb_vector").stat().st_size == 4 * num_keys * width
                assert num_keys < layer["sparse_embedding_hparam"]["max_vocabulary_size_global"]
                vectors += 1
                continue
            case "Slice":
                width_of |= {top: b - a for top, (a, b) in zip(tops, layer["ranges"])}
                continue
            case "BinaryCrossEntropyLoss":
                assert bottoms == ["logit", "label"]
                continue
        width = sum(width_of[each] for each in bottoms)
        if layer["type"] == "Reshape":
            assert layer["leading_dim"] == width
        if layer["type"] == "MultiCross":
            num_numbers += layer["mc_param"]["num_layers"] * 2 * width
        if layer["type"] == "InnerProduct":
            outputs = layer["fc_param"]["num_output"]
            num_numbers += (width + 1) * outputs
            width = outputs
        width_of[tops[0]] = width
    assert (folder / "dcn_dense_0.model").stat().st_size == 4 * num_numbers


@pytest.mark.parametrize(
    ("config", "positions", "message"),
    [
        (
            replace(BASE, projection_dim=3),
            one_id_per_slot(SIZES),
            "projection_dim is 3, expected 0",
        ),
        (
            BASE,
            FeaturePositions((0, 1, 1, 2, 3), (PooledPositions(1, 3, "mean"),)),
            "pooled by mean, expected sum",
        ),
        (
            shaped("deepfm", {"embedding_dim": 4, "tower": (8,)}, num_dense=3, num_categorical=4),
            one_id_per_slot(SIZES),
            "network is 'deepfm', expected dcn",
        ),
    ],
    ids=["dcn v2", "mean", "deepfm"],
)
def test_model_that_converter_misreads_is_refused(tmp_path, config, positions, message):
    with raises(ContractError, message):
        write_for_converter(
            tmp_path, config, SIZES, positions=positions, columns=[], folder=tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_command_writes_new_folder_and_refuses_existing_one(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "verified_part", lambda model, part: tmp_path / "weights")
    positions = one_id_per_slot(SIZES)
    expected = exported(tmp_path, BASE, positions)
    features = SimpleNamespace(id_positions=positions, id_names=("c0", "c1", "c2", "c3"))
    model = SimpleNamespace(
        config=BASE.as_document(),
        slot_sizes=SIZES,
        recommender=SimpleNamespace(features=features),
    )
    export.export_for_hugectr(model, tmp_path / "new")
    for path in expected.rglob("*"):
        if path.is_file():
            written = tmp_path / "new" / path.relative_to(expected)
            assert written.read_bytes() == path.read_bytes()
    with raises(ContractError, "--hugectr", "exists already, expected a new folder"):
        export.export_for_hugectr(model, tmp_path / "new")


def keys_of(document, ids, positions, shapes):
    """Convert rows of ids to the converter's key inputs, by the rules in the keys document."""
    keys = {
        name: np.full((len(ids), *shapes[name]), padding, np.int64)
        for name, padding in document["padding"].items()
    }
    is_list = {at for each in positions.lists for at in range(each.start, each.stop)}
    for at, where in enumerate(document["columns"].values()):
        given = ids[:, at] != 0 if at in is_list else np.full(len(ids), True)
        keys[where["input"]][given, where["slot"], where["position"]] = (
            where["first_key"] + ids[given, at]
        )
    return keys


@pytest.mark.slow
@pytest.mark.skipif(
    not find_spec("hugectr2onnx"), reason="NVIDIA's converter hugectr2onnx cannot be imported"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("config", "positions"), SHAPES.values(), ids=SHAPES)
def test_nvidias_converter_computes_our_scores(tmp_path, monkeypatch, config, positions):
    import onnx
    import onnxruntime

    if not hasattr(onnx, "mapping"):  # removed in onnx 1.19
        types = {
            np.dtype(dtype): onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            for dtype in (np.float32, np.int64)
        }
        mapping = SimpleNamespace(NP_TYPE_TO_TENSOR_TYPE=types)
        monkeypatch.setattr(onnx, "mapping", mapping, raising=False)
    from hugectr2onnx.converter import convert

    folder = exported(tmp_path, config, positions)
    sparse = sorted(map(str, folder.glob("dcn*_sparse_0.model")))
    onnx_path = str(tmp_path / "converted.onnx")
    convert(onnx_path, str(folder / "dcn.json"), str(folder / "dcn_dense_0.model"), True, sparse)
    random = np.random.default_rng(2)
    ids = np.stack([random.integers(0, SIZES[slot], 300) for slot in positions.slots], axis=1)
    dense = random.normal(size=(300, 3)).astype(np.float32)
    expected = load_scorer(tmp_path / "weights", config, SIZES, positions=positions).probabilities(
        dense, ids.astype(np.int32)
    )
    session = onnxruntime.InferenceSession(onnx_path, providers=["CPUExecutionProvider"])
    shapes = {each.name: each.shape[1:] for each in session.get_inputs()}
    keys = keys_of(read(folder / "keys.json"), ids, positions, shapes)
    (found,) = session.run(None, {"dense": dense, **keys})
    assert expected.std() > 1e-3
    np.testing.assert_allclose(found[:, 0], expected, rtol=0, atol=1.2e-7)

"""The estimate of memory: each addend against the bytes that it stands for, and the refusal with its numbers."""

from __future__ import annotations

import onnx
import pytest

from components.contracts.serving import MAX_BATCH_ROWS
from components.deployment.graph.export import GraphLimits, write_graph
from components.deployment.graph.memory import (
    GIB,
    MIG_SLICES,
    GraphSizes,
    check_fits,
    hash_map_bytes,
    memory_needed,
    parse_target,
)
from components.runtime.errors import ContractError
from components.store.models import GRAPH_FILE

LIMITS = {
    "one file": GraphLimits(),
    "embeddings beside": GraphLimits(inline_bytes=0),
    "hash table beside": GraphLimits(inline_bytes=0, label_encoder_entries=0),
}


@pytest.fixture
def written(make_parts, tmp_path):
    def write(limits, **shape):
        workflow, toy = make_parts(1, **shape)
        write_graph(tmp_path / "graph", workflow, toy.table, network=toy.network(), limits=limits)
        return tmp_path / "graph", workflow, toy

    return write


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_sizes_are_those_of_the_files(written, limits):
    folder, workflow, toy = written(limits)
    sizes = GraphSizes.of(folder)
    entries = 26 + sum(map(len, workflow.vocabularies))
    is_beside, is_hashed = limits.inline_bytes == 0, limits.label_encoder_entries == 0
    tables = sizes.tables_beside if is_beside else sizes.tables_in_message
    hashed = 12 * (1 + 1.25 * entries) if is_hashed else 0
    # Primes and the entries in the message round up.
    assert toy.table.nbytes + hashed <= tables <= toy.table.nbytes + hashed + 1000
    assert (sizes.tables_in_message if is_beside else sizes.tables_beside) < 1000
    assert sizes.label_encoder_entries == (0 if is_hashed else entries)
    dense = sum(value.nbytes for value in toy.dense.values())
    assert 0.8 * dense < sizes.dense < dense + 4000
    assert sizes.files == sum(path.stat().st_size for path in folder.iterdir())


def test_instances_share_what_lies_beside_and_nothing_else():
    sizes = GraphSizes(tables_in_message=10, tables_beside=100, dense=3, label_encoder_entries=7, row=5, files=1000)
    one, four = (memory_needed(sizes, instances=n, versions=2) for n in (1, 4))
    assert one["tables beside it"] == four["tables beside it"] == 200
    assert one["opening"] == four["opening"] == 900
    for name in ("tables in the message", "vocabularies", "dense weights", "activations"):
        assert four[name] == 4 * one[name] > 0
    assert one["activations"] == 2 * 5 * MAX_BATCH_ROWS
    assert one["tables in the message"] == 20


def test_on_a_gpu_every_session_has_its_own_tables():
    sizes = GraphSizes(tables_in_message=10, tables_beside=100, dense=3, label_encoder_entries=7, row=5, files=1000)
    addends = memory_needed(sizes, instances=3, versions=2, on_gpu=True)
    assert addends["tables"] == 6 * 110
    assert addends["dense weights"] == 6 * 3


@pytest.mark.parametrize(
    ("text", "num_bytes", "is_gpu"),
    [
        ("mig-1g.5gb", 4.75 * GIB, True),
        ("nvidia.com/mig-3g.20gb", 19.5 * GIB, True),
        ("gpu-24Gi", 24 * GIB, True),
        ("16Gi", 16 * GIB, False),
        ("1.5G", 1.5e9, False),
        ("1000000", 1e6, False),
    ],
)
def test_targets_are_known_by_name_or_size(text, num_bytes, is_gpu):
    target = parse_target(text)
    assert (target.num_bytes, target.is_gpu) == (num_bytes, is_gpu)


@pytest.mark.parametrize("text", ["mig-9g.5gb", "16GiB", "-1", "gpu-", "1e9"])
def test_an_unknown_target_is_refused_with_the_known_ones(text):
    with pytest.raises(ContractError, match=r"expected a size \(16Gi\), a GPU's \(gpu-24Gi\) or one of mig-1g.5gb"):
        parse_target(text)


def test_no_slice_has_more_memory_than_its_name_says():
    for name, gib in MIG_SLICES.items():
        assert 0.9 < gib / float(name.partition(".")[2].removesuffix("gb")) < 1


def test_what_fits_passes_and_what_does_not_is_refused_with_every_number(written):
    folder, _, _ = written(GraphLimits())
    check_fits(folder, "", instances=1)
    check_fits(folder, "1Gi", instances=1)
    check_fits(folder, "mig-1g.5gb", instances=4)
    with pytest.raises(ContractError) as told:
        check_fits(folder, "100Mi", instances=3)
    words = str(told.value)
    for part in ("2 versions of 3 instances", "the 100.0 MiB of 100Mi", "vocabularies", "activations", "processes"):
        assert part in words
    with pytest.raises(ContractError, match=r"CUDA \(allowance, not measured\) 1.00 GiB"):
        check_fits(folder, "gpu-1Gi", instances=4)


def test_the_edge_is_where_the_addends_sum_says(written):
    folder, _, _ = written(LIMITS["hash table beside"])
    sizes = GraphSizes.of(folder)
    needed = sum(memory_needed(sizes, instances=2, versions=3).values())
    check_fits(folder, str(needed), instances=2, versions=3)
    with pytest.raises(ContractError, match="would take about"):
        check_fits(folder, str(needed - 1), instances=2, versions=3)


def test_values_of_the_network_count_in_a_row(written):
    row = GraphSizes.of(written(GraphLimits())[0]).row
    # Ids; vectors, flat too; dense values; what goes into the hidden layer and comes out of it, and of the last one.
    assert row == 10 * 8 * 26 + 4 * (2 * 26 * 4 + 13 + (26 * 4 + 13) + 8 + 8 + 1)
    wide = GraphSizes.of(written(GraphLimits(), hidden=108)[0]).row
    assert wide == row + 4 * 2 * 100


def test_what_is_no_graph_of_ours_is_refused(tmp_path):
    with pytest.raises(ContractError, match=r"model\.onnx cannot be read"):
        GraphSizes.of(tmp_path)
    empty = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], []))
    onnx.save(empty, str(tmp_path / GRAPH_FILE))
    with pytest.raises(ContractError, match="has no embedding table"):
        check_fits(tmp_path, "1Gi", instances=1)
    assert hash_map_bytes(0) == 0

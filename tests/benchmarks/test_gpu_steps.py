"""Tests of the GPU benchmark's steps, each on a simulated GPU."""

import json
import subprocess
import sys
from types import SimpleNamespace

import onnxruntime
import pytest
import torch

from benchmarks import gpu, gpu_plan, gpu_steps, lists
from components.training import torch_parts
from tests.support.simulated_gpu import DEVICE, GpuTensor, simulate_gpu, simulated_gpu

TINY = {"1.2M": 130_000, "10M": 131_000, "100M": 132_000}


@pytest.fixture
def run(monkeypatch):
    """Runs a step in its quick size on the simulated GPU, and returns its document."""
    simulate_gpu(monkeypatch, torch_parts, gpu_steps)
    random_rows, products = gpu_steps.random_rows, gpu_steps.products_per_second
    small = {
        "DEVICE": "cuda",
        "QUICK_TABLES": TINY,
        "QUICK_BATCH": 64,
        "random_rows": lambda is_quick: random_rows(is_quick=True),
        "products_per_second": lambda dtype, device, side: products(dtype, device, 64),
    }
    for name, value in small.items():
        monkeypatch.setattr(gpu_steps, name, value)
    monkeypatch.setattr(torch, "compile", lambda model, mode: model)

    def go(name, is_quick=True):
        work = getattr(gpu_steps, name.partition("-")[0])
        with simulated_gpu():
            return gpu_steps.as_document(work(name, is_quick=is_quick))

    return go


def named(document):
    return {(figure.name, figure.peer): figure for figure in document["figures"]}


def test_limits_include_way_to_gpu(run):
    document = run("limits")
    assert document["skipped"] == []
    assert [figure.unit for figure in document["figures"]] == ["TFLOP/s"] * 3 + ["GB/s"] * 3
    assert gpu_steps.gpu_facts() == {
        "gpu": "one simulated GPU, 80 GiB",
        "cuda": torch.version.cuda,
    }


def test_equality_compares_gpu_with_cpu(run):
    document = run("equality")
    assert document["skipped"] == []
    assert len(document["figures"]) == 6
    assert all(figure.value.median < 1e-5 for figure in document["figures"])


@pytest.mark.parametrize("name", ["rates-dcn-1.2M", "rates-deepfm-10M", "rates-dlrm-100M"])
def test_rates_compare_each_precision_with_fastest_peer(run, name):
    document = run(name)
    missing = [each for each in document["skipped"] if not each.startswith("TorchRec in")]
    assert missing == []
    peers = ["plain PyTorch", "plain PyTorch, sparse gradients"]
    expected = {f"{each}, {kind}" for each in peers for kind in ("float32", "bfloat16")}
    assert set(document["details"]["peers"]) >= expected
    ratios = [figure for figure in document["figures"] if figure.unit == "times"]
    assert len(ratios) == len(gpu_steps.PRECISIONS)
    by_default = [each for each in document["figures"] if "batches of" in each.name]
    assert len(by_default) == (name == gpu_plan.DEFAULT_RATES)


def test_loading_measures_threads_and_processes(run):
    document = run("loading")
    assert document["skipped"] == []
    assert len(document["figures"]) == 4


def test_memory_compares_peak_with_estimate(run):
    document = run("memory")
    assert document["skipped"] == []
    peaks = [figure for figure in document["figures"] if figure.peer == "the estimate"]
    assert len(peaks) == 9


@pytest.mark.parametrize("network", gpu_plan.NETWORKS)
def test_graphs_measure_three_ways_and_engine(run, monkeypatch, network):
    captured = []

    def make_graphed(model, sample):
        """Check what torch requires, and return the module itself."""
        assert all(isinstance(each, GpuTensor) for each in (*sample, *model.parameters()))
        assert not any(each.requires_grad for each in model.buffers())
        assert [each.requires_grad for each in sample] == [False, True]
        captured.append(model.training)
        return model

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed)
    document = run(f"graphs-{network}")
    assert document["skipped"] == []
    case = f"{network}, forward and backward of 64 rows, "
    times = {figure.name for figure in document["figures"] if figure.unit == "ms"}
    assert times == {case + way for way in ("as it is", "CUDA graph", "compiled")}
    assert document["figures"][-1].unit == "rows/s"
    assert captured == [True, True]


def test_only_smaller_batch_is_compiled_in_full_run(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda model, sample: model)
    for name, value in {"BATCH": 64, "STEPS": 2, "PASSES": 2, "TABLES": TINY}.items():
        monkeypatch.setattr(gpu_steps, name, value)
    monkeypatch.setattr(gpu_steps, "seconds_of", lambda work, times: work() and 1.0)
    document = run("graphs-deepfm", is_quick=False)
    compiled = [each.name for each in document["figures"] if "compiled" in each.name]
    assert set(compiled) == {"deepfm, forward and backward of 2,048 rows, compiled"}
    assert len({each.name for each in document["figures"] if each.unit == "ms"}) == 5


def test_way_that_fails_is_reported_and_others_are_measured(run, monkeypatch):
    def fail(*arguments, **keywords):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    document = run("graphs-dcn")
    assert len([each for each in document["figures"] if each.unit == "ms"]) == 2
    assert [each.split(": ")[0] for each in document["skipped"]] == [
        "dcn, forward and backward of 64 rows, CUDA graph",
        "dcn, training with a CUDA graph",
    ]
    assert all("RuntimeError: operation not permitted" in each for each in document["skipped"])


def test_serving_compares_scores_of_both_providers(run, monkeypatch):
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    opened = []

    def open_session(path, providers):
        opened.extend(providers)
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(lists, "InferenceSession", open_session)
    document = gpu_steps.as_document(gpu_steps.serving("serving", is_quick=True))
    assert document["skipped"] == []
    assert opened == providers[::-1]
    differences = [each for each in document["figures"] if each.peer == "the CPU"]
    assert [each.value.median for each in differences] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "passed", "skipped"),
    [
        ((0, "12 passed, 27 deselected in 9.1s", ""), [12], []),
        ((0, "12 skipped in 3.1s", ""), [0], ["the tests marked gpu: 12 skipped in 3.1s"]),
        ((1, "", "No module named pytest"), [], ["the tests marked gpu: pytest is not installed"]),
    ],
    ids=["passed", "skipped", "without pytest"],
)
def test_number_of_passed_gpu_tests_is_figure(monkeypatch, answer, passed, skipped):
    code, stdout, stderr = answer
    done = SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *command, **keywords: done)
    step = gpu_steps.tests("tests", is_quick=True)
    assert [figure.value.median for figure in step.figures] == passed
    assert step.skipped == skipped


def test_failed_gpu_tests_are_error(monkeypatch):
    done = SimpleNamespace(returncode=1, stdout="1 failed, 11 passed in 9.1s", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *command, **keywords: done)
    with pytest.raises(RuntimeError, match="1 failed"):
        gpu_steps.tests("tests", is_quick=True)


@pytest.fixture
def without_gpu(monkeypatch):
    """Tiny sizes on the CPU, and networks that are not compiled."""
    for name, value in {"DEVICE": "cpu", "QUICK_TABLES": TINY, "QUICK_BATCH": 64}.items():
        monkeypatch.setattr(gpu_steps, name, value)
    monkeypatch.setattr(torch, "compile", lambda model, mode: model)


def test_steps_without_gpu_report_what_they_lack(without_gpu, monkeypatch):
    assert gpu_steps.gpu_facts() == {}
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    names = ["limits", "equality", "memory", "graphs-deepfm", "serving"]
    skipped = []
    for name in names:
        skipped += getattr(gpu_steps, name.partition("-")[0])(name, is_quick=True).skipped
    assert skipped == [
        "the way to the GPU: there is no GPU",
        "equality with the CPU: there is no GPU, so the CPU was compared with itself",
        "peak memory beside its estimate: there is no GPU",
        "deepfm, forward and backward of 64 rows, CUDA graph: NotImplementedError: there is no GPU",
        "deepfm, training with a CUDA graph: NotImplementedError: there is no GPU",
        "the served graph: import of onnxruntime halted; None in sys.modules",
    ]


def test_torchrec_trains_as_peer(without_gpu, monkeypatch):
    """FBGEMM has no fused Adam for CPUs, so the tables have SGD here."""
    pytest.importorskip("torchrec")
    from torchrec.modules import fused_embedding_modules as fused

    real = fused.FusedEmbeddingBagCollection

    def with_sgd(tables, optimizer, arguments, device):
        assert optimizer is torch.optim.Adam
        return real(tables, torch.optim.SGD, arguments, device=device)

    monkeypatch.setattr(fused, "FusedEmbeddingBagCollection", with_sgd)
    slot_sizes = gpu_steps.slot_sizes_for(TINY["1.2M"])
    rows = gpu_steps.PlantedLogit(slot_sizes).draw(128, seed=2)[0]
    config = gpu_steps.CONFIGS["deepfm"]
    train = gpu_steps.torchrec(gpu_steps.PeerCase(config, slot_sizes, rows, 64, "float32"))
    assert train(0) == 128


def test_simulated_gpu_refuses_what_gpu_refuses(monkeypatch):
    simulate_gpu(monkeypatch)
    with simulated_gpu():
        there = torch.ones(3, device="cuda")
        assert (there.device, (2 * there).device) == (DEVICE, DEVICE)
        assert (2 * there).cpu().tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        with pytest.raises(TypeError, match="can't convert cuda"):
            there.numpy()


def test_absent_packages_are_named_before_first_step(tmp_path):
    block = "import sys; sys.modules['pyarrow'] = sys.modules['msgspec'] = None; "
    code = block + "from benchmarks import gpu; gpu.main(sys.argv[1:])"
    flags = [f"--folder={tmp_path / 'gpu'}", f"--output={tmp_path / 'gpu.json'}"]
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].endswith("pip install msgspec pyarrow")
    assert not (tmp_path / "gpu").exists()


def test_document_of_step_is_json(run, tmp_path, monkeypatch):
    output = tmp_path / "memory.json"
    with simulated_gpu():
        assert gpu.main(["--step=memory", "--quick", f"--output={output}"]) == 0
    document = json.loads(output.read_text())
    assert document["machine"]["gpu"] == "one simulated GPU, 80 GiB"
    assert document["benchmark"] == "gpu"

"""Tests that the monitor's retrain request sets only inputs that the pipeline has."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.pipeline import build_parser
from components.extraction.window import find_baselines, resolve_window
from demo import runner as local_run
from demo.plan import columns_to_change, plan_for_data
from evergreen.config.features import Features
from evergreen.config.monitor import RateLimitSettings, RecipeSettings
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.manifests import RetrainRequest
from evergreen.runtime.errors import ContractError, PermanentError
from monitoring.policies.policy import Action, Decision
from monitoring.policies.rate_limit import OBSERVED_NUMBERS
from monitoring.retraining.retraining import Retraining
from monitoring.retraining.triggers import KubeflowSettings, KubeflowTrigger, LocalTrigger
from monitoring.state.store import StateStore
from pipelines.locations import LOCATIONS
from pipelines.package import compile_pipeline, read_parameters
from pipelines.placement import Placement
from tests.support.errors import raises
from tests.support.yaml_texts import documents

NOW = 1_767_225_600.5
TYPES = {"STRING": str, "NUMBER_INTEGER": int, "NUMBER_DOUBLE": float, "BOOLEAN": bool}


class Archived:
    """An archive without pending rows."""

    def flush(self):
        return []

    def waiting_for_upload(self):
        return []


class SilentJournal:
    """A journal that ignores all entries."""

    def emit(self, kind, text, **details):
        json.dumps(details, allow_nan=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("a package") / "retraining.yaml"
    compile_pipeline(path, Placement())
    return path


@pytest.fixture(scope="module")
def inputs(package):
    spec = documents(package.read_text())[0]
    found = spec["root"]["inputDefinitions"]["parameters"]
    return {name: TYPES[parameter["parameterType"]] for name, parameter in found.items()}


@pytest.fixture
def request_from_monitor(tmp_path):
    """Let the monitor make a decision, write a retrain request, and submit it through `trigger`.

    Returns the request.
    """

    def request_run(trigger) -> RetrainRequest:
        store = StateStore(tmp_path / "state" / "monitor.db")
        retraining = Retraining(
            documents=store,
            archive=Archived(),
            trigger=trigger,
            journal=SilentJournal(),
            rate_limit=RateLimitSettings(),
            recipe=RecipeSettings(),
            upload_wait_seconds=0.0,
        )
        numbers = {
            **dict.fromkeys(OBSERVED_NUMBERS, 1.0),
            "auc": 0.61,
            "auc_low": None,
            "version": 3,
        }
        reason = 'auc 0.610 < 0.700: "drift"'
        decision = Decision(
            policy="threshold", action=Action.RETRAIN, reason=reason, numbers=numbers
        )
        retraining.begin(decision, now=NOW, data_until=NOW)
        request = RetrainRequest(**retraining.progress.request)
        retraining.step(NOW)
        assert retraining.progress.phase == "running", retraining.progress
        store.close()
        return request

    return request_run


def _fits(arguments, inputs):
    unknown = arguments.keys() - inputs.keys()
    assert not unknown, f"the pipeline has no inputs {sorted(unknown)}"
    for name, value in arguments.items():
        # An integer is a valid value for a float input.
        assert isinstance(value, (int, float) if inputs[name] is float else inputs[name]), (
            name,
            value,
        )


def test_extraction_understands_requests_window(request_from_monitor, tmp_path):
    request = request_from_monitor(LocalTrigger(tmp_path / "state", tmp_path / "store", "true"))
    baselines = find_baselines(
        tmp_path / "store", parent=request.parent, champion=request.champion, features=CRITEO
    )
    window = resolve_window(
        start=request.window_start, end=request.window_end, parent=baselines.parent
    )
    assert window.start is None
    # The row at exactly the time of the request belongs to the run.
    assert window.end == round(NOW * 1e6) + 1


def test_command_line_of_local_trigger_is_accepted_by_evergreen(
    request_from_monitor, services, package, inputs, tmp_path
):
    # The monitor's settings in the demo, with a harmless program in place of the interpreter.
    command = ["true", *services.run_command()[1:]]
    trigger = LocalTrigger(tmp_path / "state", tmp_path / "store", shlex.join(command))
    request = request_from_monitor(trigger)
    note = json.loads((tmp_path / "state" / "runs" / f"{request.request_id}.json").read_text())
    program, switch, module, *line = note["command"]
    assert (program, switch, module) == ("true", "-m", "cli")
    parsed = build_parser().parse_args(line)
    assert parsed.command == "run"
    assert parsed.folder == services.folders.root
    assert parsed.package == services.package
    assert RetrainRequest.read(parsed.request) == request
    _fits(read_parameters(package, parsed.parameter), inputs)
    _fits(request.pipeline_arguments(), inputs)
    assert len(request.pipeline_arguments()) == 6, "the request must set only the pipeline's inputs"


def test_local_run_gives_pipeline_only_inputs_that_it_has(
    request_from_monitor, services, package, inputs, monkeypatch, tmp_path
):
    request = request_from_monitor(LocalTrigger(tmp_path / "state", tmp_path / "store", "true"))
    given, placed = {}, {}

    def run_pipeline(package, arguments, *, locations, **_others):
        given.update(arguments)
        placed.update(locations)

    monkeypatch.setattr(local_run, "run_pipeline", run_pipeline)
    monkeypatch.setattr(local_run.signal, "signal", lambda *_: None)
    line = build_parser().parse_args(services.run_command()[3:])
    values = {"parameters": read_parameters(package, line.parameter), "request": request}
    with raises(PermanentError, "without an outcome"):
        local_run.run_once(package, services.folders, **values)
    _fits(given, inputs)
    assert given["trigger_id"] == request.request_id
    assert given["window_end"] == request.window_end
    assert placed.keys() <= set(LOCATIONS)


def test_kubeflow_run_is_requested_with_inputs_of_pipeline(
    request_from_monitor, kubeflow, inputs, tmp_path
):
    further = {"recommender": "3", "settings": "gate.min_auc=0.7"}
    settings = KubeflowSettings(
        kubeflow_host=kubeflow.url, pipeline_name="ours", pipeline_arguments=json.dumps(further)
    )
    trigger = KubeflowTrigger(settings, store=tmp_path / "store", timeout_seconds=(5.0, 5.0))
    request = request_from_monitor(trigger)
    (run,) = kubeflow.runs
    sent = run["body"]["runtime_config"]["parameters"]
    _fits(sent, inputs)
    assert sent == {**further, **request.pipeline_arguments()}
    assert run["display_name"] == "drift 2026-01-01 00:00:00.500000 v3"


def test_own_file_of_user_is_not_overwritten_and_drifting_column_must_exist(services):
    own = services.plan.base.with_settings({"gate.min_auc": 0.7, "training.seed": 1})
    rows = {"replay_rows": 2_000, "lake_rows": 3_000, "clicks": 600, "replay_requests": 2_000}
    settings = plan_for_data(services.settings, own, **rows).recommender().settings
    assert (settings["gate"]["min_auc"], settings["training"]["seed"]) == (0.7, 1)
    with raises(ContractError, "'I99'", "expected I9"):
        plan_for_data(replace(services.settings, drift_columns=("I99",)), own, **rows)


def test_columns_that_change_are_numeric_or_have_few_categories(tmp_path):
    features = Features(numeric=("price",), categorical=("item", "user"))
    table = pa.table({"price": [0.5] * 400, "item": [1, 2] * 200, "user": list(range(400))})
    pq.write_table(table, tmp_path / "replay.parquet")
    assert columns_to_change(tmp_path / "replay.parquet", features) == ("price", "item")
    only = Features(numeric=(), categorical=("user",))
    assert columns_to_change(tmp_path / "replay.parquet", only) == ("user",)

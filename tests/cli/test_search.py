"""Tests of a search: allowed parameters, trials, the winner, and the equivalent Katib experiment.

A trial runs a program that writes a run's results into the registry. The AUC is a known function of
the settings. The slow test uses real trials.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from cli import search
from cli.runs import read_runs
from components.run_outcome import trial
from demo.environments import python_of
from evergreen.config.model import network_config
from evergreen.config.reader import parse_settings
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.manifests import ModelQuality
from evergreen.registry.models import keep_verdict
from evergreen.registry.runs import RunOutcome, step_note, store_name, write_outcome
from evergreen.runtime.errors import ContractError
from pipelines.package import with_locations
from testing.paths import REPOSITORY
from testing.recommenders import accept_into
from testing.releases import keep_model, passing_verdict
from testing.validation_models import make_dataset
from tests.k8s.crds import validate_crd

GOLDEN = REPOSITORY / "tests/pipelines/golden/retraining.yaml"
PYTHON = python_of("search")
SPACE = """
training.learning_rate: {low: 1e-3, high: 0.1, log: true}
training.min_steps: {low: 10, high: 20}
model.tower: {choices: [[64, 32], [128]]}
"""


built = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"{PYTHON} is absent: make environments ENVIRONMENTS=search"
)


def leave_run(store, run: str, auc: float) -> None:
    """Write the results of an evaluated run's steps."""
    model = keep_model(store, f"model-{run}")
    with step_note(store, run, "training") as note:
        note.facts["model"] = model.model_id
    quality = ModelQuality(auc=auc, log_loss=1 - auc)
    verdict = passing_verdict(model.model_id, store / "scores", num_rows=9, candidate=quality)
    keep_verdict(store, verdict, make_dataset(store, 9))
    fields = {"step": "deployment", "reason": "kept", "version": None, "ended_at": "2100-01-01"}
    write_outcome(store, RunOutcome(run=run, trigger_id=run, state="evaluated", **fields))


RUN = """
import sys
from cli.pipeline import build_parser
from pipelines.package import read_parameters
from tests.cli.test_search import leave_run, parse_settings
arguments = build_parser().parse_args(["run", *sys.argv[1:]])
texts = read_parameters(arguments.package, arguments.parameter)
settings = parse_settings(texts["settings"])
assert settings["release.rollout"] == "none" and texts["window_end"] and len(texts["recommender"]) == 64
if settings.get("model.tower") == [128]:
    sys.exit(3)
leave_run(arguments.folder / "store", texts["trigger_id"], 0.9 - settings.get("training.learning_rate", 0.2))
"""  # noqa: E501


def call(folder, *words, runner=search.RUNNER):
    """Run `evergreen search` over the space in the folder.

    `runner` is the program that runs a trial.
    """
    program = (
        f"import sys; from cli import search; search.RUNNER = {runner}; sys.exit(search.main())"
    )
    line = [
        PYTHON,
        "-c",
        program,
        f"--package={GOLDEN}",
        f"--folder={folder}",
        f"--space={folder}/space.yaml",
        *words,
    ]
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(line, env=variables, text=True, capture_output=True)


@built
def test_search_starts_with_given_recommender_resumes_and_names_best(tmp_path):
    accept_into(tmp_path / "store")
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "run.py").write_text(RUN)
    runner = (sys.executable, str(tmp_path / "run.py"))
    first = call(tmp_path, "--trials=2", runner=runner)
    assert re.search(
        r"  0  auc 0.7000 .* log_loss 0.3000 .*\(the recommender's own settings\)", first.stdout
    ), first.stderr
    assert re.findall(r"^trial (\d) started: .*search\.log$", first.stderr, flags=re.M) == [
        "0",
        "1",
    ]
    trials, _, ranking = call(tmp_path, "--trials=6", runner=runner).stdout.partition(
        "\nby auc, the best first:\n"
    )
    assert [line.split()[0] for line in trials.splitlines()] == ["2", "3", "4", "5"]
    assert "exit code 3, see " in trials
    *evaluated, best = ranking.splitlines()
    rates = [
        float(found[1]) for line in evaluated if (found := re.search(r"learning_rate=(\S+)", line))
    ]
    assert len(rates) >= 2
    assert rates == sorted(rates)
    assert parse_settings(best.replace("--set=", ""))["training.learning_rate"] == rates[0]
    assert (
        "as in the earlier search"
        in call(tmp_path, "--trials=9", "-pparent=none", runner=runner).stderr
    )


@built
@pytest.mark.slow  # the test runs the search twice
@pytest.mark.timeout(900)
def test_two_real_trials_are_evaluated_by_same_rows_and_release_nothing(tmp_path):
    accept_into(tmp_path / "store")
    (tmp_path / "space.yaml").write_text("training.learning_rate: {low: 1e-3, high: 1e-2}")
    simulate = [
        "simulate",
        "lake",
        f"--lake={tmp_path}/lake",
        f"--simulator={tmp_path}/simulator.json",
        "--rows=8000",
        "--days=2",
    ]
    simulate += ["--last-day=2026-01-02", "--seed=1"]
    subprocess.run([sys.executable, "-m", "cli", *simulate], check=True, cwd=REPOSITORY)
    done = call(tmp_path, "--trials=2")
    runs = read_runs(tmp_path / "store")
    assert [(run.state, run.version) for run in runs] == [("evaluated", None)] * 2, done.stderr
    assert [
        f"auc {run.auc:.4f} [" in text for run, text in zip(runs, done.stdout.splitlines())
    ] == [True, True]
    assert runs[0].auc != runs[1].auc


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "training.learning_rte: {low: 1, high: 2}",
            "training.learning_rte is not a setting, expected learning_rate",
        ),
        ("model.tower: {choices: [64]}", "model.tower is 64, expected array"),
        ("gate.min_auc: {low: 0.1, high: 0.2}", "of preprocessing, model, training"),
        (
            "training.seed: {low: 3, high: 2}",
            "low is 3, high is 2; expected either choices, or low < high",
        ),
        ("training.seed: {low: x}", "training.seed.low is 'x', expected int | float"),
    ],
)
def test_wrong_space_is_refused_by_setting_and_value(text, expected, tmp_path):
    (path := tmp_path / "space.yaml").write_text(text)
    with pytest.raises(ContractError, match=re.escape(expected)):
        search.read_space(path, CRITEO_RECOMMENDER)


def test_network_that_cannot_continue_live_model_is_refused_before_first_trial(
    tmp_path, monkeypatch, capsys
):
    store = tmp_path / "store"
    accept_into(store)
    config = network_config(CRITEO_RECOMMENDER)
    keep_model(store, "model-1", config=config.as_document())
    started = []
    monkeypatch.setattr(search, "search", lambda *_, **given: started.append(given["given"]))
    line = [f"--package={GOLDEN}", f"--folder={tmp_path}", f"--space={tmp_path}/space.yaml"]
    (tmp_path / "space.yaml").write_text(f"model.tower: {{choices: [{list(config.tower)}, [9]]}}")
    assert search.main([*line, "-pparent=model-1"]) != 0
    message = capsys.readouterr().err
    assert "model.tower is [9]" in message
    assert "`-p parent=none`" in message
    assert not started
    assert search.main([*line, "-pparent=none"]) == 0
    (tmp_path / "space.yaml").write_text("training.learning_rate: {low: 1e-3, high: 0.1}")
    assert search.main([*line, "-pparent=model-1"]) == 0
    assert [each["parent"] for each in started] == ["none", "model-1"]


def test_katib_gets_experiment_whose_trials_run_uploaded_pipeline(
    tmp_path, kubeflow, monkeypatch, capsys
):
    (tmp_path / "space.yaml").write_text(SPACE)
    package = tmp_path / "retraining.yaml"
    package.write_text(with_locations(GOLDEN, {"store": str(tmp_path)}))
    line = [
        f"--package={package}",
        f"--space={tmp_path}/space.yaml",
        f"--katib={tmp_path}/katib.yaml",
    ]
    line += [
        "--recommender=examples/criteo/recommender.yaml",
        f"--host={kubeflow.url}",
        "-pparent=none",
    ]
    assert search.main(line) == 0
    experiment = yaml.safe_load((tmp_path / "katib.yaml").read_text())
    validate_crd(experiment)
    # Like Katib, the test inserts every value into the template's JSON and joins the arguments for
    # a shell.
    spec, values = experiment["spec"], {"trial": "search-x7"}
    for each in spec["parameters"]:
        values[each["name"]] = each["feasibleSpace"].get(
            "list", [each["feasibleSpace"].get("min")]
        )[0]
    template = json.dumps(spec["trialTemplate"]["trialSpec"])
    for each in spec["trialTemplate"]["trialParameters"]:
        template = template.replace(f"${{trialParameters.{each['name']}}}", values[each["name"]])
    job = json.loads(template)
    kubernetes_validate.validate({**job, "metadata": {"name": "t"}}, "1.30", strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = shlex.split(" ".join([*container["command"], *container["args"]]))
    assert words[:3] == ["python", "-m", trial.__spec__.name]
    monkeypatch.setenv(*container["env"][0].values())

    def wait_for(_server, run_id, **_):
        leave_run(tmp_path, store_name("search-x7", "evergreen-x", run_id), 0.75)

    monkeypatch.setattr(trial, "wait", wait_for)
    kubeflow.pipelines[0]["display_name"] = trial.PIPELINE_NAME
    assert trial.main(words[3:]) == 0
    assert capsys.readouterr().out == "auc=0.75\nlog_loss=0.25\n"
    parameters = kubeflow.runs[0]["body"]["runtime_config"]["parameters"]
    tried = {"training.learning_rate": 0.001, "training.min_steps": 10, "model.tower": [64, 32]}
    assert parse_settings(parameters.pop("settings")) == {**tried, "release.rollout": "none"}
    assert parameters == {"parent": "none", "trigger_id": "search-x7"}

"""Tests that each step's parser reads equal values from its component's command line."""

import importlib
import inspect
from types import SimpleNamespace

import pytest

from components.run_outcome.component import run_outcome
from evergreen.registry.runs import STEPS, store_name
from evergreen.runtime.exit_codes import ExitCode

FLAG_OF_OUTPUT = {
    "extraction": {"raw_dataset": "output"},
    "validation": {"report": "output", "html": "html", "valid_dataset": "valid_dataset"},
    "preprocessing": {"training_set": "output"},
    "training": {"model": "output"},
    "evaluation": {"verdict": "output", "metrics": "metrics", "roc": "roc", "report": "html"},
    "deployment": {"release": "output", "card": "html"},
}
"""Maps an output artifact to the flag for its path."""

SPECIAL = {"server": "onnxruntime", "device": "gpu"}
TEXTS = ["plain", "a folder with spaces/and = signs", "--looks-like-a-flag", "", "quoted \"'$HOME"]


class Captured(Exception):
    """Exception that carries the command line of the component."""


@pytest.fixture
def command_line(monkeypatch):
    """Returns the step's parser, and the arguments that the step's component passes to `main`."""

    def capture(step, **values):
        module = importlib.import_module(f"components.{step}.__main__")
        component = getattr(importlib.import_module(f"components.{step}.component"), step)

        def main(argv, **_others):
            raise Captured(argv)

        monkeypatch.setattr(module, "main", main)
        with pytest.raises(Captured) as captured:
            component.python_func(**values)
        return module.build_parser().parse_args(captured.value.args[0])

    return capture


def _arguments(step, text):
    """Return distinct values for all parameters and artifacts of the component."""
    component = getattr(importlib.import_module(f"components.{step}.component"), step)
    values = {}
    for number, parameter in enumerate(
        inspect.signature(component.python_func).parameters.values(), start=1
    ):
        name, kind = parameter.name, parameter.annotation
        sample = {
            str: SPECIAL.get(name, f"{text}{number if text else ''}"),
            int: number,
            float: number / 7,
            bool: True,
        }
        path = f"/a folder/{text or 'x'}/{name} file"
        values[name] = (
            sample[kind] if kind in sample else SimpleNamespace(path=path, log_metric=None)
        )
    return values


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", STEPS)
def test_step_reads_parameters_of_component(command_line, step, text):
    values = _arguments(step, text)
    parsed = vars(command_line(step, **values))
    outputs = FLAG_OF_OUTPUT[step]
    for name, value in values.items():
        if isinstance(value, SimpleNamespace):
            if name in outputs or name in parsed:
                assert str(parsed[outputs.get(name, name)]) == value.path
            else:
                raise AssertionError(f"the command line of {step} lacks {name}")
            continue
        if name in ("run_resource", "run_id"):
            continue  # the flag `run` includes the value of this parameter
        if name == "run":
            value = store_name(value, values["run_resource"], values["run_id"])
        assert parsed[name] == value, name
        assert type(parsed[name]) is type(value), name


GATES = ("validation", "evaluation", "deployment")
CODES = (1, 2, 3, ExitCode.PREEMPTED)
ERROR_CODES = [
    (step, code) for step in STEPS for code in CODES if not (step in GATES and code == 1)
]
"""Exit codes that mean an error. Code 1 means that the gate or the deployment refused the model. A
retry would not change this."""


@pytest.mark.parametrize(("step", "code"), ERROR_CODES)
def test_exit_code_of_step_that_did_not_end_well_fails_task(monkeypatch, step, code):
    module = importlib.import_module(f"components.{step}.__main__")
    monkeypatch.setattr(module, "main", lambda argv, **others: code)
    component = getattr(importlib.import_module(f"components.{step}.component"), step)
    with pytest.raises(SystemExit) as ended:
        component.python_func(**_arguments(step, "x"))
    assert ended.value.code == code


def test_exit_handler_gets_final_state(monkeypatch, tmp_path):
    status = SimpleNamespace(state="FAILED")
    sentence = run_outcome.python_func(
        run="a run",
        run_resource="x",
        run_id="",
        store=(tmp_path / "a store").as_uri(),
        trigger_id="t",
        trigger_reason="r",
        status=status,
    )
    assert "failed" in sentence
    assert (tmp_path / "a store" / "runs" / "a run" / "outcome.json").exists()

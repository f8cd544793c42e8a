"""`evergreen search` tries settings of the recommender on the same held-out rows.

A trial is one run of the complete pipeline with `release.rollout=none`. The gate evaluates its
model, and the registry stores it, but it is not released. On a laptop, Optuna chooses the values,
and each trial is an `evergreen run` in the driver's environment. The study is an SQLite file, so
that the same command resumes a stopped search. `--katib` writes the same search as a manifest for
Katib. In Katib, each trial runs the program `components.run_outcome.trial`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from demo.environments import REPOSITORY, python_of
from demo.runner import LocalFolders
from evergreen.config.model import config_from_document, network_changes, network_config
from evergreen.config.reader import parse_settings, read_mapping
from evergreen.config.sections import check_settings
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import CURRENT, Model
from evergreen.recommender_file.document import load_document
from evergreen.recommender_file.form import read_recommender
from evergreen.registry.models import evaluated_run, parent
from evergreen.registry.recommenders import accepted, check_run
from evergreen.registry.runs import SEARCH_RUN, find_outcome, new_run_name
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, PermanentError, run_again
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from pipelines.package import read_locations, read_parameters, run_outcome_pod

RUNNER = (str(python_of("driver")), "-m", "cli", "run")
SECTIONS = ("preprocessing", "model", "training")
"""Sections that may be searched. The other sections change the evaluation rows or the gate."""
DIRECTIONS = {"auc": "maximize", "log_loss": "minimize"}
SEARCH_LOG = "search.log"
"""Log of all trials, with a line for each step."""
RANDOM_TRIALS = (
    5  # random trials before Optuna's sampler (TPE) models the results; Optuna's default is 10
)


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """Possible values of one setting: a lowest and a highest value, or a list of choices.

    If both ends of the range are integers, all its values are integers.
    """

    low: int | float = 0
    high: int | float = 0
    log: bool = False
    """Whether values are drawn from a log-uniform distribution."""
    choices: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.choices) == (self.low < self.high) or (self.log and self.low <= 0):
            raise ContractError(
                f"choices are {list(self.choices)}, low is {self.low:g}, high is {self.high:g}; "
                "expected either choices, or low < high with a positive low if log is true"
            )

    @property
    def words(self) -> list[str]:
        """The choices, or both ends of the range, in the form that `--set` takes."""
        return [_word(value) for value in self.choices or (self.low, self.high)]

    @property
    def kind(self) -> str:
        """Kind of the parameter in Optuna's terms."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return "categorical" if self.choices else "int" if whole else "float"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen search", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("--package", type=Path, required=True, help="compiled pipeline")
    parser.add_argument(
        "--space",
        type=Path,
        required=True,
        help="YAML: settings, each with low and high, or choices",
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=10,
        help="number of trials of the study, including earlier ones",
    )
    parser.add_argument(
        "--objective", choices=list(DIRECTIONS), default="auc", help="default: %(default)s"
    )
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="as for `evergreen run`",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--folder",
        type=Path,
        help="search on this machine: folder with lake and store, as for `evergreen run`",
    )
    where.add_argument(
        "--katib", type=Path, metavar="OUTPUT", help="write a Katib Experiment instead of a search"
    )
    parser.add_argument("--recommender", type=Path, help="with --katib: the recommender's file")
    parser.add_argument(
        "--host", default="http://ml-pipeline:8888", help="with --katib: address of the KFP API"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the search, or write it as a manifest, and return 0."""
    arguments = build_parser().parse_args(argv)
    if arguments.trials < 1 or (arguments.katib is None) != (arguments.recommender is None):
        raise ContractError(
            f"--trials is {arguments.trials} and --recommender is {arguments.recommender}, "
            "expected at least 1 trial, and no --recommender without --katib"
        )
    given = read_parameters(arguments.package, arguments.parameter)
    if arguments.katib:
        recommender = read_recommender(arguments.recommender)
        space = read_space(arguments.space, recommender)
        experiment = katib_experiment(arguments, space, given, name=recommender.name)
        write_whole(arguments.katib, yaml.safe_dump(experiment, sort_keys=False))
        return 0
    folders = LocalFolders(root=arguments.folder.resolve())
    given = {"recommender": accepted(folders.store, CURRENT).digest, **given}
    recommender = check_run(
        folders.store, reference=given["recommender"], settings=given.get("settings", "")
    )
    space = read_space(arguments.space, recommender)
    _expect_continuable(
        space, recommender, parent=parent(folders.store, given.get("parent", CURRENT))
    )
    search(arguments, space, folders, given=given)
    return 0


def read_space(path: Path, recommender: Recommender) -> dict[str, Dimension]:
    """Return the search space in a YAML file: for each setting, its possible values.

    An entry is for example `training.learning_rate: {low: 1e-3, high: 1e-2}`.

    Raises:
        ContractError: the file cannot be read, a setting does not exist in the recommender, or a
            value of a setting is invalid.
    """
    try:
        document = load_document(path.read_text(encoding="utf-8"), source=str(path)).value
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"space {path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ContractError(f"space {path} is {document!r}, expected a mapping of settings")
    space: dict[str, Dimension] = {}
    for name, values in document.items():
        if name.partition(".")[0] not in SECTIONS or not isinstance(values, dict):
            expected = f"low and high, or choices, for a setting of {', '.join(SECTIONS)}"
            raise ContractError(f"{path}: {name} is {values!r}, expected {expected}")
        space[name] = read_mapping(Dimension, values, path=f"{path}: {name}")
        for word in space[name].words:
            check_settings(recommender.with_settings(parse_settings(_settings({name: word}))))
    return space


def _expect_continuable(
    space: Mapping[str, Dimension], recommender: Recommender, *, parent: Model | None
) -> None:
    """Check that a trial with any listed value can continue training from the model `parent`.

    Raises:
        ContractError: a value changes the network.
    """
    if parent is None:
        return
    before = config_from_document(parent.config)
    for name, each in space.items():
        for word in each.words:
            settings = parse_settings(_settings({name: word}))
            if network_changes(before, network_config(recommender.with_settings(settings))):
                raise ContractError(
                    f"{name} is {word} in a trial, which cannot continue the network of the parent "
                    f"{parent.model_id}; to train all trials from scratch, "
                    + run_again("-p parent=none")
                )


def search(
    arguments: argparse.Namespace,
    space: Mapping[str, Dimension],
    folders: LocalFolders,
    *,
    given: Mapping[str, str],
) -> None:
    """Run the missing trials of the study, and print all trials.

    The first trial changes no setting of the space.

    Args:
        arguments: The command's flags.
        space: The possible values of each setting.
        folders: Folders that the trials use.
        given: Pipeline parameters, which all trials of a study share.

    Raises:
        ContractError: the stored study was made with other parameters or another search space.
        PermanentError: the first trial was not evaluated, or another trial was evaluated on other
            rows.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file, metric, states = (
        folders.root / "search.sqlite3",
        arguments.objective,
        optuna.trial.TrialState,
    )
    study = optuna.create_study(
        storage=f"sqlite:///{file}",
        study_name=metric,
        direction=DIRECTIONS[metric],
        load_if_exists=True,
    )
    # All trials use the same end of the data window, so that rows that arrive during the search do
    # not change the evaluation.
    now = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    given = {"window_end": study.user_attrs.get("parameters", {}).get("window_end", now), **given}
    for name, value in {"parameters": given, "space": repr(space)}.items():
        if (known := study.user_attrs.get(name, value)) != value:
            raise ContractError(
                f"{name} is {value}, expected {known} as in the earlier search of {file}; remove "
                "the file to start again"
            )
        study.set_user_attr(name, value)
    while (number := sum(trial.state.is_finished() for trial in study.trials)) < arguments.trials:
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM_TRIALS, seed=number)
        trial = study.ask()
        words = (
            {name: _suggested(trial, name, each) for name, each in space.items()} if number else {}
        )
        shown = _settings(words) or "(the recommender's own settings)"
        print(
            f"trial {trial.number} started: {shown}; its steps: {folders.logs / SEARCH_LOG}",
            file=sys.stderr,
            flush=True,
        )
        facts = run_trial(arguments.package, folders, given=given, words=words)
        if not number and metric not in facts:
            raise PermanentError(f"the first trial has no {metric}: {facts['reason']}")
        rows = study.user_attrs.get("rows", facts.get("rows"))
        if facts.get("rows", rows) != rows:
            raise PermanentError(
                f"trial {trial.number} and the first trial were evaluated on different rows, "
                f"because the lake or the live model has changed: remove {file} to start again"
            )
        study.set_user_attr("rows", rows)
        for name, value in {**facts, "words": words}.items():
            trial.set_user_attr(name, value)
        study.tell(trial, facts.get(metric), state=None if metric in facts else states.FAIL)
        print(_line(study.trials[trial.number]), flush=True)
    evaluated = study.get_trials(states=[states.COMPLETE])
    evaluated.sort(
        key=lambda trial: float(trial.value or 0.0), reverse=DIRECTIONS[metric] == "maximize"
    )
    print(f"\nby {metric}, the best first:", *map(_line, evaluated), sep="\n")
    print(
        shlex.join(
            f"--set={name}={word}" for name, word in evaluated[0].user_attrs["words"].items()
        )
    )


def run_trial(
    package: Path, folders: LocalFolders, *, given: Mapping[str, str], words: Mapping[str, str]
) -> dict[str, Any]:
    """Run the pipeline with the settings `words`, and return how the run ended.

    The result always has a `reason`. If the model was evaluated, the result also contains `rows`,
    the metrics and the `interval` of the AUC.
    """
    name = new_run_name(SEARCH_RUN)
    texts = {**given, "settings": _unreleased(given, _settings(words)), "trigger_id": name}
    command = [*RUNNER, f"--package={package.resolve()}", f"--folder={folders.root}"]
    command += [f"-p{parameter}={text}" for parameter, text in texts.items()]
    folders.logs.mkdir(parents=True, exist_ok=True)
    with open(folders.logs / SEARCH_LOG, "a") as log:
        variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        # Ctrl-C also interrupts the run, which then ends its step. `subprocess.run` would instead
        # kill the run in the middle of a step.
        with subprocess.Popen(command, env=variables, stdout=log, stderr=log) as process:
            process.wait()
    outcome = find_outcome(folders.store, name)
    evaluated = evaluated_run(folders.store, outcome.run) if outcome else None
    if evaluated is None:
        return {
            "reason": outcome.reason
            if outcome
            else f"exit code {process.returncode}, see {log.name}"
        }
    found = evaluated[0].candidate
    interval = f"[{found.auc_low or 0:.4f}, {found.auc_high or 0:.4f}]"
    numbers = {name: value for name in DIRECTIONS if (value := getattr(found, name)) is not None}
    return {
        "reason": evaluated[0].reason,
        "rows": evaluated[1].digest,
        "interval": interval,
        **numbers,
    }


def katib_experiment(
    arguments: argparse.Namespace,
    space: Mapping[str, Dimension],
    given: Mapping[str, str],
    *,
    name: str,
) -> dict[str, Any]:
    """Return the search as Katib's Experiment, with the image and volume of the exit handler.

    Raises:
        ContractError: a choice contains a character that must be escaped in JSON. Katib inserts
            choices into JSON without escaping them.
    """
    if broken := [
        word for each in space.values() for word in each.words if {'"', "\\"} & set(word)
    ]:
        raise ContractError(
            f"choice {broken[0]} contains a quote or a backslash, which Katib does not escape in "
            "JSON"
        )
    made: dict[str, Any] = yaml.safe_load(
        Path(__file__).with_name("katib_experiment.yaml").read_text()
    )
    made["metadata"]["name"] = f"search-{name.replace('_', '-')}"[:40].rstrip("-")
    spec, metric = made["spec"], arguments.objective
    spec["objective"] = {"type": DIRECTIONS[metric], "objectiveMetricName": metric}
    spec["maxTrialCount"] = spec["maxFailedTrialCount"] = arguments.trials
    spec["parameters"] = [_katib_parameter(setting, each) for setting, each in space.items()]
    spec["trialTemplate"]["trialParameters"] += [
        {"name": setting, "reference": setting} for setting in space
    ]
    changes = " ".join(f"{setting}=${{trialParameters.{setting}}}" for setting in space)
    run = {
        **given,
        "settings": _unreleased(given, changes),
        "trigger_id": "${trialParameters.trial}",
    }
    image, claim, mount_path = run_outcome_pod(arguments.package)
    pod = spec["trialTemplate"]["trialSpec"]["spec"]["template"]["spec"]
    pod["volumes"][0]["persistentVolumeClaim"]["claimName"] = claim
    (container,) = pod["containers"]
    container["image"], container["env"][0]["value"] = image, json.dumps(run)
    container["args"] = [
        f"--host={arguments.host}",
        f"--store={read_locations(arguments.package)['store']}",
    ]
    container["volumeMounts"][0]["mountPath"] = mount_path
    return made


def _katib_parameter(name: str, each: Dimension) -> dict[str, Any]:
    space: dict[str, Any] = {"list": [shlex.quote(word) for word in each.words]}
    if not each.choices:
        space = {
            "min": str(each.low),
            "max": str(each.high),
            "distribution": "logUniform" if each.log else "uniform",
        }
    return {
        "name": name,
        "parameterType": each.kind.replace("float", "double"),
        "feasibleSpace": space,
    }


def _suggested(trial: Any, name: str, each: Dimension) -> str:
    if each.choices:
        return str(trial.suggest_categorical(name, each.words))
    value = getattr(trial, f"suggest_{each.kind}")(name, each.low, each.high, log=each.log)
    return (
        f"{value:.4g}" if isinstance(value, float) else _word(value)
    )  # four digits, because people copy these numbers


def _line(trial: Any) -> str:
    facts, seconds = trial.user_attrs, trial.duration.total_seconds()
    evaluated = (
        "auc {auc:.4f} {interval}  log_loss {log_loss:.4f}"
        if trial.value is not None
        else "failed: {reason}"
    )
    words = _settings(facts["words"]) or "(the recommender's own settings)"
    return f"{trial.number:3d}  {evaluated.format(**facts)}  {seconds:4.0f} s  {words}"


def _unreleased(given: Mapping[str, str], changes: str) -> str:
    return " ".join(filter(None, [given.get("settings"), changes, "release.rollout=none"]))


def _settings(words: Mapping[str, str]) -> str:
    return shlex.join(f"{name}={word}" for name, word in words.items())


def _word(value: Any) -> str:
    """Return the value in the form that `--set` takes: compact JSON, or a string as it is.

    >>> _word([64, 32]), _word(0.003), _word("dcn")
    ('[64,32]', '0.003', 'dcn')
    """
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    raise SystemExit(main())

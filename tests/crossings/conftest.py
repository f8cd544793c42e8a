"""The real chain on a tiny lake: each step in its own environment, two runs.

All tests in tests/crossings share one chain. Run 1 trains from scratch. Run 2 gets later days with
drift and continues from run 1's released model. `golden/criteo.json` contains digests of the
results, so the settings of the chain must not change.
"""

import os
import shutil
import subprocess
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from controller.deployment_target import TargetSettings
from demo.environments import python_of
from demo.plan import DemoSettings, Services, plan_for_simulator
from demo.runner import LocalFolders
from demo.simulation.simulator import Drift, Simulator, write_lake
from evergreen.config.features import MISSING_CATEGORY
from evergreen.config.spec import Recommender
from evergreen.contracts.criteo import CATEGORICAL, CRITEO_RECOMMENDER, DENSE
from evergreen.contracts.manifests import (
    Model,
    RawDataset,
    Release,
    TrainingSet,
    ValidationReport,
    Verdict,
)
from evergreen.contracts.raw_rows import LABEL
from evergreen.storage.references import keep, refer
from pipelines.images import ENVIRONMENT_OF_STEP
from testing.controllers import answering
from testing.paths import REPOSITORY
from testing.recommenders import accept_into, settings_text
from testing.warm_steps import WarmSteps
from tests.support.lakes import table_in
from tests.support.relocated import replace_in_documents

ROWS, LATER_ROWS = 3000, 2000
MANIFESTS = {
    "extraction": RawDataset,
    "validation": ValidationReport,
    "preprocessing": TrainingSet,
    "training": Model,
    "evaluation": Verdict,
    "deployment": Release,
}
SETTINGS = {
    "extraction": {"holdout_fraction": 0.25, "replay_share": 0.25, "replay_days": 3},
    "preprocessing": {"frequency_threshold": 2},
    "model": {"embedding_dim": 4, "num_cross_layers": 2, "tower": [16, 8]},
    "training": {"learning_rate": 0.003, "batch_size": 256, "seed": 7},
    # The gate passes every model, because the rows are too few for a decision.
    "gate": {
        "min_auc": 0.0,
        "max_auc_loss": 1.0,
        "max_slice_loss": 9.0,
        "max_calibration_factor": 9.0,
    },
    "release": {"rollout": "full"},
}


@dataclass
class Round:
    """The manifests of one run, one for each step, as the readers of the manifests parse them."""

    run: str
    manifests: dict = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    """Paths of the manifests. `valid` is the path of the manifest of the rows that passed
    validation."""

    def __getattr__(self, step: str):
        try:
            return self.__dict__["manifests"][step]
        except KeyError:
            raise AttributeError(step) from None


@dataclass
class Chain:
    """A lake, a registry and a repository in one folder, and the pipeline runs that use them."""

    root: Path
    rounds: list[Round] = field(default_factory=list)
    settings: dict[str, dict] = field(default_factory=lambda: dict(SETTINGS))
    """For each section of the recommender, the settings that the next runs change."""
    warm: WarmSteps | None = None
    """Function that runs a step in a forked process. If None, each step runs as a plain command."""
    recommender: Recommender = CRITEO_RECOMMENDER

    def copied_to(self, root: Path, **changed: object) -> "Chain":
        """Return a chain in `root` that continues from copies of lake, registry and repository."""
        for name in ("lake", "store", "repository"):
            shutil.copytree(self.root / name, root / name)
        documents = [*root.glob("store/**/*.json"), *root.glob("store/*.jsonl")]
        replace_in_documents(documents, self.root.as_uri(), root.as_uri())
        return replace(self, root=root, rounds=list(self.rounds), **changed)

    def uri(self, name: str) -> str:
        (self.root / name).mkdir(exist_ok=True)
        return (self.root / name).as_uri()

    def step(self, step: str, run: str, flags: dict[str, object], *, name: str | None = None):
        """Run one step and return its parsed manifest, and the manifest's path."""
        output = self.root / "manifests" / run / f"{name or step}.json"
        if step == "extraction":
            accept_into(self.root / "store", self.recommender)
            changed = {
                f"{part}.{key}": value
                for part, each in self.settings.items()
                for key, value in each.items()
            }
            flags = {"settings": settings_text(changed), **flags}
        common = {"run": run, "store": self.uri("store")}
        if step != "deployment":
            common["work"] = self.uri("work")
        all_flags = {**common, **flags, "output": output}
        words = [f"--{flag}={value}" for flag, value in all_flags.items()]
        with self._controlled(step):
            code, printed = self._run(step, words)
        assert code == 0, f"{step} of {run} ended with {code}:\n{printed[-4000:]}"
        return MANIFESTS[step].read(output), output

    def _controlled(self, step: str) -> AbstractContextManager[None]:
        """Return a context in which a controller answers the step's request."""
        target = TargetSettings(store=self.root / "store", repository=self.uri("repository"))
        return answering(target) if step == "deployment" else nullcontext()

    def _run(self, step: str, arguments: list[str]) -> tuple[int, str]:
        """Return the exit code of the step's command, and its output."""
        # The step sees the repository, but nothing of pytest's environment.
        threads = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), **threads}
        if self.warm is not None:
            return self.warm.run(step, arguments, variables=variables, folder=self.root)
        done = subprocess.run(
            [python_of(ENVIRONMENT_OF_STEP[step]), "-m", f"components.{step}", *arguments],
            env=variables,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return done.returncode, done.stdout

    def _step_of(self, this: Round, name: str, **flags: object) -> None:
        dashed = {flag.replace("_", "-"): value for flag, value in flags.items()}
        this.manifests[name], this.paths[name] = self.step(name, this.run, dashed)

    def go_back(self, version: int) -> None:
        """Make an earlier version live again."""
        command = [python_of(ENVIRONMENT_OF_STEP["deployment"]), "-m", "controller.rollback"]
        command += [
            "--store",
            self.uri("store"),
            "--repository",
            self.uri("repository"),
            f"--to={version}",
        ]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        subprocess.run(
            [*command, "--reason", "a test"],
            env=environment,
            check=True,
            capture_output=True,
            timeout=60,
        )

    def turn_to_training(
        self,
        run: str,
        *,
        validation_report: Path | None = None,
        parent: str = "current",
        **flags_of_extraction: object,
    ) -> Round:
        """Run the steps up to training and return their manifests.

        If a report is given, validation is skipped.
        """
        this = Round(run)
        self._step_of(
            this, "extraction", lake=self.uri("lake"), parent=parent, **flags_of_extraction
        )
        this.paths["valid"] = this.paths["extraction"].with_name("valid.json")
        if validation_report is None:
            flags = {"raw_dataset": this.paths["extraction"], "valid_dataset": this.paths["valid"]}
            self._step_of(this, "validation", champion="current", **flags)
        else:
            replace(this.extraction, validation_report=refer(validation_report)).write(
                this.paths["valid"]
            )
        self._step_of(this, "preprocessing", raw_dataset=this.paths["valid"])
        self._step_of(this, "training", training_set=this.paths["preprocessing"])
        return this

    def turn(self, run: str, *, validation_report: Path | None = None) -> Round:
        """Run all six steps and return their manifests.

        If a report is given, validation is skipped.
        """
        this = self.turn_to_training(run, validation_report=validation_report)
        self._step_of(this, "evaluation", champion="current", model=this.paths["training"])
        release = {"server": "python"}
        verdict = this.paths["evaluation"]
        self._step_of(this, "deployment", verdict=verdict, trigger_id=f"request-{run}", **release)
        self.rounds.append(this)
        return this


@pytest.fixture(scope="session")
def warm():
    """Forks the steps."""
    with WarmSteps() as warm:
        yield warm


@pytest.fixture
def chain_of(tmp_path, warm):
    """Makes an empty chain with changed settings, and with another recommender on request."""

    def make(recommender=CRITEO_RECOMMENDER, **sections):
        return Chain(
            tmp_path, warm=warm, settings={**SETTINGS, **sections}, recommender=recommender
        )

    return make


@pytest.fixture(scope="session")
def chain(tmp_path_factory, warm):
    """A chain in which two rounds have run. It is made once per session.

    The first round starts its steps as plain commands.
    """
    chain = Chain(tmp_path_factory.mktemp("the chain"))
    simulator = Simulator.create(seed=3)
    write_lake(
        simulator, str(chain.root / "lake"), rows=ROWS, days=3, last_day=date(2026, 1, 3), seed=3
    )
    chain.turn("round-1")
    chain.warm = warm
    # In a changed manifest, the first model is its own champion. The gate therefore compares the
    # first model with itself.
    first = chain.rounds[0]
    folder = first.paths["extraction"].parent
    live_first = keep(
        replace(first.extraction, champion_model_id=first.training.model_id),
        folder / "live first.json",
    )
    encoded = keep(replace(first.preprocessing, raw_dataset=live_first), folder / "encoded.json")
    replace(first.training, training_set=encoded).write(folder / "candidate.json")
    chain.same_rows, _ = chain.step(
        "evaluation", "round-1-again", {"champion": "current", "model": folder / "candidate.json"}
    )
    later = simulator.drifted(Drift(seed=5))
    write_lake(
        later, str(chain.root / "lake"), rows=LATER_ROWS, days=2, last_day=date(2026, 1, 5), seed=4
    )
    chain.turn("round-2")
    return chain


@pytest.fixture(scope="session")
def held_out_rows():
    """Reads the holdout rows by pyarrow alone. Returns served tensors and labels."""

    def read(raw: RawDataset):
        table = table_in(raw.holdout_uri)
        categorical = _matrix(table, CATEGORICAL, MISSING_CATEGORY, np.int64)
        return _matrix(table, DENSE, np.nan, np.float32), categorical, table[LABEL].to_numpy()

    return read


def _matrix(table, names, missing, dtype):
    columns = [
        np.array([missing if v is None else v for v in table[name].to_pylist()], dtype)
        for name in names
    ]
    return np.stack(columns, axis=1)


@pytest.fixture
def services(tmp_path):
    """The demo's programs, not started."""
    settings = DemoSettings(folder=tmp_path / "a demo")
    folders = LocalFolders(root=settings.folder)
    return Services(
        settings=settings,
        plan=plan_for_simulator(settings),
        folders=folders,
        triton_url="127.0.0.1:8001",
        metrics_url="127.0.0.1:8002",
    )

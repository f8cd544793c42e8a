"""Run a lineage of models over simulated traffic, with the steps' real commands and canary.

A run executes extraction, preprocessing, training, evaluation and deployment with their defaults.
Each step runs in its environment, as a fork of a process that has already imported the libraries
(`testing.warm_steps`). Validation runs only in the first run. Later runs use the validation report
of the first run, because training only stores the report.

The traffic plan determines which released graph scores a request. One arm scores each request for
users, and the other arm scores it as shadow traffic. `controller.canary` evaluates the canary over
the rows that both arms scored. No server runs, so the canary and the live model count as equally
fast and without errors. `benchmarks.freshness` decides when runs happen.
"""

import os
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timezone
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from controller.canary import steps as canary_steps
from controller.canary.steps import CanarySettings
from controller.deployment_target import TargetSettings
from demo.environments import REPOSITORY
from demo.simulation.simulator import SimulatedRows, raw_table
from evergreen.contracts import raw_rows
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.manifests import Model, RawDataset, Release
from evergreen.contracts.serving import PROBABILITY_OUTPUT, named_inputs
from evergreen.registry import promotion_journal
from evergreen.registry.models import release_path
from evergreen.registry.traffic_plan import TrafficPlan
from evergreen.serving.parity import open_graph
from evergreen.storage.references import refer
from evergreen.storage.uris import local_path, open_objects
from testing.controllers import answering
from testing.recommenders import accept_into
from testing.warm_steps import WarmSteps

FIRST_DAY = date(2040, 1, 1)
"""First day of the traffic. The day is in the future, because a canary counts only rows that are
later than the canary's start by the wall clock."""
ROWS_PER_REQUEST = 10
RELEASED, CANARY, REFUSED, GAVE_WAY = "released", "canary", "refused", "gave way"
"""Outcomes of a run, in this order: the model serves at once, becomes a canary, is refused by the
gate, or gives way to an active canary."""
_METRICS = "no-server:8002"
_COMPUTE_MICROSECONDS = 1000.0
_REFUSED_CODE = 1
_STEP = """
import resource, runpy
try:
    runpy.run_module("components.{}", run_name="__main__", alter_sys=True)
finally:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print("\\n", sum(each.ru_utime + each.ru_stime for each in used), flush=True)
"""
"""Program that runs a step. The last line that the program prints has the step's processor seconds,
without imports."""


class CanaryEnd(NamedTuple):
    """How a canary ended, according to its evidence."""

    is_released: bool
    rows: int
    """Number of rows that both arms had scored."""


class LineageRun(NamedTuple):
    """One run of the lineage."""

    outcome: str
    rows: int
    """Number of training rows, including the training rows of earlier runs without a release."""
    seconds: dict[str, float]
    """Processor seconds of each step except validation, without startup and imports."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedRows:
    """Rows of some minutes of traffic, with their requests and times."""

    rows: SimulatedRows
    requests: list[str]
    """Request id of each row, shape [n]."""
    positions: NDArray[np.int32]
    """Position of each row within its request, shape [n]."""
    times: NDArray[np.float64]
    """Event times, shape [n], seconds since the epoch, ascending."""

    @classmethod
    def of(cls, rows: SimulatedRows, *, start: float, end: float) -> "TimedRows":
        """Return the rows with event times spread evenly over an interval.

        `start` and `end` are in hours from the beginning of `FIRST_DAY`.
        """
        number, began = (
            np.arange(len(rows.label)),
            datetime.combine(FIRST_DAY, time(tzinfo=timezone.utc)).timestamp(),
        )
        request = number // ROWS_PER_REQUEST
        seconds = 3600.0 * (end - start) * (request + 0.5) / (request[-1] + 1)
        return cls(
            rows=rows,
            requests=[f"{start:g}-{each}" for each in request.tolist()],
            positions=(number % ROWS_PER_REQUEST).astype(np.int32),
            times=began + 3600.0 * start + seconds,
        )

    @property
    def file(self) -> str:
        """File name of these rows in a lake or an archive. All rows are of one day."""
        first = datetime.fromtimestamp(self.times[0], timezone.utc)
        return f"{raw_rows.DAY_PARTITION.format(day=first.date())}/{first:%H%M%S}.parquet"

    def write(self, folder: Path, **more: Any) -> None:
        """Write the rows to a lake.

        `more` maps column names of the raw schema to values.
        """
        table = raw_table(
            self.rows, request_ids=self.requests, row=self.positions, times=self.times
        )
        for name, values in more.items():
            index = table.schema.get_field_index(name)
            table = (
                table.append_column(name, values)
                if index < 0
                else table.set_column(index, name, values)
            )
        path = folder / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)


class SimulatedLineage:
    """Lineage of models that are trained on one lake, with their registry and repository."""

    def __init__(self, root: Path, *, lake: Path, warm: WarmSteps) -> None:
        """Create a lineage without models in the existing folder `root`."""
        self.runs: list[LineageRun] = []
        self.canary_ends: list[CanaryEnd] = []
        self._root = root
        self._lake = lake
        self._warm = warm
        self._report: Path | None = None
        self._counts: Counter[tuple[str, int]] = Counter()
        for name in ("store", "repository", "work", "archive"):
            (root / name).mkdir(parents=True, exist_ok=True)
        accept_into(root / "store", CRITEO_RECOMMENDER)

    def branched(self, root: Path) -> "SimulatedLineage":
        """Return a copy of the lineage in `root` that continues from its current state.

        The work folders of runs are not copied.
        """
        for name in ("store", "repository"):
            shutil.copytree(self._root / name, root / name)
        for path in [*root.glob("store/**/*.json"), *root.glob("store/*.jsonl")]:
            path.write_text(path.read_text().replace(self._root.as_uri(), root.as_uri()))
        other = SimulatedLineage(root, lake=self._lake, warm=self._warm)
        other._report = self._report
        return other

    @cached_property
    def _canary(self) -> CanarySettings:
        return CanarySettings(
            target=TargetSettings(
                store=self._root / "store", repository=(self._root / "repository").as_uri()
            ),
            evidence=(open_objects((self._root / "archive").as_uri()),),
            metrics=(_METRICS,),
            drain_seconds=0.0,
            fetch=self._metrics_text,
        )

    def run_pipeline(self, *, parent: str = "current") -> LineageRun:
        """Run the pipeline over all rows of the lake that the parent was not trained on.

        With the parent `none`, the run uses all rows.

        Raises:
            RuntimeError: a step failed. The error message contains the end of the output.
        """
        run, seconds = f"run-{len(self.runs):04d}", {}
        folder = self._root / "manifests" / run
        folder.mkdir(parents=True)
        names = ("extraction", "preprocessing", "training", "evaluation", "deployment")
        raw, encoded, model, verdict, release = (folder / f"{name}.json" for name in names)
        work = {"work": self._root / "work"}

        def step(name: str, output: Path, **flags: Any) -> bool:
            is_done, seconds[name] = self._step(name, run=run, output=output, **flags)
            return is_done

        step("extraction", raw, lake=self._lake, parent=parent, **work)
        if self._report is None:
            self._report = folder / "validation.json"
            # Keep this folder, because every model copies the files that the report names.
            apart = self._root / "validation"
            self._step(
                "validation",
                run=run,
                output=self._report,
                raw_dataset=raw,
                champion="current",
                work=apart,
            )
        replace(RawDataset.read(raw), validation_report=refer(self._report)).write(raw)
        step("preprocessing", encoded, raw_dataset=raw, **work)
        step("training", model, training_set=encoded, **work)
        outcome = REFUSED
        if step("evaluation", verdict, model=model, **work):
            outcome = GAVE_WAY
            with answering(self._canary.target):
                is_done = step("deployment", release, verdict=verdict)
            if is_done:
                live = promotion_journal.current(self._root / "store")
                made = Model.read(model)
                outcome = RELEASED if live and live.model_id == made.model_id else CANARY
        done = LineageRun(outcome, Model.read(model).num_train_rows, seconds)
        self.runs.append(done)
        self._tidy()
        return done

    def _step(self, name: str, **flags: Any) -> tuple[bool, float]:
        """Run a step.

        Returns whether the step succeeded, and its processor seconds. A step that refused its input
        did not succeed.
        """
        arguments = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        arguments.append(f"--store={self._root / 'store'}")
        variables = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        waiting = self._warm.of(name, variables)
        code, text = waiting.run(
            _STEP.format(name), arguments, variables=variables, folder=self._root, seconds=1800
        )
        if code not in (0, _REFUSED_CODE):
            raise RuntimeError(f"{name} ended with {code}: {text[-2000:]}")
        return code == 0, float(text.split()[-1])

    def _tidy(self) -> None:
        """Remove files that no later run reads. A study has hundreds of runs."""
        shutil.rmtree(self._root / "work")
        (self._root / "work").mkdir()
        store = self._root / "store"
        used = [each for each in (promotion_journal.current(store), self._at_work) if each]
        models = {each.model_id for each in used}
        graphs = {
            str(version) for each in used for version in (each.version, each.previous_version)
        }
        for folder in [*(store / "models").iterdir(), *(store / "graphs").iterdir()]:
            if folder.name not in models | graphs:
                shutil.rmtree(folder)

    @property
    def _at_work(self) -> promotion_journal.Promotion | None:
        return promotion_journal.canary_at_work(self._root / "store")

    def serve(self, traffic: TimedRows) -> NDArray[np.float64]:
        """Return the scores [n] that users got.

        With an active canary, the scores of both arms are archived.
        """
        live = promotion_journal.current(self._root / "store")
        assert live is not None, "a line serves once a model is released"
        stable = self._scores(live.version, traffic.rows)
        plan: TrafficPlan | None = self._canary.target.open_repository().read_plan()
        if plan is None or plan.canary is None:
            return stable.astype(np.float64)
        canary = self._scores(plan.canary.version, traffic.rows)
        chosen = {
            request: plan.arm_for(request) == plan.canary
            for request in dict.fromkeys(traffic.requests)
        }
        by_canary = np.array([chosen[request] for request in traffic.requests])
        for arm in (plan.stable, plan.canary):
            self._counts[arm.model_name, arm.version] += len(chosen)
        versions = np.where(by_canary, plan.canary.version, live.version)
        served, shadow = np.where(by_canary, canary, stable), np.where(by_canary, stable, canary)
        columns = {
            raw_rows.MODEL_VERSION: pa.array(versions, pa.int32()),
            raw_rows.SCORE: pa.array(served, pa.float32()),
            raw_rows.SHADOW_VERSION: pa.array(
                live.version + plan.canary.version - versions, pa.int32()
            ),
            raw_rows.SHADOW_SCORE: pa.array(shadow, pa.float32()),
        }
        traffic.write(self._root / "archive", **columns)
        return served.astype(np.float64)

    def _scores(self, version: int, rows: SimulatedRows) -> NDArray[np.float32]:
        graph = local_path(Release.read(release_path(self._root / "store", version)).graph_uri)
        inputs = named_inputs(rows.dense, rows.categorical)
        scores: NDArray[np.float32] = (
            _session(graph).run([PROBABILITY_OUTPUT.name], inputs)[0].ravel()
        )
        return scores

    def step_canary(self) -> None:
        """Evaluate the canary once, and unload models that its release or abort makes obsolete."""
        while (step := canary_steps.step(self._canary)).action in (
            canary_steps.RELEASED,
            canary_steps.ABORTED,
        ):
            pairs = (
                step.decision.by_pairs.num_pairs if step.decision and step.decision.by_pairs else 0
            )
            self.canary_ends.append(CanaryEnd(step.action == canary_steps.RELEASED, pairs))
        if self._at_work is None:
            for day in (self._root / "archive").iterdir():
                shutil.rmtree(day)

    def _metrics_text(self, _: str) -> str:
        """Return the counters as text, in the format of Triton's metrics page."""
        lines = []
        for (name, version), requests in self._counts.items():
            of = f'{{model="{name}",version="{version}"}}'
            lines.append(f"nv_inference_request_success{of} {requests}")
            lines.append(
                f"nv_inference_compute_infer_duration_us{of} {_COMPUTE_MICROSECONDS * requests}"
            )
        return "\n".join(lines) + "\n"


@lru_cache(maxsize=12)
def _session(graph: Path) -> Any:
    return open_graph(graph)

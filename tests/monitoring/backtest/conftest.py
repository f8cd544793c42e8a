"""A monitor that ran over a known stream: version 1, a canary, drift, then version 2."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from evergreen.config.monitor import DecisionSettings
from evergreen.contracts.manifests import Model
from evergreen.registry.models import model_folder, scores_path
from evergreen.storage.folder import FolderObjects
from monitoring.backtest.backtest import evaluate_requests, read_requests
from monitoring.released_models import ReleasedModels
from monitoring.state.rules_file import write_rules
from testing.recommenders import SHOP
from testing.releases import release
from tests.support.monitors import START, WINDOW, Bench, clicks, prediction, publish

SECONDS = 300
CHANGED_AT = START + 120.0
RELEASED_AT = START + 220.0
SETTINGS = {
    "window_rows": 600,
    "decide_seconds": 5.0,
    "min_clicks": 20,
    "policies": "threshold",
    "auc_threshold": 0.7,
    "consecutive_breaches": 2,
    "cooldown_seconds": 100.0,
    "drift_bucket_seconds": 0.0,
}


@dataclass
class Ran:
    """A bench after a run of the monitor, with the files that the monitor wrote."""

    bench: Bench
    settings: DecisionSettings
    folder: Path | None = None
    """State folder of the monitor. None means the folder of the bench."""
    archived: Path | None = None
    """Archive of the monitor. None means the archive of the bench."""

    @property
    def lines(self) -> list[str]:
        return (self.bench.settings.state / "decisions.jsonl").read_text().splitlines()

    @property
    def archive(self) -> Path:
        return self.archived or self.bench.settings.archive

    @property
    def state(self) -> Path:
        return self.folder or self.bench.settings.state


def stream(seed: int = 5):
    """Yield each second with the records to publish in it: four requests of eight rows.

    Clicks follow within the window.
    """
    random = np.random.default_rng(seed)
    for second in range(SECONDS):
        records = []
        for number in range(4):
            time = START + second + float(random.random())
            changed = CHANGED_AT <= time < RELEASED_AT
            is_canary = RELEASED_AT - 60 <= time < RELEASED_AT and number == 0
            version = 2 if is_canary or time >= RELEASED_AT else 1
            labels = random.random(8) < 0.3
            # Scores predict the label, except under version 1 after the drift.
            scores = np.clip(
                0.3
                + 0.25 * labels * (0 if changed and not is_canary else 1)
                + 0.15 * random.normal(size=8),
                0,
                1,
            )
            name = f"r{second:03d}-{number}"
            batch = replace(
                prediction(name, 8, time=time, version=version, scores=scores), canary=is_canary
            )
            records.append(batch)
            events = [
                (name, int(row), time + 20.0 * float(random.random()))
                for row in np.flatnonzero(labels)
            ]
            if events:
                records.append(clicks(f"c-{name}", events))
        yield second, records


def run_over(bench: Bench, records_by_second, seconds: int, *, every: int) -> Ran:
    """Run the real monitor over a stream of `seconds`, with a turn every `every` seconds."""
    bench.start()
    for second, records in records_by_second:
        publish(bench.log, *records, form=bench.form)
        bench.clock.now = START + second + 1.0
        if second % every == 0:
            bench.monitor.tick()
    bench.tick(at=START + seconds + WINDOW + 30.0)
    bench.monitor.stop()
    settings = bench.settings.decisions
    write_rules(bench.settings.state, settings)
    return Ran(bench, settings)


def write_references(store: Path, reference) -> None:
    """Release version 1 and version 2.

    Store `reference` as the training reference of both models.
    """
    for version in (1, 2):
        reference.write(model_folder(store, f"m{version}") / Model.REFERENCE)
        reference.scores.write(scores_path(store, f"m{version}"))
        release(store, version, f"m{version}")


def backtested(settings, features=SHOP.features) -> list[str]:
    """Run a backtest of a monitor's archive with its registry, and return the decision lines."""
    models = ReleasedModels(settings.store)
    evaluated = evaluate_requests(
        read_requests(FolderObjects(settings.archive), features=features),
        settings.decisions,
        baseline=models.baseline,
        reference=models.reference,
    )
    return [each.line() for each in evaluated]


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """A run of the monitor over the stream, with a turn every three seconds.

    Tests share the run's files, and must not change the files.
    """
    bench = Bench(tmp_path_factory.mktemp("ran"), **SETTINGS)
    made = run_over(bench, stream(), SECONDS, every=3)
    bench.kill()
    yield made
    bench.log.close()

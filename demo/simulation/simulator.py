"""Draw simulated rows with their true click probabilities, with drift on request.

A simulator is defined by its parameters. The same parameters give the same rows in every process,
so a simulator is stored as a small JSON file. The true logit is bias + strength * (dense effects +
one weight per category + a few pair interactions). `tables` defines the share of variance of each
column's effect. The rows can be written as a lake for extraction, with day partitions in the raw
schema. Each file is complete or absent.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, time, timedelta, timezone
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import Generator
from numpy.typing import NDArray

from demo.simulation.tables import (
    CATEGORY_COLUMNS,
    DENSE_COLUMNS,
    DRIFT_COLUMNS,
    INTERACTION_BUCKETS,
    INTERACTIONS,
    CategoryTable,
    DenseTable,
    Tables,
)
from evergreen.config.features import MISSING_CATEGORY
from evergreen.config.reader import read_mapping
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.criteo import CATEGORICAL
from evergreen.rows.archived_rows import arrow_schema
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError
from evergreen.statistics.metrics import roc_auc
from evergreen.storage.objects import Objects
from evergreen.storage.uris import open_objects

_SCHEMA = arrow_schema(criteo.RAW_TYPES)
_ROWS_PER_FILE = 100_000
_ROWS_PER_REQUEST = 64
_CALIBRATION_ROWS = 40_000


class SimulatedRows(NamedTuple):
    """Drawn rows with their true probabilities."""

    dense: NDArray[np.float32]
    """[n, 13], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, 26], -1 = missing."""
    probability: NDArray[np.float64]
    """[n] true probability of a click."""
    label: NDArray[np.int32]
    """Labels, shape [n]: 1 for a click, and 0 for no click."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Sudden change of a simulator."""

    seed: int
    columns: tuple[str, ...] = DRIFT_COLUMNS
    """Categorical columns whose planted weights are permuted."""
    new_category_columns: tuple[str, ...] = DRIFT_COLUMNS[:2]
    new_category_share: float = 0.1
    """Share of the rows of these columns that get new categories."""
    new_categories: int = 8
    """Number of new categories per column."""

    def __post_init__(self) -> None:
        if wrong := (set(self.columns) | set(self.new_category_columns)) - set(CATEGORICAL):
            raise ContractError(f"drift names columns {sorted(wrong)}, expected some of C1..C26")
        if not 0.0 <= self.new_category_share < 1.0:
            raise ContractError(
                f"new_category_share is {self.new_category_share}, expected a share in [0, 1)"
            )


@dataclass(frozen=True, kw_only=True)
class Simulator:
    """Parameters of a simulator (see `Simulator.create`)."""

    seed: int
    click_rate: float
    strength: float
    """Approximate standard deviation of the logit."""
    bias: float
    drifts: tuple[Drift, ...] = ()

    @classmethod
    def create(cls, seed: int, *, click_rate: float = 0.25, bayes_auc: float = 0.80) -> "Simulator":
        """Create a simulator with a Bayes-optimal AUC of about `bayes_auc` at `click_rate`.

        Kaggle's click rate is 0.25.

        Raises:
            ContractError: the click rate is outside (0, 1), or the AUC is outside (0.5, 0.95].
        """
        if not 0.0 < click_rate < 1.0:
            raise ContractError(f"click_rate is {click_rate}, expected a share in (0, 1)")
        if not 0.5 < bayes_auc <= 0.95:
            raise ContractError(f"bayes_auc is {bayes_auc}, expected a value in (0.5, 0.95]")
        effects = cls(seed=seed, click_rate=click_rate, strength=1.0, bias=0.0)._sample_effects()

        def auc_at(strength: float) -> float:
            bias = bias_for(strength * effects, click_rate)
            return expected_auc(sigmoid(strength * effects + bias))

        strength = _bisected(auc_at, bayes_auc, low=0.01, high=10.0)
        bias = bias_for(strength * effects, click_rate)
        return cls(seed=seed, click_rate=click_rate, strength=strength, bias=bias)

    def drifted(self, drift: Drift) -> "Simulator":
        """Return the simulator after one more drift.

        The bias is adjusted, so that the click rate stays the same.
        """
        changed = replace(self, drifts=(*self.drifts, drift))
        return replace(
            changed, bias=bias_for(self.strength * changed._sample_effects(), self.click_rate)
        )

    def draw(self, n: int, random: Generator) -> SimulatedRows:
        """Draw `n` independent rows."""
        return drawn_rows(self.tables, n, random, strength=self.strength, bias=self.bias)

    def save(self, path: Path) -> None:
        """Write the parameters as JSON, atomically."""
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Simulator":
        """Read the simulator in `path`.

        Raises:
            ContractError: the file is absent or not JSON, or has unknown or missing names, or a
                value of another type.
        """
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ContractError(f"simulator {path} cannot be read: {error}") from error
        return read_mapping(cls, document, path=f"simulator {path}")

    @cached_property
    def tables(self) -> Tables:
        """Tables of all columns after every drift, and the weights of the interactions."""
        return Tables(
            dense=self._dense_tables(),
            categories=self._category_tables(),
            interactions=self._interaction_tables(),
        )

    def _dense_tables(self) -> list[DenseTable]:
        random = np.random.default_rng([self.seed, 1])
        tables = []
        for column in DENSE_COLUMNS.values():
            slope = np.sqrt(column.variance) * random.choice([-1.0, 1.0])
            missing_effect = np.sqrt(column.variance) * random.normal(0.0, 0.5)
            tables.append(DenseTable.build(column, slope=slope, missing_effect=missing_effect))
        return tables

    def _category_tables(self) -> list[CategoryTable]:
        tables = []
        for number, (name, column) in enumerate(CATEGORY_COLUMNS.items()):
            spread = float(np.sqrt(column.variance))
            table = CategoryTable.build(
                column, spread, np.random.default_rng([self.seed, 2, number])
            )
            for drift in self.drifts:
                # Each column has its own random numbers. A drift of one column therefore does not
                # change the rows of other columns.
                random = np.random.default_rng([drift.seed, 3, number])
                if name in drift.columns:
                    table = table.rotated(random)
                if name in drift.new_category_columns and drift.new_category_share > 0:
                    table = table.with_new_categories(
                        drift.new_categories, drift.new_category_share, random
                    )
            tables.append(table)
        return tables

    def _interaction_tables(self) -> list[tuple[int, int, NDArray[np.float32]]]:
        random = np.random.default_rng([self.seed, 4])
        size = INTERACTION_BUCKETS**2
        return [
            (
                CATEGORICAL.index(a),
                CATEGORICAL.index(b),
                (np.sqrt(v) * random.normal(size=size)).astype(np.float32),
            )
            for a, b, v in INTERACTIONS
        ]

    def _sample_effects(self) -> NDArray[np.float64]:
        random = np.random.default_rng([self.seed, 5])
        return self.tables.draw(_CALIBRATION_ROWS, random).effects.astype(np.float64)


def drawn_rows(
    tables: Tables, n: int, random: Generator, *, strength: float, bias: float
) -> SimulatedRows:
    """Draw `n` independent rows of `tables` with the logit bias + strength * effects."""
    drawn = tables.draw(n, random)
    probability = sigmoid(strength * drawn.effects + bias)
    label = (random.random(n) < probability).astype(np.int32)
    return SimulatedRows(drawn.dense, drawn.categorical, probability, label)


def sigmoid(logit: NDArray[Any]) -> NDArray[np.float64]:
    """Convert logits to probabilities, computed in float64."""
    return 1.0 / (1.0 + np.exp(-logit.astype(np.float64)))


def bias_for(effects: NDArray[np.float64], click_rate: float) -> float:
    """Return the bias at which the mean probability is `click_rate`.

    `effects` [n] are the logits without the bias.
    """
    return _bisected(
        lambda bias: float(sigmoid(effects + bias).mean()), click_rate, low=-40.0, high=40.0
    )


def expected_auc(probability: NDArray[np.float64]) -> float:
    """Return the expected AUC of true click probabilities.

    Each row counts as a click with weight p and as a non-click with weight 1 - p, where p is its
    probability.
    """
    ordered = np.sort(probability)
    others = 1.0 - ordered
    below = np.cumsum(others) - others / 2.0
    return float((ordered * below).sum() / (ordered.sum() * others.sum()))


def _bisected(rising: Callable[[float], float], goal: float, *, low: float, high: float) -> float:
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < goal else (low, middle)
    return (low + high) / 2.0


@dataclass(frozen=True, kw_only=True)
class LakeReport:
    """Summary of a written lake."""

    rows: int
    clicks: int
    days: list[str]
    bayes_auc: float | None
    """Bayes-optimal AUC of these rows. None if the rows do not contain both classes."""


def write_lake(
    simulator: Simulator, uri: str, *, rows: int, days: int, last_day: date, seed: int
) -> LakeReport:
    """Write simulated rows to a folder or a bucket.

    Every day up to `last_day` gets the same number of rows. Each file is complete or absent. A day
    is complete when its last file exists.

    Raises:
        ContractError: there are no days or fewer rows than days, a day exists already, or `uri` is
            neither a folder nor a bucket.
        TemporaryError, PermanentError: the lake cannot be written.
    """
    if days < 1 or rows < days:
        raise ContractError(
            f"{rows} rows over {days} days were requested, expected at least one row a day"
        )
    lake, random = open_objects(uri), np.random.default_rng([seed, 6])
    names = [str(last_day - timedelta(days=back)) for back in reversed(range(days))]
    if existing := [
        name for name in names if lake.list(f"{raw_rows.DAY_PARTITION.format(day=name)}/")
    ]:
        raise ContractError(
            f"lake {uri} contains day {existing[0]} already, expected no day of {names}"
        )
    written: list[SimulatedRows] = []
    for number, name in enumerate(names):
        count = rows * (number + 1) // days - rows * number // days
        written += _write_day(simulator, lake, day=name, count=count, random=random)
    label = np.concatenate([drawn.label for drawn in written])
    bayes_auc = roc_auc(label, np.concatenate([drawn.probability for drawn in written]))
    return LakeReport(rows=rows, clicks=int(label.sum()), days=names, bayes_auc=bayes_auc)


def raw_table(
    rows: SimulatedRows,
    *,
    request_ids: list[str],
    row: NDArray[np.int32],
    times: NDArray[np.float64],
) -> Any:
    """Return the rows as an Arrow table in the raw schema, without scores.

    `times` are seconds since the epoch.
    """
    columns: dict[str, Any] = {raw_rows.LABEL: pa.array(rows.label)}
    for i, name in enumerate(criteo.DENSE):
        values = rows.dense[:, i]
        columns[name] = pa.array(values, mask=np.isnan(values))
    for i, name in enumerate(criteo.CATEGORICAL):
        keys = rows.categorical[:, i]
        columns[name] = pa.array(keys, mask=keys == MISSING_CATEGORY)
    columns[raw_rows.REQUEST_ID] = pa.array(request_ids)
    columns[raw_rows.ROW] = pa.array(row)
    columns[raw_rows.EVENT_TIME] = pa.array((times * 1e6).astype(np.int64))
    columns |= dict.fromkeys(raw_rows.SERVED_BY, pa.nulls(len(row)))
    return pa.table([columns[field.name].cast(field.type) for field in _SCHEMA], schema=_SCHEMA)


def _write_day(
    simulator: Simulator, lake: Objects, *, day: str, count: int, random: Generator
) -> list[SimulatedRows]:
    midnight = datetime.combine(date.fromisoformat(day), time(tzinfo=timezone.utc)).timestamp()
    written = []
    for part, start in enumerate(range(0, count, _ROWS_PER_FILE)):
        number = np.arange(start, min(start + _ROWS_PER_FILE, count))
        drawn = simulator.draw(len(number), random)
        request = number // _ROWS_PER_REQUEST
        table = raw_table(
            drawn,
            request_ids=[f"simulated-{simulator.seed}-{day}-{i}" for i in request.tolist()],
            row=(number % _ROWS_PER_REQUEST).astype(np.int32),
            times=midnight
            + (request.astype(np.float64) * _ROWS_PER_REQUEST + 0.5) * (86_400.0 / count),
        )
        content = BytesIO()
        pq.write_table(table, content)
        lake.write(
            f"{raw_rows.DAY_PARTITION.format(day=day)}/part-{part:05d}.parquet", content.getvalue()
        )
        written.append(drawn)
    return written

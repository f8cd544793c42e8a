"""A sample installation for later versions, made by this module as a program.

It holds one run of a tiny recommender by the real steps, released, and a monitor that archived rows
scored by this version. The result, `golden/installation-<n>.zip`, is committed and never made
again. A change of a format adds the next one. The monitor's state is stored as SQL, which is
smaller than database pages.
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import PredictionBatch
from evergreen.registry.models import GRAPH_FILE, graph_folder
from evergreen.registry.promotion_journal import moment_of
from evergreen.rows.raw_schema import lake_schema, raw_batch
from evergreen.serving.parity import GoldenRows, open_graph, score
from evergreen.serving.repository.model_repository import GOLDEN_FILE
from tests.crossings.conftest import SETTINGS, Chain
from tests.support.monitors import Bench, publish
from tests.support.relocated import replace_in_documents

RECOMMENDER = Recommender(name="shop", features=Features(numeric=("price",), categorical=("item", "user")))
OWN = {
    **SETTINGS,
    "extraction": {"holdout_fraction": 0.25},
    "preprocessing": {},
    "model": {"embedding_dim": 2, "num_cross_layers": 1, "tower": [2]},
}
KEPT = ("archive", "store", "state")
MEMORY = "state/monitor.db"
ROOT = "file:///installation"
"""The installation's folder, in the sample's manifests."""


def write_day(root: Path, day: str, num_rows: int = 300) -> None:
    """Add a day to the installation's lake."""
    at, random = np.arange(num_rows), np.random.default_rng(int(day[-2:]))
    item, begin = random.integers(0, 5, num_rows), round(moment_of(day).timestamp() * 1e6)
    columns = {
        "label": pa.array((random.random(num_rows) < 0.1 + 0.1 * item).astype(np.int32)),
        "price": pa.array(random.integers(1, 9, num_rows).astype(np.float32)),
        "item": pa.array(item),
        "user": pa.array(random.integers(0, 9, num_rows)),
        "request_id": pa.array([f"{day}-{i // 3}" for i in at]),
        "row": pa.array((at % 3).astype(np.int32)),
        "event_time": pa.array(begin + at * 280_000_000).cast(pa.timestamp("us", tz="UTC")),
    }
    path = root / "lake" / f"day={day}" / "part-0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_batches([raw_batch(columns, lake_schema(RECOMMENDER.features))]), path)


def make(root: Path) -> None:
    """Create the installation in `root`."""
    for day in ("2026-01-01", "2026-01-02"):
        write_day(root, day)
    Chain(root, recommender=RECOMMENDER, settings=OWN).turn("round-1")
    folder = graph_folder(root / "store", 1)
    golden = GoldenRows.load(folder / GOLDEN_FILE).sample(8)
    bench = Bench(root.parent, archive_roll_seconds=1.0)
    bench.start(RECOMMENDER)
    for request, turns in (("archived", 3), ("open", 1)):
        batch = PredictionBatch(
            request_id=request,
            time=bench.clock.now,
            model_version=1,
            dense=golden.dense,
            categorical=golden.categorical,
            scores=score(open_graph(folder / GRAPH_FILE), golden),
        )
        publish(bench.log, batch, form=RecordFormat(RECOMMENDER.features))
        bench.turn(turns, 100.0)
    bench.close()


def pack(root: Path, sample: Path) -> None:
    """Write the files that later versions must read, without pages and locks."""
    with ZipFile(sample, "w", ZIP_DEFLATED) as packed, closing(sqlite3.connect(root / MEMORY)) as memory:
        for path in sorted(path for name in KEPT for path in (root / name).rglob("*")):
            if path.is_file() and path.suffix not in (".html", ".lock", ".db"):
                content = path.read_bytes().replace(root.as_uri().encode(), ROOT.encode())
                packed.writestr(path.relative_to(root).as_posix(), content)
        (version,) = memory.execute("PRAGMA user_version").fetchone()
        packed.writestr(f"{MEMORY}.sql", "\n".join([*memory.iterdump(), f"PRAGMA user_version = {version};"]))


def unpack(sample: Path, root: Path) -> None:
    """Unpack the installation in the sample into the folder `root`."""
    with ZipFile(sample) as packed:
        packed.extractall(root)
    replace_in_documents([*root.rglob("*.json"), *root.rglob("*.jsonl")], ROOT, root.as_uri())
    with closing(sqlite3.connect(root / MEMORY)) as memory:
        memory.executescript((root / f"{MEMORY}.sql").read_text())


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        make(Path(folder) / "a monitor")
        pack(Path(folder) / "a monitor", Path(sys.argv[1]))

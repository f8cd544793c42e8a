"""Criteo's TSV.gz to Parquet, one way a process: `python -m benchmarks.extraction_contestants WAY FILE FOLDER`.

Prints a JSON line: seconds of the work without imports, seconds of processor time, rows, peak bytes in memory. Needs of
this repository only what the chosen way needs, since the way of pandas runs in an environment of its own.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

DENSE, CATEGORICAL = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
NAMES = ["label", *DENSE, *CATEGORICAL]

Way = Callable[[Path, Path], Callable[[], int]]
"""Imports what it needs, and gives the work: file and folder to number of rows."""


def ours(file: Path, folder: Path) -> Callable[[], int]:
    """Extraction's reader and writer: every value checked, what is malformed set aside with its line number.

    Rows get request ids and event times besides; categories become int64.
    """
    from components.extraction.malformed_rows import MalformedRows
    from components.extraction.part_files import PartWriter
    from components.extraction.source import CriteoFiles
    from components.extraction.times import TimeSpan

    def work() -> int:
        with MalformedRows(folder / "malformed.jsonl") as malformed, PartWriter(folder) as writer:
            for table, _ in CriteoFiles(path=file).tables(TimeSpan(), malformed):
                writer.write(table)
            malformed.judge()
        return sum(part.num_rows for part in writer.parts)

    return work


def whole_step(file: Path, folder: Path) -> Callable[[], int]:
    """The pipeline's step: as `ours`, then the newest tenth cut off, all flushed to disk and hashed."""
    from components.extraction.extract import ExtractionSettings, extract
    from components.extraction.source import CriteoFiles
    from components.extraction.times import TimeSpan

    def work() -> int:
        settings = ExtractionSettings(replay_days=0)
        made = extract(CriteoFiles(path=file), TimeSpan(), folder / "step", settings, source_uri=file.as_uri())
        return made.num_train_rows + made.num_holdout_rows

    return work


def pyarrow_whole(file: Path, folder: Path) -> Callable[[], int]:
    """pyarrow.csv.read_csv of the gzip file with types given and its threads on, then parquet.write_table.

    Checked is the number of fields, and that a label is an integer and the others numbers; `0x1f`, `nan`, `1.5` and
    ` 1` are numbers to it. Categories stay text, whatever it is.
    """
    import pyarrow.csv as pv
    import pyarrow.parquet as pq

    def work() -> int:
        table = pv.read_csv(file, **_pyarrow_options(block_bytes=1 << 20))
        pq.write_table(table, folder / "part-0.parquet")
        return int(table.num_rows)

    return work


def pyarrow_stream(file: Path, folder: Path) -> Callable[[], int]:
    """pyarrow.csv.open_csv in blocks of 8 MiB to a ParquetWriter; checks as `pyarrow_whole`."""
    import pyarrow.csv as pv
    import pyarrow.parquet as pq

    def work() -> int:
        num_rows = 0
        reader = pv.open_csv(file, **_pyarrow_options(block_bytes=8 << 20))
        with pq.ParquetWriter(folder / "part-0.parquet", reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
                num_rows += batch.num_rows
        return num_rows

    return work


def _pyarrow_options(*, block_bytes: int) -> dict:
    import pyarrow as pa
    import pyarrow.csv as pv

    types = {"label": pa.int32(), **dict.fromkeys(DENSE, pa.float32()), **dict.fromkeys(CATEGORICAL, pa.string())}
    return {
        "read_options": pv.ReadOptions(column_names=NAMES, block_size=block_bytes),
        "parse_options": pv.ParseOptions(delimiter="\t", quote_char=False),
        "convert_options": pv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    }


def pandas_whole(file: Path, folder: Path) -> Callable[[], int]:
    """pandas.read_csv (C parser) with types given, then DataFrame.to_parquet; checks as `pyarrow_whole`."""
    import pandas as pd

    types = {"label": "int32", **dict.fromkeys(DENSE, "float32"), **dict.fromkeys(CATEGORICAL, "object")}

    def work() -> int:
        frame = pd.read_csv(file, sep="\t", header=None, names=NAMES, dtype=types, quoting=3)
        frame.to_parquet(folder / "part-0.parquet", index=False)
        return len(frame)

    return work


WAYS: dict[str, Way] = {each.__name__: each for each in (ours, whole_step, pyarrow_whole, pyarrow_stream, pandas_whole)}


def peak_bytes() -> int:
    """The most memory that this process has held, mapped files included."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def main() -> None:
    """Does the work and tells."""
    way, file, folder = sys.argv[1], Path(sys.argv[2]).absolute(), Path(sys.argv[3]).absolute()
    folder.mkdir()
    work = WAYS[way](file, folder)
    began, processor = time.perf_counter(), time.process_time()
    num_rows = work()
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    print(json.dumps({"seconds": seconds, "processor": processor, "rows": num_rows, "peak": peak_bytes()}))


if __name__ == "__main__":
    main()

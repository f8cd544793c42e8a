"""Folder of encoded rows in HugeCTR's format: Parquet files, and a file list that orders them.

Preprocessing writes folders in this format, and training and evaluation read them row by row. The
first line of the file list is the number of files. Each further line is the path of a file.
`manifests.TrainingSet` defines the columns and their types.
"""

from collections.abc import Sequence
from pathlib import Path

from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError

FILE_LIST = "_file_list.txt"


def write_file_list(folder: Path, names: Sequence[str], *, final: Path) -> None:
    """Write a list of the files `names` into `folder`.

    The listed paths are below `final`, because `folder` is later moved to this path.
    """
    lines = [str(len(names)), *(str(final / name) for name in names)]
    write_whole(folder / FILE_LIST, "\n".join(lines) + "\n")


def listed_files(folder: Path) -> list[Path]:
    """Return the folder's Parquet files in row order.

    Only the file names of the listed paths are used, because the folder may have been moved or
    copied.

    Raises:
        ContractError: the list is absent, its count is wrong, or a file is absent.
    """
    path = folder / FILE_LIST
    try:
        count, *lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ContractError(f"file list {path} cannot be read: {error}") from error
    files = [folder / Path(line).name for line in lines if line.strip()]
    if not count.strip().isdigit() or int(count) != len(files):
        raise ContractError(
            f"file list {path} names {len(files)} files, expected {count!r} as in its first line"
        )
    if absent := [file.name for file in files if not file.is_file()]:
        raise ContractError(f"{folder} lacks the listed files {absent}")
    return files

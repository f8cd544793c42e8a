"""HugeCTR's folder of encoded rows: the file list that gives its Parquet files their order.

Joins preprocessing, which writes such folders, to training and evaluation, which read them row for row. The first line
of the list is the number of files, each other line the path of one. Columns and types are `manifests.TrainingSet`'s.
"""

from collections.abc import Sequence
from pathlib import Path

from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError

FILE_LIST = "_file_list.txt"


def write_file_list(folder: Path, names: Sequence[str], *, final: Path) -> None:
    """Writes the list of the files `names` into `folder`, right for where the folder will lie, at `final`."""
    lines = [str(len(names)), *(str(final / name) for name in names)]
    write_whole(folder / FILE_LIST, "\n".join(lines) + "\n")


def listed_files(folder: Path) -> list[Path]:
    """The folder's Parquet files in row order, whatever machine and path they were written at.

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
        raise ContractError(f"file list {path} announces {count!r} files and names {len(files)}")
    if absent := [file.name for file in files if not file.is_file()]:
        raise ContractError(f"{folder} lacks the listed files {absent}")
    return files

"""What lies in a version's folder of the model repository, and the record that says whether all of it is there.

`version.json` names every file of the version with its size and SHA-256. A folder without it, or in which a file is
absent or of another size, is no version: a copy that broke off. Where versions lie, and which are served, is
`repository`'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from components.deployment.graph.files import DATA_FILE, GRAPH_FILE, graph_sha256
from components.deployment.graph.parity import GoldenRows
from components.deployment.repository.triton_config import PYTHON, ServingOptions, WarmupRow
from components.runtime.durable import sha256_file, write_whole
from components.runtime.errors import ContractError

GOLDEN_FILE = "golden.npz"
CODE_FILE = "model.py"
RECORD_FILE = "version.json"
FORMAT_VERSION = 1
_SERVED_MODEL = Path(__file__).resolve().parents[1] / "served_model.py"


class FileRecord(NamedTuple):
    """One file of a version."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class VersionRecord:
    """What `version.json` says."""

    version: int
    graph_sha256: str
    """See `graph.files.graph_sha256`."""
    options: ServingOptions
    """What the version was staged for."""
    files: Mapping[str, FileRecord]
    """Every file beside the record itself, by name."""

    def is_whole(self, sizes: Mapping[str, int]) -> bool:
        """Whether files of these sizes (bytes by name) hold all that the record names."""
        return all(sizes.get(name) == file.bytes for name, file in self.files.items())

    def dumps(self) -> bytes:
        """The record as JSON."""
        document = {**asdict(self), "files": {name: file._asdict() for name, file in self.files.items()}}
        return (json.dumps({"format_version": FORMAT_VERSION, **document}, indent=2) + "\n").encode()

    @classmethod
    def loads(cls, content: bytes, *, source: str) -> VersionRecord:
        """The record in `content`; `source` is named in errors.

        Raises:
            ContractError: no JSON, another format version, or unknown, missing or malformed fields.
        """
        try:
            document: dict[str, Any] = json.loads(content)
            if (found := document.pop("format_version")) != FORMAT_VERSION:
                raise ContractError(f"{source} has format_version {found}, expected {FORMAT_VERSION}")
            files = {str(name): FileRecord(**file) for name, file in document.pop("files").items()}
            if not {GRAPH_FILE, GOLDEN_FILE} <= files.keys():
                raise ContractError(
                    f"{source} names {sorted(files)}, expected {GRAPH_FILE} and {GOLDEN_FILE} among them"
                )
            return cls(**{**document, "options": ServingOptions(**document["options"]), "files": files})
        except ContractError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ContractError(f"{source} is no record of a version: {error!r}") from error


def assemble(version: int, graph: Path, golden: GoldenRows, options: ServingOptions, scratch: Path) -> dict[str, Path]:
    """The files of a version on this machine, by the names they get; what is made for it lies in `scratch`.

    The record is the last of them: while it is not there, nothing is.
    """
    golden.save(scratch / GOLDEN_FILE)
    files = {name: graph / name for name in (GRAPH_FILE, DATA_FILE) if (graph / name).exists()}
    files[GOLDEN_FILE] = scratch / GOLDEN_FILE
    if options.server == PYTHON:
        # A version without its code would hang Triton's loader for ever.
        files[CODE_FILE] = _SERVED_MODEL
    record = VersionRecord(
        version=version,
        graph_sha256=graph_sha256(graph),
        options=options,
        files={name: FileRecord(path.stat().st_size, sha256_file(path)) for name, path in files.items()},
    )
    write_whole(scratch / RECORD_FILE, record.dumps())
    return {**files, RECORD_FILE: scratch / RECORD_FILE}


def warmup_files(golden: GoldenRows, num_rows: int) -> tuple[list[WarmupRow], dict[str, bytes]]:
    """The first golden rows as Triton's warm-up reads them, and the content of each file that they name.

    Names are made of the content: a configuration that is written again finds the rows that it was written for.
    """
    rows, contents = [], {}
    for dense, categorical in zip(golden.dense[:num_rows], golden.categorical[:num_rows]):
        names = []
        for kind, values in (("dense", dense.astype("<f4")), ("categorical", categorical.astype("<i8"))):
            content = values.tobytes()
            names.append(f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}")
            contents[names[-1]] = content
        rows.append(WarmupRow(*names))
    return rows, contents

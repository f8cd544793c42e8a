"""docs/dependencies.md agrees with the requirements files and the locks; no index is asked."""

import re
from datetime import date

import tomllib
from packaging.version import Version

from requirements import dependencies
from tests.support.paths import REPOSITORY


def test_page_lists_every_named_package_as_it_is_locked_with_a_reason_and_a_replacement():
    rows = re.findall(r"^\| ([a-z0-9-]+) \| (.*) \|$", (REPOSITORY / "docs" / "dependencies.md").read_text(), re.M)
    page = {name: cells.split(" | ") for name, cells in rows if name != "package"}
    locked = dependencies.locked_versions()
    assert {"kfp", "torch", "numpy", "markupsafe"} <= locked.keys()
    assert {name: cells[0] for name, cells in page.items()} == {
        name: dependencies.locked_cell(versions) for name, versions in locked.items()
    }
    reasons = tomllib.loads((dependencies.FOLDER / "dependencies.toml").read_text())
    assert {name: cells[3:] for name, cells in page.items()} == reasons
    assert all(len(reason) == 2 and all(reason) for reason in reasons.values())


def test_newest_release_passes_over_prereleases_and_withdrawn_files():
    files = [
        {"filename": "a-1.9.tar.gz", "upload-time": "2024-03-02T01:00:00Z"},
        {"filename": "a-1.10-py3-none-any.whl", "upload-time": "2024-05-02T01:00:00Z"},
        {"filename": "a-1.10.tar.gz", "upload-time": "2024-05-01T01:00:00Z"},
        {"filename": "a-2.0rc1.tar.gz", "upload-time": "2025-01-01T01:00:00Z"},
        {"filename": "a-1.11.tar.gz", "upload-time": "2024-06-01T01:00:00Z", "yanked": "broken"},
        {"filename": "a-3.0.exe", "upload-time": "2024-06-01T01:00:00Z"},
    ]
    assert dependencies.newest_release(files) == dependencies.Release(Version("1.10"), date(2024, 5, 1))
    assert dependencies.newest_release(files[3:]) is None

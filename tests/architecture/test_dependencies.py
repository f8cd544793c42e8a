"""docs/dependencies.md agrees with the requirements files and the locks; no index is asked."""

import re
import shutil
import subprocess
from datetime import date

import pytest
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


@pytest.mark.parametrize(
    ("knows", "said"),
    [("pypi", "asked of pypi"), ("osv", "asked of osv"), ("neither", "no service was reached: none of")],
)
def test_audit_prints_the_report_of_the_service_that_answers_or_that_none_did(tmp_path, knows, said):
    shutil.copytree(REPOSITORY / ".ci", tmp_path / ".ci")
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")
    double = tmp_path / ".venvs" / "audit" / "bin" / "pip-audit"
    double.parent.mkdir(parents=True)
    # pip-audit ends with 1 both where it finds something and where nothing answers; only the first writes a report.
    double.write_text(f"""#!/bin/bash
[[ " $* " == *" --vulnerability-service {knows} "* ]] || exit 1
while [ "$1" != --output ]; do shift; done
echo "an-old-package 1.0 CVE-2026-0001" > "$2"
exit 1
""")
    double.chmod(0o755)
    done = subprocess.run([tmp_path / ".ci" / "audit"], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert ("CVE-2026-0001" in done.stdout) == (knows != "neither")

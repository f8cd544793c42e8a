"""Tests of docs/reference/dependencies.md and of the script `.ci/audit`."""

import re
import shutil
import subprocess

import pytest

from testing.paths import REPOSITORY


def test_page_gives_every_named_package_reason_and_replacement():
    text, folder = (
        (REPOSITORY / "docs" / "reference" / "dependencies.md").read_text(),
        REPOSITORY / "requirements",
    )
    page = re.findall(r"^\| ([a-z0-9-]+) \| (?!why).+ \| .+ \|$", text, re.M)
    files = [*folder.glob("*.in"), *folder.glob("*.txt")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    named = {re.split(r"[\[<>=!~; ]", line)[0] for line in lines if re.match(r"\w", line)}
    assert {"kfp", "torch", "numpy", "markupsafe"} <= set(page)
    assert page == sorted({re.sub(r"[-_.]+", "-", name).lower() for name in named})


@pytest.mark.parametrize(
    ("knows", "printed"),
    [
        ("pypi", "checked by pypi"),
        ("osv", "checked by osv"),
        ("neither", "no service was reached: none of"),
    ],
)
def test_audit_prints_report_of_service_that_answers_or_that_none_did(tmp_path, knows, printed):
    shutil.copytree(REPOSITORY / ".ci", tmp_path / ".ci")
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")
    double = tmp_path / ".venvs" / "audit" / "bin" / "pip-audit"
    double.parent.mkdir(parents=True)
    # pip-audit exits with 1 if it finds a vulnerability, and also if no service answers. pip-audit
    # writes a report only if it finds a vulnerability.
    double.write_text(f"""#!/bin/bash
[[ " $* " == *" --vulnerability-service {knows} "* ]] || exit 1
while [ "$1" != --output ]; do shift; done
echo "an-old-package 1.0 CVE-2026-0001" > "$2"
exit 1
""")
    double.chmod(0o755)
    done = subprocess.run(
        [tmp_path / ".ci" / "audit"], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert ("CVE-2026-0001" in done.stdout) == (knows != "neither")

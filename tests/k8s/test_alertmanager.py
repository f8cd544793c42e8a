"""Tests of the example Alertmanager configuration: it is valid, and routes alerts by severity."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.support.alerts import ALERTS
from tests.support.rendering import K8S

PATH = K8S / "components" / "observability" / "alertmanager" / "alertmanager.yml"
CONFIG = yaml.safe_load(PATH.read_text())


def amtool(*words: str) -> str:
    if shutil.which("amtool") is None:
        pytest.skip(
            "amtool is not installed (Debian: prometheus-alertmanager): the example cannot be "
            "checked"
        )
    done = subprocess.run(["amtool", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_amtool_accepts_configuration():
    assert "SUCCESS" in amtool("check-config", str(PATH))


@pytest.mark.parametrize("name", ALERTS)
def test_alert_reaches_receivers_of_its_severity(name):
    severity = ALERTS[name]["labels"]["severity"]
    labels = (f"alertname={name}", f"severity={severity}", "namespace=evergreen")
    found = amtool("config", "routes", "test", f"--config.file={PATH}", *labels)
    assert found.strip() == {"page": "pages", "ticket": "tickets"}[severity]
    assert "://" not in re.sub(r"#.*", "", PATH.read_text()), (
        "addresses and keys must come from a secret"
    )


def test_inhibitions_name_own_alerts_and_ticket_never_silences_page():
    for rule in CONFIG["inhibit_rules"]:
        sources, targets = (
            {name for name in ALERTS if all(_matches(m, name) for m in rule[f"{end}_matchers"])}
            for end in ("source", "target")
        )
        (target,) = rule["target_matchers"]
        assert len(sources) == 1
        assert len(targets) == len(re.search(r"\((.*)\)", target)[1].split("|")), (
            f"{target} names an unknown alert"
        )
        (source,) = sources
        assert ALERTS[source]["labels"]["severity"] == "page", (
            f"{source} silences other alerts but pages nobody"
        )


def _matches(matcher: str, name: str) -> bool:
    label, operator, value = re.fullmatch(r'(\w+) (=~?) "(.*)"', matcher).groups()
    assert label == "alertname"
    return name == value if operator == "=" else re.fullmatch(value, name) is not None

"""Tests of the runbook and its alerts: each command parses, can run, and names existing objects."""

import re
import shlex
from urllib.parse import urlsplit

import pytest
import yaml

from evergreen.config.monitor import DecisionSettings
from evergreen.config.reader import flat_settings
from monitoring.settings import InstallationSettings
from testing.paths import REPOSITORY
from tests.support.command_lines import parser_of
from tests.support.metric_names import known
from tests.support.rendering import K8S

PAGES = [
    REPOSITORY / "docs" / "operate" / "runbook.md",
    REPOSITORY / "docs" / "operate" / "forget-a-user.md",
    *sorted((REPOSITORY / "docs" / "operate" / "alerts").glob("*.md")),
]
PAGE = "\n".join(page.read_text() for page in PAGES)
DOCKERFILES = {
    "evergreen-monitoring": "monitoring/Dockerfile",
    "evergreen-deployment": "components/deployment/Dockerfile",
}


def commands() -> list[str]:
    """Return every command of the page, from blocks and sentences, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    return [
        re.sub(r"\s{2,}#.*", "", line)
        for line in lines
        if line.startswith(("evergreen ", "kubectl ", "python "))
    ]


COMMANDS = commands()
EXEC = [line for line in COMMANDS if " exec " in line]


def parse(line: str) -> None:
    """Parse a line with the parser of its program."""
    parser, words = parser_of(line)
    parser.parse_args(words)


def inner(line: str) -> list[str] | None:
    """Return the command that `kubectl exec` runs in the pod, or None for another program."""
    words = shlex.split(line.partition(" -- ")[2])
    words = shlex.split(words[2]) if words[:2] == ["sh", "-c"] else words
    return words if words[:1] == ["python"] else None


@pytest.mark.parametrize("line", [line for line in COMMANDS if not line.startswith("kubectl ")])
def test_commands_parse_as_their_program_parses_them(line):
    parse(line)


@pytest.mark.parametrize("line", [line for line in EXEC if inner(line)])
def test_commands_in_pods_parse_and_their_image_has_program(line):
    parse(shlex.join(inner(line)))
    workload = re.search(r"exec deploy/([\w-]+)( -c (\w+))? -- ", line)
    manifest = workload_manifest(workload[1])
    containers = {each["name"]: each for each in manifest["spec"]["template"]["spec"]["containers"]}
    image = containers[workload[3] or workload[1]]["image"]
    (dockerfile,) = [path for name, path in DOCKERFILES.items() if name in image]
    copied = re.findall(
        r"^COPY (?!--from)(\S+) ", (REPOSITORY / dockerfile).read_text(), flags=re.M
    )
    path = inner(line)[2].replace(".", "/")
    assert any(path == each or path.startswith(f"{each}/") for each in copied), (
        f"{dockerfile} has no {path}"
    )


def workload_manifest(name: str):
    """Return the Deployment named `name` in the base."""
    (found,) = [
        each
        for path in (K8S / "base" / name).glob("*.yaml")
        for each in yaml.safe_load_all(path.read_text())
        if each and each["kind"] == "Deployment" and each["metadata"]["name"] == name
    ]
    return found


def test_line_that_no_program_accepts_is_found():
    for line in (
        "evergreen release rollback --store S --too 3 --reason r",
        "evergreen models live-at --store S",
        "evergreen undo",
    ):
        with pytest.raises(SystemExit):
            parse(line)


def test_pods_containers_and_objects_named_are_those_of_base():
    for kind, name in re.findall(
        r"\b(deploy|hpa|configmap|pvc|scaledobject)[ /]([a-z][a-z-]+)", PAGE
    ):
        owner = {"configmap": "monitor", "pvc": "monitor", "hpa": "triton"}.get(kind, name)
        if kind in ("scaledobject",) or name in ("ml-pipeline",):
            continue
        texts = "".join(path.read_text() for path in (K8S / "base" / owner).glob("*.yaml"))
        assert re.search(rf"^  name: {name}$", texts, flags=re.M), (
            f"{kind}/{name} is not in k8s/base/{owner}"
        )


def test_named_settings_and_metrics_exist():
    names = flat_settings(InstallationSettings)
    for name in re.findall(r"EVERGREEN_MONITOR_([A-Z_]+)", PAGE):
        assert name.lower() in names, f"EVERGREEN_MONITOR_{name} is not a setting"
    assert "`upload_wait_seconds`" in PAGE
    assert "upload_wait_seconds" in names
    for name in ("auc_threshold", "daily_budget", "attribution_window_seconds"):
        assert f"`{name}`" in PAGE
        assert name in flat_settings(DecisionSettings)
    for name in re.findall(r"\b(?:ctr_monitor|nv|kube)_[a-z0-9_]+", PAGE):
        assert name in known(), f"no program exports {name}"


def test_monitor_account_may_publish_what_page_replays_in_its_pod():
    """Redelivery publishes messages to the log.

    Without redelivery, the monitor's account would not need the permission to publish in Pub/Sub.
    """
    assert any("deploy/monitor" in line and "dead-letters replay" in line for line in EXEC)
    settings = dict(
        re.findall(r"^(EVERGREEN_\w+)=(.+)$", (K8S / "base/monitor/monitor.env").read_text(), re.M)
    )
    topic = urlsplit(settings["EVERGREEN_MONITOR_LOG"]).path.strip("/")
    granted = f"on_topic evergreen-monitor {topic} roles/pubsub.publisher"
    assert granted in (REPOSITORY / "docs" / "kubernetes" / "gke.md").read_text()

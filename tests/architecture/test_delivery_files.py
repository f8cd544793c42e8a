"""Checks of the CI and CD files: GitHub Actions, Cloud Build, Skaffold, and the scripts in `.ci/`.

Files are validated by published schemas (from check-jsonschema) and zizmor. Scripts run here,
against the KFP server's test double and a kubectl test double that records its calls. No workflow
or build runs on GitHub's or Google's machines.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from pipelines.images import DOCKERFILES, STEP_OF_VARIANT, image_name
from pipelines.package import read_locations, with_locations
from pipelines.placement import read_values
from testing.paths import REPOSITORY
from testing.processes import runs, wait_for
from tests.support.kfp_server import KfpServer
from tests.support.rendering import OVERLAYS, render
from tests.support.yaml_texts import documents

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yaml"))
SCRIPTS = sorted(path for path in (REPOSITORY / ".ci").iterdir())
TOOLS = Path(sys.executable).parent
REVISION = "0123456789abcdef0123456789abcdef01234567"
PINNED = re.compile(r"uses: +([\w.-]+/[\w./-]+)@[0-9a-f]{40} # v\d+(\.\d+)*$")


def load(name: str) -> dict:
    # YAML 1.1 parses the key `on` as true. No test reads the key `on`.
    return yaml.safe_load((REPOSITORY / name).read_text())


def jobs() -> dict[str, dict]:
    return {
        f"{path.stem}/{name}": job
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
    }


def tool(name: str) -> Path:
    if not (TOOLS / name).exists():
        pytest.skip(f"{name} is not in this environment")
    return TOOLS / name


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
        ("vendor.cloudbuild", [REPOSITORY / "cloudbuild.yaml"]),
    ],
    ids=["github-workflows", "github-timeouts", "cloudbuild"],
)
def test_files_agree_with_published_schema(schema, paths):
    command = [tool("check-jsonschema"), "--builtin-schema", schema, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cloud_build_gets_only_supported_keys():
    """The published schema rejects unknown keys, except at the top level."""
    package = pytest.importorskip(
        "check_jsonschema", reason="check-jsonschema is not in this environment"
    )
    schema = Path(package.__file__).parent / "builtin_schemas" / "vendor" / "cloudbuild.json"
    assert load("cloudbuild.yaml").keys() <= json.loads(schema.read_text())["properties"].keys()


def test_zizmor_finds_no_weakness_in_workflows():
    command = [
        tool("zizmor"),
        "--offline",
        "--no-progress",
        "--color",
        "never",
        REPOSITORY / ".github",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_every_third_party_action_is_pinned_by_commit():
    lines = [
        line.strip()
        for path in WORKFLOWS
        for line in path.read_text().splitlines()
        if "uses: " in line
    ]
    others = [line.removeprefix("- ") for line in lines if "uses: ./" not in line]
    assert others
    assert [line for line in others if not PINNED.fullmatch(line)] == []


def test_jobs_may_read_code_and_prove_their_identity_and_hold_no_secret():
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {}
        assert "secrets." not in path.read_text()
        assert "credentials_json" not in path.read_text()
    for name, job in jobs().items():
        proves_nothing = name.startswith("test/") or name.endswith("/test")
        allowed = {"contents": "read"} | ({} if proves_nothing else {"id-token": "write"})
        assert job["permissions"] == allowed, name


def test_release_passes_tests_images_and_sample_before_promotion():
    needs = {
        name.partition("/")[2]: job.get("needs")
        for name, job in jobs().items()
        if name.startswith("release/")
    }
    assert needs == {"test": None, "images": "test", "sample": "images", "promote": "sample"}
    assert jobs()["release/promote"]["environment"] == "production"
    build = load("cloudbuild.yaml")["steps"]
    assert [step["id"] for step in build] == [
        "test",
        "plan",
        "images",
        "token",
        "sample",
        "roll-out",
        "promote",
    ]
    # A step without `waitFor` waits for all previous steps.
    assert {step["id"]: step["waitFor"] for step in build if "waitFor" in step} == {
        "token": ["images"],
        "sample": ["images"],
        "roll-out": ["sample", "token"],
    }


def test_every_image_is_built_once_by_github_and_by_cloud_build():
    matrix = jobs()["release/images"]["strategy"]["matrix"]["include"]
    assert sorted(name for entry in matrix for name in entry["images"].split()) == sorted(
        DOCKERFILES
    )
    without_nvidias = load("cloudbuild.yaml")["substitutions"]["_IMAGES"].split()
    assert sorted(without_nvidias) == sorted(set(DOCKERFILES) - set(STEP_OF_VARIANT))


def test_skaffold_builds_same_images_from_same_files():
    config = load("skaffold.yaml")
    assert config["apiVersion"] == "skaffold/v4beta13"
    artifacts = config["build"]["artifacts"]
    for profile in config["profiles"]:
        artifacts = artifacts + profile.get("build", {}).get("artifacts", [])
    registry = registry_of("gke")
    assert {artifact["image"]: artifact["docker"]["dockerfile"] for artifact in artifacts} == {
        f"{registry}/{image_name(name)}": path for name, path in DOCKERFILES.items()
    }
    assert {artifact["context"] for artifact in artifacts} == {"."}
    for part in [config, *config["profiles"]]:
        for folder in part.get("manifests", {}).get("kustomize", {}).get("paths", []):
            assert registry_of(Path(folder).name) == registry, (
                "skaffold expects its images in another registry"
            )


def registry_of(overlay: str) -> str:
    return read_values(REPOSITORY / "k8s" / "overlays" / overlay / "cluster.env")["REGISTRY"]


def images_of(text: str) -> set[str]:
    return set(re.findall(r"""(?:^|[\s"'])image: *["']?([^\s"']+)""", text))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_own_image_that_manifest_names_is_built(overlay):
    found = images_of(render(REPOSITORY / "k8s" / "overlays" / overlay))
    ours = {reference.rpartition(":")[0] for reference in found if "/evergreen-" in reference}
    assert f"{registry_of(overlay)}/evergreen-monitoring" in ours
    assert ours <= {f"{registry_of(overlay)}/{image_name(name)}" for name in DOCKERFILES}


@pytest.mark.parametrize("backend", ["pytorch", "hugectr"])
def test_every_image_that_compiled_pipeline_names_is_built(backend, tmp_path):
    output = tmp_path / "pipeline.yaml"
    placement = REPOSITORY / "k8s" / "overlays" / "gke" / "placement.yaml"
    flags = {"placement": placement, "backend": backend, "tag": REVISION, "output": output}
    words = [
        sys.executable,
        "-m",
        "cli",
        "compile",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    subprocess.run(words, check=True, cwd=REPOSITORY, capture_output=True, timeout=120)
    found = images_of(output.read_text())
    assert len(found) >= 7
    assert found <= {f"{registry_of('gke')}/{image_name(name)}:{REVISION}" for name in DOCKERFILES}


def commands() -> list[str]:
    """Return every shell text of the workflows and of Cloud Build, as the shell receives it."""
    found = [
        step["run"] for job in jobs().values() for step in job.get("steps", []) if "run" in step
    ]
    for step in load("cloudbuild.yaml")["steps"]:
        flags, *rest = step.get("args", [""])
        found += (
            [rest[0].replace("$$", "$")] if flags == "-euc" else [" ".join(step.get("args", []))]
        )
    return found


def test_shell_texts_and_scripts_are_bash_and_their_commands_exist():
    for text in [*commands(), *(path.read_text() for path in SCRIPTS)]:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}: {done.stderr}"
    assert all(os.access(path, os.X_OK) for path in SCRIPTS)
    makefile = (REPOSITORY / "Makefile").read_text()
    joined = "\n".join([*commands(), *(path.read_text() for path in SCRIPTS)])
    called = set(re.findall(r"\.ci/[\w-]+", joined + makefile))
    assert called == {f".ci/{path.name}" for path in SCRIPTS}
    targets = set(re.findall(r"\bmake (?:--\S+ )*([a-z-]+)", joined))
    assert targets == {
        *("audit", "check", "coverage", "docs", "environments", "images", "sbom", "test"),
        "test-core",
    }
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for program in set(re.findall(r"python3\.11 (\S+\.py)", joined)):
        assert (REPOSITORY / program).exists()


def test_cloud_build_runs_same_script_that_builds_and_pushes(tmp_path):
    (text,) = [text for text in commands() if "DRY_RUN" in text]
    names = load("cloudbuild.yaml")["substitutions"]["_IMAGES"]
    text = text.replace("$_IMAGES", names).replace("build/images.sh", str(tmp_path / "images.sh"))
    # Quote the path twice: once for this shell and once for the shell that make starts.
    text = text.replace("make ", f"make PYTHON={shlex.quote(shlex.quote(sys.executable))} ")
    environment = {**os.environ, "OVERLAY": "k8s/overlays/gke", "REVISION": REVISION}
    subprocess.run(["bash", "-euc", text], check=True, cwd=REPOSITORY, env=environment, timeout=60)
    lines = [shlex.split(line) for line in (tmp_path / "images.sh").read_text().splitlines()]
    wanted = [f"{registry_of('gke')}/{image_name(name)}:{REVISION}" for name in names.split()]
    assert [line[line.index("--tag") + 1] for line in lines if line[1] == "build"] == wanted
    assert [line[2] for line in lines if line[1] == "push"] == wanted


@pytest.fixture
def checkout(tmp_path):
    """A separate folder with the files that the scripts touch.

    The command `evergreen` comes from the test's environment.
    """
    folder = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / ".ci", folder / ".ci")
    shutil.copytree(REPOSITORY / "k8s", folder / "k8s")
    (folder / ".venvs" / "driver").mkdir(parents=True)
    (folder / ".venvs" / "driver" / "bin").symlink_to(TOOLS)
    return folder


def script(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "HOME": str(checkout),
        "PYTHONPATH": str(REPOSITORY),
        "REVISION": REVISION,
        **variables,
    }
    return subprocess.run(
        [checkout / words[0], *words[1:]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        cwd="/",
    )


@pytest.fixture
def kfp(monkeypatch):
    double = KfpServer()
    create = double.create_run

    def created(body):
        shown = create(body)
        double.runs[-1]["state"] = double.end
        return shown

    double.end = "SUCCEEDED"
    monkeypatch.setattr(double, "create_run", created)
    yield double
    double.close()


def test_candidate_is_tested_apart_and_promoted_with_folders_of_cluster(checkout, kfp, tmp_path):
    kfp.token = "of the build"
    (tmp_path / "token").write_text("of the build")
    server = {"KFP_HOST": kfp.url, "KFP_TOKEN_FILE": str(tmp_path / "token")}
    done = script(checkout, ".ci/sample", **server)
    assert done.returncode == 0, done.stderr
    assert [pipeline["display_name"] for pipeline in kfp.pipelines] == ["evergreen-candidate"]
    (run,) = kfp.runs
    given = run["body"]["runtime_config"]["parameters"]
    sample = f"file:///evergreen/sample/{REVISION}"
    apart = {name: f"{sample}/{name}" for name in ("store", "work")}
    apart |= {"lake": "file:///evergreen/sample/lake"}
    (tried := tmp_path / "tried.yaml").write_bytes(kfp.uploads[-1])
    locations = read_locations(tried)
    assert locations.items() >= apart.items()
    assert run["body"]["pipeline_version_reference"]["pipeline_id"] == "p1"
    assert given == {
        "recommender": "file:///evergreen/sample/store",
        "settings": "gate.min_auc=0.0 gate.max_calibration_factor=1000 release.rollout=none",
    }
    assert REVISION in kfp.uploads[-1].decode()

    done = script(checkout, ".ci/promote", **server)
    assert done.returncode == 0, done.stderr
    assert [pipeline["display_name"] for pipeline in kfp.pipelines] == [
        "evergreen-candidate",
        "evergreen-retraining",
    ]
    assert REVISION in {
        each["display_name"] for each in kfp.versions if each["pipeline_id"] == "p2"
    }
    (promoted := tmp_path / "promoted.yaml").write_bytes(kfp.uploads[-1])
    assert not read_locations(promoted).items() & apart.items()
    assert with_locations(promoted, locations) == with_locations(tried, {}), (
        "all other settings must equal the tested settings"
    )
    assert len(kfp.runs) == 1, "promotion starts no run"


def digests_of(images: set[str], folder: Path) -> dict[str, str]:
    """Write the file of digests of `images` into `folder`.

    Returns:
        The digest reference of each image by its tag.
    """
    named = {
        image: f"{image.rpartition(':')[0]}@sha256:{index:064x}"
        for index, image in enumerate(sorted(images))
    }
    (folder / "images.txt").write_text("".join(f"{name}\n" for name in named.values()))
    return named


def test_candidate_of_build_with_digests_runs_images_by_digest(checkout, kfp, tmp_path):
    named = digests_of(
        {f"{registry_of('gke')}/{image_name(name)}:{REVISION}" for name in DOCKERFILES}, tmp_path
    )
    done = script(checkout, ".ci/sample", KFP_HOST=kfp.url, DIGESTS=str(tmp_path / "images.txt"))
    assert done.returncode == 0, done.stderr
    used = set(re.findall(r"image: (\S+)", kfp.uploads[-1].decode()))
    assert used <= set(named.values())
    assert len(used) == 7


def test_failed_sample_ends_release(checkout, kfp):
    kfp.end = "FAILED"
    done = script(checkout, ".ci/sample", KFP_HOST=kfp.url)
    assert done.returncode == 3, done.stderr


@pytest.fixture
def kubectl(tmp_path):
    """A folder for PATH with a test double of kubectl, and the records of its calls.

    The test double starts an HTTP server for each port-forward. A file `ready` beside the records
    contains the number of Triton's ready pods.
    """
    folder, notes = tmp_path / "bin", tmp_path / "kubectl"
    folder.mkdir()
    (folder / "kubectl.py").write_text(f"""\
import http.server, os, sys
with open({str(notes)!r}, "a") as file:
    print(os.getpid(), *sys.argv[1:], file=file)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/apis/v2beta1/healthz" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
if "get" in sys.argv:
    print(open({str(tmp_path / "ready")!r}).read(), end="")
if "kustomize" in sys.argv:
    print(open({str(tmp_path / "kustomized")!r}).read(), end="")
if sys.argv[1:] == ["apply", "-f", "-"]:
    open({str(tmp_path / "applied")!r}, "w").write(sys.stdin.read())
if "port-forward" in sys.argv:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1].split(":")[0])), Answer).serve_forever()
""")
    # The script has no `#!` line, because such a line cannot name a path with a space.
    command = shlex.join([sys.executable, str(folder / "kubectl.py")])
    (folder / "kubectl").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (folder / "kubectl").chmod(0o755)
    yield f"{folder}:{os.environ['PATH']}", notes
    for line in notes.read_text().splitlines() if notes.exists() else []:
        # End a tunnel that was not stopped, and the loop that would restart the tunnel. Tunnel and
        # loop run in a separate session.
        with suppress(ProcessLookupError):
            if (group := os.getpgid(int(line.split()[0]))) != os.getpgrp():
                os.killpg(group, signal.SIGKILL)


@pytest.mark.parametrize("ready", ["2", ""], ids=["with a model", "before the first model"])
def test_rollout_sets_revision_of_each_own_image_and_waits_if_it_can(checkout, kubectl, ready):
    path, notes = kubectl
    (notes.parent / "ready").write_text(ready)
    settings = checkout / "k8s" / "overlays" / "gke" / "cluster.env"
    settings.write_text(settings.read_text().replace("my-", "our-"))
    done = script(checkout, ".ci/roll-out", PATH=path)
    assert done.returncode == 0, done.stderr
    calls = [line.split()[1:] for line in notes.read_text().splitlines()]
    assert calls[0][:5] == ["--namespace", "evergreen", "get", "deployment", "triton"], (
        "the script must read the Deployment before the rollout"
    )
    assert calls[1] == ["apply", "-k", "k8s/overlays/gke"]
    assert calls[2][:5] == ["--namespace", "evergreen", "rollout", "status", "deployment"]
    selector = calls[2][calls[2].index("--selector") + 1]
    waited = {m["metadata"]["name"] for m in deployments(settings.parent) if selected(m, selector)}
    assert waited == {"monitor", "release-controller"} | ({"triton"} if ready else set())
    ours = {image for image in images_of(render(settings.parent)) if "/evergreen-" in image}
    assert {image.rpartition(":")[2] for image in ours} == {REVISION}


def test_rollout_of_build_with_digests_names_every_own_image_by_digest(checkout, kubectl, tmp_path):
    path, notes = kubectl
    (notes.parent / "ready").write_text("")
    overlay = checkout / "k8s" / "overlays" / "gke"
    settings = overlay / "cluster.env"
    settings.write_text(
        re.sub(
            "^TAG=.*", f"TAG={REVISION}", settings.read_text().replace("my-", "our-"), flags=re.M
        )
    )
    rendered = render(overlay)
    (tmp_path / "kustomized").write_text(rendered)
    named = digests_of({image for image in images_of(rendered) if "/evergreen-" in image}, tmp_path)
    done = script(checkout, ".ci/roll-out", PATH=path, DIGESTS=str(tmp_path / "images.txt"))
    assert done.returncode == 0, done.stderr
    assert images_of((tmp_path / "applied").read_text()) == {
        named.get(image, image) for image in images_of(rendered)
    }
    (tmp_path / "images.txt").write_text("\n".join(list(named.values())[1:]))
    (tmp_path / "applied").unlink()
    done = script(checkout, ".ci/roll-out", PATH=path, DIGESTS=str(tmp_path / "images.txt"))
    assert done.returncode == 2
    assert f"has no digest of {sorted(named)[0]}" in done.stderr
    assert not (tmp_path / "applied").exists()


def deployments(overlay: Path) -> list[dict]:
    return [m for m in documents(render(overlay)) if m["kind"] == "Deployment"]


def selected(manifest: dict, selector: str) -> bool:
    """Evaluate kubectl's rule for `a=b,c!=d`: an absent label is unequal."""
    labels = manifest["metadata"]["labels"]
    terms = [re.fullmatch(r"([^=!]+)(!?=)([^=]+)", term).groups() for term in selector.split(",")]
    return all((labels.get(key) == value) == (operator == "=") for key, operator, value in terms)


@pytest.mark.parametrize("value", ["my-registry", ""], ids=["a placeholder", "empty"])
def test_rollout_refuses_settings_that_are_not_filled_in(checkout, kubectl, value):
    path, notes = kubectl
    settings = checkout / "k8s" / "overlays" / "gke" / "cluster.env"
    text = settings.read_text().replace("my-", "our-")
    settings.write_text(re.sub(r"^REGISTRY=.*$", f"REGISTRY={value}", text, flags=re.MULTILINE))
    done = script(checkout, ".ci/roll-out", PATH=path)
    assert done.returncode == 2
    assert f"to be filled in, in k8s/overlays/gke/cluster.env: REGISTRY={value}" in done.stderr
    assert not notes.exists()


def test_tunnel_leads_to_api_and_ends_with_command(checkout, kubectl):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed, with which .ci/with-kfp calls the API")
    path, notes = kubectl
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = script(
        checkout, ".ci/with-kfp", "sh", "-c", "echo $KFP_HOST; exit 7", PATH=path, KFP_PORT=port
    )
    assert (done.returncode, done.stdout.strip()) == (7, f"http://127.0.0.1:{port}"), done.stderr
    (line,) = notes.read_text().splitlines()
    pid, *printed = line.split()
    assert printed == [
        "--namespace",
        "kubeflow",
        "port-forward",
        "service/ml-pipeline",
        f"{port}:8888",
    ]
    wait_for(lambda: not runs(pid), "the end of the tunnel")

"""Tests of simulated clicks on a new cluster: one simulator runs, and its flags are valid."""

import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from demo.simulation.replay import MAX_DELAY_FACTOR
from evergreen.recommender_file.form import read_recommender
from testing.paths import REPOSITORY
from tests.k8s.pod import variables
from tests.support.rendering import K8S, find, pod_spec


@pytest.fixture
def variant(rendered):
    return rendered("cpu+simulation")


def words(container, replaced) -> list[str]:
    """Return the container's command, with paths replaced for this machine."""
    arguments = list(container["args"])
    for old, new in replaced.items():
        arguments = [word.replace(old, new) for word in arguments]
    return [sys.executable, "-m", "demo.simulation", *arguments]


def test_traffic_uses_simulator_whose_days_are_in_lake(variant, tmp_path):
    (lake,) = pod_spec(find(variant, "CronJob", "simulated-lake"))["containers"]
    place = variables(variant, lake)["LAKE"]
    assert place == "/evergreen/lake"
    simulator, drifted, _ = pod_spec(find(variant, "Deployment", "traffic"))["initContainers"]
    for name, container in (("lake", lake), ("traffic", simulator), ("traffic", drifted)):
        (tmp_path / name).mkdir(exist_ok=True)
        moved = {
            "$(LAKE)": place,
            "/tmp/": f"{tmp_path}/{name}/",
            "/evergreen/": f"{tmp_path}/{name}/",
            "--rows=400000": "--rows=1000",
        }
        subprocess.run(words(container, moved), cwd=REPOSITORY, check=True, capture_output=True)
    assert (tmp_path / "lake" / "simulator.json").read_bytes() == (
        tmp_path / "traffic" / "simulator.json"
    ).read_bytes()
    assert (tmp_path / "traffic" / "drifted.json").read_bytes() != (
        tmp_path / "traffic" / "simulator.json"
    ).read_bytes()
    assert len(list((tmp_path / "lake" / "lake").glob("day=*"))) == 4


def test_apply_with_another_revision_changes_no_field_that_cannot_change(variant):
    """A Job's template is immutable, so the manifests could not be applied with the next TAG.

    The Job of the simulation starts only when a person starts it.
    """
    assert [m for m in variant if m["kind"] == "Job"] == []
    assert find(variant, "CronJob", "simulated-lake")["spec"]["suspend"] is True


def test_traffic_may_end_as_late_as_its_last_label(variant):
    spec = pod_spec(find(variant, "Deployment", "traffic"))
    (delay,) = [a for a in spec["containers"][0]["args"] if a.startswith("--label-delay-seconds=")]
    assert (
        spec["terminationGracePeriodSeconds"]
        >= float(delay.partition("=")[2]) * MAX_DELAY_FACTOR + 20
    )


def test_traffic_waits_until_model_is_served_and_no_longer(variant):
    """An init container waits for the first release.

    The simulator would fail without a served model.
    """
    waits = pod_spec(find(variant, "Deployment", "traffic"))["initContainers"][-1]
    listener = socket.create_server(("127.0.0.1", 0), backlog=1)
    address = listener.getsockname()
    listener.close()
    (program,) = waits["args"]
    address_in_code = '("triton.evergreen.svc.cluster.local", 8001)'
    assert address_in_code in program
    here = program.replace(address_in_code, repr(address)).replace("sleep(2)", "sleep(.05)")
    command = [sys.executable, *waits["command"][1:], here]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith("waiting until a model is served")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            with socket.create_server(address):
                assert process.wait(30) == 0
        finally:
            process.kill()


def test_labels_of_kind_are_complete_within_minute_that_they_wait_for(rendered):
    spec = read_recommender(K8S / "kind" / "recommender.yaml")
    assert spec.settings["monitor"] == {"attribution_window_seconds": 60}
    usual = read_recommender(REPOSITORY / "examples" / "criteo" / "recommender.yaml")
    assert replace(spec, settings={}) == replace(usual, settings={})
    (traffic,) = pod_spec(find(rendered("kind"), "Deployment", "traffic"))["containers"]
    (delay,) = [a for a in traffic["args"] if a.startswith("--label-delay-seconds=")]
    assert float(delay.partition("=")[2]) * MAX_DELAY_FACTOR < 60


def test_existing_lake_ends_job_at_first_try(variant, tmp_path):
    job = find(variant, "CronJob", "simulated-lake")["spec"]["jobTemplate"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    spec = pod_spec(find(variant, "CronJob", "simulated-lake"))
    assert spec["restartPolicy"] == "Never", (
        "the API server rejects the failure rule with another policy"
    )
    (tmp_path / "day=2026-01-04").mkdir()
    (tmp_path / "day=2026-01-04" / "part-0.parquet").touch()
    command = words(
        spec["containers"][0], {"$(LAKE)": str(tmp_path), "/tmp/world": f"{tmp_path}/world"}
    )
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert "contains day 2026-01-04 already" in done.stderr
    assert (rule["action"], rule["onExitCodes"]) == (
        "FailJob",
        {"operator": "In", "values": [done.returncode]},
    )


def test_flags_of_traffic_are_accepted_by_its_program(variant):
    (traffic,) = pod_spec(find(variant, "Deployment", "traffic"))["containers"]
    known = subprocess.run(
        [sys.executable, "-m", "demo.simulation", "traffic", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    ).stdout
    assert traffic["args"][0] == "traffic"
    assert all(flag.partition("=")[0] in known for flag in traffic["args"][1:])
    assert traffic["stdin"] is True

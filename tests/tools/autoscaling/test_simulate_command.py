"""Tests of `evergreen simulate autoscaler`: its output, defaults, wrong flags and files."""

import re
from pathlib import Path

import pytest
import yaml

from tools.autoscaling.__main__ import main
from tools.autoscaling.hpa import SHIPPED_AUTOSCALER, read_autoscaler
from tools.autoscaling.queueing import read_service_times, shipped_or_file

HEAD = "seconds,requests_per_second\n"


@pytest.fixture
def short(tmp_path) -> str:
    (tmp_path / "short.csv").write_text(f"{HEAD}0,300\n120,0\n")
    return str(tmp_path / "short.csv")


def refused(capsys, *flags: object) -> str:
    """Return the command's output for flags or files that it refuses."""
    try:
        code = main([*map(str, flags)])
    except SystemExit as ended:  # argparse prints a message and exits
        code = ended.code
    assert code == 2
    return capsys.readouterr().err


def changed(tmp_path, change) -> Path:
    """Write the shipped autoscaler with a change to a file."""
    document = yaml.safe_load(SHIPPED_AUTOSCALER.read_text())
    change(document["spec"])
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "changed.yaml"


def test_printed_commands_reproduce_run(tmp_path, capsys):
    (tmp_path / "trace.csv").write_text(
        "\ufeffseconds,requests_per_second,rows_per_request\n0,10,64\n600,40,64\n1200,0,64\n",
        encoding="utf-8",
    )
    runs = []
    for _ in range(2):
        assert main(["--trace", str(tmp_path / "trace.csv")]) == 0
        runs.append(capsys.readouterr().out)
    assert runs[0] == runs[1]
    answered = int(re.search(r"([\d,]+) answered", runs[0])[1].replace(",", ""))
    assert answered == pytest.approx(600 * 50, rel=0.03)


def test_default_service_times_are_those_of_shipped_target(short, capsys):
    assert main(["--trace", short]) == 0
    printed = capsys.readouterr().out
    target = read_autoscaler(SHIPPED_AUTOSCALER).metrics[0].target
    times = read_service_times(shipped_or_file("demo"))
    assert target / (1e6 * times.of_rows(1024)) == pytest.approx(0.2, rel=0.15)
    assert f"queue target {target:,.0f} us" in printed
    assert times.what in printed


def test_manifest_without_optional_fields_means_kubernetes_defaults(tmp_path):
    def bare(spec):
        del spec["advanced"], spec["minReplicaCount"]
        spec["triggers"][0]["metadata"]["threshold"] = "1.5"

    autoscaler = read_autoscaler(changed(tmp_path, bare))
    assert autoscaler.min_replicas == 1
    assert autoscaler.metrics[0].target == 1.5
    assert autoscaler.down.stabilization_seconds == 300


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "begins with ''"),
        (b"seconds,rate\n0,1\n60,1\n", "begins with 'seconds,rate"),
        (HEAD.encode(), "fewer than two lines"),
        (f"{HEAD}0,1\n\n60,x\n".encode(), "'x'"),
        (f"{HEAD}0,nan\n60,1\n".encode(), "rates of 0 to 1e6"),
        (f"{HEAD}0,1\n60,-1\n".encode(), "rates of 0 to 1e6"),
        (f"{HEAD}0,1\n60,1\n60,1\n".encode(), "and rise"),
        (f"{HEAD}0,1\ninf,1\n".encode(), "and rise"),
        (f"{HEAD}0,1\n5,1\n".encode(), "lasts 5 s"),
        (f"{HEAD}0,999999\n86400,1\n".encode(), r"step of 8.64e\+10 requests"),
        (b"seconds,requests_per_second,rows_per_request\n0,1,5000\n60,1,1\n", "to 4096 rows"),
        (b"\xff\xfe\x00", "is not text"),
    ],
)
def test_file_that_is_no_trace_is_refused_with_reason(tmp_path, capsys, content, named):
    (tmp_path / "trace.csv").write_bytes(content)
    assert re.search(named, refused(capsys, "--trace", tmp_path / "trace.csv"))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--trace", "absent.csv"], "absent.csv cannot be read"),
        (["--trace", "."], "Is a directory"),
        (["--trace", "spike", "--service-times", "absent.json"], "absent.json cannot be read"),
        (["--trace", "spike", "--instances", "0"], "--instances: invalid choice"),
        (
            ["--trace", "spike", "--objective-ms", "nan"],
            "--objective-ms: 'nan', expected 0 or more",
        ),
        (["--trace", "spike", "--node-seconds", "-1"], "--node-seconds: '-1'"),
        (["--trace", "spike", "--target-queue-microseconds", "0"], "'0', expected 0.001"),
        (["--trace", "spike", "--peak-rate", "few"], "--peak-rate"),
    ],
)
def test_impossible_flags_are_refused_by_name(capsys, flags, named):
    assert named in refused(capsys, *flags)


def test_target_of_metric_that_manifest_lacks_is_refused(tmp_path, capsys, short):
    manifest = changed(tmp_path, lambda spec: spec["triggers"].pop(0))
    error = refused(
        capsys, "--trace", short, "--manifest", manifest, "--target-queue-microseconds", "3"
    )
    assert "has no metric triton_queue_microseconds_per_request" in error


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda spec: spec["triggers"][0]["metadata"].update(threshold="many"), "'many'"),
        (lambda spec: spec["triggers"][0].update(type="cron"), "is of type cron"),
        (
            lambda spec: spec["triggers"][0].update(name="other"),
            "metric is other, expected one of the simulated metrics",
        ),
    ],
)
def test_manifest_that_cannot_be_simulated_is_refused_with_reason(
    tmp_path, capsys, short, change, named
):
    assert named in refused(capsys, "--trace", short, "--manifest", changed(tmp_path, change))

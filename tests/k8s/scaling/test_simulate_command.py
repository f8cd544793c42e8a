"""`evergreen scale simulate` as somebody meets it first: help, wrong words, files of all sorts, and honest defaults."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from k8s.scaling.__main__ import main
from k8s.scaling.manifests import HPA_MANIFEST, KEDA_MANIFEST
from k8s.scaling.service_times import read_service_times, shipped_or_file

HEAD = "seconds,requests_per_second\n"


def refused(capsys, *flags: str) -> str:
    assert main(["simulate", *map(str, flags)]) == 2
    return capsys.readouterr().err


def hpa(tmp_path, change) -> str:
    """The shipped HPA with a change, as a file."""
    document = yaml.safe_load(HPA_MANIFEST.read_text())
    change(document["spec"])
    (tmp_path / "hpa.yaml").write_text(yaml.safe_dump(document))
    return str(tmp_path / "hpa.yaml")


def short(tmp_path, rate: float = 300) -> str:
    (tmp_path / "short.csv").write_text(f"{HEAD}0,{rate}\n120,0\n")
    return str(tmp_path / "short.csv")


def test_help_tells_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--trace" in told
    assert "60% of capacity" in re.sub(r"\s+", " ", told)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no column seconds"),
        (HEAD, "has 0 lines"),
        (f"{HEAD}0,1\n\n60,x\n", "line 4"),
        (f"{HEAD}0,1\ninf,1\n", "seconds inf"),
        (f"{HEAD}0,1\n5,1\n", "lasts 5 s"),
        (f"{HEAD}0,0\n1e300,1\n", "lasts 1e\\+300 s"),
        (f"{HEAD}0,999999\n86400,1\n", "step of 8.64e\\+10 requests"),
        (f'{HEAD}0,"{"1" * 200_000}"\n60,1\n', "no CSV"),
        ("\x89PNG\r\n\x1a\n", "no column seconds"),
    ],
)
def test_file_that_is_no_trace_is_refused_with_the_reason(tmp_path, capsys, content, named):
    (tmp_path / "trace.csv").write_text(content)
    assert re.search(named, refused(capsys, "--trace", tmp_path / "trace.csv"))


def test_folder_or_bytes_instead_of_a_trace_are_refused(tmp_path, capsys):
    assert "Is a directory" in refused(capsys, "--trace", tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "is no text" in refused(capsys, "--trace", tmp_path / "bytes")


def test_file_that_cannot_be_written_is_an_error_and_no_traceback(tmp_path, capsys):
    (tmp_path / "file").touch()
    told = refused(capsys, "--trace", short(tmp_path, 5), "--output", tmp_path / "file" / "out.json")
    assert "out.json cannot be written: " in told


def test_spreadsheets_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    (tmp_path / "trace.csv").write_bytes(b"\xef\xbb\xbf" + f"{HEAD}0,5\n60,0\n".encode())
    assert main(["simulate", "--trace", str(tmp_path / "trace.csv")]) == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--instances", "0"], "instances is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--rows", "100000"], "rows 100000"),
        (["--price", "nan"], "price is nan"),
        (["--objective-ms", "-1"], "objective-ms is -1"),
        (["--scrape-seconds", "inf"], "scrape_seconds is inf"),
        (["--scrape-seconds", "0.0001"], "scrape_seconds is 0.0001"),
        (["--metric-lag-seconds", "nan"], "metric_lag_seconds is nan"),
        (["--target-pending", "nan"], "target of triton_pending_requests is nan"),
        (["--target-pending", "0.0001"], "target of triton_pending_requests is 0.0001"),
        (["--output", "."], "is a folder"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(capsys, flags, named):
    assert named in refused(capsys, "--trace", "ramp", *flags)


def test_targets_that_are_no_numbers_are_misuse(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--trace", "ramp", "--target-pending", "few"])
    assert ended.value.code == 2
    assert "'few', expected numbers" in capsys.readouterr().err


def test_target_of_a_metric_that_the_manifest_lacks_is_refused(tmp_path, capsys):
    manifest = hpa(tmp_path, lambda spec: spec["metrics"].pop())
    told = refused(capsys, "--trace", short(tmp_path), "--manifest", manifest, "--target-pending", "3")
    assert "metric is triton_pending_requests" in told


def test_manifest_without_optional_fields_means_kubernetes_defaults(tmp_path, capsys):
    def bare(spec):
        del spec["behavior"], spec["minReplicas"]
        spec["metrics"][0]["pods"]["target"]["averageValue"] = "1500m"

    out = tmp_path / "out.json"
    manifest = hpa(tmp_path, bare)
    line = ["simulate", "--trace", short(tmp_path), "--manifest", manifest, "--output", str(out)]
    assert main(line) == 0
    autoscaler = json.loads(out.read_text())["autoscaler"]
    assert autoscaler["least"] == 1
    assert autoscaler["metrics"][0]["target"] == 1.5
    assert autoscaler["down"]["stabilization_seconds"] == 300


def test_scaled_object_with_a_query_that_is_not_simulated_is_refused(tmp_path, capsys):
    text = (KEDA_MANIFEST / "scaled-object.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("[1m]", "[5m]"))
    flags = ("--scaler", "keda", "--manifest", tmp_path / "mine.yaml")
    assert "mine.yaml has other queries than" in refused(capsys, "--trace", short(tmp_path), *flags)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.pop("maxReplicas"),
        lambda spec: spec["metrics"][0]["pods"]["target"].pop("averageValue"),
        lambda spec: spec["metrics"][0]["pods"]["target"].update(averageValue="many"),
        lambda spec: spec["behavior"]["scaleUp"]["policies"][0].pop("value"),
    ],
)
def test_manifest_that_is_no_autoscaler_is_refused_by_its_path(tmp_path, capsys, change):
    manifest = hpa(tmp_path, change)
    assert manifest in refused(capsys, "--trace", short(tmp_path), "--manifest", manifest)


def test_default_service_times_are_those_for_which_the_shipped_target_was_chosen(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["simulate", "--trace", short(tmp_path), "--output", str(out)]) == 0
    told = capsys.readouterr().out
    target = json.loads(out.read_text())["autoscaler"]["metrics"][0]["target"]
    usual = 1e6 * read_service_times(shipped_or_file("demo")).of_rows(1024)
    assert target / usual == pytest.approx(0.2, rel=0.15)
    assert f"and is {target:,.0f} us" in told
    assert json.loads(out.read_text())["inputs"]["service_times"] in told


def test_shipped_service_times_are_found_by_name_and_others_by_file(tmp_path, capsys):
    assert shipped_or_file("sample").name == "sample-cpu.json"
    assert shipped_or_file(str(tmp_path / "mine.json")) == tmp_path / "mine.json"
    assert "mine.json cannot be read" in refused(capsys, "--trace", "ramp", "--service-times", tmp_path / "mine.json")


def test_compare_prints_a_row_for_each_pair_and_keda_reads_its_own_manifest(tmp_path, capsys):
    line = ["simulate", "--trace", short(tmp_path), "--scaler", "keda", "--compare"]
    assert main([*line, "--target-queue-microseconds", "1000,5000", "--target-pending", "2,8"]) == 0
    rows = [each for each in capsys.readouterr().out.splitlines() if each.startswith("|")]
    assert [row.split("|")[1:3] for row in rows[2:]] == [[f" {a} ", f" {b} "] for a in (1000, 5000) for b in (2, 8)]

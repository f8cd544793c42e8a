"""Tests of the promotion journal: the live version at each time, and when it went live."""

import json
import random
import re
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from cli.__main__ import main
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import (
    Promotion,
    append_promotion,
    current,
    interrupted,
    live_at,
    newest_lease,
    read_entries,
)
from evergreen.runtime.errors import ContractError
from evergreen.runtime.terminal import local_time
from tests.support.errors import raises


def line(action, version, time, **other):
    return Promotion(
        time=time,
        action=action,
        version=version,
        model_id=f"model-{version}",
        model_uri="",
        release_uri="",
        trigger_id=None,
        **{"previous_version": None, "reason": "because", **other},
    )


def at(hour):
    return f"2026-03-01T{hour:02d}:00:00+00:00"


@pytest.fixture
def store(tmp_path):
    for entry in (
        line("intent", 1, at(1)),
        line("release", 1, at(1), who="run-1", sha256={"graph": "a" * 64}),
        line("intent", 2, at(2)),
        line("withdrawn", 2, at(2)),
        line("intent", 3, at(3)),
        line("release", 3, at(3), who="run-3", sha256={"graph": "c" * 64}),
        line("canary", 4, at(4), share=0.05),
        line("canary_ended", 4, at(5)),
        line("intent", 1, at(6)),
        line("rollback", 1, at(6), who="anna@desk", previous_version=3),
    ):
        append_promotion(tmp_path, entry)
    return tmp_path


def test_only_releases_rollbacks_and_promotions_change_who_is_live(store):
    assert [(e.action, e.version) for e in promotion_journal.read_journal(store)] == [
        ("release", 1),
        ("release", 3),
        ("rollback", 1),
    ]
    assert current(store).version == 1
    assert interrupted(store) is None
    append_promotion(store, line("intent", 5, at(7)))
    assert interrupted(store).version == 5
    assert current(store).version == 1


def test_line_rolled_back_right_after_it_was_written_never_was(tmp_path):
    for entry in (
        line("release", 1, at(1)),
        line("release", 2, at(2)),
        line("withdrawn", 2, at(2)),
    ):
        append_promotion(tmp_path, entry)
    assert current(tmp_path).version == 1
    assert live_at(tmp_path, datetime(2026, 3, 1, 2, 30, tzinfo=timezone.utc))[0].version == 1


def test_times_never_run_backwards(store):
    assert append_promotion(store, line("intent", 5, at(5))).time == at(6), (
        "times must not decrease if the clock is set back"
    )
    assert append_promotion(store, line("release", 5, at(7))).time == at(7)


def test_models_lists_every_entry_and_marks_what_is_live(store, capsys):
    assert main(["models", "list", "--store", str(store)]) == 0
    printed = capsys.readouterr()
    head, *lines, last = printed.out.splitlines()
    assert head.split() == ["version", "action", "time", "model", "by", "reason"]
    assert last == "version 1 is live (rollback from 3): because"
    assert "evergreen models show" in printed.err
    shown = [line for line in read_entries(store) if line.action != "intent"]
    assert [line.split()[line.startswith("*")] for line in lines] == [
        str(each.version) for each in shown
    ]
    assert [line.startswith("*") for line in lines] == [False] * (len(lines) - 1) + [True]
    assert re.search(r"run-1 +because", lines[0])
    assert re.search(r"anna@desk +because", lines[-1])
    assert "canary 5 %" in "\n".join(lines)
    assert main(["models", "list", "--store", store.as_uri(), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["live"] for entry in entries] == [False] * 9 + [True]
    assert entries[1]["sha256"] == {"graph": "a" * 64}


def test_table_on_narrow_terminal_names_rolled_back_version_and_whole_reason(
    store, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "the monitor: failed: evidence that the AUC is below 0.742: 537.2 (expected below 500)"
    append_promotion(store, line("release", 7, at(7), reason=reason))
    append_promotion(store, line("rollback", 3, at(8), previous_version=7, reason=reason))
    assert main(["models", "list", "--store", str(store)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("*        3  rollback from 7 ")
    assert last == f"version 3 is live (rollback from 7): {reason}"


@pytest.mark.parametrize(
    ("time", "version", "until"),
    [
        ("2026-03-01T01:00:00Z", 1, at(3)),
        ("2026-03-01 02:59:59", 1, at(3)),
        ("2026-03-01T04:00:00+01:00", 3, at(6)),
        ("2026-03-01T05:59:59.999999+00:00", 3, at(6)),
        ("2027-01-01", 1, None),
        ("now", 1, None),
    ],
)
def test_live_at_prints_what_was_live_since_when_and_until_when(
    store, capsys, time, version, until
):
    assert main(["models", "live-at", time, "--store", str(store), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["version"], printed["until"]) == (version, until)
    assert main(["models", "live-at", time, "--store", str(store)]) == 0
    text = capsys.readouterr().out
    assert f"version {version}, model model-{version}" in text
    assert ("still live" if until is None else f"until {local_time(until)} (") in text


def test_live_at_time_before_everything_or_at_no_time_is_error(store, capsys):
    assert main(["models", "live-at", "2026-03-01T00:59:59Z", "--store", str(store)]) == 2
    assert "error: no version was live at 2026-03-01T00:59:59+00:00" in capsys.readouterr().err
    assert main(["models", "live-at", "yesterday", "--store", str(store)]) == 2
    assert "expected ISO 8601" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"time": "yesterday"},
        {"version": "3"},
        {"version": True},
        {"action": "celebrated"},
        {"mood": "good"},
        {"reason": ...},
    ],
    ids=str,
)
def test_corrupt_line_is_named(store, change, capsys):
    document = {**json.loads((store / "journal.jsonl").read_text().splitlines()[-1]), **change}
    document = {
        name: value for name, value in document.items() if value is not ... and name != "crc32"
    }
    with open(store / "journal.jsonl", "a") as journal:
        journal.write(json.dumps(document) + "\n")
    with raises(ContractError, "journal.jsonl", "line 11"):
        append_promotion(store, line("intent", 5, at(7)))
    assert main(["models", "list", "--store", str(store)]) == 2
    assert "line 11 is " in capsys.readouterr().err


@pytest.mark.parametrize(
    "ending", [b"", b'{"time": "2026-', b"\xff\x00", b'{"reason": "one line\r two lines']
)
def test_torn_last_line_does_not_count_and_is_cut_off(store, ending):
    with open(store / "journal.jsonl", "ab") as journal:
        journal.write(ending)
    assert current(store).version == 1
    append_promotion(store, line("intent", 5, at(7)))
    assert interrupted(store).version == 5


def test_journal_that_is_no_file_is_named(tmp_path):
    (tmp_path / "journal.jsonl").mkdir()
    with raises(ContractError, "journal.jsonl", "Is a directory"):
        current(tmp_path)


def test_every_flipped_bit_of_journal_is_named_with_its_line(store):
    path = store / "journal.jsonl"
    content = path.read_bytes()
    starts = [0, *(at + 1 for at, byte in enumerate(content) if byte == 10)]
    newlines = [bit for at in starts[1:] for bit in range(8 * (at - 1), 8 * at)]
    others = random.Random(1).sample(range(8 * len(content)), 500)
    for bit in [*newlines, *others]:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        number = sum(start <= bit // 8 for start in starts)
        with raises(ContractError, "journal.jsonl", f"line {number}", "promotion"):
            promotion_journal.read_entries(store)
    path.write_bytes(content)
    assert current(store).version == 1


def test_line_that_person_wrote_needs_no_checksum(store):
    *lines, last = (store / "journal.jsonl").read_text().splitlines()
    document = json.loads(last)
    del document["crc32"]
    (store / "journal.jsonl").write_text(
        "\n".join([*lines, json.dumps({**document, "who": "bob"})]) + "\n"
    )
    assert current(store).who == "bob"
    document = json.loads(last)
    (store / "journal.jsonl").write_text(
        "\n".join([*lines, json.dumps({**document, "who": "bob"})]) + "\n"
    )
    with pytest.raises(
        ContractError,
        match=r"line 10 .* its crc32 is \w{8}, expected \w{8}: .* removing its key crc32",
    ):
        current(store)


def test_line_of_older_lease_is_ignored_after_line_of_newer_one(tmp_path):
    """A holder that lost its lock between its last check and the append changes nothing."""
    lines = [("release", 1, 1), ("intent", 2, 1), ("intent", 2, 2), ("withdrawn", 2, 2)]
    for action, version, lease in (*lines, ("release", 2, 1), ("baked", 1, None)):
        append_promotion(tmp_path, replace(line(action, version, at(7)), lease=lease))
    found = [(each.action, each.version, each.lease) for each in read_entries(tmp_path)]
    assert found == [*lines, ("baked", 1, None)]
    assert current(tmp_path).version == 1
    assert newest_lease(tmp_path) == 2


def test_journal_without_leases_is_read_as_it_is(tmp_path):
    assert newest_lease(tmp_path) == 0
    for action, version in (("release", 1), ("intent", 2), ("release", 2)):
        append_promotion(tmp_path, line(action, version, at(7)))
    assert (len(read_entries(tmp_path)), newest_lease(tmp_path)) == (3, 0)

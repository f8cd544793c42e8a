"""Tests of docs/design/performance.md: the documents that it links, and the computed slopes."""

import json

import pytest

from benchmarks import __main__ as running
from benchmarks import page
from benchmarks.growth import slopes, store_curves
from benchmarks.spread import Figure, named, spread


def document(**other):
    figure = Figure(
        "rate",
        spread([1.0, 2.0, 4.0]),
        peer="PyTorch",
        target=3,
        is_least=True,
        limit="10 by products",
    )
    usual = {
        "benchmark": "training",
        "command": "run",
        "date": "2026-11-27T10:00",
        "commit": "0123456789",
    }
    where = {
        "machine": {"processor": "a processor", "cores": 2, "cores_used": 2},
        "limits": {"fsync_ms": 0.5},
    }
    rest = {"is_quick": False, "figures": [figure], "seconds": 61.0, "other_work_share": 0.01}
    return named({**usual, **where, **rest, **other})


@pytest.mark.parametrize(
    ("kept", "is_quick", "expected"),
    [
        ({}, False, True),
        ({"is_quick": True}, True, True),
        ({"is_quick": True}, False, False),
        ({"commit": "9876543210"}, False, False),
        ({"commit": "0123456789 with changes"}, False, False),
    ],
)
def test_only_complete_measurements_of_this_commit_are_not_repeated(
    tmp_path, monkeypatch, kept, is_quick, expected
):
    monkeypatch.setattr(running, "MEASURED", tmp_path)
    (tmp_path / "training.json").write_text(json.dumps(document(**kept)))
    assert running.is_done("training", "0123456789", is_quick=is_quick) == expected
    assert not running.is_done("training", "0123456789 with changes", is_quick=is_quick)


def test_figure_is_shown_with_spread_peer_target_limit_and_doubts():
    text = page.section(document(other_work_share=0.4))
    assert "| rate | PyTorch | 2 (1 to 4) times | at least 3: **missed** | 10 by products |" in text
    assert (
        "`run` measured these figures on 2026-11-27 at commit 0123456789, and took 61 s. The "
        "benchmark used 2 of 2 cores (a processor). A write with fsync took 0.5 ms." in text
    )
    assert "other work took 40%" in text
    assert "To be measured again" not in page.section(document())


def test_cost_that_grows_faster_than_work_misses_its_target():
    store = {"a day": {"files": 1, "s, journal": 0.1}, "30 days": {"files": 1, "s, journal": 3.6}}
    (figure,) = slopes("store", store_curves({"store": store}))
    assert (figure.name, figure.is_met) == ("store: journal, slope", False)

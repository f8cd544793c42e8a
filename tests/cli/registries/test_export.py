"""Tests of the export to a registry, from hand-written journals and by the command."""

import shutil

import pytest

from cli.registries import __main__ as command
from cli.registries.exported import read_exported
from evergreen.registry.model_cards import ModelCard, card_path
from evergreen.registry.models import GRAPH_FILE, graph_folder
from evergreen.registry.promotion_journal import Promotion, append_promotion
from evergreen.runtime.errors import TemporaryError
from testing.releases import keep_model, passing_verdict, release
from testing.validation_models import make_dataset


def write(store, *lines):
    """Write a journal from pairs of action and version.

    Version N has the model mN, whose graph exists.
    """
    for name in ("m1", "m2"):
        (graph := graph_folder(store, int(name[1]))).mkdir(parents=True)
        (graph / GRAPH_FILE).write_bytes(b"")
        release(store, int(name[1]), name)
        given = {
            "verdict": passing_verdict(name, store / "scores", num_rows=1),
            "raw": make_dataset(store, 1, digest="d"),
        }
        empty = {
            "gate": {},
            "slices": [],
            "calibration": [],
            "champion_calibration": [],
            "validation": None,
        }
        model = keep_model(store, name, created_at=f"2026-01-0{name[1]}")
        ModelCard(run="r", model=model, **given, **empty).write(card_path(store, name))
    line = dict.fromkeys(("previous_version", "trigger_id")) | dict.fromkeys(
        ("model_uri", "release_uri", "reason"), ""
    )
    for action, number in lines:
        fields = {
            "action": action,
            "version": number,
            "model_id": f"m{number}",
            "time": "2026-01-03",
        }
        append_promotion(store, Promotion(**line, **fields))


@pytest.mark.parametrize(
    ("lines", "versions", "aliases"),
    [
        ([], [], (None, None)),
        ([("release", 1), ("intent", 2), ("canary", 2)], [1, 2], (1, 2)),
        ([("release", 1), ("canary", 2), ("canary_ended", 2)], [1, 2], (1, None)),
        ([("release", 1), ("canary", 2), ("promote", 2), ("baked", 2)], [1, 2], (2, None)),
        ([("release", 1), ("release", 2), ("rollback", 1)], [1, 2], (1, None)),
        ([("release", 1), ("intent", 2), ("withdrawn", 2)], [1], (1, None)),
    ],
    ids=["evaluated alone", "canary", "canary ended", "promoted", "rolled back", "never answered"],
)
def test_aliases_and_versions_match_journal(lines, versions, aliases, tmp_path):
    write(tmp_path, *lines)
    found = read_exported(tmp_path)
    assert [card.model_id for card in found.cards] == ["m1", "m2"]
    assert [each.version for each, _ in found.versions] == versions
    assert (found.aliases["champion"], found.aliases["candidate"]) == aliases
    # `evergreen admin collect` removes graphs of old versions.
    shutil.rmtree(graph_folder(tmp_path, 1))
    assert [each.version for each, _ in read_exported(tmp_path).versions] == versions[1:]


def test_absent_registry_does_not_stop_others(tmp_path, monkeypatch, caplog):
    calls, away = [], [TemporaryError("MLflow: no answer"), OSError("no route")]

    def failing(_):
        if away:
            raise away.pop(0)
        calls.append("first")

    monkeypatch.setattr(
        command, "_exporters", lambda *_: [failing, lambda exported: calls.append(exported.name)]
    )
    flags = ["--store", str(tmp_path), "--mlflow", "http://any"]
    assert command.main(flags) == 0, "no model was evaluated yet"
    write(tmp_path, ("release", 1))
    assert [command.main(flags) for _ in range(3)] == [3, 3, 0]
    assert calls == ["click_model", "click_model", "first", "click_model"]
    assert [each.message for each in caplog.records] == ["MLflow: no answer", "no route"]
    assert command.main(flags[:2]) == 2

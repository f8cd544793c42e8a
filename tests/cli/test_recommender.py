"""Tests of the messages of `evergreen init`."""

import pytest

from cli import recommender


@pytest.mark.parametrize(("label", "has_gaps"), [("click", False), ("geklickt", True)])
def test_init_mentions_gaps_only_if_draft_has_some(label, has_gaps, tmp_path, capsys):
    words = ("nein", "ja") if has_gaps else ("0", "1")
    rows = "\n".join(f"{words[n % 3 == 0]},{n % 7}" for n in range(90))
    (tmp_path / "shop.csv").write_text(f"{label},item\n{rows}\n")
    line = ["init", str(tmp_path / "shop.csv"), f"--output={tmp_path}/shop.yaml"]
    assert recommender.main(line) == 0
    assert ("fill in what is marked FILL IN" in capsys.readouterr().out) == has_gaps

"""Which folder and which data the demo takes: one demo a folder, nothing of anybody else's, both labels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from components.runtime.errors import ContractError
from pipelines.local.demo import start_clean
from pipelines.local.plan import DemoSettings, plan_for_data


def test_a_second_demo_in_the_folder_is_refused_and_the_firsts_files_stay(tmp_path):
    folder = tmp_path / "a demo"
    with start_clean(folder):
        (folder / "lake").mkdir()
        with (
            pytest.raises(ContractError, match=r"another demo is running in .*a demo, expected its end or"),
            start_clean(folder),
        ):
            pass
        assert (folder / "lake").is_dir()
    with start_clean(folder):
        assert [path.name for path in folder.iterdir()] == [".evergreen-demo"]


def test_a_killed_demo_leaves_the_folder_to_the_next(tmp_path):
    folder = tmp_path / "a demo"
    program = (
        "import os, pathlib, sys; from pipelines.local.demo import start_clean\n"
        "with start_clean(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(folder)]).returncode == -9
    with start_clean(folder):
        pass


def test_a_folder_of_somebody_elses_is_refused_and_kept(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ContractError, match="no demo wrote it"), start_clean(tmp_path):
        pass
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(("clicks", "said"), [(0, "0 clicks in 4,000 rows"), (4000, "4,000 clicks in 4,000 rows")])
def test_labels_of_one_class_are_refused_before_anything_is_trained(tmp_path, clicks, said):
    made = {"replay_rows": 1600, "lake_rows": 2400, "clicks": clicks}
    with pytest.raises(ContractError, match=said):
        plan_for_data(DemoSettings(folder=tmp_path), **json.loads(json.dumps(made)))

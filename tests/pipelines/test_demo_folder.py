"""Which folder and which data the demo takes: one demo a folder, nothing of anybody else's, both labels."""

import subprocess
import sys

import pytest

from components.contracts.criteo import CRITEO_RECOMMENDER
from components.runtime.errors import ContractError
from pipelines.local.demo import open_demo, start_clean
from pipelines.local.plan import DemoSettings, describe_data, plan_for_data


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


def test_only_a_finished_demo_can_be_opened(tmp_path):
    with pytest.raises(ContractError, match="holds no finished demo"):
        open_demo(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("clicks", "said"), [(0, "0 clicks in 4,000 rows"), (4000, "4,000 clicks in 4,000 rows")])
def test_labels_of_one_class_are_refused_before_anything_is_trained(tmp_path, clicks, said):
    settings = DemoSettings(folder=tmp_path)
    with pytest.raises(ContractError, match=said):
        plan_for_data(settings, CRITEO_RECOMMENDER, replay_rows=1600, lake_rows=2400, clicks=clicks)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "train.csv",
            ",".join(["id", "label", *map(str.lower, CRITEO_RECOMMENDER.features.names)]) + "\n" + "1," * 40 + "1\n",
            "have",
        ),
        ("day_0.tsv", "0\t1\t" + "5\t" * 12 + "68fd1e64\t" * 25 + "68fd1e64\n", "are taken for Criteo's: "),
        ("readme.md", "No rows.", "are taken for Criteo's: "),
    ],
)
def test_criteos_rows_are_known_and_not_drafted(tmp_path, name, text, said):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(text)
    found, (sentence,) = describe_data(tmp_path / "data", tmp_path / "draft.yaml")
    assert found == CRITEO_RECOMMENDER
    assert sentence.startswith(f"the rows {said}")
    assert not (tmp_path / "draft.yaml").exists()


def test_rows_that_no_draft_can_describe_are_refused_with_what_is_missing(tmp_path):
    (tmp_path / "shop.csv").write_text("clicks,price\n" + "3,0.5\n0,1.5\n" * 50)
    with pytest.raises(ContractError, match="no column that looks like label, expected .*recommender init"):
        describe_data(tmp_path / "shop.csv", tmp_path / "draft.yaml")

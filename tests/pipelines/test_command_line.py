"""The `evergreen` command line: what it accepts is a promise, and misuse has an exit code and one clear line."""

from pipelines.__main__ import ROOMS, build_parser, main


def test_commands_are_the_promised_ones():
    actions = [action for action in build_parser()._actions if action.dest == "command"]
    assert set(actions[0].choices) == {"demo", "compile", "run", "submit", "models", "model", *ROOMS}
    assert set(ROOMS) == {"monitor", "uploader", "simulate", "drift", "replay", "score", "ingest", "rollback"}


def test_parameter_without_value_is_refused_by_name(tmp_path, capsys):
    code = main(["run", "--package", "p.yaml", "--folder", str(tmp_path), "-p", "min_auc"])
    assert code == 2
    assert "parameter 'min_auc' has no '=', expected NAME=VALUE" in capsys.readouterr().err


def test_demo_refuses_a_folder_that_it_did_not_write(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["demo", "--folder", str(tmp_path)]) == 2
    assert "is not empty and no demo wrote it" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()


def test_models_of_an_empty_store_are_none(tmp_path, capsys):
    assert main(["models", "--store", str(tmp_path)]) == 0
    assert "nothing was ever live" in capsys.readouterr().out


def test_compiling_for_hugectr_chooses_its_image_and_gpus(tmp_path):
    package = tmp_path / "retraining.yaml"
    flags = ["--backend", "hugectr", "--training-gpus", "2", "--registry", "r.dev/p", "--tag", "3f2a9c1"]
    assert main(["compile", "--output", str(package), *flags]) == 0
    text = package.read_text()
    assert "r.dev/p/evergreen-training-hugectr:3f2a9c1" in text
    assert "r.dev/p/evergreen-training:3f2a9c1" not in text
    assert "r.dev/p/evergreen-evaluation:3f2a9c1" in text

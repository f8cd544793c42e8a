"""Tests of another click log, from CSV to a published model, without code."""

import io
import pickle
import pickletools
import re
import shlex
import struct
import zipfile

import numpy as np
import pytest

from evergreen.contracts.manifests import Model
from testing.paths import REPOSITORY

INDICATED = "{indicator: true, transform: [clip(0..90), minmax]}"


def is_pickle(content: bytes) -> bool:
    """Return whether the content holds a pickle of any protocol, alone or in an archive."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return any(is_pickle(archive.read(name)) for name in archive.namelist())
    if content.startswith(b"\x93NUMPY"):
        return b"'|O'" in content[:1000]
    if content[:1] == b"\x80" and content[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return True
    try:
        *_, (stop, _, position) = pickletools.genops(content)
    except (ValueError, struct.error, IndexError):
        return False
    return stop.name == "STOP" and 0 < position == len(content) - 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_differs_from_what_pipeline_writes(protocol):
    words, numbers, objects = io.BytesIO(), io.BytesIO(), np.array([{}, print])
    np.savez(words, a=np.array(["a word"]), b=np.ones(3))
    np.savez_compressed(numbers, objects=objects)
    assert not is_pickle(words.getvalue())
    assert is_pickle(numbers.getvalue())
    for content in ({"a": [1, None]}, print, objects):
        assert is_pickle(pickle.dumps(content, protocol))
    assert not any(map(is_pickle, (b"", b".", b'{"a": 1}\n', b"PAR1 and more", bytes(range(256)))))


def commands_of_readme(folder):
    """Return the commands of the README's section about a user's own data.

    The commands read and write files in `folder`.
    """
    section = (
        (REPOSITORY / "README.md")
        .read_text()
        .partition("## Use your own data\n")[2]
        .partition("\n## ")[0]
    )
    for line in section.splitlines():
        if line.startswith(("evergreen ", "mkdir ")):
            yield [
                str(folder / w) if re.fullmatch(r"clicks\.csv|build/[./\w]*", w) else w
                for w in shlex.split(line)
            ]


def test_page_of_own_data_shows_readme_commands():
    block = re.search(r"```sh\n(export PATH.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    assert block[0] in (REPOSITORY / "docs" / "get-started" / "your-data.md").read_text()


def test_readme_commands_train_model_on_csv_of_other_columns(write_clicks, tmp_path, run_to_end):
    write_clicks(tmp_path / "clicks.csv", 6000)
    folder, draft = tmp_path / "build/shop", tmp_path / "build/shop.yaml"
    store, commands = folder / "store", list(commands_of_readme(tmp_path))
    assert [words[1] for words in commands] == [
        "init",
        "data",
        "-p",
        "data",
        "data",
        "compile",
        "run",
    ]
    for number, (program, *words) in enumerate(commands):
        if program == "mkdir":
            store.mkdir(parents=True)
            continue
        ended = run_to_end(words, output=tmp_path / f"{number}.log", seconds=400)
        assert ended.code == 0, ended.output
        if words[0] == "init":
            draft.write_text(draft.read_text().replace("price: {}", f"price: {INDICATED}"))
    left_files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"store", "work", "repository"} <= {
        path.relative_to(folder).parts[0] for path in left_files
    }
    assert [path for path in left_files if is_pickle(path.read_bytes())] == []
    assert "version 1 is published; AUC 0." in ended.output
    (manifest,) = (store / "models").glob(f"*/{Model.MANIFEST}")
    model = Model.read(manifest)
    assert model.recommender.name == "clicks"
    assert model.recommender.features.numeric == ("price", "age")
    assert model.recommender.features.dense_inputs == ("price", "age", "price/missing")
    assert model.recommender.features.categorical == ("item", "shop")
    assert model.recommender.features.type_of("item") == "string"
    assert model.recommender.features.options_of("age").transform == ("standardize",)
    assert model.recommender.settings == {"gate": {"min_auc": 0.55}}

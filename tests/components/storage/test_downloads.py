"""Listed objects come as files in their order, and go again, whatever happens."""

from __future__ import annotations

import pytest

from components.runtime.errors import ContractError
from components.storage.downloads import fetched_files
from components.storage.locations import read_object
from components.storage.objects import Changed


@pytest.mark.parametrize("batch_bytes", [1, 5, 10**6])
def test_every_object_comes_once_in_its_order_and_nothing_stays(open_again, tmp_path, batch_bytes):
    contents = {f"day={n}/a file": bytes([n]) * (1 + n % 4) for n in range(7)}
    for name, content in contents.items():
        open_again().write(name, content)
    listed, at_once = open_again().list()[::-1], []
    (tmp_path / "scratch").mkdir()
    found, before = {}, tmp_path / "none"
    for info, path in fetched_files(open_again(), listed, tmp_path / "scratch", batch_bytes=batch_bytes):
        at_once.append(sum(p.stat().st_size for p in path.parent.iterdir()))
        assert not before.exists(), "one file at a time is the caller's"
        found[info.name], before = path.read_bytes(), path
    assert list(found.items()) == list(contents.items())[::-1]
    assert max(at_once) <= max(batch_bytes, 4)
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("kind", ["replaced", "reader fails"])
def test_nothing_stays_where_it_ends_early(open_again, tmp_path, kind):
    objects = open_again()
    for name in ("a", "b"):
        objects.write(name, b"before")
    files = fetched_files(objects, objects.list(), tmp_path, batch_bytes=1)
    next(files)
    if kind == "replaced":
        open_again().write("b", b"after")
        with pytest.raises(Changed, match="b is "):
            next(files)
    else:
        with pytest.raises(KeyError):
            files.throw(KeyError())
    assert not list(tmp_path.glob(".fetched-*"))


def test_an_object_is_read_by_its_uri(open_bucket):
    open_bucket("gs://models").write("a b/c.json", b"{}")
    assert read_object("gs://models/a b/c.json") == b"{}"
    for uri, message in (("gs://models/a b", "a b is absent"), ("/a/file", "expected gs://bucket/name")):
        with pytest.raises(ContractError, match=message):
            read_object(uri)

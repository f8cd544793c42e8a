"""Conformance suite for object storage in folders and in buckets."""

import hashlib
import random
import threading
import time

import pytest

from evergreen.runtime.errors import ContractError
from evergreen.storage.objects import ABSENT, Changed, Differs, ObjectInfo, download
from testing.processes import at_once
from tests.support.errors import raises

BIG = random.Random(1).randbytes(9_000_003)


def refused(call):
    try:
        call()
    except Changed:
        return True
    return False


def test_absent_object_is_none_and_cannot_be_downloaded(open_again, tmp_path):
    objects = open_again()
    assert objects.read("nothing") is None
    with raises(ContractError, "nothing", "absent"):
        download(objects, "nothing", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert objects.list() == []
    objects.delete("nothing")
    objects.delete("nothing", if_generation=7)


def test_name_of_folder_is_no_object(open_again):
    objects = open_again()
    objects.write("a/b/c", b"1")
    assert objects.read("a/b") is None
    objects.delete("a/b")
    assert objects.read("a/b/c").content == b"1"


def test_empty_object_exists(open_again, tmp_path):
    objects = open_again()
    generation = objects.write("empty", b"")
    assert objects.read("empty") == (b"", generation)
    download(objects, "empty", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b""
    assert [each[:3] for each in objects.list()] == [("empty", 0, generation)]
    assert abs(objects.list()[0].written_at - time.time()) < 60


def test_every_write_changes_generation_even_of_same_bytes(open_again):
    objects = open_again()
    generations = [objects.write("config", b"same") for _ in range(20)]
    assert len(set(generations)) == 20


def test_write_that_expects_absence_happens_once(open_again):
    objects = open_again()
    first = objects.write("lease", b"first", if_generation=ABSENT)
    with raises(Changed, "lease", "another writer"):
        open_again().write("lease", b"second", if_generation=ABSENT)
    assert objects.read("lease") == (b"first", first)


def test_write_over_seen_generation_is_refused_once_it_changed(open_again):
    mine, other = open_again(), open_again()
    seen = mine.write("config", b"1")
    latest = other.write("config", b"2", if_generation=seen)
    with pytest.raises(Changed):
        mine.write("config", b"3", if_generation=seen)
    assert mine.read("config") == (b"2", latest)
    mine.write("config", b"3", if_generation=latest)
    assert other.read("config").content == b"3"


def test_write_over_removed_object_is_refused(open_again):
    objects = open_again()
    seen = objects.write("config", b"1")
    objects.delete("config")
    with pytest.raises(Changed):
        objects.write("config", b"2", if_generation=seen)
    assert objects.read("config") is None


def test_removal_of_seen_generation_is_refused_once_it_changed(open_again):
    objects = open_again()
    seen = objects.write("config", b"1")
    objects.write("config", b"2")
    with pytest.raises(Changed):
        objects.delete("config", if_generation=seen)
    assert objects.read("config").content == b"2"
    objects.delete("config", if_generation=objects.read("config").generation)
    assert objects.read("config") is None


@pytest.mark.parametrize("is_new", [True, False], ids=["create", "replace"])
def test_one_of_many_writers_that_saw_same_state_wins(open_again, is_new):
    num_writers, handle = 4, open_again()
    for turn in range(5):
        name = f"turn {turn}"
        seen = ABSENT if is_new else handle.write(name, b"before")
        writers, won = [open_again() for _ in range(num_writers)], []

        def write(me, name=name, seen=seen, writers=writers, won=won):
            if not refused(lambda: writers[me].write(name, b"writer %d" % me, if_generation=seen)):
                won.append(me)

        at_once(num_writers, write)
        assert len(won) == 1
        assert handle.read(name).content == b"writer %d" % won[0]


def test_readers_see_complete_object_before_write_or_after_it(open_again):
    contents = {bytes([65 + at]) * (100_000 + 31 * at) for at in range(2)}
    hashes = {hashlib.sha256(content).hexdigest() for content in contents}
    first, second = contents
    open_again().write("config", first)
    seen, problems, done = {}, [], threading.Event()

    def read():
        objects, count = open_again(), 0
        while not (done.is_set() and count):
            stored = objects.read("config")
            found = hashlib.sha256(stored.content).hexdigest()
            if found not in hashes or seen.setdefault(stored.generation, found) != found:
                problems.append((stored.generation, found))
            count += 1

    readers = [threading.Thread(target=read) for _ in range(2)]
    [reader.start() for reader in readers]
    writer = open_again()
    for turn in range(20):
        writer.write("config", first if turn % 2 else second)
    done.set()
    [reader.join(60) for reader in readers]
    assert problems == []
    assert seen


def test_big_file_arrives_byte_for_byte(open_again, tmp_path):
    (tmp_path / "model.data").write_bytes(BIG)
    objects = open_again()
    generation = objects.write(
        "click_model/1/model.data", tmp_path / "model.data", if_generation=ABSENT
    )
    assert [each[:3] for each in objects.list()] == [
        ("click_model/1/model.data", len(BIG), generation)
    ]
    (tmp_path / "far").mkdir()
    download(objects, "click_model/1/model.data", tmp_path / "far" / "copy")
    assert (tmp_path / "far" / "copy").read_bytes() == BIG
    with pytest.raises(Changed):
        objects.write("click_model/1/model.data", tmp_path / "model.data", if_generation=ABSENT)


@pytest.mark.parametrize("content", [b"", b"rows", BIG], ids=["empty", "small", "in parts"])
def test_uploaded_file_is_stored_byte_for_byte_and_second_upload_succeeds(
    open_again, tmp_path, content
):
    (tmp_path / "part").write_bytes(content)
    assert open_again().upload("day=2026-01-01/part", tmp_path / "part")
    (stored,) = open_again().list()
    assert (stored.name, stored.size) == ("day=2026-01-01/part", len(content))
    assert not open_again().upload("day=2026-01-01/part", tmp_path / "part")
    assert open_again().list() == [stored], "the second upload must not change the object"
    assert open_again().read("day=2026-01-01/part").content == content


@pytest.mark.parametrize("other", [b"rowz", b"row", b"rows and more", b""])
def test_upload_over_other_bytes_is_refused_and_leaves_them(open_again, tmp_path, other):
    (tmp_path / "part").write_bytes(b"rows")
    generation = open_again().write("part", other)
    with raises(Differs, "part", "other bytes"):
        open_again().upload("part", tmp_path / "part")
    assert open_again().read("part") == (other, generation)


def test_one_of_many_uploaders_writes_file_and_all_succeed(open_again, tmp_path):
    (tmp_path / "part").write_bytes(b"rows" * 10_000)
    for turn in range(5):
        handles, answers = [open_again() for _ in range(4)], []
        at_once(
            4,
            lambda me, at=handles, to=answers, n=f"turn {turn}": to.append(
                at[me].upload(n, tmp_path / "part")
            ),
        )
        assert sorted(answers) == [False, False, False, True]
        assert open_again().read(f"turn {turn}").content == b"rows" * 10_000


def test_listing_is_by_prefix_and_in_name_order(open_again):
    objects = open_again()
    names = [
        "b",
        "click_model/10/x",
        "click_model/2/x",
        "click_model/config.pbtxt",
        "click_model_canary/2/x",
        "z/z/z",
    ]
    for name in reversed(names):
        objects.write(name, name.encode())
    assert [each.name for each in objects.list()] == names
    assert [each.name for each in objects.list("click_model/")] == names[1:4]
    assert [each.name for each in objects.list("click_model")] == names[1:5]
    assert [each.name for each in objects.list("click_model/1")] == names[1:2]
    assert objects.list("click_model/3/") == objects.list("nothing/at/all") == []
    assert {each.size for each in objects.list("z")} == {5}


def test_copy_has_content_and_is_independent_of_original(open_again):
    objects = open_again()
    objects.write("a/1", b"one")
    generation = objects.copy("a/1", "b/1")
    assert objects.read("b/1") == (b"one", generation)
    objects.write("a/1", b"two")
    assert objects.read("b/1").content == b"one"
    objects.delete("a/1")
    assert objects.read("b/1").content == b"one"


def test_copy_of_absent_or_onto_existing_object_is_refused(open_again):
    objects = open_again()
    objects.write("a", b"a")
    objects.write("b", b"b")
    with pytest.raises(Changed):
        objects.copy("a", "b")
    with raises(ContractError, "nothing", "absent"):
        objects.copy("nothing", "c")
    assert [(each.name, objects.read(each.name).content) for each in objects.list()] == [
        ("a", b"a"),
        ("b", b"b"),
    ]


def test_move_takes_every_object_and_leaves_none_behind(open_again):
    objects = open_again()
    for name in ("candidate/3/model.onnx", "candidate/3/sub/deep", "candidate/30/model.onnx"):
        objects.write(name, name.encode())
    objects.move("candidate/3", "click_model/3")
    assert [each.name for each in objects.list()] == [
        "candidate/30/model.onnx",
        "click_model/3/model.onnx",
        "click_model/3/sub/deep",
    ]
    assert objects.read("click_model/3/sub/deep").content == b"candidate/3/sub/deep"


def test_move_of_absent_or_onto_existing_objects_is_refused(open_again):
    objects = open_again()
    objects.write("a/x", b"a")
    objects.write("b/y", b"b")
    with raises(ContractError, "b", "exists already"):
        objects.move("a", "b")
    with raises(ContractError, "nothing", "does not exist"):
        objects.move("nothing", "c")
    assert [each.name for each in objects.list()] == ["a/x", "b/y"]


def test_emptied_folder_can_be_moved_to(open_again):
    objects = open_again()
    objects.write("a/x", b"new")
    objects.write("b/x", b"old")
    objects.delete("b/x")
    objects.move("a", "b")
    assert objects.read("b/x").content == b"new"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../up",
        "a//b",
        "a/",
        "a/.b/c",
        "a\nb",
        "x" * 201,
        "/".join(["x" * 100] * 10),
        "\udcff",
    ],
)
def test_names_outside_of_root_or_invalid_names_are_refused_everywhere(open_again, tmp_path, name):
    objects = open_again()
    objects.write("a", b"a")
    for call in (
        lambda: objects.read(name),
        lambda: objects.write(name, b"x"),
        lambda: objects.delete(name),
        lambda: objects.copy("a", name),
        lambda: objects.copy(name, "b"),
        lambda: objects.move(name, "b"),
        lambda: objects.move("a", name),
        lambda: objects.local(name),
        lambda: objects.upload(name, tmp_path / "copy"),
        lambda: objects.fetch(ObjectInfo(name, 1, 1, ""), tmp_path / "copy"),
    ):
        with raises(ContractError, "object", "expected"):
            call()
    assert [each.name for each in objects.list()] == ["a"]


@pytest.mark.parametrize("name", ["é ü 漢字 🙂", "a#b?c%2Fd+e&f=g", "'\"`$(x)*", "x" * 200])
def test_unusual_names_are_valid(open_again, tmp_path, name):
    objects = open_again()
    generation = objects.write(f"{name}/{name}", b"odd")
    assert objects.read(f"{name}/{name}") == (b"odd", generation)
    assert [each.name for each in objects.list(f"{name}/")] == [f"{name}/{name}"]
    objects.copy(f"{name}/{name}", "plain/1")
    objects.move(name, "moved")
    download(objects, f"moved/{name}", tmp_path / "copy")
    objects.delete(f"moved/{name}")
    assert [each.name for each in objects.list()] == ["plain/1"]


@pytest.mark.parametrize("content", [b"", b"rows", BIG], ids=["empty", "small", "big"])
def test_listed_object_is_fetched_byte_for_byte(open_again, tmp_path, content):
    objects = open_again()
    objects.write("day=2026-01-01/part", content)
    (listed,) = objects.list()
    objects.fetch(listed, tmp_path / "far" / "part")
    assert (tmp_path / "far" / "part").read_bytes() == content


def test_object_that_was_replaced_or_removed_after_listing_is_not_fetched(open_again, tmp_path):
    objects = open_again()
    objects.write("replaced", b"before")
    objects.write("removed", b"before")
    seen = objects.list()
    objects.write("replaced", b"behind")
    objects.delete("removed")
    for each in seen:
        with pytest.raises(Changed, match=f"{each.name} is (absent|at generation|no longer at)"):
            objects.fetch(each, tmp_path / each.name)
        assert not (tmp_path / each.name).exists() or (tmp_path / each.name).read_bytes() == b""

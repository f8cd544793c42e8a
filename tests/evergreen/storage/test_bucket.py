"""Tests of a bucket over a failing network: retries, errors and lost answers."""

import random
import socket

import pytest

from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.storage.objects import ABSENT, Changed, download
from evergreen.storage.uris import open_objects
from tests.support.errors import raises
from tests.support.full_disk import files_of_at_most

BIG = random.Random(2).randbytes(9_000_003)
"""Content that is too large for one upload request. `open_bucket` uploads `BIG` in five parts."""
NUM_PARTS = 5


def is_any(request):
    return True


def is_download(request):
    return request.is_download


def is_upload(request):
    return request.is_upload


def is_chunk(request):
    return request.method == "PUT"


def is_nth_part(n, seen):
    """Return a predicate that selects the request for part `n` of a large object.

    The predicate adds the request of each part to `seen`.
    """
    return lambda request: request.method == "PUT" and (seen.append(request) or len(seen) == n)


def as_it_passes(cloud_storage, number, do):
    """Call `do` just before the `number`th request from now.

    Returns:
        A list to which each request is appended, up to the request of this number.
    """
    passed = []

    def before(request):
        passed.append(request)
        if len(passed) == number:
            cloud_storage.before = lambda request: None
            do()

    cloud_storage.before = before
    return passed


def is_rewrite(request):
    return "/rewriteTo/" in request.path


@pytest.mark.parametrize("do", ["status", "cut"])
def test_every_call_survives_temporary_errors(cloud_storage, open_bucket, tmp_path, do):
    objects = open_bucket()
    for call in (
        lambda: objects.write("a/small", b"1", if_generation=ABSENT),
        lambda: objects.write("a/big", BIG, if_generation=ABSENT),
        lambda: objects.read("a/small"),
        lambda: download(objects, "a/big", tmp_path / "copy"),
        lambda: objects.copy("a/big", "b"),
        lambda: objects.move("a", "c"),
        lambda: objects.list(),
        lambda: objects.delete("b"),
    ):
        faults = [cloud_storage.fail(is_any, do, status=status) for status in (503, 429)]
        call()
        assert [fault.met for fault in faults] == [1, 1]
    assert [each.name for each in objects.list()] == ["c/big", "c/small"]
    assert (tmp_path / "copy").read_bytes() == objects.read("c/big").content == BIG


def test_lasting_service_error_is_temporary_and_names_object(cloud_storage, open_bucket):
    objects = open_bucket(retry_seconds=0.05)
    cloud_storage.fail(is_any, "status", status=503, message="backend is tired", times=10**6)
    with raises(TemporaryError, "gs://models/a prefix/config", "503 backend is tired"):
        objects.write("config", b"1")
    with raises(TemporaryError, "gs://models/a prefix/config", "503"):
        objects.read("config")


def test_call_without_answer_is_repeated(cloud_storage, open_bucket):
    objects = open_bucket(call_seconds=0.3)
    faults = [cloud_storage.fail(on, "hang") for on in (is_upload, is_download)]
    generation = objects.write("config", b"1", if_generation=ABSENT)
    assert objects.read("config") == (b"1", generation)
    assert [fault.met for fault in faults] == [1, 1]
    cloud_storage.fail(is_any, "hang", times=10**6)
    with raises(TemporaryError, "config"):
        open_bucket(call_seconds=0.1, retry_seconds=0.2).read("config")


@pytest.mark.parametrize("content", [b"small", BIG], ids=["one request", "in parts"])
@pytest.mark.parametrize("is_new", [True, False], ids=["create", "replace"])
def test_conditional_write_whose_answer_was_lost_counts_as_done(
    cloud_storage, open_bucket, content, is_new
):
    objects = open_bucket()
    seen = ABSENT if is_new else objects.write("config", b"before")
    parts = []
    # The object exists only after the last part was uploaded.
    fault = cloud_storage.fail(
        lambda request: (
            is_upload(request) and (len(content) < 10 or is_nth_part(NUM_PARTS, parts)(request))
        ),
        "lose",
    )
    generation = objects.write("config", content, if_generation=seen)
    assert fault.met == 1
    assert open_bucket().read("config") == (content, generation)
    objects.write("config", b"next", if_generation=generation)


def test_lost_answer_is_not_confused_with_equal_bytes_of_another_writer(cloud_storage, open_bucket):
    mine, other = open_bucket(), open_bucket()
    seen = mine.write("config", b"before")
    cloud_storage.fail(is_upload, "cut")
    as_it_passes(cloud_storage, 1, lambda: other.write("config", b"same bytes", if_generation=seen))
    with pytest.raises(Changed):
        mine.write("config", b"same bytes", if_generation=seen)


def test_write_of_another_after_lost_answer_is_reported_as_change(cloud_storage, open_bucket):
    mine, other = open_bucket(), open_bucket()
    seen = mine.write("config", b"before")
    cloud_storage.fail(is_upload, "lose")
    as_it_passes(
        cloud_storage,
        2,
        lambda: other.write("config", b"theirs", if_generation=other.read("config").generation),
    )
    with pytest.raises(Changed):
        mine.write("config", b"mine", if_generation=seen)
    assert other.read("config").content == b"theirs"


def test_copy_whose_answer_was_lost_counts_as_done(cloud_storage, open_bucket):
    objects = open_bucket()
    objects.write("a", b"1")
    fault = cloud_storage.fail(is_rewrite, "lose")
    generation = objects.copy("a", "b")
    assert fault.met == 1
    assert objects.read("b") == (b"1", generation)


def test_upload_refused_midway_leaves_old_object(cloud_storage, open_bucket, tmp_path):
    objects, message = open_bucket(), "quota exceeded"
    (tmp_path / "big").write_bytes(BIG)
    generation = objects.write("old", b"before")
    for name in ("old", "new"):
        parts = []
        cloud_storage.fail(is_nth_part(3, parts), "status", status=403, message=message)
        with raises(PermanentError, name, f"403 {message}", "objectUser", "bucket models"):
            objects.write(name, tmp_path / "big")
        assert len(parts) == 3
    assert objects.read("old") == (b"before", generation)
    assert objects.read("new") is None
    assert [each.name for each in objects.list()] == ["old"]


def test_content_corrupted_during_upload_is_refused_by_service(
    cloud_storage, open_bucket, tmp_path
):
    # The file changes between the checksum and the last part, as on a faulty disk.
    (tmp_path / "big").write_bytes(BIG)

    def change(request):
        if is_chunk(request):
            (tmp_path / "big").write_bytes(BIG[:-1] + bytes([BIG[-1] ^ 1]))

    cloud_storage.before = change
    with raises(PermanentError, "CRC32C"):
        open_bucket().write("big", tmp_path / "big")
    assert open_bucket().read("big") is None


def test_interrupted_read_is_completed(cloud_storage, open_bucket):
    objects = open_bucket()
    generation = objects.write("object", b"x" * 1000)
    fault = cloud_storage.fail(is_download, "half", times=2)
    assert objects.read("object") == (b"x" * 1000, generation)
    assert fault.met == 2


def test_download_corrupted_on_way_is_read_again_and_never_returned(cloud_storage, open_bucket):
    objects = open_bucket()
    objects.write("object", b"content")
    fault = cloud_storage.fail(is_download, "damage", times=2)
    assert objects.read("object").content == b"content"
    assert fault.met == 2
    cloud_storage.fail(is_download, "damage", times=10**6)
    with raises(TemporaryError, "a prefix/object", "corrupt", "CRC32C"):
        objects.read("object")


def test_object_replaced_during_download_in_parts_is_read_again(cloud_storage, open_bucket):
    objects = open_bucket()
    objects.write("object", b"1" * 100_000)
    cloud_storage.fail(is_download, "half")
    passed = as_it_passes(cloud_storage, 2, lambda: open_bucket().write("object", b"2" * 90_000))
    assert objects.read("object").content == b"2" * 90_000
    assert len(passed) == 2


def put(objects, name, content):
    """Store an object and return its entry in the listing."""
    objects.write(name, content)
    return next(each for each in objects.list() if each.name == name)


def first_bytes(requests):
    """Return the start offset of each download."""
    return [
        int(r.range.removeprefix("bytes=").split("-")[0] or 0)
        for r in requests
        if r.is_download and r.range
    ]


def test_interrupted_fetch_continues_at_byte_that_it_reached(cloud_storage, open_bucket, tmp_path):
    objects = open_bucket()
    wanted = put(objects, "big", BIG)
    fault = cloud_storage.fail(is_download, "half", times=2)
    objects.fetch(wanted, tmp_path / "part")
    half = len(BIG) // 2
    assert fault.met == 2
    assert first_bytes(cloud_storage.seen) == [half, half + (len(BIG) - half) // 2]
    generations = [r.query["generation"] for r in cloud_storage.seen if r.is_download]
    assert generations == [[str(wanted.generation)]] * 3
    assert (tmp_path / "part").read_bytes() == BIG


@pytest.mark.parametrize("here", [b"x" * 1000, BIG + b"and more"], ids=["other bytes", "too many"])
def test_bytes_that_are_not_objects_are_discarded_and_fetched_again(open_bucket, tmp_path, here):
    objects = open_bucket()
    (tmp_path / "part").write_bytes(here)
    objects.fetch(put(objects, "big", BIG), tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BIG


def test_timeout_of_large_object_counts_from_its_last_byte(cloud_storage, open_bucket, tmp_path):
    # Without retries, each cut ends a call, and each further call downloads half of the remaining
    # bytes.
    objects = open_bucket(retry_seconds=0.0)
    wanted = put(objects, "big", BIG)
    fault = cloud_storage.fail(is_download, "half", times=12)
    objects.fetch(wanted, tmp_path / "part")
    assert fault.met == 12
    assert (tmp_path / "part").read_bytes() == BIG


def test_abandoned_download_keeps_its_bytes_and_next_one_continues(
    cloud_storage, open_bucket, tmp_path
):
    objects = open_bucket(retry_seconds=0.05)
    wanted = put(objects, "big", BIG)
    cloud_storage.fail(is_download, "half")
    storm = cloud_storage.fail(is_download, "status", status=503, times=10**6)
    with raises(TemporaryError, "a prefix/big", 503):
        objects.fetch(wanted, tmp_path / "part")
    half = len(BIG) // 2
    assert (tmp_path / "part").read_bytes() == BIG[:half]
    cloud_storage.faults.remove(storm)
    cloud_storage.seen.clear()
    open_bucket().fetch(wanted, tmp_path / "part")
    assert first_bytes(cloud_storage.seen) == [half]
    assert (tmp_path / "part").read_bytes() == BIG


def test_corrupt_fetch_starts_over_and_corrupt_content_is_never_returned(
    cloud_storage, open_bucket, tmp_path
):
    objects = open_bucket()
    wanted = put(objects, "big", BIG)
    fault = cloud_storage.fail(is_download, "damage")
    objects.fetch(wanted, tmp_path / "part")
    assert (fault.met, (tmp_path / "part").read_bytes()) == (1, BIG)
    cloud_storage.fail(is_download, "damage", times=10**6)
    with raises(TemporaryError, "big", "corrupt", "CRC32C", f"{len(BIG)} bytes", "expected CRC32C"):
        objects.fetch(wanted, tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == b""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 0])
def test_empty_answers_are_not_requested_forever(cloud_storage, open_bucket, tmp_path, size):
    objects = open_bucket()
    wanted = put(objects, "object", b"content")
    (tmp_path / "part").write_bytes(b"content"[:size])
    cloud_storage.fail(is_download, "damage", change=lambda body: b"", times=10**6)
    with raises(TemporaryError, "object", f"byte {size} of 7"):
        objects.fetch(wanted, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"content"[:size]


def test_object_replaced_during_fetch_is_not_mixed_with_its_successor(
    cloud_storage, open_bucket, tmp_path
):
    objects = open_bucket()
    wanted = put(objects, "big", BIG)
    cloud_storage.fail(is_download, "half")
    as_it_passes(cloud_storage, 2, lambda: open_bucket().write("big", BIG[::-1]))
    with raises(Changed, "big", f"generation {wanted.generation}"):
        objects.fetch(wanted, tmp_path / "part")


def test_full_disk_ends_fetch_permanently_with_reason(cloud_storage, open_bucket, tmp_path):
    objects = open_bucket()
    wanted = put(objects, "big", BIG)
    cloud_storage.seen.clear()
    with (
        files_of_at_most(3_000_000),
        raises(PermanentError, "big", "File too large") as refused,
    ):
        objects.fetch(wanted, tmp_path / "part")
    assert isinstance(refused.value.__cause__, OSError)
    assert sum(request.is_download for request in cloud_storage.seen) == 1, (
        "a full disk must not be retried"
    )
    here = (tmp_path / "part").read_bytes()
    assert here == BIG[: len(here)]
    objects.fetch(wanted, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BIG


@pytest.mark.parametrize("status", [401, 403])
def test_refusal_names_bucket_and_what_is_needed(cloud_storage, open_bucket, tmp_path, status):
    objects = open_bucket()
    requested = []
    cloud_storage.fail(
        lambda r: requested.append(r) or True,
        "status",
        status=status,
        message="no access",
        times=10**6,
    )
    for call in (
        lambda: objects.read("x"),
        lambda: download(objects, "x", tmp_path / "copy"),
        lambda: objects.write("x", b"", if_generation=3),
        lambda: objects.list(),
        lambda: objects.delete("x"),
        lambda: objects.copy("x", "y"),
        lambda: objects.move("x", "y"),
    ):
        requested.clear()
        with raises(
            PermanentError, status, "no access", "roles/storage.objectUser", "bucket models"
        ):
            call()
        assert len(requested) == 1


def test_absent_bucket_is_no_absent_object(open_bucket, tmp_path):
    objects = open_bucket("gs://elsewhere/x")
    for call in (
        lambda: objects.read("x"),
        lambda: download(objects, "x", tmp_path / "copy"),
        lambda: objects.write("x", b""),
        lambda: objects.list(),
        lambda: objects.delete("x"),
    ):
        with raises(PermanentError, "absent", 404, "bucket elsewhere"):
            call()


def test_missing_credentials_are_named(monkeypatch, tmp_path):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "no such file"))
    with raises(PermanentError, "gs://models", "no credentials", "bucket models", "no such file"):
        open_objects("gs://models")


def test_proxy_in_environment_is_not_used_for_emulator(cloud_storage, open_bucket, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        objects = open_bucket(retry_seconds=0.05)
        objects.write("a", b"1")
        assert objects.read("a").content == b"1"


@pytest.mark.parametrize("uri", ["gs://", "gs:///x", "gs:models"])
def test_uri_that_names_no_bucket_is_refused(uri):
    from evergreen.storage.bucket import BucketObjects

    with raises(ContractError, "expected gs://bucket"):
        BucketObjects(uri)


def test_two_prefixes_of_bucket_do_not_see_each_other(open_bucket):
    one, two, all_of_it = (
        open_bucket("gs://models/a"),
        open_bucket("gs://models/ab/"),
        open_bucket("gs://models"),
    )
    one.write("x", b"1")
    two.write("x", b"2")
    assert [each.name for each in one.list()] == [each.name for each in two.list()] == ["x"]
    assert two.uri == "gs://models/ab"
    assert [each.name for each in all_of_it.list()] == ["a/x", "ab/x"]

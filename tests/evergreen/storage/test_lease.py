"""Tests of leases under a manual clock: acquiring, waiting, takeover and lost leases."""

import time

import pytest

from evergreen.runtime.errors import PermanentError, TemporaryError
from evergreen.storage.folder import FolderObjects
from evergreen.storage.lease import Lease
from testing.processes import at_once
from tests.support.errors import raises


class Clocks:
    """Wall clock and monotonic clock, moved by hand."""

    def __init__(self, wall=1_760_000_000.0):
        self.wall, self.steady = wall, 50.0

    def pass_(self, seconds):
        self.wall += seconds
        self.steady += seconds


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def objects(tmp_path):
    return FolderObjects(tmp_path)


@pytest.fixture
def make_lease(objects):
    def make(holder, clocks, objects=objects):
        settings = {
            "seconds": 60.0,
            "clock": lambda: clocks.wall,
            "monotonic": lambda: clocks.steady,
        }
        return Lease(objects, "deployment.lease", holder=holder, **settings)

    return make


def taken(lease):
    lease.acquire()
    return lease


def test_second_process_gets_holder_and_end_of_lease(make_lease, clocks):
    make_lease("pod a", clocks).acquire()
    clocks.pass_(59.9)
    with raises(TemporaryError, "pod a", "2025-10-09T08:54:20+00:00"):
        make_lease("pod b", clocks).acquire()


def test_returned_lease_can_be_acquired_at_once(make_lease, clocks, objects):
    lease = taken(make_lease("pod a", clocks))
    lease.release()
    assert objects.list() == []
    make_lease("pod b", clocks).acquire()


def test_lease_is_taken_over_only_after_its_end(make_lease, clocks):
    killed = taken(make_lease("pod a", clocks))
    clocks.pass_(60.0)
    heir = taken(make_lease("pod b", clocks))
    heir.check()
    for call in (killed.check, killed.renew):
        with raises(TemporaryError, "pod a", "no longer"):
            call()


def test_renewed_lease_lasts(make_lease, clocks):
    lease = taken(make_lease("pod a", clocks))
    for _ in range(10):
        clocks.pass_(40.0)
        lease.renew()
        lease.check()
        with raises(TemporaryError, "held by pod a"):
            make_lease("pod b", clocks).acquire()


def test_suspended_holder_detects_expired_lease_without_another_holder(make_lease, clocks):
    lease = taken(make_lease("pod a", clocks))
    clocks.pass_(60.0)
    with raises(TemporaryError, "no longer"):
        lease.check()


def test_returning_lease_that_another_took_over_does_not_end_it(make_lease, clocks):
    late, heir = make_lease("pod a", clocks), make_lease("pod b", clocks)
    late.acquire()
    clocks.pass_(61.0)
    heir.acquire()
    late.release()
    heir.check()


@pytest.mark.parametrize("step", [-7200.0, 7200.0], ids=["back", "forth"])
def test_clock_steps_of_holder_neither_shorten_nor_lengthen_lease(make_lease, step):
    mine, others = Clocks(), Clocks()
    lease = taken(make_lease("pod a", mine))
    mine.wall += step
    for _ in range(3):
        mine.pass_(30.0)
        others.pass_(30.0)
        lease.renew()
        lease.check()
    others.pass_(59.0)
    with raises(TemporaryError, "held by pod a"):
        make_lease("pod b", others).acquire()
    others.pass_(1.0)
    make_lease("pod b", others).acquire()


@pytest.mark.parametrize("is_ended", [False, True], ids=["free", "ended"])
def test_one_of_many_concurrent_callers_gets_lease(make_lease, clocks, is_ended):
    if is_ended:
        make_lease("killed", clocks).acquire()
        clocks.pass_(61.0)
    leases, won, lost = [make_lease(f"pod {at}", clocks) for at in range(8)], [], []

    def take(me):
        lease = leases[me]
        try:
            lease.acquire()
            won.append(lease)
        except TemporaryError as error:
            lost.append(str(error))

    at_once(8, take)
    assert (len(won), len(lost)) == (1, 7)
    won[0].check()


def test_held_lease_is_renewed_during_work_and_then_returned(objects):
    lease = Lease(objects, "deployment.lease", holder="pod a", seconds=0.3)
    lease.acquire()
    with lease.renewed():
        first, deadline = objects.read("deployment.lease").generation, time.monotonic() + 120
        seen = {first}
        while len(seen) < 4:
            assert time.monotonic() < deadline
            seen.add(objects.read("deployment.lease").generation)
    assert objects.read("deployment.lease") is None


def test_invalid_lease_object_is_named(make_lease, objects):
    objects.write("deployment.lease", b"{}")
    with raises(PermanentError, "deployment.lease", "not a lease", "remove it"):
        make_lease("pod a", Clocks()).acquire()


def test_lease_in_bucket_survives_lost_answer(open_bucket, cloud_storage, make_lease, clocks):
    lease = make_lease("pod a", clocks, objects=open_bucket())
    for call in (lease.acquire, lease.renew):
        fault = cloud_storage.fail(lambda request: request.is_upload, "lose")
        call()
        lease.check()
        assert fault.met == 1
    other = make_lease("pod b", clocks, objects=open_bucket())
    with raises(TemporaryError, "held by pod a"):
        other.acquire()
    clocks.pass_(60.0)
    other.acquire()
    with raises(TemporaryError, "pod a", "no longer"):
        lease.check()
    lease.release()
    other.check()

"""A monitor of the test's own, ended with the test."""

import pytest

from tests.support.monitors import Bench


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(**changes) -> Bench:
        made.append(Bench(tmp_path, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def started(bench):
    """`started(**settings)`: a bench whose monitor has started."""

    def make(**changes) -> Bench:
        b = bench(**changes)
        b.start()
        return b

    return make

"""Environments are rebuilt when, and only when, a lock changed or a build did not end."""

import shutil

import pytest

from pipelines.local import environments


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "requirements").mkdir()
    for lock in environments.locks_of("serving", tmp_path):
        lock.write_text("# nothing\n")
    return tmp_path


def test_built_environment_is_current_until_a_lock_changes(repository):
    assert not environments.is_current("serving", repository)
    environments.build("serving", repository)
    assert environments.is_current("serving", repository)
    assert environments.python_of("serving", repository).exists()
    environments.locks_of("serving", repository)[1].write_text("# something else\n")
    assert not environments.is_current("serving", repository)
    shutil.rmtree(repository / ".venvs")


def test_failed_build_names_its_log_and_stays_unfinished(repository):
    environments.locks_of("serving", repository)[0].write_text("./no-such-package\n")
    with pytest.raises(environments.BuildFailed, match="environment serving could not be built, see .*serving.log"):
        environments.build("serving", repository)
    assert not environments.is_current("serving", repository)


def test_every_environment_has_its_locks_and_every_pin_is_exact():
    for name in environments.ENVIRONMENTS:
        for lock in environments.locks_of(name):
            pins = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
            assert pins
            assert all(pin.count("==") == 1 and "+" not in pin for pin in pins), lock

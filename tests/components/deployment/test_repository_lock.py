"""Who may change the model repository: one deployment at a time, and none that lost its turn unnoticed."""

import pytest

from components.deployment.repository.model_repository import ModelRepository
from components.runtime.errors import TemporaryError
from components.storage.objects import Changed
from tests.support.clocks import Clock
from tests.support.model_repository import OPTIONS, named, with_versions
from tests.support.served_names import MODEL_NAME, NAMES


def test_the_configuration_is_not_written_over_anothers(open_objects, put_live):
    repository = ModelRepository(open_objects(), NAMES)
    with repository.locked():
        put_live(repository, 1)
        mine = with_versions(repository.read_config(), [1])
        open_objects().write("click_model/config.pbtxt", b"by another")
        for text in (mine, None):
            with pytest.raises(Changed, match="another deployment changed .*config.pbtxt since this one began"):
                repository.write_config(text)
    assert repository.read_config() == "by another"


def test_an_expired_holder_that_still_writes_is_refused_everywhere(open_bucket, put_live, make_version):
    clock = Clock()
    settings = {"clock": clock, "monotonic": clock}
    with ModelRepository(open_bucket(), NAMES).locked():
        pass
    late = ModelRepository(open_bucket(), NAMES, holder="late", **settings)
    with late.locked():
        put_live(late, 1)
        clock.advance(61.0)
        heir = ModelRepository(open_bucket(), NAMES, holder="heir", **settings)
        with heir.locked():
            put_live(heir, 2)
            text = with_versions(heir.read_config(), [1])
            for call in (
                lambda: late.write_config(text),
                lambda: late.write_config(None),
                lambda: late.stage(3, make_version(3), OPTIONS),
                lambda: late.publish(2),
                lambda: late.withdraw(1),
                late.remove_canary,
                lambda: late.prune(set(), num_kept=2),
            ):
                with pytest.raises(TemporaryError, match="late no longer holds"):
                    call()
        assert named(heir) == [2]
    assert ModelRepository(open_bucket(), NAMES).versions() == [1, 2]


def test_an_expired_holder_that_passed_its_check_just_before_is_stopped_by_the_generation(open_bucket, put_live):
    late = ModelRepository(open_bucket(), NAMES, holder="late")
    with late.locked():
        put_live(late, 1)
        text = late.read_config()
        # Between the check and the write: the lease ends, another takes over and publishes.
        late._check_lock = lambda: None
        open_bucket().delete(f"{MODEL_NAME}.lease")
        heir = ModelRepository(open_bucket(), NAMES, holder="heir")
        with heir.locked():
            put_live(heir, 2)
        with pytest.raises(Changed, match="another deployment changed"):
            late.write_config(text)
    assert named(heir) == [2]

"""Releases onto a real server. A test module provides `triton`."""

import dataclasses

import pytest

from controller.release import ReleaseSettings
from evergreen.serving.repository.triton_config import ServingOptions
from tests.support.deployments import release
from tests.support.stored_models import make_candidate, make_parts, raw_rows  # noqa: F401  fixtures


@pytest.fixture
def settings(triton, tmp_path):
    return ReleaseSettings(
        store=tmp_path / "store",
        repository=triton.repository.as_uri(),
        triton_urls=(triton.grpc_url,),
        options=ServingOptions(instances=1),
    )


@pytest.fixture
def deploy(settings, make_candidate):  # noqa: F811  a fixture
    """Releases the model that is made with `seed`.

    `changes` contains the settings that differ from the fixture `settings`.
    """
    return lambda seed, **changes: release(
        *make_candidate(settings.store, seed), settings=dataclasses.replace(settings, **changes)
    )


@pytest.fixture
def expected(make_parts):  # noqa: F811  a fixture
    """Computes the reference scores of `rows` by the model that was made with `seed`."""

    def scores(seed, rows):
        workflow, toy = make_parts(seed)
        return toy.scores(workflow, *rows)

    return scores

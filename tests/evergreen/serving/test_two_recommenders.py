"""Tests of two recommenders on one tritonserver: neither affects the other."""

import dataclasses

import pytest

from controller.canary import steps
from controller.rollback import rollback
from controller.watchdog import HEALED, HEALTHY, Watchdog
from demo.triton import models_to_load
from evergreen.contracts.manifests import Model
from evergreen.contracts.serving import ServedNames
from evergreen.registry.models import model_folder
from evergreen.registry.promotion_journal import current
from evergreen.runtime.errors import ContractError, TemporaryError
from evergreen.storage.uris import local_path
from inference_client.routing import PlanFollower
from testing.recommenders import SHOP
from testing.served_names import CANARY_NAME, MODEL_NAME
from tests.support.deployments import release, start_canary
from tests.support.errors import raises
from tests.support.real_servers import under_load

OTHER = "shop"


class DeploymentTarget:
    """One recommender: its registry, and its part of the shared repository."""

    def __init__(self, settings, name, make_candidate):
        timeouts = dataclasses.replace(settings.timeouts, lock_seconds=0.0)
        store = settings.store / name
        self.settings = dataclasses.replace(settings, store=store, timeouts=timeouts)
        self.name, self._make = name, make_candidate

    def candidate(self, seed, *, recommender=None):
        """Return a stored model, its verdict, and the rows of the verdict.

        The model belongs to the recommender `recommender`, or to `self.name` if `recommender` is
        None.
        """
        model, verdict, raw = self._make(self.settings.store, seed)
        named = dataclasses.replace(SHOP, name=recommender or self.name)
        model = dataclasses.replace(model, recommender=named)
        model.write(model_folder(self.settings.store, model.model_id) / Model.MANIFEST)
        return model, verdict, raw

    def release(self, seed, **how):
        return release(*self.candidate(seed, **how), settings=self.settings)

    def kept(self):
        """Return the content of each file of one recommender in repository and registry."""
        root, names = local_path(self.settings.repository), ServedNames(self.name)
        tops = {
            names.model,
            names.candidate,
            names.canary,
            f"{self.name}.traffic.json",
            f".{self.name}.lock",
        }
        mine = [path for path in root.rglob("*") if path.relative_to(root).parts[0] in tops]
        files = [path for path in (*mine, *self.settings.store.rglob("*")) if path.is_file()]
        return {path: path.read_bytes() for path in files}


@pytest.fixture
def places(settings, make_candidate, client):
    yield (
        DeploymentTarget(settings, MODEL_NAME, make_candidate),
        DeploymentTarget(settings, OTHER, make_candidate),
    )
    for name in (OTHER, CANARY_NAME):
        client.unload(name)


def test_releases_of_one_recommender_leave_other_alone_without_failures(
    places, triton, client, raw_rows
):
    click, shop = places
    click.release(1), shop.release(11)
    url, rows = triton.grpc_url, raw_rows(8)
    with under_load([url], rows) as clicks, under_load([url], rows, model=OTHER) as shops:
        before = click.kept()
        shop.release(12)
        assert click.kept() == before
        before = shop.kept()
        start_canary(*click.candidate(2), settings=click.settings, share=0.5)
        assert shop.kept() == before
        before = click.kept()
        rollback(shop.settings, reason="drill")
        assert click.kept() == before
    assert (clicks.failures, shops.failures) == ([], [])
    assert [place.settings.open_repository().versions() for place in places] == [[1, 2], [1, 2]]
    assert [current(place.settings.store).version for place in places] == [1, 1]
    assert set(clicks.answers[0]) == {1}
    assert set(shops.answers[0]) == {1, 2}
    followers = [
        PlanFollower(click.settings.open_repository().objects, place.name) for place in places
    ]
    for follower in followers:
        follower.refresh()
    assert followers[0].current.canary.model_name == CANARY_NAME
    assert followers[1].current is None
    assert models_to_load(triton.repository) == [MODEL_NAME, CANARY_NAME, OTHER]
    assert client.infer(CANARY_NAME, *rows)[1] == 2


def test_each_has_lock_and_watchdog_of_its_own(places, triton, client):
    click, shop = places
    click.release(1), shop.release(11)
    watchdogs = [Watchdog(target=place.settings) for place in places]
    client.unload(OTHER)
    with click.settings.open_repository().locked():
        with raises(TemporaryError, "at work", f"/{MODEL_NAME}"):
            click.release(2)
        found = [[watchdog.check() for watchdog in watchdogs] for _ in range(2)]
        assert shop.release(12).version == 2
    assert found[1] == [
        {f"{triton.grpc_url} {MODEL_NAME}": HEALTHY},
        {f"{triton.grpc_url} {OTHER}": HEALED},
    ]


def test_store_refuses_model_of_recommender_of_another_name(places):
    _, shop = places
    shop.release(11)
    before = shop.settings.open_repository().versions()
    with raises(ContractError, "'books'", "expected 'shop'"):
        shop.release(12, recommender="books")
    assert shop.settings.open_repository().versions() == before


def test_watchdog_waits_for_first_release_of_registry_without_recommender(places):
    _, shop = places
    shop.settings.store.mkdir(parents=True)
    watchdog = Watchdog(target=shop.settings)
    assert watchdog.check() == {}
    assert steps.step(steps.CanarySettings(target=shop.settings)).action == steps.NONE
    with raises(ContractError, "no release", "no recommender"):
        shop.settings.open_repository()
    shop.release(11)
    assert list(watchdog.check().values()) == [HEALTHY]

"""Three real tritonservers over one repository: all serve the new version, or all the old one."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing

import pytest

from components.contracts.serving import MODEL_NAME
from components.deployment.release import ReleaseSettings, release
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.repository.triton_config import ServingOptions
from components.deployment.rollback import rollback
from components.deployment.triton_client import Triton
from components.runtime.errors import PermanentError
from components.storage.locations import open_objects
from components.store.promotion_journal import current, read_entries
from pipelines.local.triton import TritonServer, TritonSettings
from tests.support.real_servers import Altered, live_version, under_load

pytestmark = pytest.mark.e2e


def test_any_replica_failing_leads_all_back_and_nobody_notices(tmp_path, make_candidate, raw_rows):
    rows = raw_rows(8)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                TritonServer(
                    tmp_path / "repository", log=tmp_path / f"{number}.log", runtime=tmp_path / "runtime",
                    settings=TritonSettings(stop_seconds=4),
                )
            )
            for number in range(3)
        ]  # fmt: skip
        urls = tuple(server.grpc_url for server in servers)
        settings = ReleaseSettings(
            store=tmp_path / "store",
            repository=str(tmp_path / "repository"),
            triton_urls=urls,
            options=ServingOptions(instances=1),
        )
        release(*make_candidate(settings.store, 1), settings)

        def wrong_on_the_last(real, asked, *rows, version=None):
            scores, answered = real.infer(asked, *rows, version=version)
            return (scores + 1e-4 if (real.url, asked, answered) == (urls[2], MODEL_NAME, 2) else scores), answered

        with under_load(urls, rows) as traffic, pytest.raises(PermanentError, match=urls[2]):
            release(
                *make_candidate(settings.store, 2),
                dataclasses.replace(settings, connect=lambda url: Altered(url, infer=wrong_on_the_last)),
            )
        assert traffic.failures == []
        assert {answers[-1] for answers in traffic.answers} == {1}
        clients = [stack.enter_context(closing(Triton(url))) for url in urls]
        assert [live_version(client, rows) for client in clients] == [1, 1, 1]
        assert read_entries(settings.store)[-1].action == "withdrawn"
        assert ModelRepository(open_objects(settings.repository)).versions() == [1]

        with under_load(urls, rows, until=3) as traffic:
            assert release(*make_candidate(settings.store, 3), settings).version == 3
        assert traffic.failures == []
        assert [live_version(client, rows) for client in clients] == [3, 3, 3]
        rollback(dataclasses.replace(settings, who="anna"), reason="drill")
        assert [live_version(client, rows) for client in clients] == [1, 1, 1]
        assert current(settings.store).who == "anna"

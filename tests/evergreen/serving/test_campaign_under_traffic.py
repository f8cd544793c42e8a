"""Kill rollback, promote and controller hundreds of times at random moments under traffic.

No request fails.

`EVERGREEN_CAMPAIGN_SHARE=0.02` runs only 2 % of the kills.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import cycle

import numpy as np
import pytest

from evergreen.registry.models import keep_verdict
from evergreen.registry.promotion_journal import current, interrupted, read_entries, read_journal
from evergreen.runtime.exit_codes import ExitCode
from inference_client.scoring import ClientSettings, ScoringClient
from testing.paths import REPOSITORY
from testing.processes import wait_for
from testing.served_names import CANDIDATE_NAME, MODEL_NAME
from tests.support.campaigns import Program, faults
from tests.support.deployments import release
from tests.support.real_servers import BackgroundTraffic, live_version

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
TURNS = [
    ("rollback", "rollback"),
    ("promote", "promote"),
    ("controller", "rollback"),
    ("controller", "promote"),
]
"""Pairs: the target of a fault, and the deployment command that runs when the fault happens."""
LONGEST = {"rollback": 2.0, "promote": 4.0}
"""Maximum time in seconds between a deployment's start and the fault. The fault is not counted if
the deployment ends first."""


class Load(BackgroundTraffic):
    """A client with default settings that sends about 30 requests a second."""

    def __init__(self, url, rows):
        super().__init__()
        self.answers, self.failures = [], []
        self._url, self._rows = url, rows

    async def _ask(self):
        async with ScoringClient(self._url, MODEL_NAME, ClientSettings()) as client:
            while not self._stop.is_set():
                try:
                    self.answers.append(await client.score(*self._rows))
                except Exception as error:
                    self.failures.append(error)
                await asyncio.sleep(0.03)


@pytest.fixture
def start(settings, tmp_path):
    """Starts a deployment command whose only argument is the registry.

    The commands are killed at the end of the test.
    """
    started = []

    def make(command, *flags):
        line = [
            sys.executable,
            "-m",
            "controller" if command == "controller" else f"controller.{command}",
            "--store",
            str(settings.store),
            *flags,
        ]
        with open(tmp_path / f"{command}.log", "ab") as log:
            started.append(
                subprocess.Popen(line, cwd=REPOSITORY, env=dict(os.environ), stderr=log, stdout=log)
            )
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.wait()


class DeploymentTarget:
    """Two models that are deployed in turn, under increasing version numbers."""

    def __init__(self, settings, start):
        self.store, self.start = settings.store, start

    def begin(self, command):
        """Start a deployment of the model that is not live."""
        live = current(self.store)
        if command == "promote":
            other = "model-2" if live.model_id == "model-1" else "model-1"
            return self.start("promote", "--model-id", other, "--override", "a campaign")
        others = [
            each.version for each in read_journal(self.store) if each.model_id != live.model_id
        ]
        return self.start("rollback", "--to", str(max(others)), "--reason", "a campaign")

    def finish(self):
        """Repeat a rollback until it succeeds, as a person would do."""

        def is_done():
            code = self.begin("rollback").wait(120)
            assert code in (ExitCode.DONE, ExitCode.FAILED), code
            return code == ExitCode.DONE

        wait_for(is_done, "a rollback")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(12))
def test_deployments_struck_at_random_moments_fail_no_request(
    settings, make_candidate, start, triton, client, raw_rows, make_parts, seed
):
    rows, chance, codes, struck = raw_rows(8), random.Random(seed), Counter(), Counter()
    for number in (1, 2):
        candidate = make_candidate(settings.store, number)
        release(*candidate, settings=settings)
        keep_verdict(settings.store, *candidate[1:])
    expected = {f"model-{number}": make_parts(number) for number in (1, 2)}
    expected = {name: toy.scores(workflow, *rows) for name, (workflow, toy) in expected.items()}
    target = DeploymentTarget(settings, start)
    controller = Program(lambda: start("controller", "--interval-seconds", "0.2"))
    signals = [sent_signal for sent_signal in SIGNALS for _ in range(faults(25))]
    chance.shuffle(signals)
    with Load(triton.grpc_url, rows) as load:
        wait_for(lambda: load.answers or load.failures)
        for victim, command in cycle(TURNS):
            if not signals:
                break
            controller.restart_if_ended()
            deployment = target.begin(command)
            time.sleep(chance.uniform(0.0, LONGEST[command]))
            if deployment.poll() is None:
                sent_signal = signals.pop()
                struck[victim, sent_signal.name] += 1
                if victim == "controller":
                    controller.disturb(sent_signal, chance.uniform(0.02, 0.6))
                else:
                    deployment.send_signal(sent_signal)
                    time.sleep(chance.uniform(0.02, 0.6) if sent_signal == signal.SIGSTOP else 0.0)
                    deployment.send_signal(signal.SIGCONT)
            codes[command, deployment.wait(120)] += 1
            assert live_version(client, rows) > 0
            if len(signals) % 10 == 0:
                target.finish()
        target.finish()
        controller.end()
    print(
        f"{dict(struck)}; {dict(codes)}; {len(load.failures)} of {len(load.answers):,} requests "
        "failed"
    )
    assert load.failures == []
    assert {code for _, code in codes} <= {
        -signal.SIGKILL,
        ExitCode.DONE,
        ExitCode.BAD_INPUT,
        ExitCode.FAILED,
    }
    assert controller.ends == []
    assert interrupted(settings.store) is None
    assert live_version(client, rows) == current(settings.store).version
    assert not (triton.repository / CANDIDATE_NAME).exists()
    model_of = {entry.version: entry.model_id for entry in read_entries(settings.store)}
    for answer in load.answers:
        np.testing.assert_allclose(
            answer.scores, expected[model_of[answer.model_version]], atol=1e-4
        )

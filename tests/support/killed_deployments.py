"""Run deployments that kill themselves at a named checkpoint, each in a forked process (`warm`).

A job is JSON with these keys:

- `action`: release, rollback or bake
- `store`, `repository`, `urls`, `state`: folders and server addresses, as in `FileDeployment`
- `candidate`: paths of the three manifests of the candidate
- `kill_at`: the name of a checkpoint. For `bake`, `kill_at` is the number of a boundary
  (`crash_chain`)
- `occurrence`: at the n-th visit of the checkpoint, the process is killed
- `lives`: number of concurrent processes
"""

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.support.crashes import Kill, sigkill

IMPORTS = (
    "from controller import baking, rollback; from tests.support import crash_chain, deployments"
)
"""Import statements that the parent process executes before it forks."""
PROGRAM = "import sys; from tests.support.killed_deployments import main; main(sys.argv[1])"


def settings_of(job, checkpoint):
    from controller.release import ReleaseSettings

    return ReleaseSettings(
        store=Path(job["store"]),
        repository=job["repository"],
        triton_urls=tuple(job["urls"]),
        who="killed",
        num_kept=2,
        connect=connect_of(job),
        checkpoint=checkpoint,
    )


def connect_of(job):
    from tests.support.triton_double import TritonDouble

    return lambda url: TritonDouble(url, repository=job["repository"], state=job["state"])


def deploy(job):
    from controller.rollback import rollback
    from evergreen.contracts.manifests import Model, RawDataset, Verdict
    from tests.support.deployments import release

    kill = Kill(job["kill_at"], visit=job["occurrence"], end=sigkill)
    settings = settings_of(job, kill.reach)
    if job["action"] == "rollback":
        rollback(settings, reason="killed")
    else:
        kinds = (Model, Verdict, RawDataset)
        manifests = [kind.read(path) for kind, path in zip(kinds, job["candidate"], strict=True)]
        release(*manifests, settings=settings)


def bake(job):
    """Run one round of a controller.

    The test doubles of servers survive because their state is in files.
    """
    from controller.baking import Baking
    from evergreen.runtime.errors import TemporaryError
    from tests.support.crash_chain import watch_boundaries
    from tests.support.triton_double import Altered

    kill = Kill(job["kill_at"], end=sigkill)
    watch_boundaries(kill)

    def load(server, *names):
        kill.is_paused = True
        server.load(*names)
        kill.is_paused = False
        kill.reach("loaded by a server")

    settings = settings_of(job, kill.reach)
    settings = replace(settings, connect=lambda url: Altered(connect_of(job)(url), load=load))
    with suppress(TemporaryError):  # raised if another controller runs
        Baking(target=settings, metrics=("triton-a:8002",), fetch=lambda address: "").step({})


def main(text):
    """Run the deployment that `text` describes.

    With `lives` = 2, two processes run the job concurrently.
    """
    job = json.loads(text)
    beside = os.fork() if job.get("lives") == 2 else None
    bake(job) if job["action"] == "bake" else deploy(job)
    if beside == 0:
        os._exit(0)
    assert not beside or os.wait()[1] == 0

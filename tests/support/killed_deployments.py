"""A process that deploys in children which kill themselves at a named place, told by lines of JSON on its input.

One process for many crashes: each child is a fork, so libraries are imported once. Line: `action` (release | rollback),
`settings` (store, repository, urls, state), `candidate` (paths of the three manifests), `kill_at`
(checkpoint), `occurrence` (from 1). Answer: the child's status as os.waitpid gives it.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path


def settings_of(job, checkpoint):
    from components.deployment.release import ReleaseSettings

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
    from tests.support.file_triton import FileTriton

    return lambda url: FileTriton(url, repository=job["repository"], state=job["state"])


def deploy(job):
    from components.contracts.manifests import Model, RawDataset, Verdict
    from components.deployment.release import release
    from components.deployment.rollback import rollback

    seen = []

    def checkpoint(name):
        seen.append(name)
        if name == job["kill_at"] and seen.count(name) == job["occurrence"]:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = settings_of(job, checkpoint)
    if job["action"] == "rollback":
        rollback(settings, reason="killed")
    else:
        kinds = (Model, Verdict, RawDataset)
        manifests = [kind.read(path) for kind, path in zip(kinds, job["candidate"], strict=True)]
        release(*manifests, settings=settings)


def main():
    from components.deployment import release, rollback  # noqa: F401  imported before the forks, once

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                deploy(json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()

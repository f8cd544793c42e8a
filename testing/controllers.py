"""Controllers in a thread or a process, which carry out the requests to a registry."""

import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

from controller.reconcile import HANDLED, reconciled
from evergreen.registry.recommenders import served_name
from evergreen.registry.requests import open_requests
from testing.paths import REPOSITORY


@contextmanager
def answering(settings):
    """Run a controller for the registry in `settings` during the `with` block."""
    stop = threading.Event()

    def run():
        while not stop.wait(0.02):
            with suppress(*HANDLED):
                name = settings.recommender or served_name(settings.store)
                if name and open_requests(settings.store):
                    with reconciled(settings):
                        pass

    thread = threading.Thread(target=run, name="controller", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def run_now(work):
    """Run an inspection in the controller's thread, so that each round waits for its inspection."""
    work()


@contextmanager
def answering_in_process(settings):
    """Run a controller of the settings' registry, without servers, in a process of its own."""
    flags = ["--store", str(settings.store), "--repository", settings.repository]
    flags += ["--triton-urls=", "--interval-seconds=0.1"]
    command = [sys.executable, "-m", "controller", *flags]
    with subprocess.Popen(command, cwd=REPOSITORY, umask=0o027) as process:
        try:
            yield
        finally:
            process.terminate()

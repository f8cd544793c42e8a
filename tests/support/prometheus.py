"""A real local Prometheus that scrapes servers as if they were pods of a PodMonitor."""

import json
import shutil
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from contextlib import closing

import pytest
import yaml

from demo.stack import DIRECT, LOOPBACK, ended_with_parent
from testing.processes import wait_for


class Prometheus:
    """A Prometheus that runs within a `with` block.

    `pods` contains the metrics URL of each pod by name.

    Prometheus adds the same labels as the Prometheus Operator adds for a PodMonitor. `interval` is
    the scrape interval, which tests keep short. `flags` are further flags of the server.
    """

    def __init__(self, folder, pods, *, interval="1s", namespace="evergreen", flags=()):
        if shutil.which("prometheus") is None:
            pytest.skip("prometheus is not installed")
        self._folder, self._flags = folder, flags
        folder.mkdir(parents=True)
        targets = [
            {
                "targets": [urllib.parse.urlsplit(url).netloc],
                "labels": {"namespace": namespace, "pod": pod},
            }
            for pod, url in pods.items()
        ]
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval},
            "scrape_configs": [{"job_name": f"{namespace}/triton", "static_configs": targets}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def __enter__(self):
        with closing(socket.socket()) as probe:
            probe.bind((LOOPBACK, 0))
            port = probe.getsockname()[1]
        self._url = f"http://{LOOPBACK}:{port}"
        with open(self._folder / "prometheus.log", "wb") as log:
            self._process = subprocess.Popen(
                ended_with_parent(
                    [
                        "prometheus",
                        f"--config.file={self._folder / 'prometheus.yml'}",
                        f"--storage.tsdb.path={self._folder / 'data'}",
                        f"--web.listen-address={LOOPBACK}:{port}",
                        *self._flags,
                    ],
                    signal.SIGKILL,
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_for(self._is_ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._process.terminate()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_ready(self):
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()[-2000:]
        try:
            with DIRECT.open(f"{self._url}/-/ready", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False

    def query(self, query, **at):
        """Return the result of the query at a time, for each value of the label `pod`.

        The default time is now.

        Samples without the label `pod` have an empty key.
        """
        found = self._get("query", query=query, **at)["result"]
        return {each["metric"].get("pod", ""): float(each["value"][1]) for each in found}

    def series(self, selector):
        """Return the labels of all series that match, as prometheus-adapter requests them."""
        return self._get("series", **{"match[]": selector})

    def _get(self, path, **parameters):
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with DIRECT.open(urllib.request.Request(url), timeout=60) as answer:
            return json.load(answer)["data"]

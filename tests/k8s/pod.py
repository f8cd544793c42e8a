"""Runs Triton's container from a manifest on this machine, and probes it like a kubelet.

The container's arguments are those of the manifest, in the same order. Only values that must differ
on this machine are replaced: the repository's path and the port numbers. Loopback addresses and the
backend's path in the wheel are appended. The module only returns the results of probes, and does
not restart the container.
"""

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from demo.stack import LOOPBACK, ended_with_parent, free_port
from demo.triton import DEFAULT_VENV, prepare
from testing.processes import http_get, wait_for
from tests.support.rendering import Manifest, containers, find


def triton_container(manifests: list[Manifest]) -> Manifest:
    """Return the only container of the Deployment `triton`."""
    (container,) = containers(find(manifests, "Deployment", "triton")["spec"]["template"]["spec"])
    return container


def variables(manifests: list[Manifest], container: Manifest) -> dict[str, str]:
    """Return the variables of a container, including those from ConfigMaps but not from Secrets."""
    found = {}
    for entry in container.get("env", ()):
        if "value" in entry:
            found[entry["name"]] = entry["value"]
        elif source := entry["valueFrom"].get("configMapKeyRef"):
            found[entry["name"]] = find(manifests, "ConfigMap", source["name"])["data"][
                source["key"]
            ]
    return found


def expanded(text: str, values: dict[str, str]) -> str:
    """Replace `$(NAME)` like Kubernetes does.

    If a name is undefined, its placeholder does not change.
    """
    return re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), text)


def flag(container: Manifest, name: str) -> str:
    """Return the value of the only argument that has the form `--name=value`."""
    (found,) = [a.partition("=")[2] for a in container["args"] if a.startswith(f"--{name}=")]
    return found


class PodPorts(NamedTuple):
    """Ports on which the server of a pod listens. The images use the HTTP port for probes."""

    http: int
    grpc: int
    metrics: int


class TritonPod:
    """Runs one container between `start` and `stop`, or in a `with` block.

    The container's log is written to `folder`.

    Args:
        manifests: Objects of a rendered overlay.
        repository: Folder or URI that replaces the model repository in the manifest.
        folder: Folder for the log and for a copy of the backend.
        change: New values by flag, for tests of a manifest with a wrong value.
        environment: Variables in addition to the environment of the test process.
        until: Probe that must pass before the body of the `with` block runs. None = do not wait.
    """

    def __init__(
        self,
        manifests: list[Manifest],
        repository: Path | str,
        folder: Path,
        *,
        change: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
        until: str | None = None,
    ) -> None:
        self._until = until
        self.container = triton_container(manifests)
        self._values = {**variables(manifests, self.container), "MODEL_REPOSITORY": str(repository)}
        self._folder, self._change, self._environment = folder, change or {}, environment or {}
        self.ports: PodPorts
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> "TritonPod":
        """Start the server, and wait until the requested probe passes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        wheel = prepare(DEFAULT_VENV, self._folder / "runtime")
        self.ports = PodPorts(*(free_port() for _ in PodPorts._fields))
        command, *arguments = self.container["args"]
        assert command == wheel.binary.name
        own = {
            **self._change,
            **{f"{name}-port": str(port) for name, port in self.ports._asdict().items()},
        }
        flags = []
        for argument in arguments:
            name = argument.partition("=")[0].removeprefix("--")
            flags.append(
                f"--{name}={own[name]}" if name in own else expanded(argument, self._values)
            )
        flags += [f"--{name}-address={LOOPBACK}" for name in PodPorts._fields]
        flags += [
            f"--backend-directory={wheel.backends}",
            f"--backend-config=python,shm-region-prefix-name={self._shm}",
        ]
        flags += [
            f"--backend-config=python,shm-{kind}-byte-size=4194304"
            for kind in ("default", "growth")
        ]
        with open(self._folder / "triton.log", "wb") as log:
            self.process = subprocess.Popen(
                ended_with_parent([str(wheel.binary), *flags], signal.SIGKILL),
                env={**os.environ, **self._environment, **wheel.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if self._until:
                self.wait_for(self._until)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End the server and its stubs by their group, and remove their shared memory."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for leftover in Path("/dev/shm").glob(f"{self._shm}*"):
            leftover.unlink(missing_ok=True)

    @property
    def _shm(self) -> str:
        return f"evergreen_{os.getpid()}_pod{self.ports.grpc}_"

    @property
    def grpc_url(self) -> str:
        """Address (host:port) of the server's gRPC port on this machine."""
        return f"{LOOPBACK}:{self.ports.grpc}"

    @property
    def log(self) -> str:
        """Standard output and standard error of the server."""
        return (self._folder / "triton.log").read_text(errors="replace")

    def get(self, path: str, *, port: str = "http", timeout: float = 5.0) -> int:
        """Return the HTTP status of a path, or 0 if nobody answers."""
        return http_get(
            f"http://{LOOPBACK}:{getattr(self.ports, port)}{path}", timeout=timeout
        ).status

    def passes(self, probe: str) -> bool:
        """Return whether the probe succeeds at present, with a status from 200 to 399."""
        action = self.container[probe]["httpGet"]
        status = self.get(
            action["path"], port=action["port"], timeout=self.container[probe]["timeoutSeconds"]
        )
        return 200 <= status < 400

    def wait_for(self, probe: str, seconds: float = 120.0) -> None:
        """Wait until the probe passes.

        If the wait times out, the error contains the server's output.
        """

        def passes() -> bool:
            assert self.process.poll() is None, (
                f"triton ended with {self.process.returncode}: {self.log[-2000:]}"
            )
            return self.passes(probe)

        wait_for(passes, seconds=seconds)

    def metrics(self) -> str:
        """Return the Prometheus text of port `metrics`."""
        return http_get(f"http://{LOOPBACK}:{self.ports.metrics}/metrics", timeout=5.0).text

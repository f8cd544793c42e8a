"""Run a real tritonserver on this machine, from the wheel of the serving environment.

The demo, development and tests use this server. The server gets free ports, and must be ready
before a deadline. The server ends with its owner. The owner stops the server at exit. If the owner
is killed, the kernel kills the server. The wheel (nvidia-pytriton) has one stub of the python
backend per Python version, but not at the path where the server looks. Therefore stub and backend
are copied into a runtime folder.

This Triton (2.51) lacks the security fixes of later releases. The server therefore listens only on
loopback, has no HTTP endpoint except the metrics, and refuses clients' shared memory and changes of
its logs and traces (docs/design/threat-model.md).
"""

import atexit
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from demo.stack import LOOPBACK, answers, ended_with_parent
from evergreen.config.spec import CANDIDATE_SUFFIX
from evergreen.contracts.serving import CODE_FILE, CONFIG_FILE, GRPC_OPTIONS, PYTHON, versions_of
from evergreen.registry.models import GRAPH_FILE
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.runtime.onnx_runtime import SILENT


def models_to_load(repository: Path) -> list[str]:
    """Return the models that a server loads at its start.

    The server loads every model that has a configuration, except the candidates of a rehearsal. A
    configuration file that contains only comments is ignored
    (`serving.repository.model_repository`).
    """
    names = sorted(
        path.parent.name
        for path in repository.glob(f"*/{CONFIG_FILE}")
        if any(line and not line.startswith("#") for line in path.read_text().splitlines())
    )
    return [name for name in names if not name.endswith(CANDIDATE_SUFFIX)]


def check_repository(repository: Path) -> None:
    """Check that Triton can start with the content of `repository`, which may be empty.

    Models without `version_policy` in their configuration are not checked, because Evergreen did
    not write them.

    Raises:
        ContractError: a configured version is absent or lacks a file. Triton would hang at its
            start.
    """
    for name in models_to_load(repository):
        text = (repository / name / CONFIG_FILE).read_text()
        needed = (GRAPH_FILE, CODE_FILE) if f'backend: "{PYTHON}"' in text else (GRAPH_FILE,)
        for version in versions_of(text) if "version_policy" in text else ():
            for file in (repository / name / str(version) / each for each in needed):
                if not file.exists():
                    raise ContractError(
                        f"{file} is absent, expected in every version that {CONFIG_FILE} names"
                    )


_ASK_PYTHON = (
    "import json, sys, sysconfig; print(json.dumps([sysconfig.get_path('purelib'), "
    "sysconfig.get_config_var('LIBDIR'), '%d.%d' % sys.version_info[:2]]))"
)


@dataclass(frozen=True, kw_only=True)
class PreparedWheel:
    """Paths and variables to start the server."""

    binary: Path
    """Path of the executable tritonserver."""
    backends: Path
    """Folder for `--backend-directory`."""
    caches: Path
    """Folder for `--cache-directory`."""
    variables: dict[str, str]
    """Environment variables that the server and its stubs need."""


def prepare(venv: Path, runtime: Path) -> PreparedWheel:
    """Return the server of the environment `venv`.

    The server's backend is copied below `runtime` unless it is there already.

    Raises:
        ContractError: the environment or a file of its wheel is absent.
    """
    python = (venv / "bin" / "python").absolute()
    if not python.exists():
        raise ContractError(f"serving environment {venv} is absent, expected a built environment")
    packages, libraries, version = json.loads(
        subprocess.check_output([python, "-I", "-c", _ASK_PYTHON], text=True)
    )
    wheel = Path(packages) / "pytriton" / "tritonserver"
    binary = wheel / "bin" / "tritonserver"
    stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
    for needed in (binary, stub):
        if not needed.exists():
            raise ContractError(f"{needed} is absent, expected a file of the nvidia-pytriton wheel")
    backend = runtime / "backends" / "python"
    backend.mkdir(parents=True, exist_ok=True)
    for source in (*(wheel / "backends" / "python").glob("*.*"), stub):
        target = backend / source.name
        if not target.exists():  # a running server may use the existing copy
            aside = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copy2(source, aside)
            os.replace(aside, target)
    variables = {
        # The first python3 on PATH interprets model.py. PYTHONPATH would not change this
        # interpreter.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        # Without this path, the stub loads another libpython, or lacks libcudart and hangs the
        # server.
        "LD_LIBRARY_PATH": f"{libraries}:{Path(packages) / 'nvidia_pytriton.libs'}",
        "OMP_NUM_THREADS": "1",
        **SILENT,
    }
    return PreparedWheel(
        binary=binary, backends=runtime / "backends", caches=wheel / "caches", variables=variables
    )


logger = logging.getLogger(__name__)

DEFAULT_VENV = Path(__file__).resolve().parents[1] / ".venvs" / "serving"
"""Environment with the server's wheel and the imports of `model.py`."""
_NAME = "evergreen_"
"""Prefix of every server's name. The rest of the name is the owner's process id and the server's
gRPC port."""
_SHM = Path("/dev/shm")
_SHM_BYTES = 4 * 2**20
"""Initial shared memory of one model instance in bytes. Triton's default is too large for small
machines."""
_ATTEMPTS = 3
"""Maximum number of starts, each with new free ports. Another process may take a port before the
server does."""
RESTRICTED = "shared-memory,trace,logging"
"""Protocols that no client may use."""
_TAKEN = "already in use"
_NOISE = ("CudaDriverHelper", "CUDA driver version", "pinned system memory")
"""Harmless warnings in the log of every start without a GPU."""


class Ports(NamedTuple):
    """Ports on which one Triton listens."""

    grpc: int
    metrics: int


@dataclass(frozen=True, kw_only=True)
class TritonSettings:
    """Settings of the server's start and stop."""

    ready_seconds: float = 60.0
    """Maximum time from start to ready. If a model's code cannot run, Triton hangs at its start
    forever."""
    stop_seconds: float = 10.0
    """Time from SIGTERM to SIGKILL. An idle server needs 1.5 to 3.5 s to stop."""
    cache_bytes: int | None = None
    """Size of the response cache, or None for no cache. A cache only pays off if requests repeat
    byte by byte (`benchmarks.cache`). Click features rarely repeat, so the cache would only cost
    the time to hash each request."""


class TritonServer:
    """One tritonserver that runs between `start` and `stop`, or inside a `with`.

    At its start, the server loads all models of the repository. The server loads later models only
    on request. The configurations in the repository name the versions. A server that restarts after
    a kill during a release therefore loads the latest published versions.

    Call `start` from a thread that lives longer than the server. For the kernel, the end of that
    thread is the end of the owner. Paths may contain spaces.

    Args:
        repository: Model repository, which is created if it is absent.
        log: Log file, to which the server appends.
        runtime: Writable folder for the prepared backend. Default: `triton-runtime` next to the
            log.
        variables: Environment variables of the server. The variables take precedence over the
            current environment and the wheel's variables.
        settings: Settings of start and stop.
    """

    def __init__(
        self,
        repository: Path,
        *,
        log: Path,
        runtime: Path | None = None,
        variables: Mapping[str, str] | None = None,
        settings: TritonSettings | None = None,
    ) -> None:
        self.repository = repository
        self.log_path = log
        self.settings = settings or TritonSettings()
        self.start_seconds: float | None = None
        """Seconds from the start until the server was ready, or None before that."""
        self._runtime = runtime or log.parent / "triton-runtime"
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: Ports | None = None
        self._aliases: list[Path] = []
        self._is_swept = True

    def __enter__(self) -> "TritonServer":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def grpc_url(self) -> str:
        """host:port for gRPC clients."""
        return f"{LOOPBACK}:{self._listening.grpc}"

    @property
    def metrics_address(self) -> str:
        """host:port of the metrics."""
        return f"{LOOPBACK}:{self._listening.metrics}"

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{self.metrics_address}/metrics"

    @property
    def pid(self) -> int | None:
        """The server's process id, or None before the first start."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """Exit status of the server, or None while it runs.

        A negative status is the number of the signal that ended the server.
        """
        return self._process.poll() if self._process else None

    def alive(self) -> bool:
        """Return whether the process runs.

        A running process may still serve wrong answers. Only a successful inference shows that a
        model works.
        """
        return self._process is not None and self._process.poll() is None

    def start(self) -> "TritonServer":
        """Start the server and wait until it is ready.

        A restart uses the same ports, so that clients find it.

        Raises:
            ContractError: the repository or the serving environment lacks a file.
            PermanentError: the server ended at once. The message quotes the server's log.
            TemporaryError: the server was not ready in time and was stopped.
        """
        assert not self.alive(), "the server runs already"
        ports = self._ports
        self.stop()
        _remove_orphaned_shared_memory()
        self.repository.mkdir(parents=True, exist_ok=True)
        check_repository(self.repository)
        wheel = prepare(DEFAULT_VENV, self._runtime)
        for attempt in range(1, _ATTEMPTS + 1):
            self._ports = ports or _free_ports()
            log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            started = time.monotonic()
            self._launch(wheel)
            try:
                self._wait_until_ready(log_start)
            except PermanentError as error:
                if ports or attempt == _ATTEMPTS or _TAKEN not in str(error):
                    raise
                logger.info("a port was taken between choice and start, choosing again")
                continue
            self.start_seconds = time.monotonic() - started
            logger.info(
                "triton %d ready after %.2f s, gRPC %s", self.pid, self.start_seconds, self.grpc_url
            )
            break
        return self

    def ask_to_stop(self) -> None:
        """Send SIGTERM without waiting. `stop` also waits for the end."""
        if self._process is not None:
            self._process.terminate()  # does nothing after the end of the process

    def stop(self) -> int | None:
        """Stop the server, and remove its remaining processes and files.

        Returns the server's exit status, or None if the server never ran.
        """
        process = self._process
        if process is None or self._is_swept:
            return self.returncode
        atexit.unregister(self.stop)
        self.ask_to_stop()
        try:
            process.wait(self.settings.stop_seconds)
        except subprocess.TimeoutExpired:
            logger.warning(
                "triton %d ignored SIGTERM for %s s, killing it",
                process.pid,
                self.settings.stop_seconds,
            )
            process.kill()
            process.wait()
        # A stub can outlive its crashed server and ignore SIGTERM. All stubs run in the process
        # group of the server.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._is_swept = True
        while self._aliases:
            shutil.rmtree(self._aliases.pop(), ignore_errors=True)
        for leftover in _SHM.glob(f"{self._shm_prefix}*"):
            leftover.unlink(missing_ok=True)
        return process.returncode

    def kill(self) -> None:
        """Kill the server at once, as a crash would.

        `stop` must still be called to remove the server's files.
        """
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def _listening(self) -> Ports:
        assert self._ports is not None, "the server has not been started"
        return self._ports

    @property
    def _shm_prefix(self) -> str:
        return f"{self._name}_"

    @property
    def _name(self) -> str:
        """Unique name of this server, for its responses and its shared memory."""
        return f"{_NAME}{os.getpid()}_{self._listening.grpc}"

    def _flags(self, repository: Path, backends: Path, caches: Path) -> list[str]:
        ports = self._listening
        flags = [
            f"--id={self._name}",
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-default-byte-size={_SHM_BYTES}",
            f"--backend-config=python,shm-growth-byte-size={_SHM_BYTES}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            "--allow-http=false",
            # Only a caller with this secret value may use these protocols, and the value is
            # discarded.
            f"--grpc-restricted-protocol={RESTRICTED}:{secrets.token_hex(8)}={secrets.token_hex(16)}",
            *(f"--{service}-address={LOOPBACK}" for service in Ports._fields),
            *(f"--{service}-port={port}" for service, port in zip(Ports._fields, ports)),
            "--allow-gpu-metrics=false",
            "--metrics-config=summary_latencies=true",
            "--pinned-memory-pool-byte-size=0",
            "--model-control-mode=explicit",
            # The generated config.pbtxt is complete. With Triton's auto-completion, every stub
            # would start twice (1.5 s instead of 0.3 s).
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={max(1, int(self.settings.stop_seconds) - 2)}",
        ]
        flags += [f"--load-model={name}" for name in models_to_load(self.repository)]
        if self.settings.cache_bytes is not None:
            flags += [
                f"--cache-directory={caches}",
                f"--cache-config=local,size={self.settings.cache_bytes}",
            ]
        return flags

    def _launch(self, wheel: PreparedWheel) -> None:
        flags = self._flags(self._plain(self.repository), self._plain(wheel.backends), wheel.caches)
        command = [str(wheel.binary), *flags]
        self._is_swept = False
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                ended_with_parent(command, signal.SIGKILL),
                env={**os.environ, **wheel.variables, **self._variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # In its own process group, the server does not receive a Ctrl-C of the terminal.
                # The owner process stops the server.
                start_new_session=True,
            )
        atexit.register(self.stop)

    def _plain(self, path: Path) -> Path:
        """Return a name of `path` that a shell reads as one word.

        Triton starts its stub through a shell without quoting.
        """
        path = path.absolute()
        if shlex.quote(str(path)) == str(path):
            return path
        folders = [f for f in (tempfile.gettempdir(), "/tmp") if shlex.quote(f) == f]
        self._aliases.append(Path(tempfile.mkdtemp(prefix="evergreen-triton-", dir=folders[0])))
        alias = self._aliases[-1] / "path"
        alias.symlink_to(path)
        return alias

    def _wait_until_ready(self, log_start: int) -> None:
        deadline = time.monotonic() + self.settings.ready_seconds
        try:
            while not self._is_ready():
                if not self.alive():
                    raise PermanentError(
                        f"triton ended with {self.returncode} at start: "
                        f"{self._last_errors(log_start)}"
                    )
                if time.monotonic() >= deadline:
                    raise TemporaryError(
                        f"triton is not ready after {self.settings.ready_seconds} s: "
                        f"{self._last_errors(log_start)}"
                    )
                time.sleep(0.02)
        except BaseException:
            self.stop()
            raise

    def _is_ready(self) -> bool:
        # The metrics port opens last. If a server cannot open this port, it ends. gRPC is called
        # only when the metrics port answers, because a refused gRPC connection would delay the next
        # attempt.
        if not answers(self.metrics_url):
            return False
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        try:
            with InferenceServerClient(self.grpc_url, channel_args=[*GRPC_OPTIONS]) as client:
                # Another Triton may have taken the port before this one. Only the name
                # distinguishes the two servers.
                named = client.get_server_metadata().name == self._name
                return bool(named and client.is_server_ready() and self.alive())
        except InferenceServerException:
            return False

    def _last_errors(self, log_start: int) -> str:
        """Return the log's last lines since `log_start`, errors first."""
        with open(self.log_path, "rb") as log:
            log.seek(log_start)
            lines = log.read().decode(errors="replace").splitlines()
        lines = [line for line in lines if not any(noise in line for noise in _NOISE)]
        errors = [line for line in lines if line.startswith("E") or "error" in line.lower()]
        return " | ".join((errors or lines)[-3:]) + f" (log: {self.log_path})"


def _free_ports() -> Ports:
    """Return two free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in Ports._fields]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return Ports(*(each.getsockname()[1] for each in sockets))


def _remove_orphaned_shared_memory() -> None:
    """Remove the shared memory of servers whose owner was killed."""
    for leftover in _SHM.glob(f"{_NAME}*"):
        owner = leftover.name.removeprefix(_NAME).partition("_")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            leftover.unlink(missing_ok=True)
        except (ValueError, PermissionError):
            continue

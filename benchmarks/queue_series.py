"""Records what real Tritons count under known loads: the series against which the autoscaler's query is tested.

Four servers stand for four pods, for 150 s: `busy` (one model under load, one that wakes half-way with few slow
requests, one idle), `restarted` (killed half-way: its counters begin again), `quiet` (three requests, once), `stuck`
(its requests do not end). Counters are read every 5 s as Prometheus would. Traffic pauses over the readings around the
kill, so that no request is lost between two of them and the truth is exact. What the clients got answered is kept
beside the counters. Not measured here: speed; the models sleep and compute nothing.

    python -m benchmarks.queue_series --out tests/k8s/queue_series.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.machine import facts
from components.contracts.serving import CANARY_NAME, CANDIDATE_NAME, MODEL_NAME, NUM_CATEGORICAL, NUM_DENSE
from components.deployment.repository.triton_config import ServingOptions, triton_config
from components.runtime.exit_codes import exits_with_code
from pipelines.local.stack import DIRECT
from pipelines.local.triton import TritonServer

METRICS = (
    "nv_inference_queue_duration_us",
    "nv_inference_request_success",
    "nv_inference_pending_request_count",
)
INTERVAL = 5.0
READINGS = 31
HALF_WAY = 15
"""The reading after which `restarted` is killed and the second model of `busy` wakes."""
LONGEST = 3_600_000_000
"""Microseconds that a request may wait: here the queue refuses nobody."""

_SLEEPER = """\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({seconds} * len(requests))
        dense = [pb_utils.get_input_tensor_by_name(r, "dense").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("probability", d[:, :1])]) for d in dense]
"""


def write_sleeper(repository: Path, name: str, seconds: float, *, instances: int = 1, cache: bool = False) -> None:
    """Adds a model to `repository` that takes `seconds` for each request and answers with its first input."""
    options = ServingOptions(instances=instances, queue_timeout_microseconds=LONGEST, response_cache=cache)
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(triton_config(name, options, [1]))
    (folder / "model.py").write_text(_SLEEPER.format(seconds=seconds))
    # The server's own start asks for a graph beside the code; the code does not read it.
    (folder / "model.onnx").touch()


def counts(metrics_url: str) -> dict[str, dict[str, int]]:
    """The server's numbers now, by metric and model."""
    with DIRECT.open(metrics_url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, dict[str, int]] = {name: {} for name in METRICS}
    for sample in (sample for family in families for sample in family.samples):
        # The parser ends every counter's name in _total, which Triton's names lack.
        if (name := sample.name.removesuffix("_total")) in found:
            found[name][sample.labels["model"]] = int(sample.value)
    return found


class Client:
    """Sends the same row to one server; counts what was answered. No deadline: a cancelled call can kill Triton."""

    def __init__(self, url: str) -> None:
        self.grpc = grpc_client.InferenceServerClient(url)
        self._inputs = []
        for name, kind, row in (
            ("dense", "FP32", np.zeros((1, NUM_DENSE), np.float32)),
            ("categorical", "INT64", np.zeros((1, NUM_CATEGORICAL), np.int64)),
        ):
            self._inputs.append(grpc_client.InferInput(name, list(row.shape), kind))
            self._inputs[-1].set_data_from_numpy(row)
        self.answered = 0
        self._lock = threading.Lock()

    def ask(self, model: str = MODEL_NAME) -> None:
        """One request, answered."""
        self.grpc.infer(model, self._inputs)
        with self._lock:
            self.answered += 1

    def ask_at_once(self, count: int, model: str = MODEL_NAME) -> list[threading.Thread]:
        """That many requests side by side, under way; a server that ends answers none of them."""

        def ask() -> None:
            with suppress(Exception):
                self.ask(model)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads


class Load:
    """A closed loop of `num_clients` on one server."""

    def __init__(self, client: Client, num_clients: int) -> None:
        self._client = client
        self._is_paused = self._is_stopped = False
        self._asking = [threading.Lock() for _ in range(num_clients)]
        for lock in self._asking:
            threading.Thread(target=self._ask_on, args=(lock,), daemon=True).start()

    def _ask_on(self, asking: threading.Lock) -> None:
        while not self._is_stopped:
            # The connection to a server that was killed fails a few times before it is made anew.
            with asking, suppress(Exception):
                if not self._is_paused:
                    self._client.ask()
            time.sleep(0.05 if self._is_paused else 0)

    def pause(self) -> None:
        """Stops asking, and waits for the answers that are due."""
        self._is_paused = True
        for lock in self._asking:
            assert lock.acquire(timeout=30), "a request did not end"
            lock.release()

    def resume(self) -> None:
        """Goes on."""
        self._is_paused = False

    def stop(self) -> None:
        """Ends the loop."""
        self._is_stopped = True


@contextmanager
def running(folder: Path, models: dict[str, float]) -> Iterator[tuple[TritonServer, Client]]:
    """A server of sleeping models, seconds by name, and a client of it."""
    for name, seconds in models.items():
        write_sleeper(folder / "repository", name, seconds)
    with TritonServer(folder / "repository", log=folder / "triton.log") as server:
        client = Client(server.grpc_url)
        for name in models.keys() - {MODEL_NAME, CANARY_NAME}:
            client.grpc.load_model(name)
        yield server, client


def record(folder: Path) -> dict[str, Any]:
    """The readings of all servers, and what their clients got answered."""
    with ExitStack() as stack:
        models = {
            "busy": {MODEL_NAME: 0.004, CANARY_NAME: 0.06, CANDIDATE_NAME: 0.004},
            "restarted": {MODEL_NAME: 0.006},
            "quiet": {MODEL_NAME: 0.02},
            "stuck": {MODEL_NAME: 600.0},
        }
        pods = {name: stack.enter_context(running(folder / name, seconds)) for name, seconds in models.items()}
        readings: dict[str, list[dict[str, dict[str, int]] | None]] = {name: [] for name in pods}
        loads = {"busy": Load(pods["busy"][1], 6), "restarted": Load(pods["restarted"][1], 4)}
        stack.callback(lambda: [load.stop() for load in loads.values()])
        began = time.monotonic()
        for index in range(READINGS):
            if index == HALF_WAY:
                loads["restarted"].pause()
            time.sleep(max(0.0, began + INTERVAL * index - time.monotonic()))
            for name, (server, _) in pods.items():
                readings[name].append(counts(server.metrics_url))
            print(f"reading {index + 1} of {READINGS}", file=sys.stderr)
            if index == HALF_WAY:
                pods["restarted"][0].kill()
                pods["restarted"][0].restart()
                # The client's next call finds the new server on the old port.
                loads["restarted"].resume()
            if index >= HALF_WAY and index % 2 == 0:
                pods["busy"][1].ask_at_once(4, CANARY_NAME)
            if index == 12:
                pods["quiet"][1].ask_at_once(3)
            if index == 4:
                pods["stuck"][1].ask_at_once(13)
        for load in loads.values():
            load.pause()
        last = {name: counts(server.metrics_url) for name, (server, _) in pods.items()}
        answered = {name: client.answered for name, (_, client) in pods.items()}
        for server, _ in pods.values():
            server.kill()
    return {"interval_seconds": INTERVAL, "readings": readings, "last": last, "answered": answered}


@exits_with_code
def main(argv: list[str]) -> int:
    """Records and writes; takes two and a half minutes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        recorded = record(Path(folder))
    machine = {key: value for key, value in facts().items() if key in ("processor", "cores", "load_average")}
    document = {"made_by": "python -m benchmarks.queue_series", "machine": machine, **recorded}
    options.out.write_text(json.dumps(document).replace("}, {", "},\n{") + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

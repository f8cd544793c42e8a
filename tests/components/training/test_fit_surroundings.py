"""What surrounds a fit: sinks for its numbers, its trace, and the request to stop."""

from __future__ import annotations

import json
import logging
import signal
import threading

import pytest

from components.runtime.errors import PermanentError, Preempted
from components.training.config import TrainingSettings
from components.training.metrics_sink import JsonLinesSink, MemorySink, SeveralSinks, TensorBoardSink
from components.training.preemption import heeding_sigterm
from components.training.profiler import ProfiledEngine
from tests.support.logistic_engine import LogisticEngine


def test_every_sink_gets_every_number_and_lines_survive_a_crash(tmp_path):
    memory, path = MemorySink(), tmp_path / "metrics.jsonl"
    sinks = SeveralSinks([JsonLinesSink(path), memory])
    sinks.log({"auc": None, "log_loss": 0.4}, 7)
    sinks.log({"rows_per_second": 3.0}, 8)
    # Not closed: a crash closes nothing.
    assert [json.loads(line) for line in path.read_text().splitlines()] == memory.lines
    assert memory.lines == [{"step": 7, "auc": None, "log_loss": 0.4}, {"step": 8, "rows_per_second": 3.0}]
    sinks.close()


def test_a_line_torn_by_a_full_disk_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "auc": 0.5}\n{"step": 2, "au')
    JsonLinesSink(path).log({"auc": 0.6}, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


class BrokenTrace:
    """A trace that cannot be written."""

    def stop(self):
        raise OSError("No space left on device")


def test_an_engine_is_closed_also_where_its_trace_cannot_be_written(tmp_path, monkeypatch):
    engine = LogisticEngine([2] * 26, TrainingSettings())
    profiled = ProfiledEngine(engine, 5, tmp_path / "trace.json")
    monkeypatch.setattr(profiled, "_trace", BrokenTrace())
    with pytest.raises(OSError, match="No space left"):
        profiled.close()
    assert engine.calls == [("close",)]


def test_a_fit_too_short_for_a_trace_says_that_there_is_none(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        ProfiledEngine(LogisticEngine([2] * 26, TrainingSettings()), 5, tmp_path / "trace.json").close()
    assert "no trace" in caplog.text
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_a_point_for_each_number_that_exists(tmp_path):
    try:
        sink = TensorBoardSink(tmp_path)
    except PermanentError:
        pytest.skip("the package tensorboard is not in this environment")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink.log({"auc": None, "log_loss": 0.5}, 7)
    sink.log({"log_loss": 0.25}, 8)
    sink.log({"branch": 1, "log_loss": 0.75}, 7)
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = {
        tag: [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]
    }
    assert points == {"log_loss": [(7, 0.5), (8, 0.25)], "branch_1/log_loss": [(7, 0.75)]}


def test_sigterm_outside_a_fit_ends_the_step_at_once():
    with pytest.raises(Preempted, match="SIGTERM came while no fit was under way"), heeding_sigterm():
        signal.raise_signal(signal.SIGTERM)


def test_sigterm_within_a_fit_is_a_request_and_ends_the_step_after_it():
    done = []
    with pytest.raises(Preempted, match="it is saved whole"), heeding_sigterm() as request:  # noqa: PT012
        assert not request()
        with request.deferred():
            signal.raise_signal(signal.SIGTERM)
            done.append(request())
    assert done == [True]


def test_a_second_sigterm_does_not_disturb_what_heeds_the_first():
    done = []
    with pytest.raises(Preempted, match="while no fit was under way"), heeding_sigterm():  # noqa: PT012
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            done.append("cleaned up")
    assert done == ["cleaned up"]


def test_the_handler_of_before_is_back_afterwards_and_threads_do_without():
    before = signal.getsignal(signal.SIGTERM)
    with heeding_sigterm():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    looked = []

    def work():
        with heeding_sigterm() as request:
            looked.append(request())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert looked == [False]

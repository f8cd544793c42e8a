"""Tests of the demo's folder and data: one demo per folder, no foreign files, and both labels."""

import gzip
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demo.demo import (
    Screen,
    _first_run,
    _print_missing_model,
    _start_drift,
    _wait_until_baked,
    open_demo,
    start_clean,
)
from demo.plan import (
    DemoSettings,
    Services,
    count_requests,
    describe_data,
    have_times,
    plan_for_data,
)
from demo.runner import LocalFolders
from demo.stack import ProcessDied, Stack
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.recommender_file.draft import draft, read_sample
from evergreen.registry.runs import RunOutcome, write_outcome
from evergreen.runtime.errors import ContractError, PermanentError, run_again
from testing.releases import passing_verdict
from tests.support.errors import raises, says


def test_second_demo_in_folder_is_refused_and_firsts_files_stay(tmp_path):
    folder = tmp_path / "a demo"
    with start_clean(folder):
        (folder / "lake").mkdir()
        with (
            says(ContractError, "another-demo", folder=folder),
            start_clean(folder),
        ):
            pass
        assert (folder / "lake").is_dir()
    with start_clean(folder):
        assert [path.name for path in folder.iterdir()] == [".evergreen-demo"]


def test_killed_demo_leaves_folder_to_next_demo(tmp_path):
    folder = tmp_path / "a demo"
    program = (
        "import os, pathlib, sys; from demo.demo import start_clean\n"
        "with start_clean(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(folder)]).returncode == -9
    with start_clean(folder):
        pass


def test_only_finished_demo_can_be_opened(tmp_path):
    with says(ContractError, "no-demo", folder=tmp_path):
        open_demo(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("clicks", "message"), [(0, "0 clicks in 4,000 rows"), (4000, "4,000 clicks in 4,000 rows")]
)
def test_labels_of_one_class_are_refused_before_anything_is_trained(tmp_path, clicks, message):
    settings = DemoSettings(folder=tmp_path)
    with pytest.raises(ContractError, match=message):
        plan_for_data(
            settings,
            CRITEO_RECOMMENDER,
            replay_rows=1600,
            lake_rows=2400,
            clicks=clicks,
            replay_requests=1600,
        )


CRITEO_NAMES = ["id", "label", *map(str.lower, CRITEO_RECOMMENDER.features.names)]
CRITEO_LINE = "0\t1\t" + "5\t" * 11 + "\t" + "68fd1e64\t" * 25 + "\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train.csv",
            (",".join(CRITEO_NAMES) + "\n" + "1," * 40 + "1\n").encode(),
            "the rows have Criteo's columns",
        ),
        ("day_0.tsv", CRITEO_LINE.encode(), "the rows are Criteo's: text without a header"),
        (
            "day_0",
            CRITEO_LINE.replace("0\t1\t", "1\t-2\t", 1).encode(),
            "the rows are Criteo's: text without a header",
        ),
        (
            "day_0.gz",
            gzip.compress(CRITEO_LINE.encode()),
            "the rows are Criteo's: text without a header",
        ),
    ],
)
@pytest.mark.parametrize("is_folder", [True, False])
def test_criteo_rows_are_recognized_and_not_drafted(tmp_path, name, content, message, is_folder):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(content)
    (tmp_path / "data" / "readme.md").write_text("How these rows were made.")
    data = tmp_path / "data" if is_folder else tmp_path / "data" / name
    found = describe_data(data, tmp_path / "draft.yaml")
    assert found == (CRITEO_RECOMMENDER, [message], False)
    assert not (tmp_path / "draft.yaml").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shop.csv", "clicked,price,price\n0,1,2.5\n1,2,3.5\n"),
        ("numbers.tsv", "1.5\t2\t3\n0\t1\t2\n"),
        ("almost.tsv", CRITEO_LINE.replace("68fd1e64", "red shoes")),
        ("test.tsv", CRITEO_LINE.partition("\t")[2]),
        ("empty.csv", ""),
    ],
)
def test_undraftable_input_gets_drafts_own_message_and_never_criteos(tmp_path, name, text):
    data = tmp_path / name
    data.write_text(text)
    with pytest.raises(ContractError) as own:
        draft(read_sample(data), name="any")
    with pytest.raises(ContractError) as caught:
        describe_data(data, tmp_path / "draft.yaml")
    assert str(caught.value) == str(own.value)
    assert "Criteo" not in str(caught.value)


def test_folder_without_rows_names_expected_files(tmp_path):
    (tmp_path / "readme.md").write_text("No rows.")
    (tmp_path / ".hidden.csv").write_text("clicked,price\n0,1.5\n")
    with raises(ContractError, "no file of rows", ".csv"):
        describe_data(tmp_path, tmp_path / "draft.yaml")


TIMES = "ts,clicked,price,item_id\n" + "".join(
    f"2026-03-0{1 + i % 3}T00:00:{i % 60:02d},{i % 2},{i / 7:.2f},{i % 9}\n" for i in range(200)
)


@pytest.mark.parametrize(
    ("text", "has_times"), [(TIMES, True), (TIMES.replace("ts,", "n,").replace("T00", ""), False)]
)
def test_rows_have_times_where_draft_or_given_file_names_their_column(tmp_path, text, has_times):
    data = tmp_path / "shop.csv"
    data.write_text(text)
    found = describe_data(data, tmp_path / "draft.yaml")
    assert found.has_times == has_times
    assert have_times(data, found.recommender) == has_times
    other = replace(found.recommender, data=replace(found.recommender.data, event_time="shown_at"))
    assert not have_times(data, other)
    assert not have_times(tmp_path / "absent.csv", found.recommender)


@pytest.mark.parametrize(
    ("rows", "requests", "keeps"),
    [
        (480, 480, True),
        (2000, 2000, True),
        (100_000, 100_000, False),
        (24_000, 4800, True),
        (24_000, 24_000, False),
    ],
)
def test_requests_of_data_are_kept_only_if_so_many_can_be_sent(tmp_path, rows, requests, keeps):
    plan = plan_for_data(
        DemoSettings(folder=tmp_path),
        CRITEO_RECOMMENDER,
        replay_rows=rows,
        lake_rows=2 * rows,
        clicks=rows // 3,
        replay_requests=requests,
    )
    assert plan.keeps_requests == keeps
    assert (plan.rate * requests / rows <= 80) == keeps
    services = Services(
        settings=DemoSettings(folder=tmp_path, data=tmp_path / "shop.csv"),
        plan=plan,
        folders=LocalFolders(root=tmp_path),
        triton_url="127.0.0.1:1",
        metrics_url="127.0.0.1:2",
    )
    assert ("--keep-requests" in services.replay_command()) == keeps


def test_requests_of_replayed_rows_are_counted(tmp_path):
    pq.write_table(
        pa.table({"request_id": ["a", "a", "b", "c", "c", "c"]}), tmp_path / "replay.parquet"
    )
    assert count_requests(tmp_path / "replay.parquet") == 3


def test_rows_that_no_draft_can_describe_are_refused_with_what_is_missing(tmp_path):
    (tmp_path / "shop.csv").write_text("clicks,price\n" + "3,0.5\n0,1.5\n" * 50)
    with raises(ContractError, "label", "evergreen init"):
        describe_data(tmp_path / "shop.csv", tmp_path / "draft.yaml")


@pytest.fixture
def begun(tmp_path):
    """A demo whose first run ends at once with an exit code.

    The run leaves an outcome and a verdict, unless a test disables them.
    """
    folders = LocalFolders(root=tmp_path)
    folders.logs.mkdir()

    def begin(stack, code, outcome, verdict=None):
        if outcome is not None:
            write_outcome(folders.store, outcome)
        if verdict is not None:
            verdict.write(folders.artifacts / "first" / "evaluation" / "verdict")
        command = [sys.executable, "-c", f"print('the last word'); raise SystemExit({code})"]
        services = SimpleNamespace(first_run_command=lambda: command)
        return SimpleNamespace(
            folders=folders, screen=Screen(), stack=stack, services=services, watch=lambda: None
        )

    with Stack(logs=folders.logs, variables={}) as stack:
        yield partial(begin, stack)


def ended(state, step):
    return RunOutcome(
        run="first",
        trigger_id="first",
        state=state,
        step=step,
        reason="because",
        version=None,
        ended_at="2026-01-01",
    )


def test_refused_first_model_ends_demo_with_advice_that_would_release_one(begun, tmp_path, capsys):
    advice = ["about 600 held-out rows would tell", f"or {run_again('--set gate.min_auc=0.52')}"]
    verdict = passing_verdict(
        "m1", tmp_path / "s", num_rows=9, accepted=False, advice=advice, warnings=["price leaks"]
    )
    demo = begun(1, ended("refused", "evaluation"), verdict)
    outcome = _first_run(demo)
    assert outcome.state == "refused"
    assert _print_missing_model(demo, outcome) == 1
    output = capsys.readouterr().out.splitlines()
    assert "no first model: refused at evaluation: because" in output[0]
    assert "warning: price leaks" in output[1]
    assert "to complete the loop: about 600 held-out rows would tell" in output[2]
    assert "write `gate: {min_auc: 0.52}` into a copy of the recommender's file" in output[3]
    assert len(output) == 4


def test_first_failed_run_says_why_and_one_without_reason_is_error(begun, capsys):
    with raises(PermanentError, "first_run", "code 3", "the last word"):
        _first_run(begun(3, None))
    demo = begun(3, ended("failed", "extraction"))
    assert _print_missing_model(demo, _first_run(demo)) == 1
    assert "no first model: failed at extraction: because" in capsys.readouterr().out


class StackDouble:
    """A double of the demo's stack of processes.

    The double records the calls of processes and never waits.
    """

    def __init__(self, *, has_ended: bool) -> None:
        self.lines: list[str] = []
        self._has_ended = has_ended

    def send_line(self, name, line):
        if self._has_ended:
            raise ProcessDied("replay ended")
        self.lines.append(line)

    def wait_until(self, condition, **_):
        assert condition()


@pytest.mark.parametrize(
    ("decided", "ran_out", "has_ended", "title", "sentence"),
    [
        (False, False, False, "drift begins", ["drift"]),
        (True, False, False, "the monitor requests a run before the drift began", []),
        (False, True, False, "the rows ran out before the drift began", []),
        (False, False, True, "the rows ran out before the drift began", []),
    ],
)
def test_drift_is_announced_only_if_it_starts(capsys, decided, ran_out, has_ended, title, sentence):
    demo = SimpleNamespace(
        stack=StackDouble(has_ended=has_ended),
        screen=Screen(),
        timeline=SimpleNamespace(lines=[]),
        has_decided=lambda: decided,
        rows_ran_out=lambda: ran_out,
        traffic_has_ended=lambda: True,
        watch=lambda: None,
    )
    assert _start_drift(demo) == decided
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(title)
    assert demo.stack.lines == sentence


@pytest.mark.parametrize("ran_out", [False, True])
def test_bad_release_starts_only_if_rows_are_left(capsys, tmp_path, ran_out):
    demo = SimpleNamespace(
        stack=StackDouble(has_ended=False),
        screen=Screen(),
        folders=LocalFolders(root=tmp_path),
        rows_ran_out=lambda: ran_out,
        watch=lambda: None,
    )
    assert _wait_until_baked(demo) != ran_out
    assert (
        "the rows ran out before a bad release could be planted" in capsys.readouterr().out
    ) == ran_out

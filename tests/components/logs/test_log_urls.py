"""A log's URL opens the file that it names, and refuses what it does not understand."""

import pytest

from components.logs.locations import open_subscriber
from components.logs.sqlite import SqliteLog
from components.runtime.errors import ContractError
from tests.support.log_benches import open_log


def test_a_log_url_opens_the_file_it_names(tmp_path):
    folder = tmp_path / "a log"
    folder.mkdir()
    SqliteLog(folder / "log.db").publish([("m", b"x")])
    now = [1000.0]
    log = open_subscriber(f"sqlite:///{folder}/log.db?lease_seconds=7".replace(" ", "%20"), clock=lambda: now[0])
    pulled = []
    for now[0] in (1000.0, 1006.9, 1007.0):
        pulled.append([delivery.message_id for delivery in log.pull(5)])
    assert pulled == [["m"], [], ["m"]]


def test_log_url_may_hold_spaces_and_be_relative(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    open_log(f"sqlite:///{tmp_path}/a b/plain.db").close()
    open_log(f"sqlite:///{tmp_path}/a%20b/encoded.db").close()
    monkeypatch.chdir(tmp_path / "a b")
    open_log("sqlite:///relative.db").close()
    assert {p.name for p in (tmp_path / "a b").glob("*.db")} == {"plain.db", "encoded.db", "relative.db"}


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "log is ''"),
        ("log.db", "expected sqlite:///<path>"),
        ("nats://host/topic", "nats://host/topic.*sqlite, pubsub, kafka"),
        ("sqlite://log.db", "three slashes"),
        ("sqlite:///", "expected sqlite:///<path>"),
        ("sqlite:////nowhere/at/all/log.db", "is no folder"),
        ("sqlite:///x.db?leases=1", "unknown options"),
        ("sqlite:///x.db?lease_seconds=soon", "to be a number"),
        ("sqlite:///x.db?lease_seconds=0", "above 0"),
    ],
)
def test_another_log_url_is_refused(url, text):
    with pytest.raises(ContractError, match=text):
        open_log(url)

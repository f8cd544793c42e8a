"""Tests that no error contains the address of a webhook."""

import socket

import pytest

from evergreen.notifications.webhook import NO_ADDRESS, post, post_to_file


@pytest.fixture
def listening():
    """A host:port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("path", ["/hook é", "/a b", "/a?x=\x00"])
def test_impossible_address_is_refused_at_once_and_not_retried(listening, path):
    answer = post(f"http://{listening}{path}", b"{}", timeout_seconds=1.0)
    assert answer == ("refused", NO_ADDRESS, None)


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "a..b"])
def test_invalid_host_is_refused_without_repeating_it_in_error(host):
    assert post(f"http://{host}/hook", b"{}", timeout_seconds=1.0) == ("refused", NO_ADDRESS, None)


def test_long_running_program_reads_corrected_file_again(tmp_path, listening):
    (tmp_path / "webhook").write_text(f"http://{listening}/hook é")
    answer = post_to_file(tmp_path / "webhook", b"{}", timeout_seconds=1.0)
    assert answer.state == "retry"
    assert listening not in answer.reason

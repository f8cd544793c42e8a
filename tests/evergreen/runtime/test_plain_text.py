"""Tests of names from outside: control characters have no effect, and names do not break lines."""

import io
import logging

import pytest

from cli.models import print_models
from evergreen.events import __main__ as log_command
from evergreen.events.sqlite import SqliteLog
from evergreen.registry.promotion_journal import RELEASE, Promotion, append_promotion
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.plain_text import TEXT, TIMED, LineFormatter, configure_logging, printable
from testing.releases import release

FORGED = "\n2026-01-01 00:00:00,000 INFO monitoring.monitor: all is well"
HOSTILE = f"r-1\x1b[2J\x1b]0;title\x07\x9b31m\r\x7f\u202e\u2028{FORGED}"


@pytest.fixture
def handler():
    """Formats log records like the commands do, into its own stream."""
    made = logging.StreamHandler(io.StringIO())
    made.setFormatter(LineFormatter(TIMED))
    yield made
    made.close()


def assert_harmless(text: str, *, lines: int) -> None:
    assert len(text.splitlines()) == lines
    assert all(line.isprintable() for line in text.splitlines())
    assert "r-1\\x1b[2J\\x1b]0;title\\x07\\x9b31m\\r\\x7f\\u202e\\u2028\\n2026" in text


def test_record_of_log_is_one_line_whatever_its_values_contain(handler):
    logger = logging.Logger("a logger")
    logger.addHandler(handler)
    logger.warning("dead letter %s", HOSTILE)
    assert_harmless(handler.stream.getvalue(), lines=1)


def test_no_line_of_traceback_looks_like_line_of_log(handler):
    logger = logging.Logger("a logger")
    logger.addHandler(handler)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("it failed")
    first, *rest = handler.stream.getvalue().splitlines()
    assert first.endswith("it failed")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert any("all is well" in line for line in rest)


def test_monitors_log_and_errors_of_commands_are_escaped(capsys):
    @exits_with_code
    def fail() -> int:
        raise ContractError(f"request {HOSTILE.replace(FORGED, '')} is wrong")

    configure_logging(TEXT)
    try:
        logging.getLogger("monitoring.journal").info("dead_letter: %s", HOSTILE)
        assert fail() == 2
    finally:
        logging.getLogger().handlers.clear()
    logged, error = capsys.readouterr().err.split("error: ")
    assert_harmless(logged, lines=1)
    assert "\x1b" not in error


def test_listings_are_escaped(tmp_path, capsys):
    log = SqliteLog(tmp_path / "log.db")
    log.publish([(HOSTILE, b"poison")])
    (delivery,) = log.pull(1)
    log.dead_letter([(delivery.token, f"request {HOSTILE} is wrong")])
    log.close()
    assert log_command.main(["dead-letters", "list", f"sqlite:///{tmp_path}/log.db"]) == 0
    assert_harmless(capsys.readouterr().out, lines=3)
    made = release(tmp_path / "store", 1)
    append_promotion(
        tmp_path / "store",
        Promotion(
            time=made.published_at,
            action=RELEASE,
            version=1,
            previous_version=None,
            model_id=made.model_id,
            model_uri=made.model_uri,
            release_uri="",
            trigger_id=None,
            reason=HOSTILE,
        ),
    )
    print_models(tmp_path / "store")
    assert_harmless(capsys.readouterr().out, lines=3)


def test_letters_of_every_script_are_not_escaped():
    assert printable("Größe 7, 木, 한국어, café") == "Größe 7, 木, 한국어, café"

"""Tests that the generated pages of docs/reference are current and complete."""

import re

import pytest

from cli.commands import COMMANDS
from cli.reference_pages import FOLDER, pages
from evergreen.runtime.flags import whoami
from testing.paths import REPOSITORY
from tests.support.alerts import ALERTS

PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_current(name):
    assert (FOLDER / name).read_text() == PAGES[name], (
        "the page is not current; `make golden` writes it"
    )


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_has_no_empty_description(name):
    assert re.findall(r"^\|.*\|\s*\|$", PAGES[name], re.MULTILINE) == []


def test_generated_pages_name_no_folder_or_user_of_this_machine():
    text = "".join(PAGES.values())
    assert [word for word in (str(REPOSITORY), whoami()) if word in text] == []


def test_every_command_has_section_with_its_name():
    headings = re.findall(r"^### evergreen (.+)$", PAGES["commands.md"], re.MULTILINE)
    assert sorted(headings) == sorted(" ".join(path) for path in COMMANDS)


def test_every_alert_links_to_its_section():
    linked = re.findall(r"\[(Evergreen\w+)\]\(\.\./operate/alerts/", PAGES["alerts.md"])
    assert sorted(linked) == sorted(ALERTS)

"""Tests of the settings reader: all sources of settings give equal values and equal errors."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from evergreen.config.reader import (
    build_parser,
    flat_settings,
    flat_values,
    make_settings,
    parse_settings,
    read_environment,
    read_flags,
    read_mapping,
    read_query,
    read_settings,
)
from evergreen.runtime.errors import ContractError, expect


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """A section inside another section."""

    boards: int = 3
    """Number of boards."""
    folder: Path | None = None
    """Folder with the list of books."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "boards")


@dataclass(frozen=True, kw_only=True)
class Room:
    """A section that contains another section."""

    name: str
    """Name of the room."""
    height: float = 2.5
    """Height in metres."""
    heated: bool = False
    """Whether the room is heated."""
    shelf: Shelf = Shelf()


@dataclass(frozen=True, kw_only=True)
class TwoShelves:
    """Two sections that contain settings of the same names."""

    one: Shelf = Shelf()
    other: Shelf = Shelf()


EXPECTED = Room(name="hall", height=3.0, heated=True, shelf=Shelf(boards=5))
TEXTS = {"name": "hall", "height": "3", "heated": "True", "boards": "5"}


def parsed(*argv):
    return build_parser(Room, prog="x", description="").parse_args(argv)


def from_flags(**texts):
    return make_settings(
        Room, **read_flags(Room, parsed(*(f"--{name}={text}" for name, text in texts.items())))
    )


def from_environment(**texts):
    variables = {f"ROOM_{name.upper()}": text for name, text in texts.items()}
    return make_settings(Room, **read_environment(Room, variables, prefix="ROOM_"))


def from_query(**texts):
    return read_query(Room, texts, source="url")


def test_all_sources_give_equal_settings():
    values = {"name": "hall", "height": 3, "heated": True, "shelf": {"boards": 5}}
    assert read_mapping(Room, values, path="room") == EXPECTED
    flags = ("--name=hall", "--height=3", "--heated", "--boards", "5")
    assert make_settings(Room, **read_flags(Room, parsed(*flags))) == EXPECTED
    assert from_environment(**TEXTS) == from_query(**TEXTS) == EXPECTED


@pytest.mark.parametrize(
    ("read", "key"), [(from_flags, "--{}"), (from_environment, "ROOM_{}"), (from_query, "url: {}")]
)
def test_text_of_wrong_type_is_refused_with_key_value_and_type(read, key):
    for name, text, expected in (("boards", "many", "int"), ("height", "tall", "float")):
        where = key.format(name.upper() if read is from_environment else name)
        with pytest.raises(ContractError, match=f"^{where} is {text!r}, expected {expected}$"):
            read(name="hall", **{name: text})


@pytest.mark.parametrize("text", ["1", "yes", ""])
def test_boolean_that_is_not_true_or_false_is_refused(text):
    with pytest.raises(ContractError, match=f"^ROOM_HEATED is '{text}', expected true or false$"):
        from_environment(name="hall", heated=text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "hall", "height": "tall"}, "room.height is 'tall', expected float"),
        ({"name": "hall", "hight": 3}, "room.hight is not a setting, expected height"),
        ({"name": "hall", "shelf": {"boards": 0}}, "room.shelf.boards is 0, expected at least 1"),
        (
            {"name": "hall", "shelf": {"board": 1}},
            "room.shelf.board is not a setting, expected boards",
        ),
    ],
)
def test_wrong_value_of_file_is_refused_with_its_full_path(values, message):
    with pytest.raises(ContractError, match=f"^{re.escape(message)}$"):
        read_mapping(Room, values, path="room")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            from_environment,
            "environment variable ROOM_BOARD names no setting, expected ROOM_BOARDS",
        ),
        (from_query, "url: board is not a setting, expected boards"),
    ],
)
def test_unknown_name_is_refused_with_nearest_one(read, message):
    with pytest.raises(ContractError, match=f"^{message}$"):
        read(name="hall", board="5")


def test_other_variables_with_lenient_prefix_are_ignored():
    variables = {"ROOM_NAME": "hall", "ROOM_SERVICE_HOST": "10.0.0.1"}
    assert read_environment(Room, variables, prefix="ROOM_", is_strict=False) == {"name": "hall"}


def test_flags_come_before_variables_and_variables_before_defaults():
    variables = {"ROOM_NAME": "hall", "ROOM_HEIGHT": "4", "ROOM_BOARDS": "5"}
    found = read_settings(Room, parsed("--height=5"), environment=variables, prefix="ROOM_")
    assert found == Room(name="hall", height=5.0, shelf=Shelf(boards=5))


def test_missing_required_setting_is_named_as_flag_and_variable():
    with pytest.raises(
        ContractError, match=r"^settings are missing: expected --name \(or ROOM_NAME and so on\)$"
    ):
        read_settings(Room, parsed(), environment={}, prefix="ROOM_")


def test_optional_path_is_read_from_text():
    assert from_query(name="hall", folder="a/b").shelf.folder == Path("a/b")


def test_flat_values_make_equal_settings():
    assert make_settings(Room, **flat_values(EXPECTED)) == EXPECTED
    with pytest.raises(ContractError, match="^board is not a setting, expected boards$"):
        make_settings(Room, name="hall", board=5)


def test_two_settings_of_one_name_are_refused():
    with pytest.raises(TypeError, match="two settings named boards"):
        flat_settings(TwoShelves)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training.seed", "'training.seed', expected section.name=value"),
        ("=3", "'=3', expected section.name=value"),
        ("training.seed=1 training.seed=2", "training.seed twice"),
        ("training.learning_rate=NaN", "training.learning_rate is NaN, expected a finite number"),
        ("training.seed='7", "No closing quotation"),
        ("training.seed=" + "9" * 5000, "..., which cannot be read: Exceeds the limit"),
        ("model.tower=" + "[" * 100_000, "..., which cannot be read: maximum recursion depth"),
    ],
)
def test_settings_of_run_that_cannot_be_read_are_named(text, message):
    with pytest.raises(ContractError, match=re.escape(message)):
        parse_settings(text)


def test_settings_of_run_are_json_or_plain_words():
    text = (
        "training.learning_rate=5e-4\nmodel.kind=dcn  release.response_cache=true "
        'extraction.columns=\'["a b", "c"]\''
    )
    assert parse_settings(text) == {
        "training.learning_rate": 5e-4,
        "model.kind": "dcn",
        "release.response_cache": True,
        "extraction.columns": ["a b", "c"],
    }
    assert parse_settings("  ") == {}

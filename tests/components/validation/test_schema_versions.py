import re
from functools import partial

import pytest
from tensorflow_metadata.proto.v0 import schema_pb2

from components.validation import schema_versions
from components.validation.schema_versions import (
    SERVING,
    TRAINING,
    compare_schemas,
    format_schema,
    main,
)
from evergreen.runtime.errors import ContractError


@pytest.fixture
def write(tmp_path):
    def to_file(schema, name="schema.pbtxt"):
        path = tmp_path / name
        path.write_text(format_schema(schema))
        return path

    return to_file


@pytest.fixture
def schema():
    """A small schema, as a run infers it."""
    schema = schema_pb2.Schema()
    label = schema.feature.add(name="label", type=schema_pb2.INT)
    label.presence.min_fraction, label.presence.min_count = 1.0, 1
    label.int_domain.min, label.int_domain.max = 0, 1
    label.not_in_environment.append(SERVING)
    number = schema.feature.add(name="I1", type=schema_pb2.FLOAT)
    number.presence.min_fraction = 0.5
    number.float_domain.min, number.float_domain.max, number.float_domain.disallow_nan = (
        0.0,
        100.0,
        True,
    )
    schema.feature.add(name="C1", type=schema_pb2.BYTES)
    schema.default_environment.extend([TRAINING, SERVING])
    return schema


def changed(schema, **changes):
    """Return a copy with changed feature fields: `I1__float_domain__max=7`."""
    copy = schema_pb2.Schema()
    copy.CopyFrom(schema)
    for path, value in changes.items():
        name, *steps, last = path.split("__")
        place = next(feature for feature in copy.feature if feature.name == name)
        for step in steps:
            place = getattr(place, step)
        getattr(place, last).extend(value) if isinstance(value, list) else setattr(
            place, last, value
        )
    return copy


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"I1__float_domain__max": 50.0}, {"I1"}),
        ({"I1__presence__min_fraction": 0.0, "label__presence__min_count": 0}, {"I1", "label"}),
        ({"C1__type": schema_pb2.INT}, {"C1"}),
        ({"C1__name": "C2"}, {"C1", "C2"}),
        ({"C1__annotation__comment": ["of the shop"]}, {"C1"}),
    ],
    ids=str,
)
def test_whatever_schema_changes_has_to_be_named_by_its_feature(
    schema, write, tmp_path, change, names
):
    live, edited = ("m1", write(schema, "live.pbtxt")), write(changed(schema, **change))
    assert set(compare_schemas(schema, changed(schema, **change))) == names
    for left_out in names:
        with pytest.raises(
            ContractError, match=f"the schema changes {left_out} .*: --change {left_out}$"
        ):
            schema_versions.accept_schema(
                tmp_path,
                edited,
                of_champion=live,
                who="ann",
                reason="x",
                change=sorted(names - {left_out}),
            )
    assert not schema_versions.read_accepted(tmp_path)
    line = schema_versions.accept_schema(
        tmp_path, edited, of_champion=live, who="ann", reason="x", change=sorted(names)
    )
    assert set(line.changed) == names


def test_environments_and_shared_lists_of_values_have_to_be_named_too(schema, write, tmp_path):
    other = changed(schema)
    other.string_domain.add(name="colours", value=["red"])
    assert set(compare_schemas(schema, other)) == {"schema"}
    with pytest.raises(ContractError, match="--change schema$"):
        schema_versions.accept_schema(
            tmp_path,
            write(other),
            of_champion=("m1", write(schema, "live.pbtxt")),
            who="ann",
            reason="x",
        )


def test_journal_says_who_accepted_what_and_why(schema, write, tmp_path):
    store = tmp_path / "store"
    live = ("m1", write(schema, "live.pbtxt"))
    edited = write(changed(schema, I1__float_domain__max=500.0))
    accept = partial(schema_versions.accept_schema, store, of_champion=live)
    with pytest.raises(
        ContractError, match="--change is C1, expected only features that the schema changes: I1"
    ):
        accept(edited, who="ann", reason="new shop", change=["I1", "C1"])
    assert schema_versions.schema_in_force(store, live[1]) == live[1]
    line = accept(edited, who="ann", reason="new shop", run="r2", change=["I1"])
    assert (line.version, line.who, line.reason, line.run, line.base) == (
        1,
        "ann",
        "new shop",
        "r2",
        "model m1",
    )
    assert schema_versions.schema_in_force(store, live[1]).read_bytes() == edited.read_bytes()
    # The next schema is compared with version 1, whichever model is live.
    again = write(changed(schema, I1__float_domain__max=400.0))
    assert accept(again, who="bob", reason="x", change=["I1"]).base == "version 1"
    assert [line.version for line in schema_versions.read_accepted(store)] == [1, 2]


def test_accept_that_was_killed_before_its_line_left_nothing_in_force(
    schema, write, tmp_path, monkeypatch
):
    def killed(*_):
        raise KeyboardInterrupt

    store, live = tmp_path / "store", ("m1", write(schema, "live.pbtxt"))
    edited = write(changed(schema, I1__float_domain__max=50.0))
    with monkeypatch.context() as broken:
        broken.setattr(schema_versions, "append_record", killed)
        with pytest.raises(KeyboardInterrupt):
            schema_versions.accept_schema(
                store, edited, of_champion=live, who="ann", reason="x", change=["I1"]
            )
    assert schema_versions.schema_in_force(store, live[1]) == live[1]
    line = schema_versions.accept_schema(
        store, edited, of_champion=live, who="ann", reason="x", change=["I1"]
    )
    assert line.version == 1


def test_version_changed_in_place_is_refused(schema, write, tmp_path):
    store = tmp_path / "store"
    schema_versions.accept_schema(store, write(schema), of_champion=None, who="x", reason="x")
    schema_versions.version_path(store, 1).write_text(
        format_schema(changed(schema, I1__float_domain__max=9e9))
    )
    with pytest.raises(ContractError, match=r"1\.pbtxt .* was changed in place"):
        schema_versions.schema_in_force(store, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"I1__float_domain__max": float("nan")}, "'I1' has bounds 0.0 to nan"),
        ({"I1__float_domain__max": -4.0}, "'I1' has bounds 0.0 to -4.0"),
        ({"I1__presence__min_fraction": 1.5}, "'I1' has min_fraction 1.5, expected 0 to 1"),
        ({"C1__name": "I1"}, "has I1 twice"),
        ({"C1__domain": "colours"}, "'C1' has domain 'colours', which is not in the schema"),
    ],
    ids=str,
)
def test_schema_by_which_nothing_can_be_checked_is_refused(
    schema, write, tmp_path, change, message
):
    with pytest.raises(ContractError, match=message):
        schema_versions.accept_schema(
            tmp_path, write(changed(schema, **change)), of_champion=None, who="x", reason="x"
        )
    assert not schema_versions.read_accepted(tmp_path)


def test_command_shows_compares_and_accepts(schema, write, tmp_path, capsys):
    store, work = tmp_path / "store", tmp_path / "work"
    (work / "r7" / "validation").mkdir(parents=True)
    store.mkdir()
    edited = str(write(changed(schema, I1__float_domain__max=500.0), "edited.pbtxt"))
    (work / "r7" / "validation" / "proposed_schema.pbtxt").write_text(
        (tmp_path / "edited.pbtxt").read_text()
    )
    first = str(write(schema))
    common = ["--store", str(store)]
    assert main(["show", *common]) == 2
    assert "no model is live yet, and none was accepted" in capsys.readouterr().err
    assert main(["log", *common]) == 0
    assert "no schema was accepted yet" in capsys.readouterr().out
    assert main(["accept", first, "--reason", "begin", "--who", "ann", *common]) == 0
    assert main(["diff", "force", "run:r7", "--work", str(work), *common]) == 1
    said = capsys.readouterr().out
    assert "--- I1" in said
    assert "-  max: 100.0\n+  max: 500.0\n" in said
    assert main(["diff", "1", first, *common]) == 0
    assert main(["accept", "run:r7", "--work", str(work), "--reason", "shop", *common]) == 2
    assert "--change I1" in capsys.readouterr().err
    assert (
        main(
            ["accept", "run:r7", "--work", str(work), "--reason", "shop", "--change", "I1", *common]
        )
        == 0
    )
    assert main(["show", *common]) == 0
    assert (tmp_path / "edited.pbtxt").read_text() in capsys.readouterr().out
    assert main(["log", *common]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r" version 1 +I1 +shop$", last)
    assert main(["accept", edited, "--reason", "again", *common]) == 2
    assert "there is nothing to accept" in capsys.readouterr().err
    assert main(["diff", "3", "1", *common]) == 2
    assert "version 3 was never accepted" in capsys.readouterr().err

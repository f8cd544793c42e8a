import random

import numpy as np
import pyarrow as pa
import pytest
import tensorflow_data_validation as tfdv
from tensorflow_data_validation.statistics import stats_impl
from tensorflow_metadata.proto.v0 import schema_pb2
from tfx_bsl.arrow import table_util

from components.runtime.errors import ContractError
from components.validation import schema_versions
from components.validation.schema_versions import (
    LOOSER,
    NOTE,
    SERVING,
    STRICTER,
    TRAINING,
    compare_schemas,
    expect_sound,
    format_schema,
    main,
)

NAMES = ("a", "b", "c", "label")
TYPES = (schema_pb2.INT, schema_pb2.FLOAT, schema_pb2.BYTES)
VALUES = ("red", "green", "blue", "grey")


def random_feature(rng: random.Random, name: str):
    feature = schema_pb2.Feature(name=name, type=rng.choice(TYPES))
    if rng.random() < 0.6:
        feature.presence.min_fraction = rng.choice([0.0, 0.3, 0.7, 1.0])
        feature.presence.min_count = rng.choice([0, 1, 20])
    if rng.random() < 0.7:
        random_domain(rng, feature)
    if rng.random() < 0.2:
        feature.not_in_environment.append(rng.choice([TRAINING, SERVING]))
    if rng.random() < 0.1:
        feature.value_count.min = feature.value_count.max = 1
    if rng.random() < 0.1:
        feature.lifecycle_stage = rng.choice([schema_pb2.DEPRECATED, schema_pb2.PRODUCTION, schema_pb2.PLANNED])
    if rng.random() < 0.2:
        feature.distribution_constraints.min_domain_mass = rng.choice([0.3, 0.8, 1.0])
    return feature


def random_domain(rng: random.Random, feature) -> None:
    kind = rng.choice(["fitting", "fitting", "fitting", "any"])
    if kind == "fitting":
        kind = {schema_pb2.INT: "int", schema_pb2.FLOAT: "float"}.get(feature.type, rng.choice(["string", "named"]))
    else:
        kind = rng.choice(["int", "float", "string", "named", "bool"])
    low, high = rng.choice([None, -5, 0]), rng.choice([None, 3, 10])
    if kind in ("int", "float"):
        domain = feature.int_domain if kind == "int" else feature.float_domain
        domain.SetInParent()
        if low is not None:
            domain.min = low
        if high is not None:
            domain.max = high
        if kind == "float":
            domain.disallow_nan, domain.disallow_inf = rng.random() < 0.5, rng.random() < 0.5
    elif kind == "string":
        feature.string_domain.value.extend(rng.sample(VALUES, rng.randint(1, 4)))
    elif kind == "named":
        feature.domain = rng.choice(["all", "some"])
    else:
        feature.bool_domain.SetInParent()


def random_schema(rng: random.Random):
    schema = schema_pb2.Schema()
    schema.string_domain.add(name="all", value=VALUES)
    schema.string_domain.add(name="some", value=rng.sample(VALUES, 2))
    for name in rng.sample(NAMES, rng.randint(2, 4)):
        schema.feature.append(random_feature(rng, name))
    schema.default_environment.extend([TRAINING, SERVING])
    return schema


FIELDS = (
    *("presence", "type", "not_in_environment", "distribution_constraints", "lifecycle_stage", "value_count"),
    *("int_domain", "float_domain", "string_domain", "domain", "bool_domain"),
)


def mutated(rng: random.Random, old):
    """A schema that differs from `old` in a few places, each drawn anew."""
    new = schema_pb2.Schema()
    new.CopyFrom(old)
    for _ in range(rng.randint(1, 2)):
        feature, kind = rng.choice(new.feature), rng.random()
        if kind < 0.1 and len(new.feature) > 1:
            new.feature.remove(feature)
        elif kind < 0.2:
            del new.string_domain[:]
            new.string_domain.extend(random_schema(rng).string_domain)
        else:
            part = random_feature(rng, feature.name)
            part.type = feature.type if rng.random() < 0.9 else part.type
            set_fields = {field.name for field, _ in [*part.ListFields(), *feature.ListFields()]}
            changed_field = rng.choice([name for name in FIELDS if name in set_fields])
            for field in part.DESCRIPTOR.fields:
                if field.name != changed_field:
                    part.ClearField(field.name)
            feature.ClearField(changed_field)
            feature.MergeFrom(part)
    return new


def random_statistics(rng: random.Random):
    rows = rng.choice([1, 10, 60])
    columns = {}
    for name in rng.sample(NAMES, rng.randint(2, 4)):
        share = rng.choice([0.0, 0.0, 0.2, 0.5, 1.0])
        missing = np.array([rng.random() < share for _ in range(rows)])
        kind = rng.randrange(4)
        if kind == 0:
            low, high = rng.choice([(0, 1), (-9, 0), (0, 3), (2, 40)])
            columns[name] = pa.array([rng.randint(low, high) for _ in range(rows)], pa.int64(), mask=missing)
        elif kind == 1:
            scale, odd = rng.choice([1.0, 9.0, 80.0]), rng.choice([None, None, float("nan"), float("inf")])
            values = [rng.uniform(-0.1, 1) * scale for _ in range(rows)]
            values[0] = values[0] if odd is None else odd
            columns[name] = pa.array(values, pa.float32(), mask=missing)
        else:
            words = rng.choice([VALUES, VALUES[:2], VALUES[:1], (*VALUES, "odd"), ("3", "12")])
            columns[name] = pa.array([rng.choice(words) for _ in range(rows)], pa.string(), mask=missing)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    generators = stats_impl.get_generators(tfdv.StatsOptions(), in_memory=True)
    lists = table_util.CanonicalizeRecordBatch(batch)
    partials = [g.add_input(g.create_accumulator(), lists) for g in generators]
    return stats_impl.extract_statistics_output(partials, generators)


def sound_schemas(rng: random.Random):
    while True:
        schema = random_schema(rng)
        try:
            expect_sound(schema, "drawn")
        except ContractError:
            continue
        yield schema


def refuses(schema, statistics, environment) -> bool:
    return bool(tfdv.validate_statistics(statistics, schema, environment=environment).anomaly_info)


@pytest.fixture
def write(tmp_path):
    def to_file(schema, name="schema.pbtxt"):
        path = tmp_path / name
        path.write_text(format_schema(schema))
        return path

    return to_file


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_the_old_schema_refuses_no_schema_accepted_without_naming_rules_lets_pass(write, tmp_path):
    rng = random.Random(7)
    statistics = [random_statistics(rng) for _ in range(150)]
    accepted = refused = 0
    kinds = set()
    for number, old in zip(range(1400), sound_schemas(rng)):
        new = mutated(rng, old)
        store = tmp_path / str(number)
        base = ("m1", write(old, "old.pbtxt"))
        kinds |= {each.kind for each in compare_schemas(old, new)}
        try:
            schema_versions.accept_schema(store, write(new), of_champion=base, who="test", reason="test")
        except ContractError:
            assert schema_versions.newest_accepted(store) is None
            continue
        accepted += 1
        for each in rng.sample(statistics, 20):
            for environment in (TRAINING, SERVING):
                if refuses(old, each, environment):
                    refused += 1
                    assert refuses(new, each, environment), (compare_schemas(old, new), environment)
    assert accepted > 100
    assert refused > 1000
    assert kinds == {LOOSER, STRICTER}


@pytest.fixture
def schema():
    """A schema as a round infers it, in small."""
    schema = schema_pb2.Schema()
    label = schema.feature.add(name="label", type=schema_pb2.INT)
    label.presence.min_fraction, label.presence.min_count = 1.0, 1
    label.int_domain.min, label.int_domain.max = 0, 1
    label.not_in_environment.append(SERVING)
    number = schema.feature.add(name="I1", type=schema_pb2.FLOAT)
    number.presence.min_fraction = 0.5
    number.float_domain.min, number.float_domain.max, number.float_domain.disallow_nan = 0.0, 100.0, True
    schema.feature.add(name="C1", type=schema_pb2.BYTES)
    schema.default_environment.extend([TRAINING, SERVING])
    return schema


def changed(schema, **changes):
    """A copy in which features' fields are set: `I1__float_domain__max=7`."""
    copy = schema_pb2.Schema()
    copy.CopyFrom(schema)
    for path, value in changes.items():
        name, *steps, last = path.split("__")
        place = next(feature for feature in copy.feature if feature.name == name)
        for step in steps:
            place = getattr(place, step)
        getattr(place, last).extend(value) if isinstance(value, list) else setattr(place, last, value)
    return copy


@pytest.mark.parametrize(
    ("change", "name", "kind"),
    [
        ({"I1__float_domain__max": 50.0}, "I1.max", STRICTER),
        ({"I1__float_domain__max": 500.0}, "I1.max", LOOSER),
        ({"I1__float_domain__min": -1.0}, "I1.min", LOOSER),
        ({"I1__float_domain__disallow_nan": False}, "I1.disallow_nan", LOOSER),
        ({"I1__presence__min_fraction": 0.6}, "I1.min_fraction", STRICTER),
        ({"I1__presence__min_fraction": 0.0}, "I1.min_fraction", LOOSER),
        ({"C1__type": schema_pb2.INT}, "C1.type", LOOSER),
        ({"label__presence__min_count": 0}, "label.min_count", LOOSER),
        ({"C1__annotation__comment": ["of the shop"]}, "C1.annotation", NOTE),
    ],
    ids=str,
)
def test_every_difference_names_its_feature_and_rule_with_its_direction(schema, change, name, kind):
    (difference,) = compare_schemas(schema, changed(schema, **change))
    assert (difference.name, difference.kind) == (name, kind)


def test_a_feature_that_comes_or_goes_loosens_the_schema(schema):
    without = schema_pb2.Schema(feature=schema.feature[:2], default_environment=schema.default_environment)
    for old, new in ((schema, without), (without, schema)):
        assert [(each.name, each.kind) for each in compare_schemas(old, new)] == [("C1.column", LOOSER)]


def test_a_loosened_rule_needs_its_name_and_the_journal_says_who_and_why(schema, write, tmp_path):
    store = tmp_path / "store"
    live = ("m1", write(schema, "live.pbtxt"))
    edited = write(changed(schema, I1__float_domain__max=500.0, I1__presence__min_fraction=0.7))
    with pytest.raises(ContractError, match=r"I1\.max \(100 -> 500\)\. If that is intended: --loosen I1\.max$"):
        schema_versions.accept_schema(store, edited, of_champion=live, who="ann", reason="new shop")
    assert schema_versions.schema_in_force(store, live[1]) == live[1]
    with pytest.raises(ContractError, match="--loosen names C1.type, which the schema does not loosen"):
        schema_versions.accept_schema(
            store, edited, of_champion=live, who="ann", reason="new shop", loosen=["I1.max", "C1.type"]
        )
    line = schema_versions.accept_schema(
        store, edited, of_champion=live, who="ann", reason="new shop", run="r2", loosen=["I1.max"]
    )
    assert (line.version, line.who, line.reason, line.run, line.loosened) == (1, "ann", "new shop", "r2", ["I1.max"])
    assert line.base == "model m1"
    assert schema_versions.schema_in_force(store, live[1]).read_bytes() == edited.read_bytes()
    # The next one is compared with version 1, whatever is live.
    stricter = write(changed(schema, I1__float_domain__max=400.0, I1__presence__min_fraction=0.7))
    assert schema_versions.accept_schema(store, stricter, of_champion=live, who="bob", reason="x").base == "version 1"
    assert [line.version for line in schema_versions.read_accepted(store)] == [1, 2]


def test_an_accept_that_was_killed_before_its_line_left_nothing_in_force(schema, write, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    store, live = tmp_path / "store", ("m1", write(schema, "live.pbtxt"))
    edited = write(changed(schema, I1__float_domain__max=50.0))
    with monkeypatch.context() as broken:
        broken.setattr(schema_versions, "append_line", killed)
        with pytest.raises(KeyboardInterrupt):
            schema_versions.accept_schema(store, edited, of_champion=live, who="ann", reason="x")
    assert schema_versions.schema_in_force(store, live[1]) == live[1]
    assert schema_versions.accept_schema(store, edited, of_champion=live, who="ann", reason="x").version == 1


def test_a_version_changed_in_place_is_refused(schema, write, tmp_path):
    store = tmp_path / "store"
    schema_versions.accept_schema(store, write(schema), of_champion=None, who="x", reason="x")
    schema_versions.version_path(store, 1).write_text(format_schema(changed(schema, I1__float_domain__max=9e9)))
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
def test_a_schema_by_which_nothing_can_be_judged_is_refused(schema, write, tmp_path, change, message):
    with pytest.raises(ContractError, match=message):
        schema_versions.accept_schema(tmp_path, write(changed(schema, **change)), of_champion=None, who="x", reason="x")
    assert not schema_versions.read_accepted(tmp_path)


def test_the_command_shows_compares_and_accepts(schema, write, tmp_path, capsys):
    store, work = tmp_path / "store", tmp_path / "work"
    (work / "r7" / "validation").mkdir(parents=True)
    store.mkdir()
    edited = str(write(changed(schema, I1__float_domain__max=500.0), "edited.pbtxt"))
    (work / "r7" / "validation" / "proposed_schema.pbtxt").write_text((tmp_path / "edited.pbtxt").read_text())
    first = str(write(schema))
    common = ["--store", str(store)]
    assert main(["show", *common]) == 2
    assert "no model is live yet, and none was accepted" in capsys.readouterr().err
    assert main(["log", *common]) == 0
    assert "no schema was accepted yet" in capsys.readouterr().out
    assert main(["accept", first, "--reason", "begin", "--who", "ann", *common]) == 0
    assert main(["diff", "force", "run:r7", "--work", str(work), *common]) == 1
    assert "looser   I1.max: 100 -> 500" in capsys.readouterr().out
    assert main(["diff", "1", first, *common]) == 0
    assert main(["accept", "run:r7", "--work", str(work), "--reason", "shop", *common]) == 2
    assert "--loosen I1.max" in capsys.readouterr().err
    loosened = ["--reason", "shop", "--loosen", "I1.max"]
    assert main(["accept", "run:r7", "--work", str(work), *loosened, *common]) == 0
    assert main(["show", *common]) == 0
    assert (tmp_path / "edited.pbtxt").read_text() in capsys.readouterr().out
    assert main(["log", *common]) == 0
    assert "over version 1: shop; loosened I1.max" in capsys.readouterr().out
    assert main(["accept", edited, "--reason", "again", *common]) == 2
    assert "there is nothing to accept" in capsys.readouterr().err
    assert main(["diff", "3", "1", *common]) == 2
    assert "version 3 was never accepted" in capsys.readouterr().err

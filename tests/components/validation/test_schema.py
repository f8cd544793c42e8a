import math

import pyarrow as pa
import pytest
from tensorflow_metadata.proto.v0 import schema_pb2

from components.validation.schema import infer_schema, possible_shares
from components.validation.schema_versions import read_schema
from evergreen.contracts import criteo, raw_rows
from evergreen.runtime.errors import ContractError
from tests.support.validation_statistics import statistics_of


@pytest.fixture
def schema(checked):
    rows = checked(
        400, I2=pa.array([-2.0, 0.0, 5.0, 30.0] * 100, pa.float32()), C5=pa.nulls(400, pa.int64())
    )
    return infer_schema(statistics_of(rows), criteo.CRITEO, range_factor=10.0)


@pytest.fixture
def features(schema):
    return {feature.name: feature for feature in schema.feature}


def test_categories_are_strings_of_any_value(schema, features):
    assert not schema.string_domain
    for name in criteo.CATEGORICAL:
        assert features[name].type == schema_pb2.BYTES
        assert features[name].WhichOneof("domain_info") is None


def test_label_must_be_present_everywhere_and_0_or_1(features):
    label = features[raw_rows.LABEL]
    assert (label.int_domain.min, label.int_domain.max, label.presence.min_fraction) == (0, 1, 1.0)


def test_features_may_be_missing_in_rows_and_in_all_only_if_they_were(features):
    assert [name for name in criteo.FEATURES if features[name].presence.min_count == 0] == ["C5"]
    assert features["C5"].presence.min_fraction == 0


def test_share_of_rows_must_have_value_less_sampling_error(checked):
    half = pa.array([1.0, None] * 10_000, pa.float32())
    statistics = statistics_of(checked(20_000, I1=half))
    features = {
        f.name: f for f in infer_schema(statistics, criteo.CRITEO, range_factor=10.0).feature
    }
    for name, share in (("I1", 0.5), ("C1", 1.0)):
        # This window is small, and the 64 rows of a request are alike.
        assert features[name].presence.min_fraction == pytest.approx(
            possible_shares(share, 10_000)[0]
        )


@pytest.mark.parametrize("hits", [0, 3, 50, 100])
def test_ends_of_share_leave_four_standard_errors_of_binomial_beyond(hits):
    """At each end of the interval, hits at least as extreme have the probability of a normal tail.

    The tail begins four standard errors from the mean.
    """
    low, high = possible_shares(hits / 100, 6400)
    tail = 0.5 * math.erfc(4 / math.sqrt(2))

    def probability(share, counts):
        return sum(math.comb(100, k) * share**k * (1 - share) ** (100 - k) for k in counts)

    assert probability(low, range(hits, 101)) == pytest.approx(tail if hits else 1.0)
    assert probability(high, range(hits + 1)) == pytest.approx(tail if hits < 100 else 1.0)


def test_dense_columns_are_bounded_by_multiples_of_their_extremes(features):
    domain = features["I2"].float_domain
    assert (domain.min, domain.max) == (-2 - 9 * 2, 10 * 30)
    assert all(features[name].float_domain.disallow_nan for name in criteo.DENSE)


def test_column_without_negatives_forbids_them_only_if_rows_are_many(checked):
    for rows, is_bounded in ((9_999, False), (10_000, True)):
        columns = {
            "I1": pa.array([0.0] * rows, pa.float32()),
            "I2": pa.array([-1.0] + [0.0] * (rows - 1), pa.float32()),
        }
        schema = infer_schema(
            statistics_of(checked(rows, **columns)), criteo.CRITEO, range_factor=10.0
        )
        least = {feature.name: feature.float_domain.min for feature in schema.feature}
        assert (least["I1"] == 0, least["I2"]) == (is_bounded, -10)


def test_file_that_is_no_schema_is_refused_by_name(tmp_path):
    (tmp_path / "schema.pbtxt").write_text("feature { nonsense: 1 }")
    with pytest.raises(ContractError, match="schema.pbtxt cannot be read"):
        read_schema(tmp_path / "schema.pbtxt")

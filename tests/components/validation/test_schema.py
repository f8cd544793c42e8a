from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tensorflow_metadata.proto.v0 import schema_pb2

from components.contracts import criteo
from components.runtime.errors import ContractError
from components.validation.schema import CHANCE, LARGEST_FACTOR, extreme_factor, infer_schema
from components.validation.schema_versions import format_schema, read_schema
from components.validation.settings import ValidationSettings
from tests.support.validation_statistics import statistics_of


@pytest.fixture
def schema(judged):
    rows = judged(400, I2=pa.array([-2.0, 0.0, 5.0, 30.0] * 100, pa.float32()), C5=pa.nulls(400, pa.int64()))
    return infer_schema(statistics_of(rows), range_factor=10.0)


@pytest.fixture
def features(schema):
    return {feature.name: feature for feature in schema.feature}


def test_categories_are_strings_of_any_value(schema, features):
    assert not schema.string_domain
    for name in criteo.CATEGORICAL:
        assert features[name].type == schema_pb2.BYTES
        assert features[name].WhichOneof("domain_info") is None


def test_the_label_must_be_present_everywhere_and_0_or_1(features):
    label = features[criteo.LABEL]
    assert (label.int_domain.min, label.int_domain.max, label.presence.min_fraction) == (0, 1, 1.0)


def test_features_may_be_missing_in_rows_and_in_all_only_if_they_were(features):
    assert [name for name in criteo.FEATURES if features[name].presence.min_count == 0] == ["C5"]
    assert features["C5"].presence.min_fraction == 0


def test_a_share_of_the_rows_must_have_a_value_less_sampling_error(judged):
    half = pa.array([1.0, None] * 10_000, pa.float32())
    statistics = statistics_of(judged(20_000, I1=half))
    features = {f.name: f for f in infer_schema(statistics, range_factor=10.0).feature}
    rows, squared = 10_000 / 64, 4.0**2  # of a small window, in which 64 rows are alike; 4 standard errors
    for name, share in (("I1", 0.5), ("C1", 1.0)):
        # Where the share lies 4 standard errors above the true one: (share - p)^2 = 16 p (1 - p) / rows.
        low = min(np.roots([1 + squared / rows, -(2 * share + squared / rows), share**2]).real)
        assert features[name].presence.min_fraction == pytest.approx(low, rel=1e-3)


def test_dense_columns_are_bounded_by_multiples_of_their_extremes(features):
    domain = features["I2"].float_domain
    # 400 rows may be 6 requests: their largest value bounds the next ones' by the cap only (see below).
    assert (domain.min, domain.max) == (-2 - 9 * 2, LARGEST_FACTOR * 30)
    assert all(features[name].float_domain.min == 0 for name in criteo.DENSE if name != "I2")
    assert all(features[name].float_domain.disallow_nan for name in criteo.DENSE)


def test_a_schema_survives_its_file(schema, tmp_path):
    path = tmp_path / "schema.pbtxt"
    path.write_text(format_schema(schema))
    assert read_schema(path) == schema


def test_a_file_that_is_no_schema_is_refused_by_name(tmp_path):
    (tmp_path / "schema.pbtxt").write_text("feature { nonsense: 1 }")
    with pytest.raises(ContractError, match="schema.pbtxt cannot be read"):
        read_schema(tmp_path / "schema.pbtxt")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"categorical_drift": 0.0}, r"categorical_drift is 0.0, expected a number in \(0, 1\]"),
        ({"missing_share_jump": float("nan")}, "missing_share_jump is nan"),
        ({"range_factor": 0.5}, "range_factor is 0.5, expected a finite number of at least 1"),
        ({"click_rate_factor": float("inf")}, "click_rate_factor is inf"),
    ],
    ids=str,
)
def test_a_threshold_that_no_distance_can_meet_is_refused(setting, message):
    with pytest.raises(ContractError, match=message):
        ValidationSettings(**setting)


# -- bounds that few requests with a heavy tail keep by chance


def drawn(random, rows, size, deviation):
    """Log-normal whole numbers that `size` rows in a row share."""
    values = np.floor(np.exp(3 + deviation * random.standard_normal(-(-rows // size))))
    return np.repeat(values, size)[:rows]


def factor_of(values):
    median, ninth = np.quantile(values, [0.5, 0.9], method="inverted_cdf")
    return extreme_factor(values.min(), median, ninth, len(values))


@pytest.mark.parametrize("deviation", [0.8, 1.6, 2.6])
def test_the_next_window_of_few_requests_keeps_the_bound(deviation):
    random = np.random.default_rng(0)
    runs, beyond, beyond_ten = 2000, 0, 0
    for _ in range(runs):
        first, following = drawn(random, 2000, 64, deviation), drawn(random, 2000, 64, deviation)
        beyond += following.max() > first.max() * max(10.0, factor_of(first))
        beyond_ten += following.max() > first.max() * 10
    # A spread estimated from 31 requests and the cap cost a part of the promised rate.
    assert beyond / runs <= 0.005
    if deviation == 2.6:
        assert beyond_ten / runs > 0.05


def test_the_chance_of_the_ratio_is_that_of_a_tail_that_falls_as_a_power():
    """Maxima of Pareto samples whose index is the one taken: exceeded with `CHANCE`, by simulation."""
    rows, median, ninth = 64 * 1000, 8.0, 22.0
    factor = extreme_factor(0.0, median, ninth, rows)
    index = np.log(factor) / np.log(1 / CHANCE - 1)
    random = np.random.default_rng(1)
    # The largest of n: tail probability 1 - U^(1/n).
    tails = -np.expm1(np.log(random.random((2, 400_000))) / 1000)
    first, following = tails**-index
    assert (following > factor * first).mean() == pytest.approx(CHANCE, rel=0.15)


def test_the_factor_grows_with_the_tail_and_falls_with_the_rows_up_to_its_cap():
    factors = [extreme_factor(0.0, 8.0, ninth, 64_000) for ninth in (9.0, 22.0, 90.0, 1e9)]
    assert factors == sorted(factors)
    assert factors[-1] == pytest.approx(LARGEST_FACTOR)
    sizes = [extreme_factor(0.0, 8.0, 40.0, rows) for rows in (1, 2000, 64_000, 10_000_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert extreme_factor(5.0, 5.0, 5.0, 100) == 1


def test_a_schema_bounds_a_light_tail_by_the_setting_and_a_heavy_one_of_few_rows_by_chance(judged):
    random = np.random.default_rng(2)
    light, heavy = np.floor(random.uniform(0, 100, 2000)), drawn(random, 2000, 64, 2.6)
    rows = judged(2000, I2=pa.array(light, pa.float32()), I5=pa.array(heavy, pa.float32()))
    schema = infer_schema(statistics_of(rows), range_factor=10.0)
    bounds = {feature.name: feature.float_domain.max for feature in schema.feature}
    assert bounds["I2"] == 10 * light.max()
    # TFDV's deciles come from a sketch.
    assert bounds["I5"] / np.float32(heavy.max()) == pytest.approx(factor_of(heavy), rel=0.05)
    assert bounds["I5"] > 50 * heavy.max()

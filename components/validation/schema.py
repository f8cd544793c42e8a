"""The schema of the training rows: inferred by TFDV once, curated by what is known of Criteo, then only reused.

The first run infers it; it is kept beside the model, and every later run is judged by its champion's file unchanged.

Curated: categories are strings (see `summarize`) without a list of allowed values, for new ones come daily; a feature
may be missing in any row, but not in all where the first run had it; the label is in every row and is 0 or 1; dense
columns stay below `range_factor` times the first run's extremes, and hold neither NaN nor infinity. No drift
thresholds: those are settings of the step, not facts about the data.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from components.contracts import criteo
from components.contracts.errors import ContractError
from components.validation.tfdv import schema_pb2, tfdv


def make_type_schema() -> Any:
    """A schema with types only: what TFDV must know to take categories as categories."""
    schema = schema_pb2.Schema()
    schema.feature.add(name=criteo.LABEL, type=schema_pb2.INT)
    for name in criteo.DENSE:
        schema.feature.add(name=name, type=schema_pb2.FLOAT)
    for name in criteo.CATEGORICAL:
        schema.feature.add(name=name, type=schema_pb2.BYTES)
    return schema


def infer_schema(statistics: Any, *, range_factor: float) -> Any:
    """The curated schema of the rows that `statistics` describe."""
    schema = tfdv.infer_schema(statistics, infer_feature_shape=False)
    del schema.string_domain[:]
    observed = {f.path.step[0]: f for f in statistics.datasets[0].features}
    for feature in schema.feature:
        if feature.name == criteo.LABEL:
            feature.presence.min_fraction, feature.presence.min_count = 1.0, 1
            feature.int_domain.min, feature.int_domain.max = 0, 1
            continue
        feature.presence.ClearField("min_fraction")
        if feature.name in criteo.CATEGORICAL:
            # Inferred from what the strings look like: a list of values, or integers.
            if inferred := feature.WhichOneof("domain_info"):
                feature.ClearField(inferred)
        else:
            feature.float_domain.disallow_nan = feature.float_domain.disallow_inf = True
            _bound(feature.float_domain, observed[feature.name].num_stats, range_factor)
    return schema


def _bound(domain: Any, numbers: Any, factor: float) -> None:
    if numbers.common_stats.num_non_missing and math.isfinite(numbers.min) and math.isfinite(numbers.max):
        # An extreme of zero has no multiple; it is taken for one.
        domain.min = numbers.min - (factor - 1) * max(abs(numbers.min), 1.0)
        domain.max = numbers.max + (factor - 1) * max(abs(numbers.max), 1.0)


def read_schema(path: Path) -> Any:
    """The schema in the text file `path`.

    Raises:
        ContractError: the file is absent or not a schema.
    """
    try:
        return text_format.Parse(path.read_text(), schema_pb2.Schema())
    except (OSError, ValueError, text_format.ParseError) as error:
        raise ContractError(f"schema {path} cannot be read: {error}") from error


def format_schema(schema: Any) -> str:
    """The schema as text, one file's content."""
    return str(text_format.MessageToString(schema))

"""Statistics against a schema by TFDV, in an environment: in `TRAINING` the label must be there, in `SERVING` not."""

from __future__ import annotations

from typing import Any

from components.runtime.errors import ContractError
from components.validation.schemas.files import TRAINING, with_environments
from components.validation.tfdv import tfdv


def check_statistics(statistics: Any, schema: Any, environment: str = TRAINING) -> Any:
    """TFDV's `Anomalies` of `statistics` against `schema`.

    Raises:
        ContractError: the schema does not know `environment`; TFDV would then ask for no column at all.
    """
    schema = with_environments(schema)
    if environment not in schema.default_environment:
        known = ", ".join(schema.default_environment)
        raise ContractError(f"schema does not know the environment {environment!r}, expected one of {known}")
    return tfdv.validate_statistics(statistics, schema, environment=environment)

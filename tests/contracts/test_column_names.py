"""A user's names for the columns that every row has."""

from __future__ import annotations

import pytest

from components.contracts.raw_rows import ColumnNames
from components.runtime.errors import ContractError


@pytest.mark.parametrize("names", [{"label": ""}, {"label": "ts", "event_time": "ts"}, {"row": "request_id"}])
def test_names_that_cannot_be_told_apart_are_refused(names):
    with pytest.raises(ContractError, match="expected a name for each"):
        ColumnNames(**names)

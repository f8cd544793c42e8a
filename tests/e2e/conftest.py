"""The deployment step's stored models and second opinion, for the servers that are started here."""

from tests.components.deployment.conftest import (  # noqa: F401  pytest finds fixtures by these names
    make_candidate,
    make_parts,
    raw_rows,
)

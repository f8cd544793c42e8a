"""The deployment step's stored models and second opinion, for the servers that are started here."""

from tests.support.stored_models import make_candidate, make_parts, raw_rows  # noqa: F401  fixtures

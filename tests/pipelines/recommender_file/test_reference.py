"""docs/recommender.md holds every setting that a room reads, as it is now."""

from pipelines.recommender_file.reference import reference
from tests.support.paths import REPOSITORY


def test_the_page_is_current():
    assert (REPOSITORY / "docs/recommender.md").read_text() == reference(), "make golden writes it"


def test_the_page_says_key_type_default_and_meaning():
    page = reference()
    assert "| `passes` | int | `1` | Passes over the rows. |" in page
    assert "| `solver.loss_interval` | int | `100` | Steps between looks" in page
    assert "Number of cross layers. Only of dcn. |" in page
    assert "num_dense" not in page
    assert "|  |" not in page

"""What the demo says of a step: its numbers where they are known, else its own reason."""

import pytest

from components.store.run_notes import StepNote
from pipelines.local.observations import describe

RELEASED = {"version": 2, "parity_max_abs_diff": 3e-7, "parity_rows": 4096}


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (
            StepNote(step="deployment", state="done", reason="version 2 serves; pass", seconds=1.25, facts=RELEASED),
            "deployment done in 1.2 s: version 2 serves, parity 3.0e-07 over 4,096 rows",
        ),
        (
            StepNote(step="deployment", state="failed", reason="OSError: full", seconds=1.0, facts=RELEASED),
            "deployment failed in 1.0 s: OSError: full",
        ),
        (
            StepNote(step="evaluation", state="done", reason="pass over 10 rows", seconds=1.0),
            "evaluation done in 1.0 s: pass over 10 rows",
        ),
        (
            StepNote(step="training", state="done", seconds=2.0, facts={"stopping_auc": None, "rows_per_second": 1.0}),
            "training done in 2.0 s",
        ),
    ],
    ids=["facts", "failure", "no facts", "a fact that does not exist"],
)
def test_a_step_is_told_by_its_facts_or_its_reason(note, text):
    assert describe(note) == text

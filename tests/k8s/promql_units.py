"""Evaluate PromQL with promtool's engine: queries over given series, with expected results.

Files and promtool's output are in `build/promtool/`. promtool compares exactly, so a tolerance is
part of the query.
"""

import shutil
import subprocess
from typing import Any, NamedTuple

import pytest
import yaml

from testing.paths import REPOSITORY

FOLDER = REPOSITORY / "build" / "promtool"


class Question(NamedTuple):
    """A query, its evaluation time, and the expected samples by labels (`{pod="a"}`)."""

    query: str
    at: str
    answers: dict[str, float]


def assert_answers(
    name: str, series: dict[str, str], questions: list[Question], *, interval: str = "5s"
) -> None:
    """Assert that promtool gets every expected answer.

    If an answer differs, the assertion shows promtool's output.

    Args:
        name: Name of the files.
        series: Values by series in promtool's notation (`0+10x5`, `_` = no sample).
        questions: Queries with the samples that they must return.
        interval: Time between two values of a series.
    """
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: queries cannot be evaluated as Prometheus does")
    case: dict[str, Any] = {
        "interval": interval,
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [
            {
                "expr": question.query,
                "eval_time": question.at,
                "exp_samples": [
                    {"labels": labels, "value": value} for labels, value in question.answers.items()
                ],
            }
            for question in questions
        ],
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump(
            {"evaluation_interval": interval, "tests": [case]}, sort_keys=False, width=200
        )
    )
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=120
    )
    output = done.stdout + done.stderr
    path.with_suffix(".txt").write_text(output)
    assert done.returncode == 0, output


def close_to(query: str, expected: float, *, share: float = 1e-9) -> str:
    """Return a query with the result 1 if `query` is within `share` of `expected`, otherwise 0."""
    return f"abs(({query}) / {expected!r} - 1) < bool {share!r}"

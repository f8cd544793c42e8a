"""The monitor benchmark's figures: made of answers that are equal, and of the rates of one round."""

import json

import numpy as np
import pytest

from benchmarks import monitor
from benchmarks.monitor_figures import (
    OURS,
    RIVER,
    SCIKIT_LEARN,
    Answers,
    Unequal,
    expect_equal,
    of_rate,
    verdict,
)
from benchmarks.spread import named, spread


def test_ratio_is_of_the_rates_of_one_round_whatever_the_machine_does_between_rounds():
    def one(factor):
        return {
            OURS: Answers(np.zeros(1000), 0.001 * factor, 5),
            SCIKIT_LEARN: Answers(np.zeros(10), 0.02 * factor, 5),
        }

    result = of_rate(0.03, [one(1.0), one(10.0), one(3.0)])
    assert result["ours_over"] == {SCIKIT_LEARN: pytest.approx(spread([2000.0]))}
    assert result["records_per_second"][SCIKIT_LEARN] == pytest.approx((1000 / 6, 50, 500))
    assert json.loads(json.dumps(named(result)))["ours_over"][SCIKIT_LEARN]["median"] == pytest.approx(2000)


def test_different_answers_stop_the_benchmark_and_different_windows_are_not_compared():
    aucs = np.array([0.5, 0.75, np.nan])
    fine = {"a": Answers(aucs, 1.0, 10), "b": Answers(aucs[:2] + 1e-13, 1.0, 10), "c": Answers(aucs * 0, 1.0, 200)}
    expect_equal(fine)
    with pytest.raises(Unequal, match="record 1: a says .*0.75.*, d .*0.7500"):
        expect_equal({**fine, "d": Answers(aucs + np.array([0, 1e-9, 0]), 1.0, 10)})
    with pytest.raises(Unequal, match="record 2"):
        expect_equal({"a": fine["a"], "d": Answers(np.array([0.5, 0.75, 0.5]), 1.0, 10)})


@pytest.mark.parametrize(
    ("name", "ratio", "said"), [(SCIKIT_LEARN, 999.0, "MISSED"), (SCIKIT_LEARN, 1001.0, "met"), (RIVER, 0.9, "MISSED")]
)
def test_verdict_holds_the_ratio_against_its_target(name, ratio, said):
    assert said in verdict(name, spread([ratio]))
    assert verdict("another", spread([ratio])) == ""


def test_ours_and_scikit_learn_answer_alike_on_the_stream_that_is_measured():
    pytest.importorskip("sklearn")
    for levels in (None, 100):
        stream = monitor.Stream.draw(0.03, 30, seed=1, levels=levels)
        assert (len(np.unique(stream.scores)) == len(stream.scores)) == (levels is None)
        asked = {"ours": monitor.ours(7), "single": monitor.ours(1), "theirs": monitor.scikit_learn(monitor.WINDOW)}
        answers = {name: Answers(*each(stream, 30), monitor.WINDOW) for name, each in asked.items()}
        expect_equal(answers)
        assert all(len(each.aucs) == 30 for each in answers.values())
        assert not np.isnan(answers["ours"].aucs).any()

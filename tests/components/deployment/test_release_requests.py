"""What a released model makes of unusual requests: the largest, one too large, a bad one among good ones."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from components.contracts.serving import MAX_BATCH_ROWS, MODEL_NAME
from components.deployment.triton_client import Triton
from components.runtime.errors import PermanentError

pytestmark = pytest.mark.e2e


def test_the_largest_request_is_answered_and_a_larger_one_refused(deploy, client, raw_rows):
    deploy(1)
    dense, categorical = (np.repeat(rows, 64, axis=0) for rows in raw_rows(65))
    scores, _ = client.infer(MODEL_NAME, dense[:MAX_BATCH_ROWS], categorical[:MAX_BATCH_ROWS])
    assert len(scores) == MAX_BATCH_ROWS
    with pytest.raises(PermanentError, match="batch-size must be <= 4096"):
        client.infer(MODEL_NAME, dense, categorical)


def test_one_bad_request_does_not_fail_the_batch_it_is_in(deploy, client, raw_rows, triton):
    deploy(1)
    dense, categorical = raw_rows(4)
    bad = dense.copy()
    bad[2, 5] = np.inf
    refusals, answers, others = [], [], []

    def ask(rows, count):
        mine = Triton(triton.grpc_url)
        for _ in range(count):
            try:
                answers.append(mine.infer(MODEL_NAME, rows, categorical)[0])
            except PermanentError as error:
                (refusals if rows is bad else others).append(str(error))
        mine.close()

    threads = [threading.Thread(target=ask, args=(rows, 40)) for rows in (dense, bad, dense, bad)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert others == []
    assert len(answers) == len(refusals) == 80
    assert all("dense[2, 5] is inf, expected a finite value, or NaN for missing" in text for text in refusals)

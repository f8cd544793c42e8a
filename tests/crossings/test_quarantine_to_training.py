"""Tests of a quarantine rule: later steps skip the rows, and a later run trains on all rows."""

import json
import os
import re
import subprocess
import sys
from datetime import date
from functools import partial

import numpy as np

from demo.simulation.simulator import Simulator, write_lake
from evergreen.contracts.manifests import RawDataset
from evergreen.storage.uris import local_path
from testing.paths import REPOSITORY
from tests.crossings.conftest import Chain
from tests.support.lakes import table_in


def learn(chain, run, *, turn=Chain.turn, **rules):
    """Run one round of the pipeline with `rules` for validation.

    Returns:
        The manifests of the extracted rows, the validated rows, the training set and the model.
    """
    chain.settings = {
        **chain.settings,
        "extraction": {"holdout_fraction": 0.25},
        "validation": rules,
    }
    this = turn(chain, run)
    return this.extraction, RawDataset.read(this.paths["valid"]), this.preprocessing, this.training


def column(uri, name):
    return table_in(uri, name)[name].to_numpy()


def evergreen(*words):
    """Run the `evergreen` command."""
    return subprocess.run(
        [sys.executable, "-m", "cli", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_later_steps_train_on_remaining_rows_and_run_without_rule_on_all(chain, tmp_path):
    own = chain.copied_to(tmp_path / "own")
    simulator = Simulator.create(seed=3)
    write_lake(
        simulator, str(own.root / "lake"), rows=2000, days=1, last_day=date(2026, 1, 6), seed=11
    )
    last = own.rounds[-1]
    bound = float(np.nanquantile(column(last.extraction.train_uri, "I2"), 0.9, method="lower"))
    head, name, rest = local_path(last.validation.schema_uri).read_text().partition('name: "I2"')
    bounded = re.sub(r"(float_domain \{\s+min: \S+\s+max: )\S+", rf"\g<1>{bound}", rest, count=1)
    (own.root / "bounded.pbtxt").write_text(head + name + bounded)
    accept = [
        "accept",
        own.root / "bounded.pbtxt",
        "--store",
        own.root / "store",
        "--reason",
        "a test",
        "--change=I2",
    ]
    assert evergreen("data", "schema", *accept).returncode == 0

    actions = {"domain": "quarantine", "quarantined_share": "warn"}
    raw, valid, encoded, model = learn(own, "round-3", actions=actions)
    before, is_odd = column(raw.train_uri, "request_id"), column(raw.train_uri, "I2") > bound
    num_odd = int(is_odd.sum())
    assert 0 < num_odd < len(before)
    assert (valid.num_quarantined, encoded.num_train_rows) == (num_odd, len(before) - num_odd)
    assert column(valid.train_uri, "request_id").tolist() == before[~is_odd].tolist()
    assert column(valid.quarantine_uri, "request_id").tolist() == before[is_odd].tolist()
    assert encoded.raw_digest == model.raw_digest == valid.digest != raw.digest
    assert encoded.num_holdout_rows == raw.num_holdout_rows

    store = ["--store", own.root / "store"]
    listed = evergreen("data", "quarantine", "list", "--json", *store)
    (batch,) = json.loads(listed.stdout)
    assert (batch["run"], batch["num_rows"]) == ("round-3", num_odd)
    write_lake(
        simulator, str(own.root / "lake"), rows=2000, days=1, last_day=date(2026, 1, 7), seed=12
    )
    again = partial(Chain.turn_to_training, parent=model.parent_model_id)
    raw, valid, encoded, model = learn(own, "round-4", turn=again)
    trained = column(valid.train_uri, "request_id")
    assert trained[np.isin(trained, before)].tolist() == before.tolist()
    assert encoded.num_train_rows == raw.num_train_rows
    assert model.raw_digest == valid.digest == raw.digest


def test_schema_command_reaches_its_own_environment(chain):
    shown = evergreen("data", "schema", "show", "--store", chain.root / "store")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert 'name: "label"' in shown.stdout
    assert (
        evergreen(
            "data", "schema", "diff", "force", "live", "--store", chain.root / "store"
        ).returncode
        == 0
    )
    assert (
        "expected a file, force, live"
        in evergreen("data", "schema", "show", "no", "--store", chain.root / "store").stderr
    )

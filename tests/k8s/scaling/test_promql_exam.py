"""The evaluator's exam: random series and queries, and a real Prometheus' answers to them."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
import yaml

from components.runtime.errors import ContractError
from k8s.scaling.promql import Query
from k8s.scaling.series import Sample, SeriesStore, labels_of

SEEDS = range(4)
START = 1_700_000_000_000
SPAN = 1_200_000
QUERIES = [
    'rate(queue_us{model=~"m.*"}[1m])',
    "increase(queue_us[2m])",
    "rate(queue_us[45s] offset 1m)",
    "irate(queue_us[1m])",
    "delta(pending[2m])",
    "sum by (pod) (rate(queue_us[1m])) / sum by (pod) (rate(requests[1m]))",
    "sum by (pod) (rate(queue_us[2m])) / clamp_min(sum by (pod) (rate(requests[2m])), 0.5)",
    "sum by (pod) (rate(queue_us[1m])) / (sum by (pod) (rate(requests[1m])) > 2)",
    "sum by (pod) (rate(queue_us[1m])) / (sum by (pod) (rate(requests[1m])) > 2) or sum by (pod) (pending) * 0",
    "sum(rate(queue_us[1m])) / sum(rate(requests[1m]))",
    'avg by (model) (pending{pod!="p0"})',
    "max without (pod, model) (pending)",
    "count by (pod) (pending) - on() group_left() min(pending)",
    "min(pending) - on() group_right() count by (pod) (pending)",
    "count(pending) > bool 2",
    "pending > 3",
    "pending * 20 >= on(pod, model) requests",
    "pending and on(pod) (requests > 100)",
    "pending unless on(pod) (requests > 100)",
    "rate(queue_us[1m]) / on(pod, model) group_left() sum by (pod, model) (pending)",
    "sum by (pod) (avg_over_time(pending[1m])) + sum by (pod) (max_over_time(pending[90s])) ^ 2",
    "min_over_time(pending[1m]) % 3 - -sum_over_time(pending[1m]) + count_over_time(pending[1m])",
    "last_over_time(pending[30s])",
    "0 ^ (0 - pending) + (pending - 9) ^ 401",
    "clamp_max(pending, 4) * 2 - abs(delta(pending[1m]))",
    "sum(pending) / 0 or vector(1)",
    "scalar(sum(pending)) + vector(0)",
    'sum by (pod) (rate(absent_metric[1m])) or sum by (pod) (rate(requests{model=""}[1m])) or vector(0)',
]


def random_series(seed: int) -> dict[tuple, list[Sample]]:
    """Counters with resets and gauges of some pods, scraped with jitter; some scrapes fail, some pods end early."""
    chance = random.Random(seed)
    series: dict[tuple, list[Sample]] = {}
    for pod in range(4):
        begins = START + chance.choice([0, 0, 300_000])
        ends = START + SPAN - chance.choice([0, 0, 90_000, 420_000])
        for model in ("m1", "m2"):
            names = {"queue_us": 5000, "requests": 7, "pending": 0}
            values = dict.fromkeys(names, 0.0)
            at = begins + chance.randrange(15_000)
            while at < ends:
                if chance.random() < 0.02:
                    values = dict.fromkeys(names, 0.0)
                for name, step in names.items():
                    grown = values[name] + step * chance.random() * chance.choice([0, 1, 1, 20])
                    values[name] = grown if step else float(chance.randrange(9))
                if chance.random() > 0.1:
                    for name, value in values.items():
                        key = labels_of(name, {"pod": f"p{pod}", "model": model})
                        series.setdefault(key, []).append(Sample(at, value))
                at += 15_000 + chance.randrange(-40, 41)
    return series


def store_of(series) -> SeriesStore:
    store = SeriesStore()
    for labels, samples in series.items():
        store.extend(labels, samples)
    return store


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Address of a real Prometheus that holds the random series, each seed's under a label of its own."""
    if not shutil.which("promtool") or not shutil.which("prometheus"):
        pytest.skip("prometheus or promtool is not installed: nothing to hold the evaluator against")
    folder = tmp_path_factory.mktemp("prometheus")
    lines = []
    by_name: dict[str, list[str]] = {}
    for seed in SEEDS:
        for labels, samples in random_series(seed).items():
            named = dict(labels)
            text = ",".join(f'{k}="{v}"' for k, v in {**named, "seed": str(seed)}.items() if k != "__name__")
            by_name.setdefault(named["__name__"], []).extend(
                f"{named['__name__']}{{{text}}} {value!r} {at / 1000:.3f}" for at, value in samples
            )
    for name, rows in by_name.items():
        lines += [f"# TYPE {name} unknown", *rows]
    (folder / "series.txt").write_text("\n".join([*lines, "# EOF", ""]))
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "series.txt", folder / "data"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (folder / "prometheus.yml").write_text("global: {}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={address}", "--storage.tsdb.retention.time=100y"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not is_ready(address):
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield address
    finally:
        server.kill()
        server.wait()


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def asked(address: str, query: str, milliseconds: int) -> dict[tuple, float]:
    question = urllib.parse.urlencode({"query": query, "time": f"{milliseconds / 1000:.3f}"})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{question}", timeout=60) as answer:
        found = json.load(answer)["data"]
    assert found["resultType"] == "vector"
    pairs = ((tuple(sorted(r["metric"].items())), float(r["value"][1])) for r in found["result"])
    return {tuple(pair for pair in labels if pair[0] != "seed"): value for labels, value in pairs}


def of_seed(query: str, seed: int) -> str:
    """The query restricted to one seed's series."""
    return re.sub(
        r"\b(queue_us|requests|pending|absent_metric)\b(\{)?",
        lambda m: f'{m[1]}{{seed="{seed}"{"," if m[2] else "}"}',
        query,
    )


def same(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(
        (math.isnan(ours[k]) and math.isnan(theirs[k])) or math.isclose(ours[k], theirs[k], rel_tol=1e-9, abs_tol=1e-12)
        for k in ours
    )


@pytest.mark.parametrize("query", QUERIES)
def test_evaluator_answers_as_a_real_prometheus_does(prometheus, query):
    num_values = 0
    for seed in SEEDS:
        series = random_series(seed)
        store, chance = store_of(series), random.Random(seed)
        edges = [START + 60_000, START + SPAN - 60_000, START + SPAN + 200_000]
        # Moments at which a sample falls on a range's very edge, too.
        edges += [next(iter(series.values()))[9].milliseconds + offset for offset in (0, 60_000, 300_000)]
        for at in [*(START + chance.randrange(SPAN + 400_000) for _ in range(25)), *edges]:
            theirs = asked(prometheus, of_seed(query, seed), at)
            ours = Query(query).at(store, at)
            assert same(ours, theirs), f"seed {seed} at {at}: ours {ours}, Prometheus {theirs}"
            num_values += len(theirs)
    assert num_values >= 20, "the queries found too little to say anything"


def test_stale_series_are_absent_as_in_promtools_own_tests(tmp_path):
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed: nothing to hold the evaluator against")
    values = [0, 10, None, "stale", 3, 9, 20, "stale", None, None, None, None, None]
    store, labels = SeriesStore(), labels_of("requests", {"pod": "a"})
    for i, value in enumerate(values):
        if value is not None:
            store.add(labels, i * 15_000, None if value == "stale" else float(value))
    text = " ".join("_" if v is None else str(v) for v in values)
    expected = []
    for query in ("requests", "rate(requests[1m])", "sum(increase(requests[1m])) or vector(-1)"):
        for step in range(len(values)):
            found = Query(query).at(store, step * 15_000)
            samples = [{"labels": _text(ls), "value": value} for ls, value in found.items()]
            expected.append({"expr": query, "eval_time": f"{step * 15}s", "exp_samples": samples})
    tests = {"rule_files": [], "evaluation_interval": "15s", "tests": [
        {"interval": "15s", "input_series": [{"series": 'requests{pod="a"}', "values": text}],
         "promql_expr_test": expected}]}  # fmt: skip
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _text(labels) -> str:
    named = dict(labels)
    inside = ", ".join(f'{k}="{v}"' for k, v in named.items() if k != "__name__")
    return f"{named.get('__name__', '')}{{{inside}}}"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("histogram_quantile(0.9, x)", "histogram_quantile"),
        ("max_over_time(rate(x[1m])[5m:15s])", "subquery"),
        ("topk(3, x)", "topk"),
        ("x @ 30", "@"),
        ("x atan2 y", "atan2"),
        ("sum(", "PromQL"),
    ],
)
def test_what_is_outside_the_subset_is_refused_by_name(query, named):
    with pytest.raises(ContractError, match=re.escape(named)):
        Query(query).at(SeriesStore(), 0)


def test_several_matches_where_one_may_be_are_refused():
    store = SeriesStore()
    for pod in "ab":
        store.add(labels_of("x", {"pod": pod}), 0, 1.0)
    with pytest.raises(ContractError, match="several series"):
        Query("x / on(model) x").at(store, 0)


def test_range_that_reaches_beyond_the_kept_samples_is_refused_and_not_cut_short():
    store = store_of(random_series(0))
    store.forget(START + 600_000)
    Query("rate(queue_us[10m])").at(store, START + 1_200_000)
    with pytest.raises(ContractError, match="reaches back 660 s, expected at most 600 s"):
        Query("rate(queue_us[11m])").at(store, START + 1_200_000)


def test_pattern_of_another_regular_expression_language_is_refused_by_name():
    with pytest.raises(ContractError, match="query matches pod"):
        Query(r'pending{pod=~"\\pL+"}').at(store_of(random_series(0)), START)

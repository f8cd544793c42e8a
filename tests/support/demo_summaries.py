"""The summary of a successful demo, and its lines."""

from demo.summary import (
    AucNumbers,
    DemoSummary,
    FeatureDriftNumbers,
    LiveChange,
    RecordNumbers,
    ReleaseNumbers,
    ReplayedDecisions,
    RunNumbers,
    TrafficDuring,
    TriggerNumbers,
    VerifiedVersion,
    VersionNumbers,
    bad_release_numbers,
)

START = 1_800_000_000.0
DRIFT_TIME = 100.0


def traffic_line(second, version, *, p99=4.0, failed=0):
    versions = version if isinstance(version, dict) else {str(version): 1984}
    return {
        "time": START + second,
        "requests_sent": 31,
        "requests_failed": failed,
        "p99_ms": p99,
        "versions": versions,
    }


PLANTED = [
    LiveChange(version=3, started_at=START + 200.2, seconds=1.2, why="planted"),
    LiveChange(
        version=2,
        started_at=START + 201.4,
        seconds=3.1,
        why="the AUC is low",
        answered_at=START + 206.0,
    ),
]
QUIET = TrafficDuring(requests_sent=31, requests_failed=0, p99_ms=6.0)
RELEASE = ReleaseNumbers(
    version=2,
    seconds=0.5,
    during=QUIET,
    p99_ms_before=4.0,
    p99_ms_after=None,
)
BAD_RELEASE = bad_release_numbers(PLANTED, [traffic_line(second, 1) for second in range(198, 208)])
VERIFIED = [
    VerifiedVersion(
        version=n, same=True, num_rows=320, num_different=0, max_abs_diff=1e-7, wrong_checks=[]
    )
    for n in (1, 2)
]
RUNS = [
    RunNumbers(
        run=name,
        trigger_id=name,
        state="released",
        step="deployment",
        reason="",
        version=1,
        ended_at="",
    )
    for name in ("first", "drift-1")
]
VERSIONS = [
    VersionNumbers(
        version=n,
        model_id=f"m{n}",
        trained_rows=1,
        trained_until="2026-01-01T00:00:00+00:00",
        evaluation_rows=1,
        parent=None,
        gate="pass",
        reason="pass",
        parity_max_abs_diff=3e-7,
    )
    for n in (1, 2)
]
GOOD = DemoSummary(
    created_at="",
    bayes_auc=None,
    requests={"sent": 10, "failed": 0},
    latency_ms={},
    drift={},
    auc=AucNumbers(threshold=0.7, baseline=0.78, recovered=0.77, regained_share=0.9),
    versions=VERSIONS,
    release=RELEASE,
    bad_release=BAD_RELEASE,
    verified=VERIFIED,
    records=RecordNumbers(published=640, archived=640, duplicates=0, dead_letters=0),
    trigger=TriggerNumbers(reason="low", runs=1),
    policies={},
    feature_drift=FeatureDriftNumbers(seconds=None, columns={}),
    decisions=ReplayedDecisions(points=20, equal=True, digest="00"),
    seconds={},
    serving_parity_max_abs_diff=3e-7,
    runs=RUNS,
    uncertain=[],
)

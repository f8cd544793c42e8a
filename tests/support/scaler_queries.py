"""The queries that the shipped manifests send to Prometheus."""

import re
from pathlib import Path

import yaml

from tests.support.rendering import K8S
from tests.support.yaml_texts import documents

KEDA, ADAPTER = K8S / "components" / "keda", K8S / "components" / "prometheus-adapter"


def read_queries(folder: Path) -> dict[str, str]:
    """Map each metric's name to its PromQL in KEDA's triggers or prometheus-adapter's rules.

    An adapter's rule is a Go template (pkg/naming/metrics_query.go, `Build`). The templates in the
    shipped rules use no field.
    """
    if folder == ADAPTER:
        queries = {metric_name(rule): str(rule["metricsQuery"]) for rule in adapter_rules()}
    else:
        (scaler,) = documents((folder / "scaled-object.yaml").read_text())
        triggers = [each for each in scaler["spec"]["triggers"] if each["type"] == "prometheus"]
        queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in triggers}
    assert queries
    assert not any("<<" in query for query in queries.values())
    return queries


def adapter_rules() -> list[dict]:
    """Return the rules in the values of prometheus-adapter's chart."""
    return yaml.safe_load((ADAPTER / "values.yaml").read_text())["rules"]["external"]


def of_pods(query: str, *pods: str) -> str:
    """Restrict the query to the pods named `pods`."""
    return query.replace('pod=~"triton-.+"', f'pod=~"{"|".join(pods)}"')


def metric_name(rule: dict) -> str:
    """Return the name under which a rule of the adapter publishes its metric.

    Rules with Go's `$0` or `$1` are not supported.
    """
    series = str(rule["seriesQuery"]).partition("{")[0]
    assert re.search(rule["name"]["matches"], series), f"the rule's pattern does not match {series}"
    return rule["name"]["as"]

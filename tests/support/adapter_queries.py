"""The queries that the shipped manifests send to Prometheus, as the autoscalers send them.

A rule of prometheus-adapter is a Go template; of its fields the shipped rules use two, substituted as the adapter's
source does (pkg/naming/metrics_query.go, `Build`).
"""

from __future__ import annotations

import re

from tests.support.rendering import K8S
from tests.support.yaml_texts import documents

ADAPTER = K8S / "components" / "prometheus-adapter"
_TEMPLATE = re.compile(r"<<\s*(.*?)\s*>>")


def read_queries(path, *, pods=("triton-0",)):
    """PromQL by the name of its metric.

    Args:
        path: A manifest or a folder of them: prometheus-adapter's rules, asked as the HPA asks (one series per pod,
            label `pod`), or a ScaledObject (one value; triggers of other types than `prometheus` have no query).
        pods: Names of the pods asked about, at least one; a ScaledObject's queries ask about all.
    """
    queries = {}
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    for document in (each for file in files for each in documents(file.read_text())):
        if document.get("kind") == "ScaledObject":
            triggers = [each for each in document["spec"]["triggers"] if each["type"] == "prometheus"]
            queries |= {trigger["name"]: trigger["metadata"]["query"] for trigger in triggers}
        for rule in document["rules"] if isinstance(document.get("rules"), list) else ():
            queries[metric_name(rule)] = substitute(rule["metricsQuery"], namespace="evergreen", pods=pods)
    assert queries, f"{path} has neither rules of prometheus-adapter nor a ScaledObject"
    return queries


def substitute(template, *, namespace, pods):
    """The query that prometheus-adapter makes of a rule's `metricsQuery` for these pods."""
    matcher = "=~" if len(pods) > 1 else "="
    values = {".LabelMatchers": f'namespace="{namespace}",pod{matcher}"{"|".join(pods)}"', ".GroupBy": "pod"}
    return _TEMPLATE.sub(lambda match: values[match[1]], template)


def metric_name(rule):
    """The name under which an adapter's rule publishes; Go's `$0`, `$1` in it are not used here."""
    series = str(rule["seriesQuery"]).partition("{")[0]
    assert re.search(rule["name"]["matches"], series), f"{series} is not what the rule is about: it publishes nothing"
    return rule["name"]["as"]

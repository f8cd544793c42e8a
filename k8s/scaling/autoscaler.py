"""The shipped autoscaler, read from the manifests: targets, bounds, behaviour and queries in the simulator's terms.

`shipped_query` reads the files; the algorithm is `hpa`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.runtime.errors import ContractError
from k8s.scaling import shipped_query
from k8s.scaling.hpa import DEFAULT_DOWN, DEFAULT_UP, EXTERNAL, PODS, Autoscaler, Metric, PerPod, Policy, Rules
from k8s.scaling.promql import Query
from k8s.scaling.series import SeriesStore
from k8s.scaling.shipped_query import MANIFESTS

HPA, KEDA = "hpa", "keda"
SCALERS = (HPA, KEDA)
_AUTOSCALER = {HPA: MANIFESTS / "base" / "triton" / "autoscaler.yaml", KEDA: MANIFESTS / "components" / "keda"}
_QUERIES = {HPA: shipped_query.ADAPTER, KEDA: MANIFESTS / "components" / "keda"}


def read_autoscaler(scaler: str, path: Path | None = None) -> Autoscaler:
    """What the manifest of a scaler says.

    Args:
        scaler: `hpa` or `keda`, whose operator makes an HPA of a ScaledObject, with External metrics.
        path: Another manifest than the shipped one.

    Raises:
        ContractError: an unknown scaler, or a manifest that cannot be simulated; names what.
    """
    path = path or _AUTOSCALER[_known(scaler)]
    try:
        return _read(scaler, path)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"{path} is no autoscaler of autoscaling/v2 or KEDA: {error!r}") from error


def _read(scaler: str, path: Path) -> Autoscaler:
    least, most = shipped_query.read_bounds(path)
    if least < 1:
        raise ContractError(f"{path}: least replicas are {least}; waking from none is KEDA's, and is not simulated")
    behaviour = shipped_query.read_behaviour(path)
    kind = PODS if scaler == HPA else EXTERNAL
    metrics = tuple(
        Metric(name=name, target=target.value, kind=kind, is_average=target.is_per_pod)
        for name, target in shipped_query.read_targets(path).items()
    )
    return Autoscaler(
        metrics=metrics,
        least=least,
        most=most,
        up=_rules(behaviour.get("scaleUp"), DEFAULT_UP),
        down=_rules(behaviour.get("scaleDown"), DEFAULT_DOWN),
    )


def with_targets(spec: Autoscaler, targets: Mapping[str, float]) -> Autoscaler:
    """The same with other targets.

    Raises:
        ContractError: a metric that the autoscaler does not have.
    """
    if unknown := targets.keys() - {metric.name for metric in spec.metrics}:
        known = ", ".join(metric.name for metric in spec.metrics)
        raise ContractError(f"metric is {sorted(unknown)[0]}, expected one of {known}")
    return replace(spec, metrics=tuple(replace(m, target=targets.get(m.name, m.target)) for m in spec.metrics))


class Readings:
    """What the metrics APIs answer the autoscaler: the shipped queries, evaluated over scraped series.

    Args:
        scaler: `hpa` (prometheus-adapter's rules, one value a pod) or `keda` (one value).
        path: Other manifests than the shipped ones.

    Raises:
        ContractError: no such scaler, or no queries there.
    """

    def __init__(self, scaler: str, path: Path | None = None) -> None:
        self._scaler, self._path = scaler, path or _QUERIES[_known(scaler)]
        self._queries: dict[tuple[str, ...], dict[str, Query]] = {}
        self.names = frozenset(shipped_query.read_queries(self._path))
        """Metrics that there are queries for."""

    def at(self, store: SeriesStore, seconds: float, pods: Sequence[str]) -> dict[str, PerPod | float | None]:
        """Each metric's value by pod (hpa), or value (keda); None where there is none.

        NaN counts as none; a query should not let it come to that.
        """
        # KEDA's query names no pods, so it is one for all.
        key = tuple(sorted(pods)) if self._scaler == HPA else ("all",)
        if not key:
            return {}
        if key not in self._queries:
            texts = shipped_query.read_queries(self._path, pods=key)
            self._queries = {key: {name: Query(text) for name, text in texts.items()}}
        return {name: self._reading(query, store, seconds) for name, query in self._queries[key].items()}

    def _reading(self, query: Query, store: SeriesStore, seconds: float) -> PerPod | float | None:
        value = query.at(store, round(seconds * 1000))
        if isinstance(value, float):
            return None if math.isnan(value) else value
        if self._scaler == HPA:
            return {dict(labels)["pod"]: v for labels, v in value.items() if not math.isnan(v)} or None
        if len(value) > 1:
            raise ContractError(f"query {query.text!r} has {len(value)} results, expected one: KEDA takes no more")
        return next((v for v in value.values() if not math.isnan(v)), None)


def _known(scaler: str) -> str:
    if scaler not in SCALERS:
        raise ContractError(f"scaler is {scaler!r}, expected one of {', '.join(SCALERS)}")
    return scaler


def _rules(given: Mapping[str, Any] | None, default: Rules) -> Rules:
    """Rules of one direction; what is not given is Kubernetes' default."""
    given = given or {}
    policies = given.get("policies")
    return Rules(
        stabilization_seconds=float(given.get("stabilizationWindowSeconds", default.stabilization_seconds)),
        policies=tuple(Policy(p["type"], int(p["value"]), float(p["periodSeconds"])) for p in policies)
        if policies
        else default.policies,
        select=given.get("selectPolicy", default.select),
        tolerance=shipped_query.quantity(given.get("tolerance", default.tolerance)),
    )

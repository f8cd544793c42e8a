"""Evaluates NetworkPolicies by the rules of Kubernetes' documentation ("Network Policies").

If a policy selects a pod for a direction, the pod is isolated in this direction: a connection is
possible only if some policy allows it. A connection needs the egress of its source and the ingress
of its destination. The documentation leaves open whether an `ipBlock` also matches pods' own
addresses. In this evaluator, an `ipBlock` matches pods' addresses, so the evaluator allows at least
as much as a cluster. No test checks whether a cluster's network enforces policies at all.
"""

import ipaddress
from dataclasses import dataclass, field
from typing import Any

from tests.support.rendering import Manifest, matches

TCP, UDP = "TCP", "UDP"


@dataclass(frozen=True)
class Endpoint:
    """One end of a connection: a pod or an external address."""

    address: str
    namespace: str = ""
    """Namespace, empty for an address that is not a pod."""
    labels: dict[str, str] = field(default_factory=dict)
    namespace_labels: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    """Named ports of the pod."""


def allowed(
    policies: list[Manifest],
    source: Endpoint,
    destination: Endpoint,
    port: int,
    protocol: str = TCP,
) -> bool:
    """Return whether `source` may open a connection to `port` of `destination`."""
    out = _is_allowed(policies, source, destination, destination, port, protocol, "Egress")
    return out and _is_allowed(
        policies, destination, source, destination, port, protocol, "Ingress"
    )


def _is_allowed(
    policies: list[Manifest],
    pod: Endpoint,
    peer: Endpoint,
    destination: Endpoint,
    port: int,
    protocol: str,
    direction: str,
) -> bool:
    """Return whether the policies of `pod` allow a connection with `peer` in `direction`."""
    if not pod.namespace:
        return True
    ours = [
        p
        for p in policies
        if p["metadata"]["namespace"] == pod.namespace and _isolates(p, pod, direction)
    ]
    if not ours:
        return True
    key, side = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    return any(
        _is_peer(rule.get(side), peer, pod.namespace)
        and _is_port(rule.get("ports"), destination, port, protocol)
        for policy in ours
        for rule in policy["spec"].get(key) or ()
    )


def _isolates(policy: Manifest, pod: Endpoint, direction: str) -> bool:
    spec = policy["spec"]
    # A policy without the field `policyTypes` has the type Ingress, and also Egress if it has
    # egress rules.
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    return direction in types and matches(spec["podSelector"] or {}, pod.labels)


def _is_peer(peers: list[Manifest] | None, end: Endpoint, namespace: str) -> bool:
    return not peers or any(_is_one(peer, end, namespace) for peer in peers)


def _is_one(peer: Manifest, end: Endpoint, namespace: str) -> bool:
    if block := peer.get("ipBlock"):
        address = ipaddress.ip_address(end.address)
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(
            address in ipaddress.ip_network(each) for each in block.get("except", ())
        )
    if not end.namespace:
        return False
    if "namespaceSelector" in peer:
        in_namespace = matches(peer["namespaceSelector"] or {}, end.namespace_labels)
    else:
        in_namespace = end.namespace == namespace
    return in_namespace and matches(peer.get("podSelector") or {}, end.labels)


def _is_port(ports: list[Manifest] | None, destination: Endpoint, port: int, protocol: str) -> bool:
    return not ports or any(_is_one_port(each, destination, port, protocol) for each in ports)


def _is_one_port(entry: Manifest, destination: Endpoint, port: int, protocol: str) -> bool:
    if entry.get("protocol", TCP) != protocol:
        return False
    first: Any = entry.get("port")
    if first is None:
        return True
    if isinstance(first, str):
        return destination.ports.get(first) == port
    return bool(first <= port <= entry.get("endPort", first))
